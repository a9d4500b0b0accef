/* tests/unit/test_write_file.c: a file is written whole or not at all, and nothing stays beside it:
 * neither when the process is killed while it writes, nor for good where the file system knows no
 * files without a name. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "folder.h"

#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define FOLDER    RF_TEST_BINARY_DIR "/test_write_file"
#define PATH      FOLDER "/file"
#define TEMPORARY PATH ".ringfence.tmp"
#define SIZE      20000u

static uint8_t old_bytes[SIZE], new_bytes[SIZE + 1];

static rf_status write_bytes(const uint8_t *data, uint64_t count, rf_error *err)
{
    rf_piece pieces[] = {{data, count / 3}, {NULL, 0}, {data + count / 3, count - count / 3}};
    return rf_os_write_file(PATH, pieces, RF_ARRAY_COUNT(pieces), err);
}

static int start(void **state)
{
    (void)state;
#ifdef RF_TEST_EMULATED
    print_message("skipped: limits and signals are the emulator's here\n");
    exit(77);
#endif
    for (uint32_t i = 0; i < SIZE; i++)
        old_bytes[i] = (uint8_t)(i * 7), new_bytes[i] = (uint8_t)(i * 11 + 5);
    mkdir(FOLDER, 0777);
    unlink(TEMPORARY);
    return write_bytes(old_bytes, SIZE, NULL);
}

static void holds(const uint8_t *data, uint64_t count)
{
    static uint8_t got[SIZE + 2];
    FILE *file = fopen(PATH, "rb");
    assert_non_null(file);
    assert_int_equal(fread(got, 1, sizeof got, file), count);
    assert_memory_equal(got, data, count);
    fclose(file);
}

/* From now on this process sees a file system that cannot open a file without a name, or a system
 * that cannot name one. False: it may not be lied to. */
static bool refuse(bool open_too)
{
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_linkat, 4, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, open_too ? SYS_openat : UINT32_MAX, 0, 2),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_TMPFILE & ~O_DIRECTORY, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP)};
    struct sock_fprog filter = {RF_ARRAY_COUNT(steps), steps};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

typedef enum file_system { WHOLE, NO_LINK, NO_NAMELESS } file_system;

static void die(int number)
{
    (void)number;
    kill(getpid(), SIGKILL);
}

#define CANNOT_LIE 98

/* Writes count new bytes in a child that is killed when the file has `limit` of them. */
static int write_in_child(uint64_t count, rlim_t limit, file_system has)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGXFSZ, die);
        if (has != WHOLE && !refuse(has == NO_NAMELESS))
            _exit(CANNOT_LIE);
        if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){limit, limit}) != 0)
            _exit(99);
        _exit((int)write_bytes(new_bytes, count, NULL));
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void may_lie(void)
{
    if (write_in_child(SIZE, RLIM_INFINITY, NO_LINK) == CANNOT_LIE) {
        print_message("skipped: no filter of system calls may be set here\n");
        skip();
    }
    assert_int_equal(write_bytes(old_bytes, SIZE, NULL), RF_OK);
}

static void a_process_that_is_killed_while_it_writes_leaves_nothing(void **state)
{
    (void)state;
    for (rlim_t limit = 0; limit < SIZE; limit += 1999) {
        assert_int_equal(write_in_child(SIZE, limit, WHOLE), -SIGKILL);
        assert_int_equal(files_in(FOLDER), 1);
        holds(old_bytes, SIZE);
    }
    assert_int_equal(write_in_child(SIZE + 1, RLIM_INFINITY, WHOLE), RF_OK);
    assert_int_equal(files_in(FOLDER), 1);
    holds(new_bytes, SIZE + 1);
}

static void where_every_file_has_a_name_one_stays_and_the_next_write_takes_it(void **state)
{
    (void)state;
    may_lie();
    for (rlim_t limit = 0; limit < SIZE; limit += 1999) { /* the later ones find a longer one */
        assert_int_equal(write_in_child(SIZE, SIZE - 1 - limit, NO_NAMELESS), -SIGKILL);
        assert_int_equal(files_in(FOLDER), 2);
        assert_int_equal(access(TEMPORARY, F_OK), 0);
        holds(old_bytes, SIZE);
    }
    assert_int_equal(write_in_child(100, RLIM_INFINITY, NO_NAMELESS), RF_OK);
    assert_int_equal(files_in(FOLDER), 1);
    holds(new_bytes, 100);
}

static void a_file_that_can_get_no_name_is_written_again_under_one(void **state)
{
    (void)state;
    may_lie();
    assert_int_equal(write_in_child(SIZE + 1, RLIM_INFINITY, NO_LINK), RF_OK);
    assert_int_equal(files_in(FOLDER), 1);
    holds(new_bytes, SIZE + 1);
}

/* Between the file's getting a name and the last step, too. */
static void what_a_dead_process_left_is_replaced(void **state)
{
    (void)state;
    FILE *left = fopen(TEMPORARY, "wb");
    assert_non_null(left);
    fputs("left", left);
    fclose(left);
    assert_int_equal(write_bytes(new_bytes, SIZE, NULL), RF_OK);
    assert_int_equal(files_in(FOLDER), 1);
    holds(new_bytes, SIZE);
}

static void what_a_living_process_writes_is_left_to_it(void **state)
{
    (void)state;
    may_lie();
    int file = open(TEMPORARY, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    assert_true(file >= 0);
    assert_int_equal(write(file, "mine", 4), 4);
    assert_int_equal(flock(file, LOCK_EX), 0);
    assert_int_equal(write_in_child(SIZE, RLIM_INFINITY, NO_NAMELESS), RF_ERR_IO);
    struct stat info;
    assert_int_equal(stat(TEMPORARY, &info), 0);
    assert_int_equal(info.st_size, 4);
    holds(old_bytes, SIZE);
    close(file);
    unlink(TEMPORARY);
}

/* Somebody's link must not lead to the file behind it. */
static void a_link_in_place_of_the_temporary_file_leads_nowhere(void **state)
{
    (void)state;
    may_lie();
    assert_int_equal(symlink("file", TEMPORARY), 0);
    assert_int_equal(write_in_child(SIZE, RLIM_INFINITY, NO_NAMELESS), RF_ERR_IO);
    holds(old_bytes, SIZE);
    unlink(TEMPORARY);
    assert_int_equal(link(PATH, TEMPORARY), 0);
    assert_int_equal(write_in_child(SIZE, RLIM_INFINITY, NO_NAMELESS), RF_ERR_IO);
    holds(old_bytes, SIZE);
    unlink(TEMPORARY);
}

static void a_file_keeps_the_usual_permissions(void **state)
{
    (void)state;
    struct stat info;
    mode_t before = umask(027);
    assert_int_equal(write_bytes(new_bytes, SIZE, NULL), RF_OK);
    umask(before);
    assert_int_equal(stat(PATH, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0640);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_process_that_is_killed_while_it_writes_leaves_nothing, start),
        cmocka_unit_test_setup(where_every_file_has_a_name_one_stays_and_the_next_write_takes_it,
                               start),
        cmocka_unit_test_setup(a_file_that_can_get_no_name_is_written_again_under_one, start),
        cmocka_unit_test_setup(what_a_dead_process_left_is_replaced, start),
        cmocka_unit_test_setup(what_a_living_process_writes_is_left_to_it, start),
        cmocka_unit_test_setup(a_link_in_place_of_the_temporary_file_leads_nowhere, start),
        cmocka_unit_test_setup(a_file_keeps_the_usual_permissions, start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
