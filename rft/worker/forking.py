"""Client of a process that forks others: started on first use, restarted after a crash.

Orders are messages with descriptors.  The process sends {} or {error} first.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence


class ForkingProcess:
    """Client of a forking process, usable from any thread.

    `answers`: the process answers each order with a message.
    """

    def __init__(
        self, *, env: Mapping[str, str], cwd: str | None = None, start_s: float, answers: bool
    ) -> None:
        self._env = env
        self._cwd = cwd
        self._start_s = start_s
        self._answers = answers
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        if self._process is not None:
            return self._process.pid
        return None

    def _command(self, control: int) -> list[str]:
        """Return the command line; `control`: descriptor passed to it."""
        raise NotImplementedError

    def _cannot_start(self, reason: str) -> Exception:
        raise NotImplementedError

    def _cannot_order(self, reason: str) -> Exception:
        raise NotImplementedError

    def _order(self, message: bytes, fds: Sequence[int]) -> bytes:
        """Send an order, again after a crash, and return its answer or b"".

        Needs the lock.
        """
        for attempt in (1, 2):
            control = self._started()
            try:
                socket.send_fds(control, [message], list(fds))
                answer = control.recv(500) if self._answers else b""
                if answer or not self._answers:
                    return answer
                reason = "its server ended"
            except OSError as e:
                reason = str(e)
            self._stop()
            if attempt == 2:
                raise self._cannot_order(reason)
        raise AssertionError("unreachable")

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                self._command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self._env,
                cwd=self._cwd,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.settimeout(self._start_s)
        try:
            first = json.loads(
                ours.recv(1 << 16)
                or b'{"error": "it ended while starting; see its message in the log"}'
            )
        except OSError as e:
            first = {"error": str(e)}
        if "error" in first:
            ours.close()
            self._stop()
            raise self._cannot_start(first["error"])
        self._control = ours
        self.starts += 1
        return ours

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
