"""Programs of a model, run and judged where they can do no harm: on this machine, or by a remote service (`sandbox_remote`).

Knows nothing of tasks.  What a program and its checks give is remembered; a timeout is not, since the next time may be quieter.
Invariant: a verdict is about the program; when the sandbox itself fails, SandboxError is raised, and a machine that cannot keep a
program from the network, from its limits' other side or from outliving its run is refused with SandboxUnavailable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import xxhash

from rft.reward import pool
from rft.reward.box import jobs
from rft.reward.box.host import LEVELS, Limits, SandboxError, SandboxUnavailable, Server
from rft.reward.box.jobs import BrokenTests, Verdict

__all__ = [
    "BrokenTests", "Calls", "Checks", "Judge", "Limits", "Pairs", "Sandbox", "SandboxError", "SandboxUnavailable", "Tests", "Verdict",
]  # fmt: skip

log = logging.getLogger(__name__)
_MEMO = 16384
_SELF_TEST = """
import socket, wave, json
try:
    socket.socket()
    print("open")
except PermissionError:
    print("closed")
"""


@dataclass(frozen=True)
class Pairs:
    """Text for stdin, and what has to be printed."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Calls:
    """Arguments, and what `function` (or that method of a class Solution) has to return."""

    function: str
    cases: Sequence[tuple[Sequence[Any], Any]]


@dataclass(frozen=True)
class Tests:
    """Code with asserts; `check(candidate)` is called with the function `entry_point`.  `prompt`: code whose helpers they use."""

    __test__ = False  # no test class
    tests: Sequence[str]
    entry_point: str = ""
    prompt: str = ""


Checks = Pairs | Calls | Tests


class Judge(Protocol):
    """Where programs are judged.  Raises SandboxError, SandboxUnavailable or BrokenTests; `all`: go on after a failure."""

    async def judge(self, program: str, checks: Checks, limits: Limits, *, all: bool = False) -> Verdict: ...

    def close(self) -> None:
        """Waits for what is under way and ends everything.  The next call starts anew."""
        ...


class Sandbox:
    """On this machine, at most `size` programs at a time.  Usable from any thread and any event loop; ended by `pool.close_all`.

    `levels`: which ways of closing a program off are accepted, best first.
    """

    name = "sandbox"  # in the metrics reward/sandbox/calls, memo_hits, timeouts, restarts

    def __init__(self, *, size: int | None = None, levels: Sequence[str] = LEVELS, python: str = sys.executable) -> None:
        self._size = size if size is not None else max(2, min(16, os.cpu_count() or 1))
        self._levels, self._python = levels, python
        self._server: Server | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._memo: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self.calls = self.memo_hits = self.timeouts = self.restarts = 0
        pool.register(self)

    async def judge(self, program: str, checks: Checks, limits: Limits, *, all: bool = False) -> Verdict:
        """The verdict on `program`; see `Judge`."""
        key = xxhash.xxh3_128_digest(msgspec.msgpack.encode([program, type(checks).__name__, checks, limits, all]))
        with self._lock:
            self.calls += 1
            if (known := self._memo.get(key)) is not None:
                self.memo_hits += 1
                self._memo.move_to_end(key)
                return known
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._size, thread_name_prefix="sandbox")
            job = self._threads.submit(self._judge, program, checks, limits, all)
        verdict = await asyncio.wrap_future(job)
        with self._lock:
            if verdict.reason in ("timeout", "killed"):
                self.timeouts += 1
                return verdict
            self._memo[key] = verdict
            if len(self._memo) > _MEMO:
                self._memo.popitem(last=False)
        return verdict

    def level(self) -> str:
        """How programs are closed off here: "namespaces" or "seccomp".  Raises SandboxUnavailable."""
        return self._open().level

    def _judge(self, program: str, checks: Checks, limits: Limits, all: bool) -> Verdict:
        server = self._open()
        self.restarts = max(0, server.starts - 1)
        if isinstance(checks, Pairs):
            return jobs.judge_pairs(server, program, checks.pairs, limits, all=all)
        if isinstance(checks, Calls):
            return jobs.judge_calls(server, program, checks.function, checks.cases, limits, all=all)
        return jobs.judge_tests(
            server, program, checks.tests, limits, entry_point=checks.entry_point, prompt=checks.prompt, all=all
        )

    def _open(self) -> Server:
        with self._opening:
            if self._server is None:
                self._server = open_server(self._levels, self._python)
            return self._server

    def close(self) -> None:
        """See `Judge`."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        with self._opening:
            if self._server is not None:
                self._server.close()
                self._server = None


def open_server(levels: Sequence[str], python: str) -> Server:
    """A server of the first level that works here, as a program inside it shows.  Raises SandboxUnavailable."""
    faults: list[str] = []
    for level in levels:
        server = Server(level, python)
        try:
            ran = jobs.run(server, _SELF_TEST, b"", Limits(timeout_s=30))
        except SandboxError as e:
            fault = str(e)
        else:
            if ran.output == b"closed\n":
                if level != LEVELS[0]:
                    log.warning(
                        "programs run at sandbox level %s: without network, processes and writing, but they can read what this "
                        "account can read%s",
                        level,
                        f" ({'; '.join(faults)})" if faults else "",
                    )
                return server
            fault = ran.detail or f"a test program was not kept from the network: {ran.output[:100]!r}"
        server.close()
        faults.append(f"{level}: {fault}")
    raise SandboxUnavailable(
        f"programs cannot be run safely on this machine ({'; '.join(faults) or 'no level is accepted'}).  Linux on x86_64 or aarch64 "
        "with seccomp is needed, better also user namespaces (sysctl user.max_user_namespaces, or in a container "
        "--security-opt seccomp=unconfined), and a Python that other users can read.  Or name a remote sandbox in "
        "reward_fn_args.sandbox_url"
    )
