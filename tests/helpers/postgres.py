"""A private PostgreSQL server for tests, in a temporary folder, reached by a unix socket.

A test that asks for `postgres` gets the running server.
Without the server's programs such tests are skipped, with RFT_REQUIRE_POSTGRES=1 they fail.  The
server refuses to run as root, so there it runs as nobody.  It knows nothing of ledgers.  The one
invariant: the server ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

REQUIRE = "RFT_REQUIRE_POSTGRES"
START_S = 30.0
_READY = "database system is ready to accept connections"
_OPTIONS = {
    "listen_addresses": "",
    "shared_buffers": "16MB",
    "max_connections": "50",
    "autovacuum": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "dynamic_shared_memory_type": "mmap",  # nothing of it is left in /dev/shm
}


def programs() -> Path | None:
    """The newest folder with the server's programs; RFT_POSTGRES_BIN names another one."""
    named = os.environ.get("RFT_POSTGRES_BIN")
    on_path = shutil.which("postgres")
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True
    )
    found = (
        [Path(named)]
        if named
        else [*versions, *([Path(on_path).resolve().parent] if on_path else [])]
    )
    return next((p for p in found if (p / "postgres").exists() and (p / "initdb").exists()), None)


class PostgresServer:
    """One server process and its folder.  `url` is for `ledger_url`, of the role "rft" and the
    database "postgres".
    """

    def __init__(self, bin: Path) -> None:
        self._bin = bin
        self._user = "nobody" if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix=f"rft-pg-{os.getpid()}-"))
        self._process: subprocess.Popen[str] | None = None
        self._log: list[str] = []
        self._keeper: threading.Thread | None = None
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self.url = f"postgresql://rft@/postgres?host={self._folder}"
        made = self._command(
            "initdb",
            "-D",
            str(self._data),
            "-U",
            "rft",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
            "-N",
        )
        done = subprocess.run(
            made, capture_output=True, text=True, user=self._user, cwd="/", timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stdout}{done.stderr}")

    @property
    def pid(self) -> int:
        """Of the server's first process."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Returns when it accepts connections."""
        self._log = []
        ready = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep, args=(ready,), daemon=True, name="postgres"
        )
        self._keeper.start()
        if not ready.wait(START_S) or self._process is None or self._process.poll() is not None:
            self.stop()
            raise RuntimeError(f"PostgreSQL did not start: {' '.join(self._log[-5:])}")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: connections are ended, everything is written.  SIGQUIT: at once, as after a
        crash.
        """
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_S)
            self._process = None
        if self._keeper is not None:
            self._keeper.join(START_S)
            self._keeper = None

    def crash(self) -> None:
        """kill -9 of every process of the server; the folder stays as they left it."""
        import psutil

        assert self._process is not None, "the server is not running"
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()  # first: it would end the others in its own way
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, START_S)
        self._process.wait(START_S)
        self._process = None

    def restart(self, how: signal.Signals = signal.SIGINT) -> None:
        self.stop(how)
        self.start()

    def close(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._folder)

    def run(self, sql: str) -> list[tuple[object, ...]]:
        """Statements as a person would send them, each committed; rows of the last one."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [str(self._bin / program), *arguments]

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _keep(self, ready: threading.Event) -> None:
        """Starts the server and keeps its pipe empty, until it ends.  (What tells it of its
        parent's death goes by thread.)

        `setpriv`, not `preexec_fn`: Python code between fork and exec can crash the child of a
        process with many threads.
        """
        options = [x for name, value in _OPTIONS.items() for x in ("-c", f"{name}={value}")]
        with_parent = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
        try:
            self._process = subprocess.Popen(
                [
                    *with_parent,
                    *self._command(
                        "postgres", "-D", str(self._data), "-k", str(self._folder), *options
                    ),
                ],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                user=self._user,
                cwd="/",
            )
            assert self._process.stderr is not None
            with self._process.stderr as lines:
                for line in lines:
                    self._log.append(line.strip())
                    if _READY in line:
                        ready.set()
        except OSError as e:
            self._log.append(str(e))
        finally:
            ready.set()  # it ended: `start` looks


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The session's server; tests keep apart by schemas (`BufferSettings.run`)."""
    bin = programs()
    if bin is None:
        said = (
            "no PostgreSQL server is installed (initdb and postgres; RFT_POSTGRES_BIN names "
            "their folder)"
        )
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(said)
        pytest.skip(said)
    server = PostgresServer(bin)
    try:
        server.start()
        yield server
    finally:
        server.close()
