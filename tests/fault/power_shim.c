/* Remembers what was synced: after each fsync and fdatasync of something below POWER_ROOT, its content (of a folder: its names) is
   copied to POWER_SHADOW under its inode number.  What is not there, a power loss may take.  Loaded with LD_PRELOAD. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void remember(int fd) {
    const char *root = getenv("POWER_ROOT"), *shadow = getenv("POWER_SHADOW");
    char link[64], path[4096], aside[4200], final[4200];
    struct stat st;
    ssize_t n;
    if (!root || !shadow || fstat(fd, &st)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if ((n = readlink(link, path, sizeof path - 1)) < 0) return;
    path[n] = 0;
    if (strncmp(path, root, strlen(root))) return;
    snprintf(final, sizeof final, "%s/%lu", shadow, (unsigned long)st.st_ino);
    snprintf(aside, sizeof aside, "%s.aside", final);
    int out = open(aside, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (out < 0) abort();
    if (S_ISDIR(st.st_mode)) {
        DIR *dir = opendir(path);
        struct dirent *e;
        while (dir && (e = readdir(dir)))
            if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) dprintf(out, "%lu %s\n", (unsigned long)e->d_ino, e->d_name);
        if (dir) closedir(dir);
    } else {
        char block[65536];
        off_t at = 0;
        while ((n = pread(fd, block, sizeof block, at)) > 0) {
            if (write(out, block, n) != n) abort();
            at += n;
        }
        if (n < 0) { /* opened for writing only */
            int in = open(link, O_RDONLY);
            at = 0;
            while (in >= 0 && (n = pread(in, block, sizeof block, at)) > 0) {
                if (write(out, block, n) != n) abort();
                at += n;
            }
            if (in < 0 || n < 0) abort();
            close(in);
        }
    }
    close(out);
    if (rename(aside, final)) abort();
}

#define WRAP(name)                                                                   \
    int name(int fd) {                                                               \
        int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, #name);                    \
        int result = real(fd);                                                       \
        if (!result) remember(fd);                                                   \
        return result;                                                               \
    }
WRAP(fsync)
WRAP(fdatasync)
