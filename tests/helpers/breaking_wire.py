"""A stretch of wire between a PostgreSQL client and its server that breaks where a test says: it
forwards bytes until then.

It understands nothing of the protocol but the statement it is told to watch for.  The one
invariant: what breaks is a real connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from pathlib import Path
from typing import Literal

Moment = Literal["before", "after", "abandon"]
_PORT = ".s.PGSQL.5432"


class BreakingWire:
    """Listens in `folder` (short enough for a socket's name) for what is meant for the server in
    `server_folder`.

    `arm(b"COMMIT", "after")`: the next (or `nth`) statement with these bytes is answered by the
    server, but the answer is lost with the connection (for statements that are answered one by one,
    as COMMIT is). "before": the server never sees it.  "abandon": the client loses the connection,
    the server keeps it until `close`.
    """

    def __init__(self, folder: Path, server_folder: Path) -> None:
        self._server = str(server_folder / _PORT)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / _PORT))
        self._listener.listen()
        self._plan: tuple[bytes, Moment] | None = None
        self._left = 0
        self._open: set[socket.socket] = set()
        self.broken = 0
        self._thread = threading.Thread(target=self._accept, daemon=True, name="breaking-wire")
        self._thread.start()

    def arm(self, statement: bytes, moment: Moment, nth: int = 1) -> None:
        """A statement that was sent often goes by a name of its own, without its words."""
        self._plan = (statement, moment)
        self._left = nth

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for end in self._open:  # what "abandon" left
            end.close()

    def _due(self, data: bytes) -> bool:
        found = self._plan is not None and self._plan[0] in data
        self._left -= found
        return found and self._left == 0

    def _accept(self) -> None:
        links: list[threading.Thread] = []
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                links.append(threading.Thread(target=self._forward, args=(client,), daemon=True))
                links[-1].start()
        for link in links:
            link.join()

    def _forward(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        keep = False
        self._open |= {client, server}
        try:
            server.connect(self._server)
            while True:
                ready = select.select([client, server], [], [])[0]
                if server in ready:
                    if not (data := server.recv(1 << 16)):
                        return
                    client.sendall(data)
                if client in ready:
                    if not (data := client.recv(1 << 16)):
                        return
                    if self._due(data):
                        assert self._plan is not None
                        moment, self._plan = self._plan[1], None
                        self.broken += 1
                        keep = moment == "abandon"
                        if moment == "after":
                            server.sendall(data)
                            server.recv(1 << 16)
                        return
                    server.sendall(data)
        except OSError:  # one side is gone
            return
        finally:
            for end in (client,) if keep else (client, server):
                self._open.discard(end)
                end.close()
