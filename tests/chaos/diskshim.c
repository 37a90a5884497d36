/* A disk that can be made to fail or to hang under a running process: an LD_PRELOAD library.
 *
 * DISKSHIM_ROOT names a directory; calls on files below it are the disk's. DISKSHIM_CONTROL names a
 * file of CONTROL_BYTES bytes, mapped shared, that the test writes while the process runs:
 *
 *   byte 0..5   what happens to writes, reads, syncs, opens, renames and unlinks:
 *               0 nothing, 1 EIO, 2 ENOSPC, 3 EROFS, 4 hangs until the byte changes
 *   byte 8..15  how many calls were hit or held so far (native uint64, atomic)
 *
 * Descriptors are recognised by their path (/proc/self/fd) when a fault is on, so that a healthy
 * disk costs one load a call. A held call waits on a futex over the first bytes of the control
 * file; `diskshim_set` wakes it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CONTROL_BYTES = 4096 };
enum call { WRITE, READ, SYNC, OPEN, NAME, UNLINK };
enum fault { NONE, IO_ERROR, NO_SPACE, READ_ONLY, HANG };

static volatile uint8_t *control;
static const char *root;
static size_t root_length;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("DISKSHIM_CONTROL");
    root = getenv("DISKSHIM_ROOT");
    if (!path || !root)
        return;
    root_length = strlen(root);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0)
        abort();
    void *map = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (map == MAP_FAILED)
        abort();
    control = map;
}

static int is_below(const char *path)
{
    return strncmp(path, root, root_length) == 0;
}

static int is_ours(int descriptor)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_below(path);
}

/* Returns 0 to go on, or the errno to fail with. */
static int suffer(enum call call)
{
    uint32_t *word = (uint32_t *)(control + (call & ~3));
    __atomic_add_fetch((uint64_t *)(control + 8), 1, __ATOMIC_SEQ_CST);
    for (;;) {
        uint32_t seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
        switch (control[call]) {
        case NONE: return 0;
        case IO_ERROR: return EIO;
        case NO_SPACE: return ENOSPC;
        case READ_ONLY: return EROFS;
        default: syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
        }
    }
}

/* For the test's own process: change a fault and wake whoever hangs on the old one. */
void diskshim_set(uint8_t *shared, int call, int fault)
{
    __atomic_store_n(shared + call, (uint8_t)fault, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, shared + (call & ~3), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define GUARD(call, ours) \
    if (control && control[call] && (ours)) { \
        int error = suffer(call); \
        if (error) { \
            errno = error; \
            return -1; \
        } \
    }

/* A call of this name on a descriptor, with these parameters and arguments. */
#define ON_DESCRIPTOR(type, name, call, parameters, arguments) \
    type name parameters \
    { \
        REAL(name); \
        GUARD(call, is_ours(fd)); \
        return real arguments; \
    }

ON_DESCRIPTOR(ssize_t, write, WRITE, (int fd, const void *data, size_t n), (fd, data, n))
ON_DESCRIPTOR(ssize_t, writev, WRITE, (int fd, const struct iovec *v, int n), (fd, v, n))
ON_DESCRIPTOR(ssize_t, pwrite, WRITE, (int fd, const void *data, size_t n, off_t at),
              (fd, data, n, at))
ON_DESCRIPTOR(ssize_t, pwrite64, WRITE, (int fd, const void *data, size_t n, off64_t at),
              (fd, data, n, at))
ON_DESCRIPTOR(ssize_t, pwritev64v2, WRITE,
              (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))
ON_DESCRIPTOR(ssize_t, pread64, READ, (int fd, void *data, size_t n, off64_t at),
              (fd, data, n, at))
ON_DESCRIPTOR(ssize_t, preadv64v2, READ,
              (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))
ON_DESCRIPTOR(int, fdatasync, SYNC, (int fd), (fd))
ON_DESCRIPTOR(int, fsync, SYNC, (int fd), (fd))

/* This one returns the error itself. */
int posix_fallocate64(int fd, off64_t at, off64_t count)
{
    REAL(posix_fallocate64);
    if (control && control[WRITE] && is_ours(fd)) {
        int error = suffer(WRITE);
        if (error)
            return error;
    }
    return real(fd, at, count);
}

int open64(const char *path, int flags, ...)
{
    REAL(open64);
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    GUARD(OPEN, is_below(path));
    return real(path, flags, mode);
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    GUARD(NAME, is_below(from));
    return real(from, to);
}

int unlink(const char *path)
{
    REAL(unlink);
    GUARD(UNLINK, is_below(path));
    return real(path);
}
