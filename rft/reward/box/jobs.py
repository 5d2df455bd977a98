"""What a program is worth: by pairs of input and output, by calls of one function, or by tests that are code.

Expected results stay in this process, or in a referee's own box; the program's box sees inputs only.  Invariant: a verdict says what
the program did; where that is not known, SandboxError or BrokenTests is raised.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rft.reward.box import wire
from rft.reward.box.host import Box, Limits, SandboxError, Server, remaining

_ERRORS_KEPT = 4096
_XCPU, _KILLED = 128 + 24, 128 + 9


class BrokenTests(ValueError):
    """The tests themselves cannot be run."""


@dataclass(frozen=True)
class Verdict:
    """`reason` of the first failure: wrong_answer, error, timeout, memory, output, exit, killed, crash; "passed" without one."""

    passed: int
    total: int
    reason: str
    detail: str = ""

    @property
    def right(self) -> bool:
        return 0 < self.total == self.passed


@dataclass(frozen=True)
class Ran:
    """One run of a program.  `reason` empty: it ended by itself with status 0."""

    reason: str
    detail: str
    output: bytes


def judge_pairs(server: Server, program: str, pairs: Sequence[tuple[str, str]], limits: Limits, *, all: bool = False) -> Verdict:
    """Each input on stdin, what is printed compared with the output.  `all`: go on after a failure."""
    return _count((_pair(server, program, given, wanted, limits) for given, wanted in pairs), len(pairs), all)


def judge_calls(
    server: Server, program: str, function: str, cases: Sequence[tuple[Sequence[Any], Any]], limits: Limits, *, all: bool = False
) -> Verdict:
    """Each case is (arguments, result); `function` may be a method of a class called Solution.  The deadline holds for each call."""
    ours, theirs = socket.socketpair()
    with ours, contextlib.ExitStack() as stack:
        with theirs:
            box = stack.enter_context(server.box("serve", limits, link=theirs))
        failure, _ = _load(box, program, limits)
        if failure is not None:
            return Verdict(0, len(cases), failure.reason, failure.detail)
        target: list[str | int] = []

        def one(args: Sequence[Any], wanted: Any) -> Ran:
            deadline = time.monotonic() + limits.timeout_s
            try:
                if not target:
                    target.append(_find(ours, function, deadline))
                got = _ask(ours, ["call", target[0], [wire.encode(a, _plain) for a in args], {}], deadline)
            except _Raised as e:
                return Ran("memory" if str(e).startswith("MemoryError") else "error", str(e), b"")
            except TimeoutError:
                box.end()
                return Ran("timeout", f"no answer after {limits.timeout_s:g} s", b"")
            except (wire.Closed, wire.Unreadable, OSError) as e:
                return _ended(box.ended(), str(e), limits)
            right = wire.same(got, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and wire.same(got, wanted[0]))
            return Ran("" if right else "wrong_answer", "" if right else f"{function} gave {_short(got)}", b"")

        return _count((one(*case) for case in cases), len(cases), all)


def judge_tests(
    server: Server,
    program: str,
    tests: Sequence[str],
    limits: Limits,
    *,
    entry_point: str = "",
    prompt: str = "",
    all: bool = False,
) -> Verdict:
    """Each test is code with asserts; one that defines `check` has it called with the function `entry_point`.

    `prompt`: code whose helpers the tests may use.  The deadline holds for loading and all tests together.  Raises BrokenTests.
    """
    to_program, to_referee = socket.socketpair()
    with contextlib.ExitStack() as stack:
        with to_program, to_referee:
            box = stack.enter_context(server.box("serve", limits, link=to_program))
            referee = stack.enter_context(server.box("judge", limits, link=to_referee))
        failure, deadline = _load(box, program, limits)
        if failure is not None:
            return Verdict(0, len(tests), failure.reason, failure.detail)
        order = {"tests": list(tests), "entry_point": entry_point, "prompt": prompt, "all": all}
        try:
            referee.channel.settimeout(remaining(deadline))
            wire.send(referee.channel, order, largest=wire.LARGEST_ORDER)
            referee.channel.settimeout(remaining(deadline))
            said = wire.receive(referee.channel)
        except TimeoutError:
            return Verdict(0, len(tests), "timeout", f"no verdict after {limits.timeout_s:g} s")
        except (wire.Closed, OSError):
            status = referee.ended()
            if status in (_XCPU, _KILLED):
                return Verdict(0, len(tests), "timeout", "the tests used up their processor time")
            raise SandboxError(f"the tests' process ended without a verdict (status {status})") from None
        if "broken" in said:
            raise BrokenTests(f"the tests cannot be run: {said['broken']}")
        reason, detail = said["reason"], said["detail"]
        if reason == "gone":
            ended = _ended(box.ended(), detail, limits)
            reason, detail = ended.reason, ended.detail
        elif "MemoryError" in detail:
            reason = "memory"
        return Verdict(said["passed"], said["total"], reason, detail)


def run(server: Server, program: str, stdin: bytes, limits: Limits) -> Ran:
    """`python program` with `stdin`, under the limits."""
    with server.box("run", limits) as box:
        wire.send(box.channel, {"program": program}, largest=wire.LARGEST_ORDER)
        deadline = time.monotonic() + limits.timeout_s
        output, errors, stopped = _talk(box, stdin, deadline, limits)
        status = box.end()
        if stopped:
            return Ran(
                stopped,
                f"more than {limits.output_kb} KB" if stopped == "output" else f"no end after {limits.timeout_s:g} s",
                b"",
            )
    if status == 0:
        return Ran("", "", output)
    return _ended(status, _last_line(errors), limits)


# ---------------------------------------------------------------- parts


def _pair(server: Server, program: str, given: str, wanted: str, limits: Limits) -> Ran:
    ran = run(server, program, given.encode(), limits)
    if ran.reason:
        return ran
    got = ran.output.decode(errors="replace")
    return ran if same_output(got, wanted) else Ran("wrong_answer", f"printed {_short(got)}", b"")


def same_output(got: str, wanted: str) -> bool:
    """Line by line, blanks at the ends aside; numbers with a point or exponent to a relative 1e-6."""
    mine, theirs = ([line.split() for line in text.strip().splitlines()] for text in (got, wanted))
    return len(mine) == len(theirs) and all(
        len(a) == len(b) and all(x == y or _close(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(mine, theirs, strict=True)
    )


def _close(a: str, b: str) -> bool:
    if not (set("._eE") & set(b)) or len(a) > 40:
        return False
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _count(results: Iterable[Ran], total: int, all: bool) -> Verdict:
    passed, first = 0, Ran("passed", "", b"")
    for result in results:
        if not result.reason:
            passed += 1
            continue
        first = result if first.reason == "passed" else first
        if not all or result.reason == "timeout":  # ten timeouts for one answer hold up the others
            break
    return Verdict(passed, total, first.reason, first.detail)


def _load(box: Box, program: str, limits: Limits) -> tuple[Ran | None, float]:
    """How loading failed, if it did, and the deadline."""
    deadline = time.monotonic() + limits.timeout_s
    try:
        box.channel.settimeout(limits.timeout_s)
        wire.send(box.channel, {"program": program}, largest=wire.LARGEST_ORDER)
        box.channel.settimeout(remaining(deadline))
        said = wire.receive(box.channel)
    except TimeoutError:
        return Ran("timeout", f"loading took longer than {limits.timeout_s:g} s", b""), deadline
    except (wire.Closed, wire.Unreadable, OSError):
        return _ended(box.ended(), "it ended while it was loaded", limits), deadline
    if said == {"loaded": True}:
        return None, deadline
    error = str(said.get("error") if isinstance(said, dict) else said)[:500]
    return Ran("memory" if error.startswith("MemoryError") else "error", error, b""), deadline


class _Raised(Exception):
    """The program's function raised."""


def _ask(link: socket.socket, message: Any, deadline: float) -> Any:
    link.settimeout(remaining(deadline))
    wire.send(link, message, largest=wire.LARGEST_ORDER)
    link.settimeout(remaining(deadline))
    reply = wire.receive(link)
    if not isinstance(reply, dict):
        raise wire.Unreadable("no reply")
    if "raised" in reply:
        raise _Raised(str(reply.get("message"))[:500])
    return wire.decode(reply.get("value"))


def _find(link: socket.socket, function: str, deadline: float) -> str | int:
    """What to call: the function, or that method of a `Solution`."""
    try:
        solution = _ask(link, ["call", "Solution", [], {}], deadline)
    except _Raised:
        return function
    method = _ask(link, ["attr", solution.id, function], deadline) if isinstance(solution, wire.Handle) else None
    return method.id if isinstance(method, wire.Handle) else function


def _plain(value: Any) -> Any:
    raise BrokenTests(f"an argument is a {type(value).__name__}")


def _talk(box: Box, stdin: bytes, deadline: float, limits: Limits) -> tuple[bytes, bytes, str]:
    """Feeds and reads until the program ends.  (stdout, the end of stderr, why it has to be stopped)."""
    output, errors, sent = bytearray(), b"", 0
    with selectors.DefaultSelector() as ready:
        os.set_blocking(box.fds["stdin"], False)
        ready.register(box.fds["stdin"], selectors.EVENT_WRITE, "stdin")
        for name in ("stdout", "stderr"):
            ready.register(box.fds[name], selectors.EVENT_READ, name)
        while len(ready.get_map()) > (1 if "stdin" in box.fds else 0):
            found = ready.select(max(0.0, deadline - time.monotonic()))
            if not found:
                return b"", errors, "timeout"
            for key, _ in found:
                if key.data == "stdin":
                    sent = _feed(key.fd, stdin, sent)
                    if sent >= len(stdin):
                        ready.unregister(key.fd)
                        os.close(box.fds.pop("stdin"))
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
    if box.wait(remaining(deadline)) is None:
        return b"", errors, "timeout"
    return bytes(output), errors, ""


def _feed(fd: int, data: bytes, sent: int) -> int:
    try:
        return sent + os.write(fd, data[sent : sent + (1 << 16)])
    except BrokenPipeError:  # it does not read to the end
        return len(data)


def _ended(status: int, detail: str, limits: Limits) -> Ran:
    if status == _XCPU or (status == _KILLED and not detail):
        return Ran("timeout" if status == _XCPU else "killed", f"{limits.timeout_s:g} s of processor time are used up", b"")
    if status >= 128:
        return Ran("killed" if status == _KILLED else "crash", f"ended by signal {status - 128}", b"")
    if detail.startswith("MemoryError"):
        return Ran("memory", f"more than {limits.memory_mb} MB", b"")
    return Ran("error" if status else "exit", detail or f"exit status {status}", b"")


def _last_line(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= 200 else f"{text[:200]}…")
