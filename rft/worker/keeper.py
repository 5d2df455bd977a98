"""Run one program and end it with all its descendants: `python -I -S keeper.py LIFELINE FOLDER
COMMAND...`

Daemons are included: the kernel makes orphans children of this process (PR_SET_CHILD_SUBREAPER),
which kills its children until none is left, then removes FOLDER if it is not empty text.  It does
so when the program has ended, and when the other end of the descriptor LIFELINE is closed by or with
the process that started the keeper.  Exit code: the program's, or 128 + its signal.

It imports nothing of rft, so it starts as fast as Python.
"""

import ctypes
import os
import select
import shutil
import signal
import sys

_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_START = 127


def adopt_orphans(on: bool) -> None:
    """Make orphans below this process its children instead of init's, or stop that.  Linux only."""
    if (
        sys.platform == "linux"
        and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0
    ):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def main(lifeline: int, folder: str, command: list[str]) -> int:
    adopt_orphans(True)
    pid = os.fork()
    if pid == 0:
        _become(lifeline, command)
    os.setsid()  # not in the program's process group
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    program = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(program, select.POLLIN)
    poll.register(lifeline, select.POLLHUP)
    ended = {fd for fd, _ in poll.poll()}
    if program not in ended:
        signal.pidfd_send_signal(program, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    end_children()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _become(lifeline: int, command: list[str]) -> None:
    try:
        os.close(lifeline)
        os.setsid()
        os.execvp(command[0], command)
    except OSError as e:
        os.write(2, f"{command[0]} cannot be started: {e.strerror}\n".encode())
        os._exit(_CANNOT_START)


def end_children() -> None:
    """Kill children, and orphans that become children, until none is left."""
    while True:
        for pid in children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # it has ended, or belongs to another user
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    parent = os.getpid()
    pids = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            pids.append(int(name))
    return pids


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
