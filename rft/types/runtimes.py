"""The port of runtimes: places with their own files and processes, for an agent and for its tests.

A driver starts runtimes; `rft.extras.sandbox` has one for this machine and one for containers.  A
driver of your own passes `rft.testing.runtime_contract`.  Methods block; one thread at a time uses
a runtime, and any thread may kill it.

Invariants: what runs inside reaches no file, process or network outside, but for
`RuntimeSpec.port`; no process or file of a runtime outlives `kill`, or a kill -9 of its owner.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from socket import socket
from typing import Protocol

KEPT = 64 << 10  # last bytes of each stream in `Executed`


class RuntimeFailed(RuntimeError):
    """The runtime itself failed, or was killed: nothing is known about what ran inside."""


@dataclass(frozen=True)
class RuntimeLimits:
    """`memory_mb`: of a container, or of each process; `disk_mb`: of all files, or of each file."""

    cpus: float = 1.0
    memory_mb: int = 2048
    disk_mb: int = 1024
    processes: int = 256


@dataclass(frozen=True)
class RuntimeSpec:
    """`image`: its files; empty: the programs of this machine, read-only.  `workdir`: empty: that
    of the image.

    `port`: not 0: the only network; `AgentRuntime.listener` listens at 127.0.0.1:port inside.
    `shown`: folders of this machine, read-only at the same place.
    """

    image: str = ""
    workdir: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict)
    limits: RuntimeLimits = RuntimeLimits()
    port: int = 0
    shown: Sequence[str] = ()


@dataclass(frozen=True)
class Executed:
    """`code`: exit code, or 128 + signal; None: the deadline passed.  `output`, `errors`: the last
    KEPT bytes.
    """

    code: int | None
    output: bytes
    errors: bytes


class RuntimeFiles(Protocol):
    """The files of a runtime, to start others from."""

    def drop(self) -> None: ...


class AgentRuntime(Protocol):
    """Methods raise RuntimeFailed."""

    workdir: str
    listener: socket | None

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout_s: float,
    ) -> Executed:
        """Run a program in `workdir` and return when it has ended; what it started may go on.

        `user`: a name or number; empty: that of the image.  After a deadline the program may still
        run: `stop` ends it.
        """
        ...

    def put(self, archive: bytes, *, read_only: str = "") -> None:
        """Extract a tar archive whose names are paths from the root; then make the folder
        `read_only` unchangeable for everyone inside.
        """
        ...

    def get(self, path: str, *, most_bytes: int) -> bytes:
        """Return a tar archive of a file or folder; names begin with its last part.

        Raises FileNotFoundError; RuntimeFailed for a larger archive.
        """
        ...

    def stop(self) -> None:
        """End every process inside; the files stay."""
        ...

    def snapshot(self) -> RuntimeFiles: ...

    def kill(self) -> None:
        """End everything; no error where it has ended already."""
        ...


class RuntimeDriver(Protocol):
    def start(self, spec: RuntimeSpec, *, files: RuntimeFiles | None = None) -> AgentRuntime:
        """Start a runtime, from the files of a snapshot if one is given.

        Raises RuntimeFailed, or SetupError where this machine cannot run any.
        """
        ...


# ---------------------------------------------------------------- archives


def packed(files: Mapping[str, bytes], *, mode: int = 0o644) -> bytes:
    """Return a tar archive of files by path."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size = len(data)
            entry.mode = mode
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def packed_folder(
    folder: Path, inside: str, *, run: Iterable[str] = (), private: bool = False
) -> bytes:
    """Return a tar archive of a folder of this machine, owned by root, as the folder `inside`.

    `run`: names below it that become executable; `private`: only root may read it.
    """
    runs = {str(PurePosixPath(inside, name)).lstrip("/") for name in run}

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mode |= 0o755 if entry.isdir() or entry.name in runs else 0o444
        entry.mode &= 0o700 if private else 0o777
        return entry

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(folder, inside.lstrip("/"), filter=owned)
    return stream.getvalue()


def packed_file(archive: bytes) -> bytes:
    """Return the content of an archive of one file.  Raises FileNotFoundError if it is another thing."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        entry = opened.next()
        file = opened.extractfile(entry) if entry is not None and entry.isreg() else None
        if file is None:
            raise FileNotFoundError("no regular file")
        return file.read()
