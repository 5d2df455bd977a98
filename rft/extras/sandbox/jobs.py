"""Judge programs by pairs of input and output, by calls of one function, or by tests in code.

Expected results stay in this process, or in the sandbox of a test runner; the program's sandbox
gets only inputs, and its values are never decoded in this process.
Invariant: a verdict describes the program's behaviour; if that is unknown, SandboxError or
BrokenTests is raised.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rft.extras.sandbox import wire
from rft.extras.sandbox.processes import (
    ForkServer,
    ProgramLimits,
    SandboxedProcess,
    SandboxError,
    remaining,
)
from rft.extras.sandbox.testrunner import unknown
from rft.worker.framing import BadMessage

_ERRORS_KEPT = 4096
_XCPU = 128 + 24
_KILLED = 128 + 9


class BrokenTests(ValueError):
    """The tests themselves cannot be run."""


@dataclass(frozen=True)
class ProgramVerdict:
    """`reason` of the first failure: wrong_answer, error, timeout, memory, output, exit, killed,
    crash; "passed" without a failure.
    """

    passed: int
    total: int
    reason: str
    detail: str = ""

    # output may hold lone surrogates, which cannot be stored
    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", self.detail.encode(errors="replace").decode())

    @property
    def right(self) -> bool:
        return 0 < self.total == self.passed


class Talking(Protocol):
    """A running program: rft's ends of stdin, stdout and stderr, and its status after its end."""

    fds: dict[str, int]

    def wait(self, timeout_s: float) -> int | None: ...


@dataclass(frozen=True)
class Ran:
    """One run of a program.  Empty `reason`: it ended by itself with status 0."""

    reason: str
    detail: str
    output: bytes


def judge_pairs(
    server: ForkServer,
    program: str,
    pairs: Sequence[tuple[str, str]],
    limits: ProgramLimits,
    *,
    all: bool = False,
) -> ProgramVerdict:
    """Run the program on each stdin and compare stdout with the expected text.  `all`: continue
    after a failure.
    """
    return _count(
        (_pair(server, program, stdin, expected, limits) for stdin, expected in pairs),
        len(pairs),
        all,
    )


def judge_calls(
    server: ForkServer,
    program: str,
    function: str,
    cases: Sequence[tuple[Sequence[Any], Any]],
    limits: ProgramLimits,
    *,
    all: bool = False,
) -> ProgramVerdict:
    """Judge by (arguments, result) cases; `function` may be a method of a class Solution.

    The deadline applies to each call.
    """
    with _two(server, replace(limits, deadlines=1 + len(cases))) as (process, runner):
        failure, deadline = _load(process, program, limits)
        if failure is not None:
            return ProgramVerdict(0, len(cases), failure.reason, failure.detail)
        try:
            wire.send(runner.channel, {"function": function}, deadline=deadline)
        except OSError as e:
            raise SandboxError(f"the tests' process does not listen: {e}") from e

        def call_once(args: Sequence[Any], expected: Any) -> Ran:
            deadline = time.monotonic() + limits.timeout_s
            case = {
                "args": [wire.encode(a, _no_object) for a in args],
                "wanted": wire.encode(expected, _no_object),
            }
            try:
                wire.send(runner.channel, case, largest=wire.LARGEST_ORDER, deadline=deadline)
                reply = wire.receive(runner.channel, largest=wire.LARGEST_REPLY, deadline=deadline)
            except TimeoutError:
                return Ran("timeout", f"no answer after {limits.timeout_s:g} s", b"")
            except OSError:  # only rft's code runs there: the program's result ended it
                return Ran("error", f"its result cannot be compared (status {runner.ended()})", b"")
            if reply["reason"] == "gone":
                return how_ended(process.ended(), reply["detail"], limits)
            return _memory(reply["reason"], reply["detail"])

        return _count((call_once(*case) for case in cases), len(cases), all)


def judge_tests(
    server: ForkServer,
    program: str,
    tests: Sequence[str],
    limits: ProgramLimits,
    *,
    entry_point: str = "",
    prompt: str = "",
    gold: str = "",
    all: bool = False,
) -> ProgramVerdict:
    """Judge by tests, each code with asserts; a defined `check` is called with the function
    `entry_point`.

    `prompt`: code whose helpers the tests may use.  The deadline covers loading and all tests.
    Raises BrokenTests if the tests cannot run; an error that a program may cause counts as broken
    tests only if `gold`, or constant programs, cause the same error.
    """
    order = {"tests": list(tests), "entry_point": entry_point, "prompt": prompt, "all": all}
    verdict, suspect = _run_tests(server, program, order, limits)
    if suspect:
        names = sorted(unknown([*tests, entry_point], {}))
        constant = [
            "\n".join(f"def {name}(*_, **__): return {value}" for name in names)
            for value in (None, 1)
        ]
        if _all_fail_so(server, [gold] if gold else constant, order, limits):
            raise BrokenTests(f"the tests cannot be run: {suspect}")
    return verdict


def _all_fail_so(
    server: ForkServer, programs: Sequence[str], order: dict[str, Any], limits: ProgramLimits
) -> bool:
    return all(_run_tests(server, program, order, limits)[1] for program in programs)


def _run_tests(
    server: ForkServer, program: str, order: dict[str, Any], limits: ProgramLimits
) -> tuple[ProgramVerdict, str]:
    """Return the verdict, and an error that the program or the tests themselves may have caused."""
    total = len(order["tests"])
    with _two(server, limits) as (process, runner):
        failure, deadline = _load(process, program, limits)
        if failure is not None:
            return ProgramVerdict(0, total, failure.reason, failure.detail), ""
        try:
            wire.send(runner.channel, order, largest=wire.LARGEST_ORDER, deadline=deadline)
            reply = wire.receive(runner.channel, largest=wire.LARGEST_REPLY, deadline=deadline)
        except TimeoutError:
            return ProgramVerdict(
                0, total, "timeout", f"no verdict after {limits.timeout_s:g} s"
            ), ""
        except OSError:
            status = runner.ended()
            if status in (_XCPU, _KILLED):
                return ProgramVerdict(
                    0, total, "timeout", "the tests used up their processor time"
                ), ""
            raise SandboxError(
                f"the tests' process ended without a verdict (status {status})"
            ) from None
        if "broken" in reply:
            raise BrokenTests(f"the tests cannot be run: {reply['broken']}")
        reason = reply["reason"]
        detail = reply["detail"]
        if reason == "gone":
            ended = how_ended(process.ended(), detail, limits)
            reason = ended.reason
            detail = ended.detail
        ran = _memory(reason, detail)
        return ProgramVerdict(reply["passed"], reply["total"], ran.reason, ran.detail), reply.get(
            "suspect", ""
        )


def run(server: ForkServer, program: str, stdin: bytes, limits: ProgramLimits) -> Ran:
    """Run `python program` with `stdin` under the limits."""
    with server.start("run", limits) as process:
        deadline = time.monotonic() + limits.timeout_s
        try:
            wire.send(
                process.channel, {"program": program}, largest=wire.LARGEST_ORDER, deadline=deadline
            )
        except OSError as e:
            raise SandboxError(f"the sandbox does not take its program: {e}") from e
        output, errors, stopped = talk(process, stdin, deadline, limits)
        status = process.end()
        if stopped:
            return was_stopped(stopped, limits)
    if status == 0:
        return Ran("", "", output)
    return how_ended(status, last_line(errors), limits)


# ---------------------------------------------------------------- parts


def _pair(
    server: ForkServer, program: str, stdin: str, expected: str, limits: ProgramLimits
) -> Ran:
    ran = run(
        server,
        program,
        stdin.encode(),
        replace(limits, output_kb=limits.output_kb + (len(expected) >> 8)),
    )
    if ran.reason:
        return ran
    got = ran.output.decode(errors="replace")
    return (
        ran
        if same_output(got, expected)
        else Ran("wrong_answer", f"printed {wire.short(got)}", b"")
    )


def same_output(got: str, expected: str) -> bool:
    """Compare line by line, ignoring outer spaces; numbers with a point or exponent to a relative
    1e-6.
    """
    got_lines, theirs = (
        [line.split() for line in text.strip().splitlines()] for text in (got, expected)
    )
    return len(got_lines) == len(theirs) and all(
        len(a) == len(b) and all(x == y or _close(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(got_lines, theirs, strict=True)
    )


def _close(a: str, b: str) -> bool:
    if not (set("._eE") & set(b)) or len(a) > 1000:
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _count(results: Iterable[Ran], total: int, all: bool) -> ProgramVerdict:
    passed = 0
    first = Ran("passed", "", b"")
    for result in results:
        if not result.reason:
            passed += 1
            continue
        first = result if first.reason == "passed" else first
        if not all or result.reason == "timeout":  # ten timeouts would delay other answers
            break
    return ProgramVerdict(passed, total, first.reason, first.detail)


def _load(
    process: SandboxedProcess, program: str, limits: ProgramLimits
) -> tuple[Ran | None, float]:
    """Load the program; return the failure, if any, and the deadline."""
    deadline = time.monotonic() + limits.timeout_s
    try:
        wire.send(
            process.channel, {"program": program}, largest=wire.LARGEST_ORDER, deadline=deadline
        )
        reply = wire.receive(process.channel, largest=wire.LARGEST_REPLY, deadline=deadline)
    except TimeoutError:
        return Ran("timeout", f"loading took longer than {limits.timeout_s:g} s", b""), deadline
    except (BadMessage, OSError):
        return how_ended(process.ended(), "it ended while it was loaded", limits), deadline
    if reply == {"loaded": True}:
        return None, deadline
    error = str(reply.get("error") if isinstance(reply, dict) else reply)[:500]
    return _memory("error", error), deadline


@contextlib.contextmanager
def _two(
    server: ForkServer, limits: ProgramLimits
) -> Iterator[tuple[SandboxedProcess, SandboxedProcess]]:
    """Start the program's process and the test runner's, connected by a socket."""
    to_program, to_runner = socket.socketpair()
    with contextlib.ExitStack() as stack:
        with to_program, to_runner:
            process = stack.enter_context(server.start("serve", limits, link=to_program))
            runner = stack.enter_context(server.start("judge", limits, link=to_runner))
        yield process, runner


def _memory(reason: str, detail: str) -> Ran:
    return Ran("memory" if reason and "MemoryError" in detail else reason, detail, b"")


def _no_object(value: Any) -> Any:
    raise BrokenTests(f"an argument is a {type(value).__name__}")


def talk(
    process: Talking, stdin: bytes, deadline: float, limits: ProgramLimits
) -> tuple[bytes, bytes, str]:
    """Feed and read a program until it ends; return (stdout, the end of stderr, reason to stop it)."""
    output = bytearray()
    errors = b""
    sent = 0
    with selectors.DefaultSelector() as ready:
        os.set_blocking(process.fds["stdin"], False)
        ready.register(process.fds["stdin"], selectors.EVENT_WRITE, "stdin")
        for name in ("stdout", "stderr"):
            ready.register(process.fds[name], selectors.EVENT_READ, name)
        while len(ready.get_map()) > (1 if "stdin" in process.fds else 0):
            events = ready.select(max(0.0, deadline - time.monotonic()))
            if not events or time.monotonic() > deadline:  # output extends no deadline
                return b"", errors, "timeout"
            for key, _ in events:
                if key.data == "stdin":
                    sent = _feed(key.fd, stdin, sent)
                    if sent >= len(stdin):
                        ready.unregister(key.fd)
                        os.close(process.fds.pop("stdin"))
                    continue
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    ready.unregister(key.fd)
                elif key.data == "stdout":
                    output += piece
                else:
                    errors = (errors + piece)[-_ERRORS_KEPT:]
            if len(output) > limits.output_kb << 10:
                return b"", errors, "output"
    if process.wait(remaining(deadline)) is None:
        return b"", errors, "timeout"
    return bytes(output), errors, ""


def _feed(fd: int, data: bytes, sent: int) -> int:
    try:
        return sent + os.write(fd, data[sent : sent + (1 << 16)])
    except BrokenPipeError:  # the program does not read all input
        return len(data)


def was_stopped(cause: str, limits: ProgramLimits) -> Ran:
    """Return the result of a program that `talk` stopped: timeout or output."""
    return Ran(
        cause,
        f"more than {limits.output_kb} KB"
        if cause == "output"
        else f"no end after {limits.timeout_s:g} s",
        b"",
    )


def how_ended(status: int, detail: str, limits: ProgramLimits) -> Ran:
    if status == _XCPU or (status == _KILLED and not detail):
        return Ran(
            "timeout" if status == _XCPU else "killed",
            f"{limits.timeout_s:g} s of processor time are used up",
            b"",
        )
    if status >= 128:
        return Ran(
            "killed" if status == _KILLED else "crash", f"ended by signal {status - 128}", b""
        )
    if detail.startswith("MemoryError"):
        return Ran("memory", f"more than {limits.memory_mb} MB", b"")
    return Ran("error" if status else "exit", detail or f"exit status {status}", b"")


def last_line(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else ""
