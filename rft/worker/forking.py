"""Our end of a process that others are forked from: started on first use, and started again where
it has died.

Orders are messages with descriptors; what is done with them is the business of the process.  Its
first message is {} or {error}.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence


class ForkingProcess:
    """Usable from any thread.  `answers`: whether each order is answered with a message."""

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
        return self._process.pid if self._process is not None else None

    def _command(self, control: int) -> list[str]:
        """The command line; `control`: the descriptor that it gets."""
        raise NotImplementedError

    def _cannot_start(self, why: str) -> Exception:
        raise NotImplementedError

    def _cannot_order(self, why: str) -> Exception:
        raise NotImplementedError

    def _order(self, message: bytes, fds: Sequence[int]) -> bytes:
        """The answer to an order, b"" where there is none; a process that has died costs no order.
        Needs the lock.
        """
        for attempt in (1, 2):
            control = self._started()
            try:
                socket.send_fds(control, [message], list(fds))
                answer = control.recv(500) if self._answers else b""
                if answer or not self._answers:
                    return answer
                why = "its server ended"
            except OSError as e:
                why = str(e)
            self._stop()
            if attempt == 2:
                raise self._cannot_order(why)
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
            said = json.loads(
                ours.recv(1 << 16)
                or b'{"error": "it ended while starting; see its message in the log"}'
            )
        except OSError as e:
            said = {"error": str(e)}
        if "error" in said:
            ours.close()
            self._stop()
            raise self._cannot_start(said["error"])
        self._control = ours
        self.starts += 1
        return ours

    def close(self) -> None:
        """Ends the process."""
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
