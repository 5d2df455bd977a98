"""Runs one program and ends it with everything that it has started: `python -I -S keeper.py
LIFELINE COMMAND...`

Daemons too (`setsid`, two forks): the kernel gives orphans to this process
(PR_SET_CHILD_SUBREAPER), which ends its children until it has none.  That happens when the program
has ended, and when the other end of the descriptor LIFELINE is closed: the process that started
this one does not need it any more, or is gone.  Ends with the program's exit code, or 128 + the
signal that ended it.

Stands alone: it imports nothing of rft, and starts as quickly as Python does.
"""

import ctypes
import os
import select
import signal
import sys

_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_START = 127


def adopt_orphans(on: bool) -> None:
    """Whether the kernel gives processes below this one whose parent ends to it, instead of to
    init.  Linux only.
    """
    if (
        sys.platform == "linux"
        and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0
    ):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def main(lifeline: int, command: list[str]) -> int:
    adopt_orphans(True)
    pid = os.fork()
    if pid == 0:
        _become(lifeline, command)
    os.setsid()  # what the program sends to its process group does not reach this one
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
    """Kills children, and those that become children by it, until there are none."""
    while True:
        for pid in children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # it has ended, or belongs to another account
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    mine = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == mine:
            found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
