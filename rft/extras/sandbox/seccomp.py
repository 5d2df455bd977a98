"""A seccomp filter with the system calls that a sandboxed program may make, assembled without a
library.

Unlisted calls fail with EPERM: sockets beyond this process, other processes, tracing, mounts,
shared memory, io_uring, keys.  Source: Linux, Documentation/userspace-api/seccomp_filter.rst and
include/uapi/linux/{seccomp,filter,audit}.h.
Invariant: calls are allowed by their names in the tables below, for the two architectures whose
numbers are listed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Literal

# name:number on x86_64:number on aarch64
_ALWAYS = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 lseek:8:62 close:3:57 close_range:436:436
fstat:5:80 newfstatat:262:79 stat:4:- lstat:6:- statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439
getdents64:217:61 readlink:89:- readlinkat:267:78 getcwd:79:17 chdir:80:49 dup:32:23 dup2:33:- dup3:292:24
pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20
epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 eventfd2:290:19 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216
madvise:28:233 brk:12:214 mincore:27:232 futex:202:98 sched_yield:24:124 sched_getaffinity:204:123 set_robust_list:273:99
get_robust_list:274:100 rseq:334:293 set_tid_address:218:96 gettid:186:178 getpid:39:172 getppid:110:173 getuid:102:174
geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 getpgrp:111:- getpgid:121:155 getsid:124:156
getresuid:118:148 getresgid:120:150 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 restart_syscall:219:128 pause:34:- nanosleep:35:101
clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153
getrusage:98:165 sysinfo:99:179 uname:63:160 getrandom:318:278 exit:60:93 exit_group:231:94 arch_prctl:158:- setitimer:38:103
getitimer:36:102 alarm:37:- getrlimit:97:163 umask:95:166 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
shutdown:48:210 getsockopt:55:209 getsockname:51:204 getpeername:52:205 membarrier:324:283 wait4:61:260 waitid:247:95
getcpu:309:168 fadvise64:221:223
"""
_OPENS = """
open:2:- openat:257:56
"""
_CHECKED = """
ioctl:16:29 fcntl:72:25 clone:56:220 clone3:435:435 socketpair:53:199 prlimit64:302:261
"""
_WRITES = """
mkdir:83:- mkdirat:258:34 unlink:87:- unlinkat:263:35 rmdir:84:- rename:82:- renameat:264:38 renameat2:316:276 ftruncate:77:46
truncate:76:45 fsync:74:82 fdatasync:75:83 flock:73:32 chmod:90:- fchmod:91:52 fchmodat:268:53 utimensat:280:88
fallocate:285:47
"""
_PROCESSES = """
fork:57:- vfork:58:-
"""
_GROUPS = """
setsid:112:157 setpgid:109:154 kill:62:129 tgkill:234:131
"""
_PROGRAMS = """
execve:59:221 fchdir:81:50 statfs:137:43 fstatfs:138:44 symlink:88:- symlinkat:266:36 link:86:- linkat:265:37
"""
_SESSION = """
connect:42:203 accept:43:202 accept4:288:242 bind:49:200 listen:50:201 setsockopt:54:208 sendmmsg:307:269 recvmmsg:299:243
timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 signalfd4:289:74 eventfd:284:- inotify_init:253:-
inotify_init1:294:26 inotify_add_watch:254:27 inotify_rm_watch:255:28 memfd_create:319:279 prctl:157:167 setrlimit:160:164
sched_setaffinity:203:122 sched_getparam:143:121 sched_getscheduler:145:120 getpriority:140:141 setpriority:141:140
chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 mknod:133:- mknodat:259:33 creat:85:- copy_file_range:326:285
sendfile:40:71 splice:275:76 tee:276:77 preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287 msync:26:227
sync:162:81 syncfs:306:267 utime:132:- utimes:235:- futimesat:261:- fchmodat2:452:452 getdents:78:- getxattr:191:8
lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 setuid:105:146 setgid:106:144
setreuid:113:145 setregid:114:143 setresuid:117:147 setresgid:119:149 setgroups:116:159 setfsuid:122:151 setfsgid:123:152
capget:125:90 capset:126:91 execveat:322:281 tkill:200:130 rt_sigqueueinfo:129:138 pidfd_open:434:434
pidfd_send_signal:424:424 epoll_pwait2:441:441 futex_waitv:449:449
"""
_SOCKETS = """
socket:41:198
"""

# (column of the tables, AUDIT_ARCH)
_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
_ALLOW = 0x7FFF0000  # SECCOMP_RET_*
_KILL = 0x80000000
_ERRNO = 0x00050000
_LOAD = 0x20  # BPF: LD|W|ABS, JEQ|K, JSET|K, ALU|AND|K, RET|K
_EQUAL = 0x15
_ANY_BIT = 0x45
_AND = 0x54
_RETURN = 0x06
_NR = 0
_ARCH = 4
_X32 = 0x40000000
_PR_SET_SECCOMP = 22
_FILTER = 2

_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}
_THREAD = 0x00010000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0x400000  # the last is __O_TMPFILE
# TCGETS TIOCGWINSZ FIONBIO FIONREAD FIONCLEX FIOCLEX
_TERMINAL = (0x5401, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451)

# F_SETOWN F_SETSIG F_SETOWN_EX: files whose events send signals to another process
_SIGNALLING = (8, 10, 15)

Files = Literal["none", "read", "write"]
_Code = list[tuple[int, int, int, int]]


def supported() -> str:
    """Return the reason why no filter exists for this architecture; empty if one does."""
    return (
        ""
        if platform.machine() in _MACHINES
        else f"no table of system calls for {platform.machine()}"
    )


def make(
    *,
    files: Files,
    processes: bool,
    groups: bool = True,
    programs: bool = False,
    session: bool = False,
) -> bytes:
    """Return the filter in the kernel's format.

    `files`: access to files; `processes`: allow starting processes, and with `programs` also other
    programs; without `groups` processes stay in this process group and send no signals.
    `session`: in a user and network namespace of its own: sockets, and a change of user.
    """
    column, arch = _MACHINES[platform.machine()]
    code: _Code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_ANY_BIT, 0, 1, _X32),
        (_RETURN, 0, 0, _fail(errno.EPERM)),
    ]
    writes = files == "write"
    checks = dict(_checks(writes, processes))
    for name, number in _numbers(
        _CHECKED + (_OPENS if files != "none" else "") + (_SOCKETS if session else ""), column
    ):
        code += _rule(number, checks[name])
    offered = (
        (_WRITES, writes),
        (_PROCESSES, processes),
        (_GROUPS, processes and groups),
        (_PROGRAMS, programs),
        (_SESSION, session),
    )
    for table in (_ALWAYS, *(t for t, allowed in offered if allowed)):
        for _, number in _numbers(table, column):
            code += _rule(number, [(_RETURN, 0, 0, _ALLOW)])
    code.append((_RETURN, 0, 0, _fail(errno.EPERM)))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install(code: bytes) -> None:
    """Apply the filter permanently to this thread and its children.  Needs PR_SET_NO_NEW_PRIVS.
    Raises OSError.
    """
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.prctl(
            _PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(program, len(program)), 0, 0
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), f"seccomp filter: {os.strerror(ctypes.get_errno())}")


def _checks(writes: bool, processes: bool) -> list[tuple[str, _Code]]:
    allow = (_RETURN, 0, 0, _ALLOW)
    refuse = (_RETURN, 0, 0, _fail(errno.EPERM))

    def without(argument: int, bits: int) -> _Code:
        return [_low(argument), (_ANY_BIT, 0, 1, bits), refuse, allow]

    # only own limits may be set, and these can only decrease
    own_limits = [_low(0), (_EQUAL, 0, 1, 0), allow, refuse]
    # AF_UNIX, SOCK_STREAM
    pair = [
        _low(0),
        (_EQUAL, 0, 4, 1),
        _low(1),
        (_AND, 0, 0, 0xFF),
        (_EQUAL, 0, 1, 1),
        allow,
        refuse,
    ]
    # families of the network namespace: AF_UNIX, AF_INET, AF_INET6; others reach the machine
    socket: _Code = [_low(0)]
    for family in (1, 2, 10):
        socket += [(_EQUAL, 0, 1, family), allow]
    ioctl: _Code = [_low(1)]
    for request in _TERMINAL:
        ioctl += [(_EQUAL, 0, 1, request), allow]
    fcntl: _Code = [_low(1)]
    for request in _SIGNALLING:
        fcntl += [(_EQUAL, 0, 1, request), refuse]
    return [
        ("open", [allow] if writes else without(1, _WRITING)),
        ("openat", [allow] if writes else without(2, _WRITING)),
        ("ioctl", [*ioctl, refuse]),
        ("fcntl", [*fcntl, allow]),
        (
            "clone",
            without(0, _NEW_NAMESPACES)
            if processes
            else [_low(0), (_ANY_BIT, 0, 1, _THREAD), allow, refuse],
        ),
        # flags are behind a pointer; libraries fall back to clone
        ("clone3", [(_RETURN, 0, 0, _fail(errno.ENOSYS))]),
        ("socketpair", pair),
        ("socket", [*socket, refuse]),
        ("prlimit64", own_limits),
    ]


def _rule(number: int, body: _Code) -> _Code:
    return [(_EQUAL, 0, len(body), number), *body]


def _low(argument: int) -> tuple[int, int, int, int]:
    return (
        _LOAD,
        0,
        0,
        16 + 8 * argument,
    )  # the low half: little-endian


def _fail(number: int) -> int:
    return _ERRNO | number


def _numbers(table: str, column: int) -> list[tuple[str, int]]:
    rows = [entry.split(":") for entry in table.split()]
    return [(row[0], int(row[column])) for row in rows if row[column] != "-"]
