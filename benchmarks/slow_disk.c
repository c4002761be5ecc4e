/* The files of a folder on a slow disk, for benchmarks/chaos.py: preloaded, it lets each call on them sleep first.

   cc -shared -fPIC -O2 -o slow_disk.so slow_disk.c -ldl

   CHAOS_FOLDER: the folder, without links. CHAOS_MET: a file that grows by one byte with each call that slept. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define OPEN 10 /* milliseconds */
#define READ 10
#define WRITE 50
#define SYNC 200

static void sleep_if_slow(int file, long milliseconds)
{
    char link[40], path[PATH_MAX];
    const char *folder = getenv("CHAOS_FOLDER"), *met = getenv("CHAOS_MET");
    int error = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = file < 0 || !folder || !met ? -1 : readlink(link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        if (!strncmp(path, folder, strlen(folder))) {
            long counter = syscall(SYS_openat, AT_FDCWD, met, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
            if (counter >= 0) {
                syscall(SYS_write, counter, ".", 1);
                syscall(SYS_close, counter);
            }
            nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000}, NULL);
        }
    }
    errno = error;
}

/* A call whose first argument is the file. */
#define SLOW(result, name, milliseconds, parameters, ...)                           \
    result name parameters                                                          \
    {                                                                               \
        static result(*right) parameters;                                           \
        if (!right)                                                                 \
            right = (result(*) parameters)dlsym(RTLD_NEXT, #name);                  \
        sleep_if_slow(file, milliseconds);                                          \
        return right(__VA_ARGS__);                                                  \
    }

SLOW(ssize_t, read, READ, (int file, void *bytes, size_t count), file, bytes, count)
SLOW(ssize_t, write, WRITE, (int file, const void *bytes, size_t count), file, bytes, count)
SLOW(int, ftruncate, WRITE, (int file, off_t size), file, size)
SLOW(int, ftruncate64, WRITE, (int file, off64_t size), file, size)
SLOW(int, fsync, SYNC, (int file), file)
SLOW(int, fdatasync, SYNC, (int file), file)

/* Opens: the file is known afterwards. */
#define SLOW_OPEN(name)                                                             \
    int name(const char *path, int flags, ...)                                      \
    {                                                                               \
        static int (*right)(const char *, int, ...);                                \
        va_list more;                                                               \
        va_start(more, flags);                                                      \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;     \
        va_end(more);                                                               \
        if (!right)                                                                 \
            right = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);       \
        int file = right(path, flags, mode);                                        \
        sleep_if_slow(file, OPEN);                                                  \
        return file;                                                                \
    }

SLOW_OPEN(open)
SLOW_OPEN(open64)
