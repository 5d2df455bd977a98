"""Run and judge programs of a model in isolation on this machine; see `remote_sandbox` for a remote
service.

Independent of tasks.  Results are cached, except timeouts, which may depend on the machine's
load.
Invariant: a verdict is about the program; if the sandbox itself fails, SandboxError is raised.  A
machine that cannot keep a program from the network, from files, memory and environment of others,
or from outliving its run raises SandboxUnavailable.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import xxhash

from rft.extras.sandbox import jobs
from rft.extras.sandbox.jobs import BrokenTests, ProgramVerdict
from rft.extras.sandbox.processes import (
    LEVELS,
    ForkServer,
    Level,
    ProgramLimits,
    SandboxError,
    SandboxUnavailable,
)
from rft.worker.job_pool import JobPool

__all__ = [
    "BrokenTests",
    "Calls",
    "Checks",
    "Level",
    "Pairs",
    "ProgramJudge",
    "ProgramLimits",
    "ProgramVerdict",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailable",
    "Tests",
]

log = logging.getLogger(__name__)
DEFAULT = LEVELS[:2]
"""Levels tried by default.  "seccomp" must be requested: its programs can import little, so correct
ones may fail.
"""
CLOSE_S = 5.0  # time that `close` leaves to programs in progress
SWITCH_ON = (
    "Switch on user namespaces (sysctl user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container "
    "--security-opt seccomp=unconfined) or Landlock (Linux 5.13, landlock in the kernel's lsm= "
    "list), on x86_64 or aarch64"
)
ACCEPT_LESS = (
    "Or accept less with sandbox_level: seccomp in reward_fn_args (no packages but NumPy), or name "
    "a remote sandbox in "
    "reward_fn_args.sandbox_url"
)
_SELF_TEST = """
import json, socket, wave
found = []
try:
    socket.socket()
    found.append("the network")
except PermissionError:
    pass
for path in ("/etc/passwd", "/proc/{pid}/environ", "/proc/{pid}/mem"):
    try:
        open(path, "rb").close()
        found.append(path)
    except OSError:
        pass
print(*found or ["closed"])
"""


@dataclass(frozen=True)
class Pairs:
    """(stdin, expected stdout) of each case."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Calls:
    """(arguments, expected result) of each case, for `function` or that method of a class Solution."""

    function: str
    cases: Sequence[tuple[Sequence[Any], Any]]


@dataclass(frozen=True)
class Tests:
    """Code with asserts; `check(candidate)` is called with the function `entry_point`.

    `prompt`: code whose helpers the tests use.  `gold`: a correct program, which distinguishes
    broken tests from wrong programs.
    """

    __test__ = False  # not a test class for pytest
    tests: Sequence[str]
    entry_point: str = ""
    prompt: str = ""
    gold: str = field(default="", compare=False)


Checks = Pairs | Calls | Tests


class ProgramJudge(Protocol):
    """Judges programs.  Raises SandboxError, SandboxUnavailable or BrokenTests; `all`: continue
    after a failure.
    """

    async def judge(
        self, program: str, checks: Checks, limits: ProgramLimits, *, all: bool = False
    ) -> ProgramVerdict: ...

    def close(self) -> None:
        """Leave some seconds to programs in progress, then end everything; a later call restarts
        the sandbox.
        """
        ...


class Sandbox(JobPool):
    """Sandbox on this machine with at most `size` concurrent programs.

    Usable from any thread and any event loop; closed by `job_pool.close_all`.  `level`: isolation;
    None: the first of DEFAULT that this machine supports.
    """

    def __init__(
        self, *, size: int | None = None, level: Level | None = None, python: str = sys.executable
    ) -> None:
        super().__init__(
            "sandbox", size=size if size is not None else max(2, min(16, os.cpu_count() or 1))
        )
        self._levels = (level,) if level else DEFAULT
        self._python = python
        self._server: ForkServer | None = None
        self._opening = threading.Lock()

    async def judge(
        self, program: str, checks: Checks, limits: ProgramLimits, *, all: bool = False
    ) -> ProgramVerdict:
        """Return the verdict on `program`; see `ProgramJudge`."""
        request = [program, type(checks).__name__, checks, limits, all]
        try:
            key = xxhash.xxh3_128_digest(msgspec.msgpack.encode(request))
        except OverflowError:  # an integer of more than 64 bits
            key = xxhash.xxh3_128_digest(repr(request).encode())
        verdict = await self._answered(
            key, lambda: self._judge(program, checks, limits, all), _to_be_kept
        )
        if not _to_be_kept(verdict):
            with self._lock:
                self.timeouts += 1
        return verdict

    async def run(self, program: str, limits: ProgramLimits, stdin: bytes = b"") -> jobs.Ran:
        """Return the program's output, and the reason of a failure."""
        return await self._done(lambda: jobs.run(self._open(), program, stdin, limits))

    def level(self) -> Level:
        """Return the isolation level in use.  Raises SandboxUnavailable."""
        return self._open().level

    def _judge(
        self, program: str, checks: Checks, limits: ProgramLimits, all: bool
    ) -> ProgramVerdict:
        server = self._open()
        self.restarts = max(0, server.starts - 1)
        try:
            return _judged(server, program, checks, limits, all)
        finally:
            if server.aborted:
                raise SandboxError("the sandbox was closed while the program ran")

    def _open(self) -> ForkServer:
        with self._opening:
            if self._server is None:
                try:
                    self._server = open_server(self._levels, self._python)
                except SandboxUnavailable as e:
                    raise SandboxUnavailable(f"{e}.  {ACCEPT_LESS}") from None
            return self._server

    def close(self) -> None:
        """See `ProgramJudge`."""
        self._end_jobs(self._abort, after_s=CLOSE_S)
        with self._opening:
            if self._server is not None:
                self._server.close()
                self._server = None

    def _abort(self) -> None:
        if (server := self._server) is not None:
            server.abort()


def _to_be_kept(verdict: ProgramVerdict) -> bool:
    """Return whether a verdict may be cached; timeouts depend on the machine's load."""
    return verdict.reason not in ("timeout", "killed")


def _judged(
    server: ForkServer, program: str, checks: Checks, limits: ProgramLimits, all: bool
) -> ProgramVerdict:
    if isinstance(checks, Pairs):
        return jobs.judge_pairs(server, program, checks.pairs, limits, all=all)
    if isinstance(checks, Calls):
        return jobs.judge_calls(server, program, checks.function, checks.cases, limits, all=all)
    named = {"entry_point": checks.entry_point, "prompt": checks.prompt, "gold": checks.gold}
    return jobs.judge_tests(server, program, checks.tests, limits, **named, all=all)


def offered(python: str = sys.executable) -> tuple[Level | None, dict[Level, str]]:
    """Return the strongest level that this machine supports, and the reasons against stronger ones."""
    reasons: dict[Level, str] = {}
    for level in LEVELS:
        server = ForkServer(level, python)
        fault = _fault(server)
        server.close()
        if not fault:
            return level, reasons
        reasons[level] = fault
    return None, reasons


def open_server(
    levels: Sequence[Level], python: str, *, folders: Sequence[str] = (), writable: str = ""
) -> ForkServer:
    """Start a server of the first level that passes a self-test.  Raises SandboxUnavailable.

    Arguments as in `ForkServer`.
    """
    tried: list[str] = []
    for level in levels:
        server = ForkServer(level, python, folders=folders, writable=writable)
        if not (fault := _fault(server)):
            if level == "seccomp":
                log.warning(
                    "programs run at sandbox level seccomp: they can import only Python's own "
                    "library and NumPy"
                )
            return server
        server.close()
        tried.append(f"{level}: {fault}")
    raise SandboxUnavailable(
        f"programs cannot be run safely on this machine ({'; '.join(tried)}).  {SWITCH_ON}, and a "
        f"Python that other users can read"
    )


def _fault(server: ForkServer) -> str:
    try:
        ran = jobs.run(
            server, _SELF_TEST.replace("{pid}", str(os.getpid())), b"", ProgramLimits(timeout_s=30)
        )
    except SandboxError as e:
        return str(e)
    if ran.output == b"closed\n":
        return ""
    return (
        ran.detail
        or f"a test program was not kept from {ran.output[:100].decode(errors='replace').strip()}"
    )
