/* Preloaded: a folder whose disk fails or is slow, for as long as a file says so.
 *
 * $TROUBLED_FOLDER names the folder, $TROUBLE a file with the trouble's name: `eio`, by which whatever
 * is written or synchronised there fails, or `slow`, by which to synchronise takes a second. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_in_trouble(int fd, const char *trouble) {
    const char *folder = getenv("TROUBLED_FOLDER"), *name = getenv("TROUBLE");
    char link[64], path[PATH_MAX], found[16] = "";
    if (!folder || !name) return 0;
    int kept = errno, file = open(name, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        if (read(file, found, sizeof found - 1) < 0) found[0] = 0;
        close(file);
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (length < 0) return 0;
    path[length] = 0;
    return !strcmp(found, trouble) && !strncmp(path, folder, strlen(folder));
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if (fd > 2 && is_in_trouble(fd, "eio")) return errno = EIO, -1;
    return real(fd, data, size);
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    if (is_in_trouble(fd, "eio")) return errno = EIO, -1;
    if (is_in_trouble(fd, "slow")) sleep(1);
    return real(fd);
}
