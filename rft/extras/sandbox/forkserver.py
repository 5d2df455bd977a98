"""The process that programs are forked from: it holds no test and no secret, so neither do its
forks.

    rft process --(orders, file descriptors)--> server --fork--> supervisor --fork--> [first process
    of the space --fork-->] program

The supervisor watches the program and its lifeline, a socket to the rft process: when that closes,
the program and all of its descendants are killed.  It then reports the program's exit on the
lifeline.
Invariant: a program runs only after its process space, limits, user and system-call filter are in
place; if a step fails, the supervisor reports the error and nothing runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from rft.extras.sandbox import kernel, landlock, namespaces, program, seccomp, testrunner, wire
from rft.worker import limits
from rft.worker.parent import die_with_parent

FDS = ("lifeline", "channel", "link", "stdin", "stdout", "stderr")
_PRELOADED = (
    "array",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "operator",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "threading",
    "traceback",
    "typing",
)
# (first user id, number of ids) in the range that systemd documents as unused
_USERS = (60600, 500)
_STACK = 64 << 20
_FILES: dict[str, seccomp.Files] = {"namespaces": "write", "landlock": "read", "seccomp": "none"}
_preloaded_bytes = 0  # address space that does not count towards a program's limit
_account_tasks = 0  # threads of this account, which RLIMIT_NPROC counts
_NOT_PRELOADED = {
    "antigravity",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pip",
    "test",
    "this",
    "tkinter",
    "turtle",
    "turtledemo",
}


def main(argv: list[str]) -> None:
    """Run the server.  `argv`: control descriptor, level, folders to read, a folder to write in,
    folders to import from.

    Sends {} or {error}, then executes orders until the other side closes.
    """
    os.umask(0o022)  # programs run under another account and use folders created here
    control = socket.socket(fileno=int(argv[0]))
    level, folders, writable, *sites = argv[1:]
    readable = [*sites, *folders.split(":")]
    sys.path[:] = [p for p in sys.path[1:] if p] + sites
    try:
        for name in _PRELOADED:
            __import__(name)
        if missing := seccomp.supported():
            raise OSError(missing)
        if level == "namespaces":
            namespaces.enter(readable)
        elif level == "landlock":
            _count_account_tasks()
            landlock.enter(namespaces.readable(readable), namespaces.DEVICES, writable)
        else:
            _preload_everything()
    except OSError as e:
        control.send(json.dumps({"error": str(e)}).encode())
        return
    kernel.hide_memory()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped automatically
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    control.send(b"{}")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, len(FDS))
        if not message:
            return
        order = json.loads(message)
        try:
            pid = os.fork()
        except OSError:
            pid = -1  # the lifeline closes without a message, which means that nothing was started
        if pid == 0:
            control.close()
            _supervisor(order, dict(zip(order["fds"], fds, strict=True)), level, readable)
        for fd in fds:
            os.close(fd)


def _preload_everything() -> None:
    """Import Python's library and NumPy; without access to files, later imports are impossible."""
    global _preloaded_bytes
    before = limits.address_space()
    names = [
        n
        for n in sys.stdlib_module_names
        if n not in _NOT_PRELOADED and not n.startswith(("_test", "_xx"))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*sorted(names), "numpy"):
            _import(name)
            for module_info in pkgutil.walk_packages(
                getattr(sys.modules.get(name), "__path__", ()), f"{name}.", onerror=lambda _: None
            ):
                last = module_info.name.rpartition(".")[2]
                if (
                    name != "numpy"
                    and last not in ("__main__", "test", "tests")
                    and ".test" not in module_info.name
                ):
                    _import(module_info.name)
    _preloaded_bytes = limits.address_space() - before


def _count_account_tasks() -> None:
    global _account_tasks
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has ended
            if process.name.isdigit() and process.stat().st_uid == os.geteuid():
                _account_tasks += len(os.listdir(process / "task"))


def _import(name: str) -> None:
    with contextlib.suppress(Exception, SystemExit):  # another system's module
        importlib.import_module(name)


# ---------------------------------------------------------------- the supervisor


def _supervisor(
    order: dict[str, Any], fds: dict[str, int], level: str, readable: list[str]
) -> NoReturn:
    lifeline = socket.socket(fileno=fds.pop("lifeline"))
    outcome = "error the sandbox ended before its program began"
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        kernel.adopt_orphans()
        if level == "namespaces" and order["programs"]:
            namespaces.private_root(readable, order["file_mb"])
        elif level == "namespaces":
            namespaces.private_tmp(readable, order["file_mb"])
        supervisor_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            lifeline.close()
            (_first if level == "namespaces" else _child)(order, fds, level, supervisor_pid)
        for fd in fds.values():
            os.close(fd)
        outcome = _watch(pid, lifeline)
    except OSError as e:
        outcome = f"error {e}"
    with contextlib.suppress(OSError):  # the rft process has ended
        lifeline.sendall(outcome.encode())
    os._exit(0)


def _watch(pid: int, lifeline: socket.socket) -> str:
    child = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    if child not in {fd for fd, _ in poll.poll()}:
        signal.pidfd_send_signal(child, signal.SIGKILL)  # type: ignore[attr-defined]
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # ended before it had a group, or the whole group has ended
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return f"exit {_code(status)}"


def _code(status: int) -> int:
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _first(order: dict[str, Any], fds: dict[str, int], level: str, _: int) -> NoReturn:
    """Run the first process of a process space: when it ends, the kernel kills all others of the
    space.
    """
    die_with_parent()
    if order["programs"]:
        namespaces.show_processes()
    pid = os.fork()
    if pid == 0:
        _child(order, fds, level, 1)
    for fd in fds.values():
        os.close(fd)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            os._exit(_code(status))


# ---------------------------------------------------------------- the program's process


def _child(order: dict[str, Any], fds: dict[str, int], level: str, parent: int) -> NoReturn:
    channel = None
    try:
        channel, link = _descriptors(fds)
        os.chdir("/tmp" if level == "namespaces" else "/")
        if level != "namespaces":  # children stay in this group and die with it
            os.setpgid(0, 0)
        _limit(order, level)
        _drop(order, parent)
        files = "write" if order["programs"] else _FILES[level]
        own_space = level == "namespaces"
        several = order["processes"] > 1
        programs = order["programs"]
        seccomp.install(
            seccomp.make(files=files, processes=several, groups=own_space, programs=programs)
        )
        wire.send(channel, {"ready": True})
        work = wire.receive(channel, largest=wire.LARGEST_ORDER)
    except Exception as e:
        if channel is not None:
            with contextlib.suppress(OSError):
                wire.send(channel, {"error": f"{type(e).__name__}: {e}"})
        os._exit(1)
    if link is None:
        channel.close()
        program.run(work["program"])
    elif order["role"] == "serve":
        program.serve(work["program"], channel, link)
    elif "function" in work:
        testrunner.compare(work, channel, link)
    else:
        testrunner.run_tests(work, channel, link)
    os._exit(0)


def _descriptors(fds: dict[str, int]) -> tuple[socket.socket, socket.socket | None]:
    """Place descriptors: 0, 1, 2 are the given ones or /dev/null, 3 and 4 the sockets; close all
    others.
    """
    nothing = os.open("/dev/null", os.O_RDWR)
    order = [
        *(fds.get(name, nothing) for name in ("stdin", "stdout", "stderr")),
        fds["channel"],
        fds.get("link", nothing),
    ]
    high = [os.dup2(fd, 100 + i) for i, fd in enumerate(order)]
    for i, fd in enumerate(high):
        os.dup2(fd, i, inheritable=i < 3)
    os.closerange(5, 1024)
    for fd, name, mode in ((0, "stdin", "rb"), (1, "stdout", "wb"), (2, "stderr", "wb")):
        stream = io.TextIOWrapper(open(fd, mode, closefd=False), encoding="utf-8", errors="replace")  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return socket.socket(fileno=3), socket.socket(fileno=4) if "link" in fds else None


def _limit(order: dict[str, Any], level: str) -> None:
    memory = (order["memory_mb"] << 20) + _preloaded_bytes
    file = order["file_mb"] << 20
    if os.geteuid() == 0:  # the program gets its own user
        tasks = 64 + order["processes"]
    elif level == "namespaces":
        tasks = 512
    elif order["processes"] > 1:
        tasks = _account_tasks + 64 + order["processes"]
    else:  # other processes of the account would count, and the program may not start any
        tasks = resource.RLIM_INFINITY
    for what, most in (
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file),
        (resource.RLIMIT_NOFILE, order["files"]),
        (resource.RLIMIT_NPROC, tasks),  # threads count too
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, _STACK),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        limits.limit(what, most)


def _drop(order: dict[str, Any], parent: int) -> None:
    """Change root to a user that owns nothing; drop all capabilities of every user."""
    if os.geteuid() == 0:
        user = _USERS[0] + order["number"] % _USERS[1]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    die_with_parent()  # after the change of user, which clears the setting
    if os.getppid() != parent:
        raise OSError("the supervisor is gone")
    kernel.hide_memory()
    kernel.no_new_privileges()
