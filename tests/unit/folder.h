/* tests/unit/folder.h: what lies in a folder. After cmocka.h. */
#ifndef FOLDER_H
#define FOLDER_H

#include <dirent.h>

/* Hidden ones are not counted. */
static inline uint32_t files_in(const char *path)
{
    uint32_t count = 0;
    DIR *folder = opendir(path);
    assert_non_null(folder);
    for (struct dirent *entry; (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

#endif
