"""Ends what a killed test session has left: `python guardian.py PID MARK FOLDER`.

No fixture and no exit handler runs in a session that SIGTERM or SIGKILL ends (`timeout`, a lost
terminal), and `rft run`, with its containers, goes on without a reader of its output.  This process,
which is in no family or group of the session, waits for the end of PID; then it ends the processes
with MARK (NAME=VALUE) in their environment and removes FOLDER.  Containers end with their owners.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 5.0  # what ends with the session by itself does so
LIMIT_S = 60.0


def start(name: str, folder: Path) -> None:
    """Mark this process and what it starts with the environment variable `name`; have it guarded."""
    env = dict(os.environ, TMPDIR=str(folder.parent))
    os.environ[name] = uuid.uuid4().hex
    mark = f"{name}={os.environ[name]}"
    line = [sys.executable, "-P", __file__, str(os.getpid()), mark, str(folder)]
    subprocess.run(line, env=env, cwd="/", stdin=subprocess.DEVNULL, check=True)


def main(pid: int, mark: str, folder: str) -> None:
    session = os.pidfd_open(pid)
    if os.fork():
        return
    os.setsid()
    with open(os.devnull, "r+b") as nothing:
        for fd in (1, 2):
            os.dup2(nothing.fileno(), fd)
    select.select([session], [], [])
    _wait(list(_marked(mark)), GRACE_S)
    killed = False
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and (processes := list(_marked(mark))):
        killed = True
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        _wait(processes, GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)
    if killed:
        from rft.launch import leftovers

        leftovers.clean("")  # their shared memory


def _marked(mark: str) -> Iterator[int]:
    """Yield a descriptor of each living process that was started with the mark."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            process = os.pidfd_open(int(place.name))
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, process)
                if f"\0{mark}\0".encode() in b"\0" + (place / "environ").read_bytes():
                    stack.pop_all()
                    yield process


def _wait(processes: list[int], seconds: float) -> None:
    """Until all have ended, or for so long."""
    until = time.monotonic() + seconds
    waiting = list(processes)
    while waiting and (left := until - time.monotonic()) > 0:
        for fd in select.select(waiting, [], [], left)[0]:
            waiting.remove(fd)
    for fd in processes:
        os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
