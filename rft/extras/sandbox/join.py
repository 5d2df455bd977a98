"""What the owner of a container does inside of it without a program of its image, which could be
changed: `python -I -S -c BOOT ROOT PID ACTION ...`, with PID that of the container's first process.

    listen PORT SOCKET   listen at 127.0.0.1:PORT; send the socket over the descriptor SOCKET
    lock FOLDER          mount FOLDER read-only over itself
    stop                 kill every process but the first
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from rft.extras.sandbox import kernel


def main(argv: list[str]) -> None:
    pid, action, *arguments = argv
    spaces = {"listen": ("net",), "lock": ("mnt",), "stop": ("pid",)}[action]
    try:
        _enter(int(pid), spaces)
        if action == "listen":
            with (
                socket.create_server(("127.0.0.1", int(arguments[0]))) as listener,
                socket.socket(fileno=int(arguments[1])) as wire,
            ):
                socket.send_fds(wire, [b"{}"], [listener.fileno()])
        elif action == "lock":
            kernel.mount(arguments[0], arguments[0], "", kernel.MS_BIND)
            kernel.restrict_mount(arguments[0], kernel.RDONLY | kernel.NOSUID | kernel.NODEV)
        elif os.fork() == 0:  # a child is in the process space
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
        else:
            os.wait()
    except OSError as e:
        sys.exit(f"{action} in the container of process {pid}: {e}")


def _enter(pid: int, spaces: tuple[str, ...]) -> None:
    fds = [os.open(Path(f"/proc/{pid}/ns/{name}"), os.O_RDONLY) for name in spaces]
    if not Path("/proc/self/ns/user").samefile(f"/proc/{pid}/ns/user"):  # no root outside
        user = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
        kernel.join(user)
        os.close(user)
    for fd in fds:
        kernel.join(fd)
        os.close(fd)
