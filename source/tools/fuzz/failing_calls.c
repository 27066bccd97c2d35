/* System calls on the files of one folder, counted; the n-th of them fails or kills the process.
 *
 *     cc -shared -fPIC -O1 -o failing_calls.so failing_calls.c -ldl -lpthread
 *     LD_PRELOAD=./failing_calls.so python ...
 *
 * Functions of the C library that name a file, or a descriptor of one, go through this library. Nothing happens until
 * the process calls `failing_calls_arm`. From then on each call on a file of the folder is one line of a log: its name
 * and its path. `faults.py` forks a process for each case and arms it through ctypes.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t length;        /* of the folder's name; 0 while nothing is counted */
static long count, fail_at;  /* calls so far, and the call that fails; 0 for none */
static int error_number;     /* errno of that call; negative: the number of a signal */
static int lasting;          /* whether all calls after it fail, too */
static int log_handle = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* torch writes directories in a thread of its own */

/* Begin to count the calls on files below `name`, an absolute path without links. */
void failing_calls_arm(const char *name, long call, int number, int all, int log) {
    length = 0;
    strncpy(folder, name, sizeof(folder) - 2);
    strcat(folder, "/");
    count = 0, fail_at = call, error_number = number, lasting = all, log_handle = log;
    length = strlen(folder);
}

void failing_calls_disarm(void) { length = 0; }

/* Count a call on an absolute path; return the errno with which it fails, or 0. */
static int fails(const char *call, const char *path) {
    int number = 0;
    if (strncmp(path, folder, length) != 0) return 0;
    pthread_mutex_lock(&lock);
    count++;
    if (log_handle >= 0) {
        char line[PATH_MAX + 64];
        int size = snprintf(line, sizeof(line), "%s %s\n", call, path + length);
        syscall(SYS_write, log_handle, line, (size_t)size);
    }
    if (fail_at > 0 && (count == fail_at || (lasting && count > fail_at))) number = error_number;
    pthread_mutex_unlock(&lock);
    if (number < 0) syscall(SYS_kill, (pid_t)syscall(SYS_getpid), -number);
    return number;
}

static int fails_at(const char *call, int place, const char *path) {
    char whole[2 * PATH_MAX + 2];
    if (length == 0 || path == NULL) return 0;
    if (path[0] == '/') return fails(call, path);
    if (place == AT_FDCWD) {
        if (syscall(SYS_getcwd, whole, PATH_MAX) < 0) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof(link), "/proc/self/fd/%d", place);
        long size = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX);
        if (size < 0) return 0;
        whole[size] = 0;
    }
    if (path[0] != 0) {
        strcat(whole, "/");
        strncat(whole, path, PATH_MAX);
    }
    return fails(call, whole);
}

static int fails_on(const char *call, int handle) { return fails_at(call, handle, ""); }

/* A function of the C library, and what it returns when a call fails. */
#define NEXT(type, name, ...)                                               \
    static type (*next)(__VA_ARGS__);                                       \
    if (next == NULL) *(void **)&next = dlsym(RTLD_NEXT, #name)

#define FAIL_IF(failure, result)   \
    do {                           \
        int saved_errno = errno;   \
        int number_ = (failure);   \
        errno = saved_errno;       \
        if (number_ > 0) {         \
            errno = number_;       \
            return result;         \
        }                          \
    } while (0)

/* The mode stands behind the flags where a file may be made. */
#define READ_MODE(mode, flags)                                     \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                         \
        va_list rest;                                              \
        va_start(rest, flags);                                     \
        (mode) = va_arg(rest, mode_t);                             \
        va_end(rest);                                              \
    }

#define OPEN(name)                                                 \
    int name(const char *path, int flags, ...) {                   \
        mode_t mode = 0;                                           \
        NEXT(int, name, const char *, int, ...);                   \
        READ_MODE(mode, flags);                                    \
        FAIL_IF(fails_at(flags & (O_WRONLY | O_RDWR) ? "open-to-write" : "open", AT_FDCWD, path), -1); \
        return next(path, flags, mode);                            \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                               \
    int name(int place, const char *path, int flags, ...) {        \
        mode_t mode = 0;                                           \
        NEXT(int, name, int, const char *, int, ...);              \
        READ_MODE(mode, flags);                                    \
        FAIL_IF(fails_at(flags & (O_WRONLY | O_RDWR) ? "open-to-write" : "open", place, path), -1); \
        return next(place, path, flags, mode);                     \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                \
    FILE *name(const char *path, const char *mode) {               \
        NEXT(FILE *, name, const char *, const char *);            \
        FAIL_IF(fails_at(mode[0] == 'r' && !strchr(mode, '+') ? "open" : "open-to-write", AT_FDCWD, path), NULL); \
        return next(path, mode);                                   \
    }
FOPEN(fopen)
FOPEN(fopen64)

#define ON_HANDLE(type, name, parameters, arguments)               \
    type name parameters {                                         \
        NEXT(type, name, PARAMETERS parameters);                   \
        FAIL_IF(fails_on(#name, handle), -1);                      \
        return next arguments;                                     \
    }
#define PARAMETERS(...) __VA_ARGS__
ON_HANDLE(ssize_t, read, (int handle, void *data, size_t size), (handle, data, size))
ON_HANDLE(ssize_t, readv, (int handle, const struct iovec *data, int size), (handle, data, size))
ON_HANDLE(ssize_t, pread, (int handle, void *data, size_t size, off_t at), (handle, data, size, at))
ON_HANDLE(ssize_t, pread64, (int handle, void *data, size_t size, off64_t at), (handle, data, size, at))
ON_HANDLE(ssize_t, write, (int handle, const void *data, size_t size), (handle, data, size))
ON_HANDLE(ssize_t, writev, (int handle, const struct iovec *data, int size), (handle, data, size))
ON_HANDLE(ssize_t, pwrite, (int handle, const void *data, size_t size, off_t at), (handle, data, size, at))
ON_HANDLE(ssize_t, pwrite64, (int handle, const void *data, size_t size, off64_t at), (handle, data, size, at))
ON_HANDLE(int, fsync, (int handle), (handle))
ON_HANDLE(int, fdatasync, (int handle), (handle))
ON_HANDLE(int, ftruncate, (int handle, off_t size), (handle, size))
ON_HANDLE(int, ftruncate64, (int handle, off64_t size), (handle, size))
ON_HANDLE(int, flock, (int handle, int operation), (handle, operation))

#define ON_PATH(name, parameters, arguments)                       \
    int name parameters {                                          \
        NEXT(int, name, PARAMETERS parameters);                    \
        FAIL_IF(fails_at(#name, AT_FDCWD, path), -1);              \
        return next arguments;                                     \
    }
ON_PATH(rename, (const char *old, const char *path), (old, path))
ON_PATH(link, (const char *old, const char *path), (old, path))
ON_PATH(symlink, (const char *target, const char *path), (target, path))
ON_PATH(unlink, (const char *path), (path))
ON_PATH(rmdir, (const char *path), (path))
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH(truncate, (const char *path, off_t size), (path, size))
ON_PATH(truncate64, (const char *path, off64_t size), (path, size))
ON_PATH(stat, (const char *restrict path, struct stat *restrict found), (path, found))
ON_PATH(stat64, (const char *restrict path, struct stat64 *restrict found), (path, found))
ON_PATH(lstat, (const char *restrict path, struct stat *restrict found), (path, found))
ON_PATH(lstat64, (const char *restrict path, struct stat64 *restrict found), (path, found))

#define ON_PLACE(name, parameters, arguments)                      \
    int name parameters {                                          \
        NEXT(int, name, PARAMETERS parameters);                    \
        FAIL_IF(fails_at(#name, place, path), -1);                 \
        return next arguments;                                     \
    }
ON_PLACE(renameat, (int from, const char *old, int place, const char *path), (from, old, place, path))
ON_PLACE(linkat, (int from, const char *old, int place, const char *path, int flags), (from, old, place, path, flags))
ON_PLACE(symlinkat, (const char *target, int place, const char *path), (target, place, path))
ON_PLACE(unlinkat, (int place, const char *path, int flags), (place, path, flags))
ON_PLACE(mkdirat, (int place, const char *path, mode_t mode), (place, path, mode))
ON_PLACE(fstatat, (int place, const char *restrict path, struct stat *restrict found, int flags),
         (place, path, found, flags))
ON_PLACE(fstatat64, (int place, const char *restrict path, struct stat64 *restrict found, int flags),
         (place, path, found, flags))

ssize_t readlink(const char *restrict path, char *restrict data, size_t size) {
    NEXT(ssize_t, readlink, const char *, char *, size_t);
    FAIL_IF(fails_at("readlink", AT_FDCWD, path), -1);
    return next(path, data, size);
}

DIR *opendir(const char *path) {
    NEXT(DIR *, opendir, const char *);
    FAIL_IF(fails_at("opendir", AT_FDCWD, path), NULL);
    return next(path);
}

#define MMAP(name, offset)                                                           \
    void *name(void *at, size_t size, int protection, int flags, int handle, offset start) { \
        NEXT(void *, name, void *, size_t, int, int, int, offset);                   \
        if (handle >= 0) FAIL_IF(fails_on("mmap", handle), MAP_FAILED);              \
        return next(at, size, protection, flags, handle, start);                     \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

/* A file that was written may report at its end what it could not write; the descriptor is closed all the same. */
int close(int handle) {
    NEXT(int, close, int);
    int failure = 0, saved_errno = errno;
    if (length > 0) {
        long flags = syscall(SYS_fcntl, handle, F_GETFL, 0);
        if (flags >= 0 && (flags & (O_WRONLY | O_RDWR))) failure = fails_on("close", handle);
        errno = saved_errno;
    }
    int result = next(handle);
    if (failure > 0) {
        errno = failure;
        return -1;
    }
    return result;
}
