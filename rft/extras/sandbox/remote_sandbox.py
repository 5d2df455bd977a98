"""A remote sandbox service: send programs with their input, and compare their output here.

    POST url {code, stdin, language, compile_timeout, run_timeout, memory_limit_MB}
    -> {status: Success | Failed | SandboxError, message, run_result: {status: Finished |
    TimeLimitExceeded, return_code, stdout, stderr}}

This is the format of Sandbox Fusion's /run_code.
Invariant: requests to a busy or broken service are repeated, then SandboxError is raised; only the
program's own behaviour counts as its failure.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from rft.errors import ConfigError
from rft.extras.sandbox.code_sandbox import Calls, Checks, Pairs
from rft.extras.sandbox.jobs import ProgramVerdict, Ran, same_output
from rft.extras.sandbox.processes import ProgramLimits, SandboxError
from rft.extras.sandbox.wire import same
from rft.worker.threads import CLOCK

ATTEMPTS = 5
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_LARGEST = 16 << 20
_MARK = "rft-result:"
_CALL = """

if True:
    import json as _json, sys as _sys
    _args = [
        {{int(k): v for k, v in a.items()}} if isinstance(a, dict) and all(k.lstrip("-").isdecimal() for k in a) else a
        for a in _json.loads(_sys.stdin.read())
    ]
    _fn = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
    _value = _fn(*_args)
    print()
    print({mark!r} + _json.dumps(_value, default=lambda v: v.tolist() if hasattr(v, "tolist") else list(v)))
"""


class RemoteSandbox:
    """Client of the service at `url`, with at most `max_concurrent` requests.

    A request may take `grace_s` longer than compiling and running its program.
    """

    def __init__(
        self,
        url: str,
        *,
        max_concurrent: int = 64,
        grace_s: float = 10.0,
        first_wait_s: float = _FIRST_WAIT_S,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"sandbox_url is {url!r}; it begins with http:// or https://", given=url
            )
        self._url = url
        self._grace_s = grace_s
        self._first_wait_s = first_wait_s
        self._max_concurrent = max_concurrent
        self._room: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        self._under_way: set[asyncio.Task[Any]] = set()

    async def judge(
        self, program: str, checks: Checks, limits: ProgramLimits, *, all: bool = False
    ) -> ProgramVerdict:
        """See `rft.extras.sandbox.code_sandbox.ProgramJudge`.

        Raises ConfigError for tests in code, which the service would run in the program's process.
        """
        if isinstance(checks, Pairs):
            cases = [(program, stdin, expected) for stdin, expected in checks.pairs]
        elif isinstance(checks, Calls):
            called = program + _CALL.format(name=checks.function, mark=_MARK)
            cases = [(called, json.dumps(list(args)), expected) for args, expected in checks.cases]
        else:
            raise ConfigError(
                "sandbox_url judges inputs and outputs.  Tests that are code would run beside the "
                "program, which could fake their "
                "result: leave sandbox_url away, they are judged on this machine"
            )
        passed = 0
        first = Ran("passed", "", b"")
        for code, stdin, expected in cases:
            ran = await self._run(code, stdin, limits)
            if not ran.reason:
                ran = _compared(ran.output.decode(), expected, isinstance(checks, Calls))
            if not ran.reason:
                passed += 1
                continue
            first = ran if first.reason == "passed" else first
            if not all or ran.reason == "timeout":
                break
        return ProgramVerdict(passed, len(cases), first.reason, first.detail)

    async def _run(self, code: str, stdin: str, limits: ProgramLimits) -> Ran:
        request = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": limits.timeout_s,
            "run_timeout": limits.timeout_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        body = json.dumps(request).encode()
        failure = ""
        for attempt in range(ATTEMPTS):
            status, answer, retry_after = await self._post_in_turn(body, limits.timeout_s)
            if status == 200:
                ran, failure = _read(answer)
                if ran is not None:
                    return ran
            else:
                failure = (
                    f"HTTP {status}: {answer[:200].decode(errors='replace')}"
                    if status
                    else answer.decode()
                )
                if status and status != 429 and status < 500:
                    break
            if attempt + 1 < ATTEMPTS:
                wait = min(
                    _LONGEST_WAIT_S, self._first_wait_s * 2**attempt * random.uniform(0.5, 1.5)
                )
                await asyncio.sleep(max(wait, min(retry_after, _LONGEST_WAIT_S)))
        raise SandboxError(f"the sandbox at {self._url} gave no result: {failure}")

    async def _post_in_turn(self, body: bytes, timeout_s: float) -> tuple[int, bytes, float]:
        """Return (HTTP status or 0, body or error, Retry-After in seconds) of a request, sent when
        there is room.
        """
        room = self._room.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self._max_concurrent)
        )
        async with CLOCK.get().turn(room):  # waiting does not count towards the run's deadline
            request = asyncio.ensure_future(self._post(body, 2 * timeout_s + self._grace_s))
            self._under_way.add(request)
            request.add_done_callback(self._under_way.discard)
            try:
                await asyncio.wait({request})
            finally:
                request.cancel()
        if request.cancelled():
            raise SandboxError("the sandbox was closed while the program ran")
        return request.result()

    async def _post(self, body: bytes, allowed_s: float) -> tuple[int, bytes, float]:
        """Send one request; `allowed_s` covers the complete answer, however slow the service."""
        import httpx

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        got = bytearray()
        try:
            async with (
                asyncio.timeout(allowed_s),
                httpx.AsyncClient(verify=_certificates(), timeout=allowed_s) as client,
                client.stream("POST", self._url, content=body, headers=headers) as reply,
            ):
                most = _LARGEST if reply.status_code == 200 else 1000
                async for piece in reply.aiter_raw():
                    got += piece
                    if len(got) >= most:
                        break
        except TimeoutError:
            return (
                0,
                f"TimeoutError: its answer was not complete within {allowed_s:g} s ({len(got)} "
                f"bytes came)".encode(),
                0.0,
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as e:
            cause: BaseException = e
            while (deeper := cause.__cause__ or cause.__context__) is not None:
                cause = deeper
            return 0, f"{type(cause).__name__}: {cause}".encode("utf-8", "replace"), 0.0
        after = reply.headers.get("Retry-After", "")
        return (
            reply.status_code,
            bytes(got[:most]),
            float(after) if after.isdecimal() and len(after) < 10 else 0.0,
        )

    def close(self) -> None:
        """Cancel requests in progress; see `rft.extras.sandbox.code_sandbox.ProgramJudge`."""
        for request in list(self._under_way):
            if not (loop := request.get_loop()).is_closed():
                loop.call_soon_threadsafe(request.cancel)


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _read(answer: bytes) -> tuple[Ran | None, str]:
    """Return the program's result, or None and the reason if the service reports none."""
    try:
        reply: Any = json.loads(answer)
        status = reply["status"]
        result = reply.get("run_result") or {}
        if status == "SandboxError":
            return None, str(reply.get("message"))[:300]
        compiled = reply.get("compile_result") or {}
        if "TimeLimitExceeded" in (result.get("status"), compiled.get("status")):
            return Ran("timeout", "the service stopped it", b""), ""
        if status == "Success":
            return Ran("", "", str(result["stdout"]).encode()), ""
        errors = (
            str(result.get("stderr") or compiled.get("stderr") or reply.get("message"))
            .strip()
            .splitlines()
        )
        return Ran(
            "error", errors[-1][:500] if errors else f"exit status {result.get('return_code')}", b""
        ), ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return (
            None,
            f"its answer cannot be read ({type(e).__name__}): "
            f"{answer[:200].decode(errors='replace')}",
        )


def _compared(output: str, expected: Any, called: bool) -> Ran:
    if not called:
        right = same_output(output, expected)
        got = output
    else:
        _, marker, got = output.rpartition(_MARK)
        try:
            value = json.loads(got) if marker else None
        except (ValueError, RecursionError):
            return Ran("error", "the result is no JSON", b"")
        right = bool(marker) and (
            same(value, expected)
            or (isinstance(expected, list) and len(expected) == 1 and same(value, expected[0]))
        )
    return Ran("" if right else "wrong_answer", "" if right else f"gave {got.strip()[:200]!r}", b"")
