"""The process that holds a runtime of this machine: its namespaces, files and the programs in it.

    rft --(orders, descriptors)--> room --fork--> program, in the room's process space

The room is outside of the process space whose first process it starts: when the order socket
closes, or the room ends in any way, the kernel kills that process and with it every program.
Invariant: a program runs with its user, limits, capabilities and system-call filter in place, or
its order is answered with an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import sys
import tarfile
from pathlib import Path
from typing import Any

from rft.extras.sandbox import kernel, namespaces, seccomp
from rft.worker import limits
from rft.worker.parent import die_with_parent

LARGEST = 1 << 20  # bytes of an order
# CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID: of root in its user namespace
CAPABILITIES = (0, 1, 3, 5, 6, 7)
NOBODY = 65534
_PROGRAMS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/alternatives", "/etc/ssl/certs"),
)
_FOLDERS = ("tmp", "var/tmp", "run", "root", "home", "opt", "dev/shm")
_ETC = {
    "passwd": "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def main(argv: list[str]) -> None:
    """`argv`: the descriptor of the order socket."""
    control = socket.socket(fileno=int(argv[0]))
    os.setsid()
    os.umask(0o022)
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.SIG_IGN)
    try:
        setup = json.loads(control.recv(LARGEST))
        kernel.unshare(kernel.CLONE_NEWUSER)
        control.send(b"{}")  # now rft writes the maps of users
        control.recv(LARGEST)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        listener = _enter(setup)
    except OSError as e:
        busy = e.errno == errno.EAGAIN  # too many processes, now
        control.send(json.dumps({"error": str(e), "busy": busy}).encode())
        return
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(listener).fileno()] if listener else []
        socket.send_fds(control, [b"{}"], fds)
    _serve(control, setup)


def _enter(setup: dict[str, Any]) -> socket.socket | None:
    spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    kernel.unshare(spaces | kernel.CLONE_NEWUTS | kernel.CLONE_NEWPID)
    socket.sethostname("runtime")
    kernel.raise_loopback()
    listener = socket.create_server(("127.0.0.1", setup["port"])) if setup["port"] else None
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    options = f"size={setup['disk_mb']}m,nr_inodes={64 * setup['disk_mb']},mode=755"
    for folder in setup["shown"]:
        os.listdir(folder)  # an error names it
    root = namespaces.build_root((*_PROGRAMS, *setup["shown"]), options, "/sys")
    _first_process(f"{root}/proc")
    for name in _FOLDERS:
        Path(root, name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp", "dev/shm"):
        Path(root, name).chmod(0o1777)
    Path(root, "etc").mkdir(exist_ok=True)
    for name, text in _ETC.items():
        Path(root, "etc", name).write_text(text)
    kernel.swap_root(root, "/old")
    Path("/old").rmdir()
    Path(setup["workdir"]).mkdir(parents=True, exist_ok=True)
    return listener


def _first_process(proc: str) -> None:
    """Start the first process of the space; it mounts `proc`, and adopts and reaps orphans."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            die_with_parent()
            os.close(read)
            with contextlib.suppress(PermissionError):  # of a container that hides some of it
                kernel.mount("proc", proc, "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
            os.closerange(0, write)
            kernel.hide_memory()
            os.close(write)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    os.read(read, 1)  # its end: the first process is ready
    os.close(read)


def _serve(control: socket.socket, setup: dict[str, Any]) -> None:
    """Carry out orders until the other side closes; report the end of each program."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    programs: dict[int, tuple[int, int]] = {}  # number of the order, pid; by descriptor
    while True:
        for fd, _ in poll.poll():
            if fd != control.fileno():
                number, pid = programs.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                code = status if status >= 0 else 128 - status
                control.send(json.dumps({"number": number, "code": code}).encode())
                continue
            message, fds, _, _ = socket.recv_fds(control, LARGEST, 3)
            if not message:
                return
            order = json.loads(message)
            reply: dict[str, Any] = {"number": order["number"]}
            try:
                if order["do"] == "exec":
                    pid = _started(order, fds, setup)
                    program = os.pidfd_open(pid)
                    programs[program] = (order["number"], pid)
                    poll.register(program, select.POLLIN)
                    continue
                _DO[order["do"]](order, fds)
            except (OSError, tarfile.TarError) as e:
                reply |= {"error": str(e), "missing": isinstance(e, FileNotFoundError)}
            finally:
                for descriptor in fds:
                    os.close(descriptor)
            control.send(json.dumps(reply).encode())


def _put(order: dict[str, Any], fds: list[int]) -> None:
    with (
        os.fdopen(os.dup(fds[0]), "rb") as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for entry in archive:
            entry.uid = entry.gid = 0
            archive.extract(entry, "/", filter="tar", numeric_owner=True)
    if folder := order["read_only"]:
        Path(folder).mkdir(parents=True, exist_ok=True)
        kernel.mount(folder, folder, "", kernel.MS_BIND)
        kernel.restrict_mount(folder, kernel.RDONLY | kernel.NOSUID | kernel.NODEV)


def _get(order: dict[str, Any], fds: list[int]) -> None:
    path = Path(order["path"])
    path.lstat()
    with (
        os.fdopen(os.dup(fds[0]), "wb") as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        archive.add(path, path.name or ".", filter=_on_this_disk)


def _on_this_disk(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what is mounted: the machine's programs, processes and devices."""
    path = "/" + entry.name.removeprefix(".").lstrip("/")
    top = path.split("/")[1]
    return None if path in _PROGRAMS or top in ("proc", "dev") else entry


def _stop(_: dict[str, Any], __: list[int]) -> None:
    """Kill every process of the space but its first: -1 means all that a process can see."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)


_DO = {"put": _put, "get": _get, "stop": _stop}


def _started(order: dict[str, Any], fds: list[int], setup: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for place, fd in enumerate([os.dup2(fd, 100 + i) for i, fd in enumerate(fds)]):
            os.dup2(fd, place)
        os.closerange(3, 1024)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        _restrict(order["user"], setup)
        os.chdir(setup["workdir"])
        os.execvpe(order["command"][0], order["command"], order["env"])
    except OSError as e:
        os.write(2, f"{order['command'][0]} cannot be started: {e}\n".encode())
    finally:
        os._exit(127)


def _restrict(user: int, setup: dict[str, Any]) -> None:
    for what, most in (
        (resource.RLIMIT_DATA, setup["memory_mb"] << 20),
        (resource.RLIMIT_NPROC, setup["processes"]),
        (resource.RLIMIT_NOFILE, 4096),
        (resource.RLIMIT_CORE, 0),
    ):
        limits.limit(what, most)
    kernel.bound_capabilities(CAPABILITIES)
    with contextlib.suppress(PermissionError):  # one user is mapped: groups cannot change
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel.drop_capabilities(but=CAPABILITIES if user == 0 else ())
    kernel.no_new_privileges()
    seccomp.install(seccomp.make(files="write", processes=True, programs=True, session=True))


if __name__ == "__main__":
    main(sys.argv[1:])
