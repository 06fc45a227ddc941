/* Faults in the calls of this process to the file system, preloaded before the C library.
 *
 * Counts the calls that touch a root directory, and at the chosen one kills the process, cuts the power of the file
 * system, fails, or shortens the transfer; writes down every call and its data on demand. Does nothing until armed.
 * Python arms it through ctypes after a fork, or for a program through its environment (see shim.py, which mirrors the
 * numbers below).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum call { OPEN, CREATE, WRITE, PWRITE, FSYNC, FTRUNCATE, FALLOCATE, LINK, RENAME, UNLINK, MKDIR, CLOSE_WRITTEN,
            CLOSE, READ, PREAD, FSTAT, STAT, MMAP, FLOCK, OPENDIR, FCNTL, RMDIR, CALLS };
enum action { NOTHING, KILL_BEFORE, KILL_AFTER, FAIL, SHORTEN, CUT_BEFORE, CUT_AFTER, ORPHAN_BEFORE, ORPHAN_AFTER };

#define FS_IOC_SHUTDOWN 0x8004587d
#define DESCRIPTORS 4096

static char root[4096];
static size_t root_length;
static uint32_t counted;          /* a bit per enum call */
static int action, parameter;
static long first, last;          /* the action is taken at calls first..last, counted from 1; none if first is 0 */
static int trace_fd = -1, root_fd = -1;
static _Atomic long calls, struck;
static _Atomic long calls_of[CALLS];
static _Atomic int armed;
static char *path_of[DESCRIPTORS]; /* the path of each descriptor under the root; NULL for all others */
static unsigned char written[DESCRIPTORS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct record { int32_t call, error; int64_t offset, length; uint32_t path_length, other_length, data_length, flags; };

#define REAL(name) ({ static __typeof__(&name) real_; if (!real_) real_ = dlsym(RTLD_NEXT, #name); real_; })

static int under_root(const char *path) {
    return armed && path && root_length && strncmp(path, root, root_length) == 0 &&
           (path[root_length] == '/' || path[root_length] == 0);
}

static const char *tracked(int fd) {
    return armed && fd >= 0 && fd < DESCRIPTORS ? path_of[fd] : NULL;
}

/* The path that a name in the directory ``at`` stands for, in ``room`` where it has to be made. */
#define ROOM 8192
static const char *from(int at, const char *path, char *room) {
    const char *directory = path && path[0] != '/' ? tracked(at) : NULL;
    if (!directory || snprintf(room, ROOM, "%s/%s", directory, path) >= ROOM) return path;
    return room;
}

static void cut_power(void) {
    uint32_t without_log_flush = 2;
    if (root_fd < 0 || ioctl(root_fd, FS_IOC_SHUTDOWN, &without_log_flush) != 0) _exit(71);
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Kill the process that started this one, which goes on when that is gone. */
static void orphan(void) {
    pid_t parent = getppid();
    syscall(SYS_kill, parent, SIGKILL);
    while (getppid() == parent) usleep(1000);
}

/* What to do at this call; the count goes up. */
static int enter(enum call call) {
    if (!(counted >> call & 1)) return NOTHING;
    long number = atomic_fetch_add(&calls, 1) + 1;
    atomic_fetch_add(&calls_of[call], 1);
    if (first == 0 || number < first || number > last) return NOTHING;
    atomic_fetch_add(&struck, 1);
    if (action == CUT_BEFORE) { cut_power(); die(); }
    if (action == KILL_BEFORE) die();
    if (action == ORPHAN_BEFORE) orphan();
    return action;
}

static void leave(int act) {
    if (act == CUT_AFTER) { cut_power(); die(); }
    if (act == KILL_AFTER) die();
    if (act == ORPHAN_AFTER) orphan();
}

static void record_call(enum call call, const char *path, const char *other, int64_t offset, int64_t length,
                        const struct iovec *data, int parts, uint32_t flags, int error) {
    if (trace_fd < 0) return;
    struct record record = {call, error, offset, length, path ? strlen(path) : 0, other ? strlen(other) : 0, 0, flags};
    if (data && length > 0) record.data_length = (uint32_t)length;
    pthread_mutex_lock(&lock);
    REAL(write)(trace_fd, &record, sizeof record);
    if (path) REAL(write)(trace_fd, path, record.path_length);
    if (other) REAL(write)(trace_fd, other, record.other_length);
    int64_t rest = record.data_length;
    for (int part = 0; part < parts && rest > 0; part++) {
        int64_t size = (int64_t)data[part].iov_len < rest ? (int64_t)data[part].iov_len : rest;
        REAL(write)(trace_fd, data[part].iov_base, size);
        rest -= size;
    }
    pthread_mutex_unlock(&lock);
}

/* The frame of a call that returns -1 for an error. */
#define CALL(call, path, other, offset, length, flags, real) ({ \
    int act_ = enter(call); \
    long result_ = act_ == FAIL ? (errno = parameter, -1) : (long)(real); \
    int error_ = errno; \
    record_call(call, path, other, offset, length, NULL, 0, flags, result_ < 0 ? error_ : 0); \
    leave(act_); \
    errno = error_; \
    result_; })

/* ---- for Python ---- */

void torture_arm(const char *directory, uint32_t mask, int act, int param, long from, long to, int trace) {
    armed = 0;
    strncpy(root, directory, sizeof root - 1);
    root_length = strlen(root);
    counted = mask;
    action = act, parameter = param, first = from, last = to;
    trace_fd = trace;
    calls = struck = 0;
    for (int call = 0; call < CALLS; call++) calls_of[call] = 0;
    if (act == CUT_BEFORE || act == CUT_AFTER) {
        char parent[4096];
        strcpy(parent, root);
        while (parent[1] && (root_fd = REAL(open)(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
            *strrchr(parent, '/') = 0;
    }
    armed = 1;
}

/* A program that a process under torture starts is armed by its environment. */
__attribute__((constructor)) static void arm_from_environment(void) {
    const char *fault = getenv("TORTURE_FAULT"), *directory = getenv("TORTURE_ROOT"), *trace = getenv("TORTURE_TRACE");
    uint32_t mask;
    int act, param;
    long from, to;
    if (!fault || !directory || !trace || sscanf(fault, "%u %d %d %ld %ld", &mask, &act, &param, &from, &to) != 5) return;
    torture_arm(directory, mask, act, param, from, to, REAL(open)(trace, O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
}

void torture_disarm(void) { armed = 0; }
long torture_calls(void) { return calls; }
long torture_struck(void) { return struck; }
long torture_calls_of(int call) { return calls_of[call]; }
void torture_cut_power(void) { cut_power(); }
int torture_tracked(void) {
    int count = 0;
    for (int fd = 0; fd < DESCRIPTORS; fd++) count += path_of[fd] != NULL;
    return count;
}

/* ---- opening and closing ---- */

static int opened(int fd, const char *path, int flags) {
    if (fd >= 0 && fd < DESCRIPTORS) {
        free(path_of[fd]);
        path_of[fd] = strdup(path);
        written[fd] = (flags & O_ACCMODE) != O_RDONLY;
    }
    return fd;
}

#define OPENING(name) \
int name(const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, int); va_end(list); \
    if (!under_root(path)) return REAL(name)(path, flags, mode); \
    enum call call = flags & O_CREAT ? CREATE : OPEN; \
    return opened(CALL(call, path, NULL, 0, 0, flags, REAL(name)(path, flags, mode)), path, flags); \
}
OPENING(open)
OPENING(open64)

#define OPENING_AT(name) \
int name(int at, const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, int); va_end(list); \
    char room[ROOM]; \
    const char *full = from(at, path, room); \
    if (!under_root(full)) return REAL(name)(at, path, flags, mode); \
    enum call call = flags & O_CREAT ? CREATE : OPEN; \
    return opened(CALL(call, full, NULL, 0, 0, flags, REAL(name)(at, path, flags, mode)), full, flags); \
}
OPENING_AT(openat)
OPENING_AT(openat64)

int close(int fd) {
    const char *path = tracked(fd);
    if (!path) return REAL(close)(fd);
    int act = enter(written[fd] ? CLOSE_WRITTEN : CLOSE);
    char *name = path_of[fd];
    enum call call = written[fd] ? CLOSE_WRITTEN : CLOSE;
    path_of[fd] = NULL;
    /* A descriptor is gone even where closing it tells of a failure. */
    int result = REAL(close)(fd), error = errno;
    if (act == FAIL) result = -1, error = parameter;
    record_call(call, name, NULL, 0, 0, NULL, 0, 0, result < 0 ? error : 0);
    leave(act);
    free(name);
    errno = error;
    return result;
}

/* ---- transfers ---- */

static size_t total(const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int part = 0; part < count; part++) bytes += parts[part].iov_len;
    return bytes;
}

/* A transfer of only some bytes, which may end anywhere: not even O_DIRECT is told of. */
static ssize_t transfer_some(int fd, const struct iovec *parts, int64_t offset, size_t length, int writes) {
    char *buffer = malloc(length);
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int other = syscall(SYS_openat, AT_FDCWD, name, writes ? O_WRONLY : O_RDONLY, 0);
    if (other < 0) other = dup(fd);
    ssize_t result;
    size_t done = 0;
    if (writes)
        for (int part = 0; done < length; part++) {
            size_t size = parts[part].iov_len < length - done ? parts[part].iov_len : length - done;
            memcpy(buffer + done, parts[part].iov_base, size);
            done += size;
        }
    off_t at = offset < 0 ? lseek(fd, 0, SEEK_CUR) : offset;
    result = syscall(writes ? SYS_pwrite64 : SYS_pread64, other, buffer, length, at);
    int error = errno;
    if (result > 0 && offset < 0) lseek(fd, result, SEEK_CUR);
    if (!writes)
        for (int part = 0; result > 0 && done < (size_t)result; part++) {
            size_t size = parts[part].iov_len < result - done ? parts[part].iov_len : result - done;
            memcpy(parts[part].iov_base, buffer + done, size);
            done += size;
        }
    syscall(SYS_close, other);
    free(buffer);
    errno = error;
    return result;
}

/* How many bytes a shortened transfer takes: one, half, all but one, or half in whole sectors. */
static size_t shortened(size_t length) {
    switch (parameter) {
    case 1: return 1;
    case 2: return length > 1 ? length / 2 : 1;
    case 3: return length > 1 ? length - 1 : 1;
    default: return length / 2 >= 512 ? length / 2 / 512 * 512 : (length > 1 ? length / 2 : 1);
    }
}

#define TRANSFER(call, fd, parts, count, offset, writes, real) ({ \
    int act_ = enter(call); \
    size_t length_ = total(parts, count); \
    ssize_t result_; \
    if (act_ == FAIL) errno = parameter, result_ = -1; \
    else if (act_ == SHORTEN && length_ > 0) result_ = transfer_some(fd, parts, offset, shortened(length_), writes); \
    else result_ = (real); \
    int error_ = errno; \
    record_call(call, path_of[fd], NULL, offset, result_, (writes) ? (parts) : NULL, count, 0, result_ < 0 ? error_ : 0); \
    leave(act_); \
    errno = error_; \
    result_; })

ssize_t write(int fd, const void *data, size_t length) {
    if (!tracked(fd)) return REAL(write)(fd, data, length);
    struct iovec part = {(void *)data, length};
    return TRANSFER(WRITE, fd, &part, 1, -1, 1, REAL(write)(fd, data, length));
}

ssize_t read(int fd, void *data, size_t length) {
    if (!tracked(fd)) return REAL(read)(fd, data, length);
    struct iovec part = {data, length};
    return TRANSFER(READ, fd, &part, 1, -1, 0, REAL(read)(fd, data, length));
}

#define PWRITING(name) \
ssize_t name(int fd, const void *data, size_t length, off_t offset) { \
    if (!tracked(fd)) return REAL(name)(fd, data, length, offset); \
    struct iovec part = {(void *)data, length}; \
    return TRANSFER(PWRITE, fd, &part, 1, offset, 1, REAL(name)(fd, data, length, offset)); \
}
PWRITING(pwrite)
PWRITING(pwrite64)

#define PREADING(name) \
ssize_t name(int fd, void *data, size_t length, off_t offset) { \
    if (!tracked(fd)) return REAL(name)(fd, data, length, offset); \
    struct iovec part = {data, length}; \
    return TRANSFER(PREAD, fd, &part, 1, offset, 0, REAL(name)(fd, data, length, offset)); \
}
PREADING(pread)
PREADING(pread64)

#define VECTORED(name, call, writes) \
ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) { \
    if (!tracked(fd)) return REAL(name)(fd, parts, count, offset); \
    return TRANSFER(call, fd, parts, count, offset, writes, REAL(name)(fd, parts, count, offset)); \
}
VECTORED(pwritev, PWRITE, 1)
VECTORED(pwritev64, PWRITE, 1)
VECTORED(preadv, PREAD, 0)
VECTORED(preadv64, PREAD, 0)

#define VECTORED_2(name, call, writes) \
ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) { \
    if (!tracked(fd)) return REAL(name)(fd, parts, count, offset, flags); \
    return TRANSFER(call, fd, parts, count, offset, writes, REAL(name)(fd, parts, count, offset, flags)); \
}
VECTORED_2(pwritev2, PWRITE, 1)
VECTORED_2(pwritev64v2, PWRITE, 1)
VECTORED_2(preadv2, PREAD, 0)
VECTORED_2(preadv64v2, PREAD, 0)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (!tracked(fd)) return REAL(writev)(fd, parts, count);
    return TRANSFER(WRITE, fd, parts, count, -1, 1, REAL(writev)(fd, parts, count));
}

/* ---- durability and size ---- */

#define SYNCING(name) \
int name(int fd) { \
    const char *path = tracked(fd); \
    if (!path) return REAL(name)(fd); \
    return CALL(FSYNC, path, NULL, 0, 0, 0, REAL(name)(fd)); \
}
SYNCING(fsync)
SYNCING(fdatasync)

#define TRUNCATING(name) \
int name(int fd, off_t length) { \
    const char *path = tracked(fd); \
    if (!path) return REAL(name)(fd, length); \
    return CALL(FTRUNCATE, path, NULL, 0, length, 0, REAL(name)(fd, length)); \
}
TRUNCATING(ftruncate)
TRUNCATING(ftruncate64)

#define RESERVING(name) \
int name(int fd, off_t offset, off_t length) { \
    const char *path = tracked(fd); \
    if (!path) return REAL(name)(fd, offset, length); \
    int act = enter(FALLOCATE); \
    int result = act == FAIL ? parameter : REAL(name)(fd, offset, length); \
    record_call(FALLOCATE, path, NULL, offset, length, NULL, 0, 0, result); \
    leave(act); \
    return result; \
}
RESERVING(posix_fallocate)
RESERVING(posix_fallocate64)

#define ALLOCATING(name) \
int name(int fd, int mode, off_t offset, off_t length) { \
    const char *path = tracked(fd); \
    if (!path) return REAL(name)(fd, mode, offset, length); \
    return CALL(FALLOCATE, path, NULL, offset, length, 0, REAL(name)(fd, mode, offset, length)); \
}
ALLOCATING(fallocate)
ALLOCATING(fallocate64)

/* ---- names ---- */

int link(const char *from, const char *to) {
    if (!under_root(to)) return REAL(link)(from, to);
    return CALL(LINK, from, to, 0, 0, 0, REAL(link)(from, to));
}

int linkat(int at, const char *name, int to_at, const char *to, int flags) {
    char room[ROOM], to_room[ROOM];
    const char *old = from(at, name, room), *new = from(to_at, to, to_room);
    if (!under_root(new)) return REAL(linkat)(at, name, to_at, to, flags);
    return CALL(LINK, old, new, 0, 0, 0, REAL(linkat)(at, name, to_at, to, flags));
}

int rename(const char *from, const char *to) {
    if (!under_root(to)) return REAL(rename)(from, to);
    return CALL(RENAME, from, to, 0, 0, 0, REAL(rename)(from, to));
}

int renameat(int at, const char *name, int to_at, const char *to) {
    char room[ROOM], to_room[ROOM];
    const char *old = from(at, name, room), *new = from(to_at, to, to_room);
    if (!under_root(new)) return REAL(renameat)(at, name, to_at, to);
    return CALL(RENAME, old, new, 0, 0, 0, REAL(renameat)(at, name, to_at, to));
}

int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    if (!under_root(to)) return REAL(renameat2)(at, from, to_at, to, flags);
    return CALL(RENAME, from, to, 0, 0, flags, REAL(renameat2)(at, from, to_at, to, flags));
}

int unlink(const char *path) {
    if (!under_root(path)) return REAL(unlink)(path);
    return CALL(UNLINK, path, NULL, 0, 0, 0, REAL(unlink)(path));
}

int unlinkat(int at, const char *path, int flags) {
    char room[ROOM];
    const char *full = from(at, path, room);
    if (!under_root(full)) return REAL(unlinkat)(at, path, flags);
    return CALL(flags & AT_REMOVEDIR ? RMDIR : UNLINK, full, NULL, 0, 0, 0, REAL(unlinkat)(at, path, flags));
}

int rmdir(const char *path) {
    if (!under_root(path)) return REAL(rmdir)(path);
    return CALL(RMDIR, path, NULL, 0, 0, 0, REAL(rmdir)(path));
}

int mkdir(const char *path, mode_t mode) {
    if (!under_root(path)) return REAL(mkdir)(path, mode);
    return CALL(MKDIR, path, NULL, 0, 0, 0, REAL(mkdir)(path, mode));
}

int mkdirat(int at, const char *path, mode_t mode) {
    char room[ROOM];
    const char *full = from(at, path, room);
    if (!under_root(full)) return REAL(mkdirat)(at, path, mode);
    return CALL(MKDIR, full, NULL, 0, 0, 0, REAL(mkdirat)(at, path, mode));
}

/* ---- looking ---- */

#define STATTING(name, type) \
int name(const char *path, struct type *status) { \
    if (!under_root(path)) return REAL(name)(path, status); \
    return CALL(STAT, path, NULL, 0, 0, 0, REAL(name)(path, status)); \
}
STATTING(stat, stat)
STATTING(stat64, stat64)
STATTING(lstat, stat)
STATTING(lstat64, stat64)

#define STATTING_FD(name, type) \
int name(int fd, struct type *status) { \
    const char *path = tracked(fd); \
    if (!path) return REAL(name)(fd, status); \
    return CALL(FSTAT, path, NULL, 0, 0, 0, REAL(name)(fd, status)); \
}
STATTING_FD(fstat, stat)
STATTING_FD(fstat64, stat64)

#define STATTING_AT(name, type) \
int name(int at, const char *path, struct type *status, int flags) { \
    char room[ROOM]; \
    const char *full = from(at, path, room); \
    if (!under_root(full)) return REAL(name)(at, path, status, flags); \
    return CALL(STAT, full, NULL, 0, 0, 0, REAL(name)(at, path, status, flags)); \
}
STATTING_AT(fstatat, stat)
STATTING_AT(fstatat64, stat64)

int statx(int at, const char *path, int flags, unsigned mask, struct statx *status) {
    const char *known = under_root(path) ? path : tracked(at);
    if (!known) return REAL(statx)(at, path, flags, mask, status);
    return CALL(STAT, known, NULL, 0, 0, 0, REAL(statx)(at, path, flags, mask, status));
}

#define MAPPING(name) \
void *name(void *address, size_t length, int protection, int flags, int fd, off_t offset) { \
    const char *path = flags & MAP_ANONYMOUS ? NULL : tracked(fd); \
    if (!path) return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset); \
    return (void *)CALL(MMAP, path, NULL, offset, length, 0, \
                        syscall(SYS_mmap, address, length, protection, flags, fd, offset)); \
}
MAPPING(mmap)
MAPPING(mmap64)

int flock(int fd, int operation) {
    extern int flock(int, int);
    const char *path = tracked(fd);
    if (!path) return REAL(flock)(fd, operation);
    return CALL(FLOCK, path, NULL, 0, 0, 0, REAL(flock)(fd, operation));
}

#include <dirent.h>
DIR *opendir(const char *path) {
    if (!under_root(path)) return REAL(opendir)(path);
    int act = enter(OPENDIR);
    DIR *result = act == FAIL ? (errno = parameter, NULL) : REAL(opendir)(path);
    int error = errno;
    record_call(OPENDIR, path, NULL, 0, 0, NULL, 0, 0, result ? 0 : error);
    leave(act);
    errno = error;
    return result;
}

#define CONTROLLING(name) \
int name(int fd, int command, ...) { \
    va_list list; va_start(list, command); long argument = va_arg(list, long); va_end(list); \
    const char *path = tracked(fd); \
    if (!path) return REAL(name)(fd, command, argument); \
    return CALL(FCNTL, path, NULL, 0, 0, 0, REAL(name)(fd, command, argument)); \
}
CONTROLLING(fcntl)
CONTROLLING(fcntl64)

/* ---- not a fault ---- */

#include <netdb.h>
/* torch looks up the name of every address that it connects to; a slow name server would be measured instead of us. */
int getnameinfo(const struct sockaddr *restrict address, socklen_t length, char *restrict host, socklen_t host_length,
                char *restrict service, socklen_t service_length, int flags) {
    return REAL(getnameinfo)(address, length, host, host_length, service, service_length, flags | NI_NUMERICHOST);
}
