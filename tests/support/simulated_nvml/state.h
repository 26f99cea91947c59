/* The state file shared by both simulated libraries: lines of "key value", re-read when replaced. */
#ifndef SIMULATED_STATE_H
#define SIMULATED_STATE_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TEXT_SIZE (1 << 16)

/* A machine's own driver (-DMACHINE="FOLDER") needs no variable to be found. */
#ifndef MACHINE
#define FILE_OF(name, variable) getenv(variable)
#else
#define FILE_OF(name, variable) (MACHINE "/" name)
#endif

static char state_text[TEXT_SIZE + 2];
static struct stat state_seen;

static void state_refresh(void) {
    const char *path = FILE_OF("state", "SIMULATED_NVML_STATE");
    struct stat now;
    if (!path || stat(path, &now) != 0) {
        state_text[0] = 0;
        return;
    }
    if (now.st_ino == state_seen.st_ino && now.st_size == state_seen.st_size &&
        now.st_mtim.tv_sec == state_seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == state_seen.st_mtim.tv_nsec && state_text[0])
        return;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    /* a leading newline lets every key be found as "\nkey " */
    state_text[0] = '\n';
    ssize_t size = read(fd, state_text + 1, TEXT_SIZE);
    close(fd);
    state_text[size > 0 ? size + 1 : 0] = 0;
    state_seen = now;
}

/* Copies the value of "key" into out; 0 if there is no such line. */
static int state_get(const char *key, char *out, size_t size) {
    char wanted[192];
    int length = snprintf(wanted, sizeof wanted, "\n%s ", key);
    const char *at = strstr(state_text, wanted);
    if (!at) return 0;
    at += length;
    size_t n = strcspn(at, "\n");
    if (n >= size) n = size - 1;
    memcpy(out, at, n);
    out[n] = 0;
    return 1;
}

static long long state_number(const char *key, long long otherwise) {
    char value[64];
    return state_get(key, value, sizeof value) ? strtoll(value, NULL, 10) : otherwise;
}

static void log_call(const char *function, const char *label) {
    const char *path = FILE_OF("calls", "SIMULATED_NVML_CALLS");
    if (!path) return;
    char line[192];
    int n = snprintf(line, sizeof line, "%d %s %s\n", (int)getpid(), function, label);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return;
    if (write(fd, line, (size_t)n) < 0) { /* a lost line only makes a test fail */ }
    close(fd);
}

/* What every call does first: fresh state, call log, the hang and the error set for it. */
static int enter(const char *function, const char *label) {
    char key[192];
    state_refresh();
    log_call(function, label);
    /* a wedged driver: no signal ends it, only that the key goes */
    snprintf(key, sizeof key, "hang.%s.%s", function, label);
    for (; state_number(key, 0); state_refresh()) {
        struct timespec pause = {0, 10000000L};
        nanosleep(&pause, NULL);
    }
    snprintf(key, sizeof key, "error.%s.all", function);
    int code = (int)state_number(key, 0);
    snprintf(key, sizeof key, "error.%s.%s", function, label);
    return (int)state_number(key, code);
}

#endif
