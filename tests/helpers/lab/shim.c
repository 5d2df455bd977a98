/* What the kernel may do to a process, on demand: full disks, torn writes, lost power, jumping clocks.
 *
 * Preloaded (LD_PRELOAD) and idle until `lab_arm` is called; it touches only files below one folder.  Every fsync of such a file copies
 * it to a shadow folder, every fsync of a folder copies its list of names: the shadow is the disk after a power loss that kept nothing
 * but what was synced.  The n-th write below the folder can fail with an error, or be cut in half and kill the process.
 *
 * In a process that was started with LAB_CLOCK the file of that name says by how many seconds (a 64-bit number) the time of day is off;
 * who changes it makes the clocks of all these processes jump.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char root[PATH_MAX], shadow[PATH_MAX];
static size_t root_len;
static long first_write, last_write, writes;
static int write_error, clock_mode;
static long clock_calls;
static const volatile long long *off_by;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* `error`: errno of writes first..last (counted from 1 in this process), 0 = the first of them is torn and kills the process. */
void lab_arm(const char *folder, const char *copy, long first, long last, int error, int clock) {
    snprintf(root, sizeof root, "%s", folder);
    snprintf(shadow, sizeof shadow, "%s", copy);
    root_len = strlen(root);
    first_write = first, last_write = last, write_error = error, writes = 0, clock_mode = clock;
}

static int below(int fd, char *path) {
    if (!root_len) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return !strncmp(path, root, root_len) && (path[root_len] == '/' || !path[root_len]);
}

static int is_write_ahead_index(const char *path) {
    size_t n = strlen(path);
    return n > 4 && !strcmp(path + n - 4, "-shm"); /* rebuilt from the log; lost at every power loss */
}

/* 0: go on; 1: fail with errno set; 2: write half, then die */
static int meet(int fd) {
    char path[PATH_MAX];
    if (!first_write || !below(fd, path) || is_write_ahead_index(path)) return 0;
    long n = __sync_add_and_fetch(&writes, 1);
    if (n < first_write || n > last_write) return 0;
    if (!write_error) return 2;
    errno = write_error;
    return 1;
}

static ssize_t die(ssize_t written) {
    kill(getpid(), SIGKILL);
    pause();
    return written;
}

ssize_t write(int fd, const void *data, size_t n) {
    switch (meet(fd)) {
    case 1: return -1;
    case 2: return die(syscall(SYS_write, fd, data, n / 2));
    }
    return syscall(SYS_write, fd, data, n);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    switch (meet(fd)) {
    case 1: return -1;
    case 2: return die(syscall(SYS_pwrite64, fd, data, n / 2, at));
    }
    return syscall(SYS_pwrite64, fd, data, n, at);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return pwrite64(fd, data, n, at); }

/* Half of what the pieces hold. */
static ssize_t torn(int fd, const struct iovec *pieces, int count, off64_t at) {
    ssize_t written = 0;
    for (int i = 0; i < count && i <= count / 2; i++)
        written += syscall(SYS_pwrite64, fd, pieces[i].iov_base, i < count / 2 ? pieces[i].iov_len : pieces[i].iov_len / 2, at + written);
    return die(written);
}

ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off64_t at, int flags) {
    switch (meet(fd)) {
    case 1: return -1;
    case 2: return torn(fd, pieces, count, at);
    }
    return syscall(SYS_pwritev2, fd, pieces, count, (unsigned long)at, 0ul, flags);
}

ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t at) { return pwritev64v2(fd, pieces, count, at, 0); }

ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t at, int flags) {
    return pwritev64v2(fd, pieces, count, at, flags);
}

ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t at) { return pwritev64v2(fd, pieces, count, at, 0); }

static void parents(char *path) {
    for (char *p = path + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            mkdir(path, 0700);
            *p = '/';
        }
}

static void copy(const char *from, const char *to) {
    char aside[PATH_MAX + 8], buffer[1 << 16];
    snprintf(aside, sizeof aside, "%s.lab", to);
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(aside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    for (ssize_t n; in >= 0 && out >= 0 && (n = read(in, buffer, sizeof buffer)) > 0;) syscall(SYS_write, out, buffer, n);
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    if (in >= 0 && out >= 0) rename(aside, to);
    else unlink(aside);
}

/* What is durable of a file is kept by its inode, so that a rename moves durable bytes. */
static void bytes_of(const char *path, char *out) {
    struct stat s;
    snprintf(out, PATH_MAX, "%s/.bytes/%lu", shadow, stat(path, &s) ? 0ul : (unsigned long)s.st_ino);
}

static void sync_file(const char *path) {
    char kept[PATH_MAX], to[PATH_MAX];
    bytes_of(path, kept);
    parents(kept);
    copy(path, kept);
    snprintf(to, sizeof to, "%s%.*s", shadow, PATH_MAX / 2, path + root_len);
    parents(to);
    copy(kept, to); /* as ext4 and xfs do: syncing a new file keeps its name too */
}

/* A folder that was renamed into place brings along what of it is durable: the files that were synced. */
static void bring(const char *path, const char *to) {
    char name[PATH_MAX], kept[PATH_MAX], target[PATH_MAX];
    struct stat s;
    if (mkdir(to, 0700)) return;
    DIR *now = opendir(path);
    for (struct dirent *e; now && (e = readdir(now));) {
        snprintf(name, sizeof name, "%.*s/%s", PATH_MAX / 2, path, e->d_name);
        snprintf(target, sizeof target, "%.*s/%s", PATH_MAX / 2, to, e->d_name);
        if (e->d_name[0] == '.' || stat(name, &s)) continue;
        if (S_ISDIR(s.st_mode)) bring(name, target);
        bytes_of(name, kept);
        if (S_ISREG(s.st_mode) && !access(kept, R_OK)) copy(kept, target);
    }
    if (now) closedir(now);
}

static void forget(const char *path) {
    char name[PATH_MAX];
    struct stat s;
    DIR *now = opendir(path);
    for (struct dirent *e; now && (e = readdir(now));) {
        snprintf(name, sizeof name, "%.*s/%s", PATH_MAX / 2, path, e->d_name);
        if (e->d_name[0] == '.' || stat(name, &s)) continue;
        if (S_ISDIR(s.st_mode)) forget(name);
        else unlink(name);
    }
    if (now) closedir(now);
    rmdir(path);
}

static void sync_folder(const char *path) {
    char to[PATH_MAX], name[PATH_MAX], kept[PATH_MAX], target[PATH_MAX];
    struct stat s;
    snprintf(to, sizeof to, "%s%.*s/", shadow, PATH_MAX / 2, path + root_len);
    parents(to);
    DIR *now = opendir(path);
    for (struct dirent *e; now && (e = readdir(now));) {
        snprintf(name, sizeof name, "%.*s/%s", PATH_MAX / 2, path, e->d_name);
        snprintf(target, sizeof target, "%.*s%s", PATH_MAX / 2, to, e->d_name);
        if (e->d_name[0] == '.' || stat(name, &s)) continue;
        if (S_ISDIR(s.st_mode)) bring(name, target);
        if (!S_ISREG(s.st_mode)) continue;
        bytes_of(name, kept);
        if (!access(kept, R_OK)) copy(kept, target);
        else close(open(target, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)); /* a name without synced bytes: empty */
    }
    if (now) closedir(now);
    DIR *then = opendir(to);
    for (struct dirent *e; then && (e = readdir(then));) {
        snprintf(name, sizeof name, "%.*s/%s", PATH_MAX / 2, path, e->d_name);
        snprintf(target, sizeof target, "%.*s%s", PATH_MAX / 2, to, e->d_name);
        if (e->d_name[0] == '.' || !stat(name, &s) || stat(target, &s)) continue;
        if (S_ISDIR(s.st_mode)) forget(target);
        else unlink(target);
    }
    if (then) closedir(then);
}

/* An inode may be used again: what was durable under its number must not become another file's. */
static void unlinked(const char *path) {
    char full[PATH_MAX], kept[PATH_MAX];
    struct stat s;
    if (!shadow[0] || !realpath(path, full) || strncmp(full, root, root_len) || stat(full, &s) || s.st_nlink > 1) return;
    bytes_of(full, kept);
    syscall(SYS_unlink, kept);
}

int unlink(const char *path) { return unlinked(path), (int)syscall(SYS_unlink, path); }

int rename(const char *from, const char *to) { return unlinked(to), (int)syscall(SYS_rename, from, to); }

static void synced(int fd) {
    char path[PATH_MAX];
    struct stat s;
    if (!shadow[0] || !below(fd, path) || is_write_ahead_index(path) || fstat(fd, &s)) return;
    pthread_mutex_lock(&lock);
    S_ISDIR(s.st_mode) ? sync_folder(path) : sync_file(path);
    pthread_mutex_unlock(&lock);
}

/* Where a shadow is the disk, waiting for the real one proves nothing. */
int fsync(int fd) { return root_len ? synced(fd), 0 : (int)syscall(SYS_fsync, fd); }
int fdatasync(int fd) { return root_len ? synced(fd), 0 : (int)syscall(SYS_fdatasync, fd); }

__attribute__((constructor)) static void follow_clock(void) {
    const char *name = getenv("LAB_CLOCK");
    int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof *off_by, PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) off_by = page;
    close(fd);
}

/* 1: an hour on at every other call, 2: the hour comes and goes with the seconds, 3: stands still */
static void shift(time_t *seconds, long *fraction) {
    long n = __sync_add_and_fetch(&clock_calls, 1);
    if (clock_mode == 1) *seconds += n % 2 ? 3600 : -3600;
    if (clock_mode == 2) *seconds += *seconds % 2 ? 3600 : -3600;
    if (clock_mode == 3) *seconds = 1700000000, *fraction = 0;
    if (off_by) *seconds += (time_t)*off_by;
}

int clock_gettime(clockid_t id, struct timespec *t) {
    int code = (int)syscall(SYS_clock_gettime, id, t);
    if (!code && id == CLOCK_REALTIME) shift(&t->tv_sec, &t->tv_nsec);
    return code;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    int code = (int)syscall(SYS_gettimeofday, t, zone);
    if (!code) shift(&t->tv_sec, &t->tv_usec);
    return code;
}

time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
