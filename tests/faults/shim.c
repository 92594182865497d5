/* A shim for LD_PRELOAD: one chosen system call on a file of a folder fails, is cut short, or kills the process.
 *
 * The folder is in the variable FAULT_FOLDER. `fault_arm` chooses the call: the n-th of the given kinds on a path of
 * that folder, or on a descriptor of such a path. `fault_arm(-1, ...)` lets all calls through. Calls of other files
 * are neither counted nor changed. Armed and asked by one thread; ctypes in shim.py.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

/* Kinds of calls; the same numbers are in shim.py. */
enum {
    K_OPEN = 1, K_WRITE = 2, K_READ = 4, K_SYNC = 8, K_NAME = 16, K_STAT = 32, K_LOCK = 64, K_MAP = 128,
    K_FOLDER = 256, K_TRUNCATE = 512, K_CREATE = 1024
};
/* What happens to the chosen call; the same numbers are in shim.py. */
enum { FAIL = 0, CUT_SHORT = 1, KILL_BEFORE = 2, KILL_AFTER = 3 };
/* What the wrapper of a call is to do. */
enum { PASS, RETURN_ERROR, HALVE, DIE_AFTER };

#define DESCRIPTORS 4096
#define PATH_BYTES 500

static const char *folder = "/nowhere/";
static char is_marked[DESCRIPTORS]; /* by descriptor: a file of the folder */

static long chosen = -1;
static int error_number, effect, kinds, is_tracing;
static long seen;
static int hits;
#define TRACED (1 << 16)
static unsigned short traced_kinds[TRACED]; /* of each call that was counted while all pass */
static unsigned traced_paths[TRACED];       /* a hash of its path */
static char hit_call[32], hit_path[PATH_BYTES];

void fault_arm(long call, int error, int what, int of_kinds) {
    chosen = call, error_number = error, effect = what, kinds = of_kinds, is_tracing = 0;
    seen = hits = 0;
    hit_call[0] = hit_path[0] = 0;
}
/* Let all calls pass, and note the kind and the path of each. */
void fault_trace(void) {
    fault_arm(LONG_MAX, 0, FAIL, ~0);
    is_tracing = 1;
}
long fault_seen(void) { return seen; }
int fault_kinds(long call) { return traced_kinds[call]; }
unsigned fault_path_hash(long call) { return traced_paths[call]; }
int fault_hits(void) { return hits; }
const char *fault_call(void) { return hit_call; }
const char *fault_path(void) { return hit_path; }

__attribute__((constructor)) static void begin(void) {
    if (getenv("FAULT_FOLDER")) folder = getenv("FAULT_FOLDER");
}

static int is_inside(const char *path) { return path && strncmp(path, folder, strlen(folder)) == 0; }
static int is_known(int descriptor) { return descriptor >= 0 && descriptor < DESCRIPTORS && is_marked[descriptor]; }
static int keep(int descriptor, const char *path) {
    if (descriptor >= 0 && descriptor < DESCRIPTORS) is_marked[descriptor] = is_inside(path);
    return descriptor;
}
static void die(void) {
    kill(getpid(), SIGKILL);
    pause();
}

/* Write the path of a call into `found`; `path` is 0 for a call on a descriptor. */
static void path_of(const char *path, int descriptor, char *found) {
    if (path) {
        snprintf(found, PATH_BYTES, "%s", path);
        return;
    }
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, found, PATH_BYTES - 1);
    found[size < 0 ? 0 : size] = 0;
}
static unsigned hash(const char *text) {
    unsigned value = 2166136261u;
    for (; *text; text++) value = (value ^ (unsigned char)*text) * 16777619u;
    return value;
}

/* Count a call and decide what happens to it; `path` is 0 for a call on a descriptor. Sets errno for RETURN_ERROR. */
static int decide(int kind, const char *name, const char *path, int descriptor) {
    if (chosen < 0 || !(kinds & kind)) return PASS;
    if (is_tracing && seen < TRACED) {
        char found[PATH_BYTES];
        path_of(path, descriptor, found);
        traced_kinds[seen] = kind;
        traced_paths[seen] = hash(found);
    }
    if (seen++ != chosen) return PASS;
    hits++;
    snprintf(hit_call, sizeof hit_call, "%s", name);
    path_of(path, descriptor, hit_path);
    switch (effect) {
    case CUT_SHORT: return HALVE;
    case KILL_BEFORE: die(); return PASS;
    case KILL_AFTER: return DIE_AFTER;
    default: errno = error_number; return RETURN_ERROR;
    }
}

/* The C library's own function of a name, in `real`. */
#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* Call `call` as decided, and return its result; `failed` is what an error returns. */
#define RUN(type, decision, failed, call) \
    do { \
        int decided = (decision); \
        if (decided == RETURN_ERROR) return failed; \
        type result = (call); \
        if (decided == DIE_AFTER) die(); \
        return result; \
    } while (0)

/* Opening. A call that may create a file is of the kind K_CREATE, too. */
#define MAKES_A_FILE (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))
static int open_kind(int flags) { return K_OPEN | (flags & MAKES_A_FILE ? K_CREATE : 0); }
static mode_t mode_of(int flags, va_list list) {
    return flags & MAKES_A_FILE ? va_arg(list, mode_t) : 0;
}
#define WRAP_OPEN(NAME) \
    int NAME(const char *path, int flags, ...) { \
        REAL(int, #NAME, const char *, int, ...); \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = mode_of(flags, list); \
        va_end(list); \
        RUN(int, is_inside(path) ? decide(open_kind(flags), "open", path, -1) : PASS, -1, \
            keep(real(path, flags, mode), path)); \
    }
WRAP_OPEN(open)
WRAP_OPEN(open64)
#define WRAP_OPENAT(NAME) \
    int NAME(int at, const char *path, int flags, ...) { \
        REAL(int, #NAME, int, const char *, int, ...); \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = mode_of(flags, list); \
        va_end(list); \
        RUN(int, is_inside(path) ? decide(open_kind(flags), "open", path, -1) : PASS, -1, \
            keep(real(at, path, flags, mode), path)); \
    }
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)
int close(int descriptor) {
    REAL(int, "close", int);
    if (is_known(descriptor)) is_marked[descriptor] = 0;
    return real(descriptor);
}
DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    RUN(DIR *, is_inside(path) ? decide(K_FOLDER, "opendir", path, -1) : PASS, 0, real(path));
}

/* Writing. A write that fails leaves its first half, as on a disk that fills up; one cut short says so. */
#define WRAP_PWRITE(NAME) \
    ssize_t NAME(int descriptor, const void *bytes, size_t size, off_t at) { \
        REAL(ssize_t, #NAME, int, const void *, size_t, off_t); \
        int decided = is_known(descriptor) ? decide(K_WRITE, "pwrite", 0, descriptor) : PASS; \
        if (decided == RETURN_ERROR && size > 1) { \
            int error = errno; \
            real(descriptor, bytes, size / 2, at); \
            errno = error; \
        } \
        if (decided == HALVE && size > 1) size /= 2; \
        RUN(ssize_t, decided, -1, real(descriptor, bytes, size, at)); \
    }
WRAP_PWRITE(pwrite)
WRAP_PWRITE(pwrite64)
ssize_t write(int descriptor, const void *bytes, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    int decided = is_known(descriptor) ? decide(K_WRITE, "write", 0, descriptor) : PASS;
    if (decided == HALVE && size > 1) size /= 2;
    RUN(ssize_t, decided, -1, real(descriptor, bytes, size));
}
#define WRAP_TRUNCATE(NAME) \
    int NAME(int descriptor, off_t size) { \
        REAL(int, #NAME, int, off_t); \
        RUN(int, is_known(descriptor) ? decide(K_TRUNCATE, "ftruncate", 0, descriptor) : PASS, -1, \
            real(descriptor, size)); \
    }
WRAP_TRUNCATE(ftruncate)
WRAP_TRUNCATE(ftruncate64)
#define WRAP_SYNC(NAME) \
    int NAME(int descriptor) { \
        REAL(int, #NAME, int); \
        RUN(int, is_known(descriptor) ? decide(K_SYNC, #NAME, 0, descriptor) : PASS, -1, real(descriptor)); \
    }
WRAP_SYNC(fsync)
WRAP_SYNC(fdatasync)

/* Reading */
#define WRAP_PREAD(NAME) \
    ssize_t NAME(int descriptor, void *bytes, size_t size, off_t at) { \
        REAL(ssize_t, #NAME, int, void *, size_t, off_t); \
        RUN(ssize_t, is_known(descriptor) ? decide(K_READ, "pread", 0, descriptor) : PASS, -1, \
            real(descriptor, bytes, size, at)); \
    }
WRAP_PREAD(pread)
WRAP_PREAD(pread64)
#define WRAP_PREADV(NAME) \
    ssize_t NAME(int descriptor, const struct iovec *parts, int count, off_t at) { \
        REAL(ssize_t, #NAME, int, const struct iovec *, int, off_t); \
        RUN(ssize_t, is_known(descriptor) ? decide(K_READ, "preadv", 0, descriptor) : PASS, -1, \
            real(descriptor, parts, count, at)); \
    }
WRAP_PREADV(preadv)
WRAP_PREADV(preadv64)
ssize_t read(int descriptor, void *bytes, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t);
    RUN(ssize_t, is_known(descriptor) ? decide(K_READ, "read", 0, descriptor) : PASS, -1,
        real(descriptor, bytes, size));
}
#define WRAP_MMAP(NAME) \
    void *NAME(void *address, size_t size, int protection, int flags, int descriptor, off_t at) { \
        REAL(void *, #NAME, void *, size_t, int, int, int, off_t); \
        RUN(void *, is_known(descriptor) ? decide(K_MAP, "mmap", 0, descriptor) : PASS, MAP_FAILED, \
            real(address, size, protection, flags, descriptor, at)); \
    }
WRAP_MMAP(mmap)
WRAP_MMAP(mmap64)

/* Names */
int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    RUN(int, is_inside(to) ? decide(K_NAME, "rename", to, -1) : PASS, -1, real(from, to));
}
int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    RUN(int, is_inside(to) ? decide(K_NAME, "linkat", to, -1) : PASS, -1, real(from_at, from, to_at, to, flags));
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    RUN(int, is_inside(path) ? decide(K_NAME, "mkdir", path, -1) : PASS, -1, real(path, mode));
}
#define WRAP_REMOVE(NAME) \
    int NAME(const char *path) { \
        REAL(int, #NAME, const char *); \
        RUN(int, is_inside(path) ? decide(K_NAME, #NAME, path, -1) : PASS, -1, real(path)); \
    }
WRAP_REMOVE(unlink)
WRAP_REMOVE(rmdir)

/* Looking */
#define WRAP_STAT(NAME, TYPE) \
    int NAME(const char *path, TYPE *answer) { \
        REAL(int, #NAME, const char *, TYPE *); \
        RUN(int, is_inside(path) ? decide(K_STAT, #NAME, path, -1) : PASS, -1, real(path, answer)); \
    }
WRAP_STAT(stat, struct stat)
WRAP_STAT(stat64, struct stat64)
WRAP_STAT(lstat, struct stat)
WRAP_STAT(lstat64, struct stat64)
WRAP_STAT(statvfs, struct statvfs)
WRAP_STAT(statvfs64, struct statvfs64)
#define WRAP_FSTAT(NAME, TYPE) \
    int NAME(int descriptor, TYPE *answer) { \
        REAL(int, #NAME, int, TYPE *); \
        RUN(int, is_known(descriptor) ? decide(K_STAT, "fstat", 0, descriptor) : PASS, -1, \
            real(descriptor, answer)); \
    }
WRAP_FSTAT(fstat, struct stat)
WRAP_FSTAT(fstat64, struct stat64)

/* Locking: locks and leases; other commands of fcntl() pass. */
static int is_lock(int command) {
    return command == F_OFD_SETLK || command == F_OFD_GETLK || command == F_SETLK || command == F_GETLK ||
           command == F_SETLEASE || command == F_GETLEASE;
}
#define WRAP_FCNTL(NAME) \
    int NAME(int descriptor, int command, ...) { \
        REAL(int, #NAME, int, int, ...); \
        va_list list; \
        va_start(list, command); \
        void *argument = va_arg(list, void *); \
        va_end(list); \
        int counts = is_known(descriptor) && is_lock(command); \
        RUN(int, counts ? decide(K_LOCK, "fcntl", 0, descriptor) : PASS, -1, real(descriptor, command, argument)); \
    }
WRAP_FCNTL(fcntl)
WRAP_FCNTL(fcntl64)
