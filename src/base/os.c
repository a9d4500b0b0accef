/* base/os.c: everything that is asked of Linux.
 *
 * Reserve, map, touch, count: the only file below the command line that makes system calls
 * (workers.c starts threads beside it). Files under /proc and /sys are read with open and read
 * into the stack, because stdio would take a buffer from the heap in the middle of a measurement.
 * What the system does not tell is said to be unknown, never guessed. Knows no plan and no model.
 */
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h> /* rename, nothing else */
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14, include/uapi/asm-generic/mman-common.h */
#endif

#define POPULATE_SLICE_BYTES (UINT64_C(16) << 20)
#define STACK_TOUCH_BYTES    (128u * 1024u)
#define PROC_TEXT_BYTES      4096u

/* ---- small readers ----------------------------------------------------------------------- */

/* strerror may load a catalogue of messages; these are the errors that users meet. */
static const char *errno_text(int code)
{
    switch (code) {
    case ENOENT:
        return "no such file or directory";
    case ENOTDIR:
        return "a part of the path is not a directory";
    case EACCES:
    case EPERM:
        return "permission denied";
    case ELOOP:
        return "too many symbolic links";
    case ENAMETOOLONG:
        return "the name is too long";
    case EMFILE:
    case ENFILE:
        return "too many open files";
    case ENOMEM:
        return "out of memory";
    case EIO:
        return "input/output error";
    case ENOSPC:
        return "no space is left on the device";
    case EDQUOT:
        return "the disk quota is used up";
    case EFBIG:
        return "the file would be too large";
    case EROFS:
        return "the file system is read-only";
    case EISDIR:
        return "it is a directory";
    case EAGAIN:
        return "another process is writing it";
    case ENODEV:
        return "the file system cannot map files";
    case EOVERFLOW:
        return "the file is too large";
    default:
        return NULL;
    }
}

static rf_status fail_errno(rf_error *err, rf_status status, const char *where, const char *what,
                            int code)
{
    const char *reason = errno_text(code);
    if (reason)
        return rf_fail(err, status, where, "%s: %s", what, reason);
    return rf_fail(err, status, where, "%s: error %d of the system", what, code);
}

/* Fills text (terminated) with the start of a file; false when it cannot be read. */
static bool read_small_file(const char *path, char *text, size_t capacity)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    size_t length = 0;
    while (length < capacity - 1) {
        ssize_t count = read(file, text + length, capacity - 1 - length);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            break;
        length += (size_t)count;
    }
    close(file);
    text[length] = '\0';
    return length > 0;
}

/* Reads decimal digits behind spaces; false when there are none, or more than 64 bits. */
static bool parse_u64(const char *text, uint64_t *out)
{
    while (*text == ' ' || *text == '\t')
        text++;
    if (*text < '0' || *text > '9')
        return false;
    uint64_t value = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        if (!rf_mul(value, 10, &value) || !rf_add(value, (uint64_t)(*text - '0'), &value)) {
            return false;
        }
    }
    *out = value;
    return true;
}

/* The number behind name at the start of a line ("VmData:"); 0 when there is none. */
static uint64_t line_value(const char *text, const char *name, bool *found)
{
    size_t length = strlen(name);
    uint64_t value = 0;
    for (const char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n')
            line++;
        if (strncmp(line, name, length) == 0 && parse_u64(line + length, &value)) {
            if (found)
                *found = true;
            return value;
        }
    }
    return 0;
}

/* The same for a line in kB; bytes, UINT64_MAX when unknown. */
static uint64_t line_kib(const char *text, const char *name)
{
    bool found = false;
    uint64_t bytes = 0;
    uint64_t kib = line_value(text, name, &found);
    return found && rf_mul(kib, 1024, &bytes) ? bytes : UINT64_MAX;
}

static uint64_t less(uint64_t limit, uint64_t used)
{
    return limit > used ? limit - used : 0;
}

/* ---- memory ------------------------------------------------------------------------------ */

uint64_t rf_os_page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

static rf_status fail_reserve(rf_error *err, uint64_t bytes)
{
    rf_budget_source source;
    rf_os_budget(&source);
    uint64_t left = RF_MIN(source.mem_available, RF_MIN(source.cgroup_left, source.rlimit_left));
    rf_fail(err, RF_ERR_NO_FIT, "reserve", "the system refuses this much memory");
    rf_fail_expected(err, "%llu bytes", (unsigned long long)bytes);
    if (left == UINT64_MAX)
        rf_fail_got(err, "an unknown number of bytes");
    else
        rf_fail_got(err, "%llu bytes available", (unsigned long long)left);
    return RF_ERR_NO_FIT;
}

rf_status rf_os_reserve(uint64_t bytes, void **out, rf_error *err)
{
    uint64_t page = rf_os_page_bytes();
    uint64_t inner = 0;
    uint64_t whole = 0;
    if (bytes == 0)
        return rf_fail(err, RF_ERR_USAGE, "reserve", "zero bytes were asked for");
    if (!rf_align_up(bytes, page, &inner) || !rf_add(inner, 2 * page, &whole) || whole > SIZE_MAX) {
        return fail_reserve(err, bytes);
    }
    /* Everything starts out of reach; what stays so is the guard in front and behind. */
    uint8_t *base = mmap(NULL, (size_t)whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return fail_reserve(err, bytes);
    if (mprotect(base + page, (size_t)inner, PROT_READ | PROT_WRITE) != 0) {
        munmap(base, (size_t)whole);
        return fail_reserve(err, bytes);
    }
    *out = base + page;
    return RF_OK;
}

void rf_os_release(void *base, uint64_t bytes)
{
    if (!base || bytes == 0)
        return;
    uint64_t page = rf_os_page_bytes();
    uint64_t inner = (bytes + page - 1) & ~(page - 1); /* reserve has checked this sum */
    munmap((uint8_t *)base - page, (size_t)(inner + 2 * page));
}

void rf_os_touch(void *base, uint64_t bytes)
{
    if (bytes == 0)
        return;
    uint64_t page = rf_os_page_bytes();
    volatile uint8_t *first = base;
    for (uint64_t at = 0; at < bytes; at += page)
        first[at] = 0;
    first[bytes - 1] = 0; /* the last page, when base is not at the start of one */
}

__attribute__((noinline)) void rf_os_touch_stack(void)
{
    volatile uint8_t below[STACK_TOUCH_BYTES];
    uint64_t page = rf_os_page_bytes();
    for (uint64_t at = sizeof below; at > page; at -= page)
        below[at - 1] = 0;
    below[0] = 0;
}

rf_status rf_os_map(const char *path, rf_mapping *out, rf_error *err)
{
    rf_status status = RF_OK;
    struct stat info;
    *out = (rf_mapping){0};
    /* O_NONBLOCK: a pipe that somebody names by mistake must not hold us at open. */
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return fail_errno(err, RF_ERR_IO, path, "cannot open", errno);
    if (fstat(file, &info) != 0) {
        status = fail_errno(err, RF_ERR_IO, path, "cannot ask for the size", errno);
        goto done;
    }
    if (S_ISDIR(info.st_mode)) {
        status = rf_fail(err, RF_ERR_IO, path, "cannot open: it is a directory");
        goto done;
    }
    if (!S_ISREG(info.st_mode)) {
        status = rf_fail(err, RF_ERR_IO, path, "cannot open: it is not a regular file");
        goto done;
    }
    if (info.st_size == 0)
        goto done; /* the system maps no empty range */
    void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (data == MAP_FAILED) {
        status =
            fail_errno(err, errno == ENOMEM ? RF_ERR_NO_FIT : RF_ERR_IO, path, "cannot map", errno);
        goto done;
    }
    *out = (rf_mapping){.data = data, .size = (uint64_t)info.st_size};
done:
    close(file);
    return status;
}

/* ---- whole files out --------------------------------------------------------------------- */

static bool write_all(int file, const uint8_t *data, uint64_t bytes)
{
    while (bytes > 0) {
        ssize_t written = write(file, data, (size_t)RF_MIN(bytes, (uint64_t)1 << 30));
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        data += written;
        bytes -= (uint64_t)written;
    }
    return true;
}

/* Everything written and on the disk: 0, or the system's reason. */
static int write_pieces(int file, const rf_piece *pieces, uint32_t count)
{
    errno = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!write_all(file, pieces[i].data, pieces[i].bytes))
            return errno ? errno : EIO;
    }
    return fsync(file) == 0 ? 0 : errno;
}

/* Gives a file without a name this one, which at most a dead process has left there. */
static bool name_file(int file, const char *name)
{
    char self[32];
    rf_print(self, sizeof self, "/proc/self/fd/%d", file);
    for (int tries = 0; tries < 2; tries++) {
        if (linkat(AT_FDCWD, self, AT_FDCWD, name, AT_SYMLINK_FOLLOW) == 0)
            return true;
        if (errno != EEXIST || unlink(name) != 0)
            return false;
    }
    return false;
}

/* The empty file of this name; what a dead process left is taken over, since its lock died with it.
 * No link is followed: only the temporary file itself is ever emptied. A file system that knows no
 * locks must do without. */
static int open_named(const char *name)
{
    struct stat held, named;
    int file = open(name, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644);
    if (file < 0)
        return -1;
    bool alone = flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
    if (alone && fstat(file, &held) == 0 && lstat(name, &named) == 0 && S_ISREG(held.st_mode) &&
        held.st_nlink == 1 && held.st_dev == named.st_dev && held.st_ino == named.st_ino &&
        ftruncate(file, 0) == 0)
        return file;
    close(file);
    errno = EAGAIN;
    return -1;
}

/* Makes name a whole file, on the disk: 0, or the system's reason. *out stays open, for its lock;
 * -1: there is none. A file without a name goes with the process that writes it, so it gets its
 * name when it is whole; where that cannot be, it has one from the start. */
static int write_beside(const char *folder, const char *name, const rf_piece *pieces,
                        uint32_t count, int *out)
{
    *out = open(folder, O_WRONLY | O_TMPFILE | O_CLOEXEC, 0644);
    if (*out >= 0) {
        int code = write_pieces(*out, pieces, count);
        if (code || name_file(*out, name))
            return code;
        close(*out);
    }
    *out = open_named(name);
    if (*out < 0)
        return errno;
    int code = write_pieces(*out, pieces, count);
    if (code)
        unlink(name);
    return code;
}

/* After a rename the folder's own entry must reach the disk; where that cannot be asked, the file
 * is whole all the same. */
static void sync_folder(const char *folder)
{
    int handle = open(folder, O_RDONLY | O_CLOEXEC | O_DIRECTORY);
    if (handle >= 0) {
        (void)fsync(handle);
        close(handle);
    }
}

rf_status rf_os_write_file(const char *path, const rf_piece *pieces, uint32_t count, rf_error *err)
{
    char folder[4096], temporary[4096];
    size_t length = strlen(path);
    if (length + 32 > sizeof temporary)
        return rf_fail(err, RF_ERR_IO, path, "cannot write: the path is too long");
    rf_print(temporary, sizeof temporary, "%s.ringfence.tmp", path);
    while (length > 0 && path[length - 1] != '/')
        length--;
    rf_print(folder, sizeof folder, "%.*s.", (int)length, path);
    int file;
    int code = write_beside(folder, temporary, pieces, count, &file);
    if (!code && rename(temporary, path) != 0) {
        code = errno;
        unlink(temporary);
    }
    if (file >= 0)
        close(file); /* nothing is lost here: the bytes are on the disk, or a reason is known */
    if (code)
        return fail_errno(err, RF_ERR_IO, path, "cannot write", code);
    sync_folder(folder);
    return RF_OK;
}

void rf_os_unmap(rf_mapping *mapping)
{
    if (mapping->data)
        munmap((void *)(uintptr_t)mapping->data, (size_t)mapping->size);
    *mapping = (rf_mapping){0};
}

/* Before Linux 5.14 there is nothing better than to read a byte of each page. A file that shrinks
 * meanwhile raises SIGBUS here. */
static void read_each_page(const uint8_t *base, uint64_t bytes, uint64_t page)
{
    const volatile uint8_t *first = base;
    for (uint64_t at = 0; at < bytes; at += page)
        (void)first[at];
}

rf_status rf_os_populate(const void *base, uint64_t bytes,
                         bool (*progress)(void *context, uint64_t done), void *context,
                         rf_error *err)
{
    if (bytes == 0)
        return RF_OK;
    uint64_t page = rf_os_page_bytes();
    uint64_t lead = (uint64_t)((uintptr_t)base & (page - 1));
    const uint8_t *first = (const uint8_t *)base - lead;
    uint64_t whole = bytes + lead; /* cannot overflow: the range is mapped */
    bool advice = true;
    for (uint64_t at = 0; at < whole;) {
        uint64_t count = RF_MIN(whole - at, POPULATE_SLICE_BYTES);
        if (advice &&
            madvise((void *)(uintptr_t)(first + at), (size_t)count, MADV_POPULATE_READ) != 0) {
            if (errno == EINTR || errno == EAGAIN)
                continue;
            if (errno == EFAULT) {
                rf_fail(err, RF_ERR_IO, "populate", "the file shrank while it was mapped");
                rf_fail_expected(err, "%llu bytes", (unsigned long long)bytes);
                rf_fail_got(err, "an end of file before byte %llu",
                            (unsigned long long)(at + count));
                return RF_ERR_IO;
            }
            if (errno != EINVAL && errno != ENOSYS) {
                return fail_errno(err, RF_ERR_IO, "populate", "cannot read the mapped file", errno);
            }
            advice = false;
        }
        if (!advice)
            read_each_page(first + at, count, page);
        at += count;
        if (progress && !progress(context, RF_MIN(less(at, lead), bytes))) {
            return rf_fail(err, RF_ERR_INTERRUPTED, "populate", "stopped by the caller");
        }
    }
    return RF_OK;
}

/* ---- figures ----------------------------------------------------------------------------- */

uint64_t rf_os_resident(const void *base, uint64_t bytes)
{
    /* Documentation/admin-guide/mm/pagemap.rst: one word a page, bit 63 says present. */
    uint64_t entries[512];
    uint64_t page = rf_os_page_bytes();
    uint64_t begin = (uint64_t)(uintptr_t)base;
    uint64_t end = 0;
    uint64_t resident = 0;
    if (!rf_add(begin, bytes, &end))
        return UINT64_MAX;
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return UINT64_MAX;
    for (uint64_t index = begin / page; index * page < end;) {
        uint64_t count = RF_MIN((end + page - 1) / page - index, RF_ARRAY_COUNT(entries));
        ssize_t got = pread(file, entries, (size_t)count * sizeof entries[0],
                            (off_t)(index * sizeof entries[0]));
        if (got < (ssize_t)sizeof entries[0]) {
            resident = UINT64_MAX;
            break;
        }
        count = (uint64_t)got / sizeof entries[0];
        for (uint64_t i = 0; i < count; i++, index++) {
            uint64_t low = RF_MAX(index * page, begin);
            uint64_t high = RF_MIN((index + 1) * page, end);
            if (entries[i] >> 63)
                resident += high - low;
        }
    }
    close(file);
    return resident;
}

uint64_t rf_os_anonymous(void)
{
    char text[PROC_TEXT_BYTES];
    if (!read_small_file("/proc/self/smaps_rollup", text, sizeof text))
        return 0;
    return (line_value(text, "Anonymous:", NULL) + line_value(text, "Swap:", NULL)) * 1024;
}

uint64_t rf_os_data_bytes(void)
{
    char text[PROC_TEXT_BYTES];
    if (!read_small_file("/proc/self/status", text, sizeof text))
        return 0;
    return line_value(text, "VmData:", NULL) * 1024;
}

rf_faults rf_os_faults(void)
{
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) != 0)
        return (rf_faults){0};
    return (rf_faults){.minor = (uint64_t)usage.ru_minflt, .major = (uint64_t)usage.ru_majflt};
}

uint64_t rf_os_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- control groups ---------------------------------------------------------------------- */

#define CGROUP_PATH_BYTES 512u
#define NO_LIMIT          (UINT64_C(1) << 62) /* version 1: LONG_MAX in whole pages */

/* Fills path with this process's group under a controller ("" for version 2, whose line reads
 * "0::/path"); false when it has none. */
static bool cgroup_path(const char *controller, char *path, size_t capacity)
{
    char text[PROC_TEXT_BYTES];
    if (!read_small_file("/proc/self/cgroup", text, sizeof text))
        return false;
    size_t length = strlen(controller);
    for (char *line = text; *line;) {
        char *end = strchr(line, '\n');
        if (!end)
            end = line + strlen(line);
        char *names = memchr(line, ':', (size_t)(end - line));
        char *group = names ? memchr(names + 1, ':', (size_t)(end - names - 1)) : NULL;
        for (char *name = names; group && name < group;) {
            char *stop = name + 1;
            while (stop < group && *stop != ',')
                stop++;
            if ((size_t)(stop - name - 1) == length && !memcmp(name + 1, controller, length)) {
                rf_print(path, capacity, "%.*s", (int)(end - group - 1), group + 1);
                return true;
            }
            name = stop;
        }
        line = *end ? end + 1 : end;
    }
    return false;
}

/* Reads root + path + "/" + name. */
static bool read_group_file(const char *root, const char *path, const char *name, char *text,
                            size_t capacity)
{
    char whole[CGROUP_PATH_BYTES + 128];
    rf_print(whole, sizeof whole, "%s%s/%s", root, strcmp(path, "/") == 0 ? "" : path, name);
    return read_small_file(whole, text, capacity);
}

/* One step towards the root of the hierarchy; false when path was the root. */
static bool cgroup_parent(char *path)
{
    char *slash = strrchr(path, '/');
    if (!slash || path[0] == '\0' || strcmp(path, "/") == 0)
        return false;
    *slash = '\0';
    return true;
}

typedef struct rf_cgroup_names { /* one version's spelling */
    const char *controller;
    const char *root;
    const char *limit;
    const char *anonymous; /* a line of memory.stat */
    const char *shared;
} rf_cgroup_names;

/* A limit binds everything below it, so the smallest rest on the way up counts. In a container the
 * path may name a group that only the host sees; then the root of the mount is the group. */
static uint64_t cgroup_left(const rf_cgroup_names *names)
{
    char path[CGROUP_PATH_BYTES];
    char text[PROC_TEXT_BYTES];
    uint64_t left = UINT64_MAX;
    if (!cgroup_path(names->controller, path, sizeof path))
        return left;
    do {
        uint64_t limit = 0;
        if (!read_group_file(names->root, path, names->limit, text, sizeof text))
            continue;
        if (!parse_u64(text, &limit) || limit >= NO_LIMIT)
            continue; /* "max" */
        uint64_t used = 0;
        if (read_group_file(names->root, path, "memory.stat", text, sizeof text)) {
            used = line_value(text, names->anonymous, NULL) + line_value(text, names->shared, NULL);
        }
        left = RF_MIN(left, less(limit, used));
    } while (cgroup_parent(path));
    return left;
}

/* Processors that a quota amounts to, rounded up; UINT64_MAX without one. */
static uint64_t quota_processors(uint64_t quota_us, uint64_t period_us)
{
    if (period_us == 0)
        return UINT64_MAX;
    return RF_MAX(quota_us / period_us + (quota_us % period_us != 0), 1);
}

static uint64_t cgroup_processors(void)
{
    char path[CGROUP_PATH_BYTES];
    char text[PROC_TEXT_BYTES];
    uint64_t processors = UINT64_MAX;
    uint64_t quota = 0;
    uint64_t period = 0;
    if (cgroup_path("", path, sizeof path)) {
        do { /* cpu.max: "200000 100000" or "max 100000" */
            if (!read_group_file("/sys/fs/cgroup", path, "cpu.max", text, sizeof text))
                continue;
            const char *space = strchr(text, ' ');
            if (!space || !parse_u64(text, &quota) || !parse_u64(space, &period))
                continue;
            processors = RF_MIN(processors, quota_processors(quota, period));
        } while (cgroup_parent(path));
    }
    if (cgroup_path("cpu", path, sizeof path)) {
        const char *root = "/sys/fs/cgroup/cpu";
        do { /* a quota of -1 is none */
            if (!read_group_file(root, path, "cpu.cfs_quota_us", text, sizeof text))
                continue;
            if (!parse_u64(text, &quota))
                continue;
            if (!read_group_file(root, path, "cpu.cfs_period_us", text, sizeof text))
                continue;
            if (!parse_u64(text, &period))
                continue;
            processors = RF_MIN(processors, quota_processors(quota, period));
        } while (cgroup_parent(path));
    }
    return processors;
}

uint32_t rf_os_processor_count(void)
{
    cpu_set_t sets[8]; /* 8192 processors; the kernel refuses a mask that is too short */
    uint64_t count = 1;
    if (sched_getaffinity(0, sizeof sets, sets) == 0) {
        count = (uint64_t)CPU_COUNT_S(sizeof sets, sets);
    }
    count = RF_MIN(count, cgroup_processors());
    return (uint32_t)RF_MAX(count, 1);
}

static uint64_t rlimit_left(int resource, uint64_t used)
{
    struct rlimit limit;
    if (getrlimit((__typeof__(RLIMIT_AS))resource, &limit) != 0)
        return UINT64_MAX;
    if (limit.rlim_cur == RLIM_INFINITY || used == UINT64_MAX)
        return UINT64_MAX;
    return less((uint64_t)limit.rlim_cur, used);
}

void rf_os_budget(rf_budget_source *out)
{
    static const rf_cgroup_names version_2 = {"", "/sys/fs/cgroup", "memory.max", "anon ",
                                              "shmem "};
    static const rf_cgroup_names version_1 = {
        "memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss ", "total_shmem "};
    char text[PROC_TEXT_BYTES];
    *out = (rf_budget_source){UINT64_MAX, UINT64_MAX, UINT64_MAX};
    if (read_small_file("/proc/meminfo", text, sizeof text)) {
        out->mem_available = line_kib(text, "MemAvailable:");
    }
    out->cgroup_left = RF_MIN(cgroup_left(&version_2), cgroup_left(&version_1));
    if (read_small_file("/proc/self/status", text, sizeof text)) {
        uint64_t address_space = rlimit_left(RLIMIT_AS, line_kib(text, "VmSize:"));
        uint64_t data = rlimit_left(RLIMIT_DATA, line_kib(text, "VmData:"));
        out->rlimit_left = RF_MIN(address_space, data);
    }
}
