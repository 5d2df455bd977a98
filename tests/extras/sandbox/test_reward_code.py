"""Rewards for programs on the shapes of public data sets, and the remote sandbox against a server
on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rft.errors import ConfigError
from rft.extras.sandbox import code_reward as code
from rft.extras.sandbox import code_sandbox as sandbox
from rft.extras.sandbox.code_reward import CodeArgs, checks_of, program_of
from rft.extras.sandbox.code_sandbox import BrokenTests, Calls, Pairs, Tests
from rft.extras.sandbox.processes import ProgramLimits, SandboxError
from rft.extras.sandbox.remote_sandbox import RemoteSandbox
from rft.plugins import load_all
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.types.completion import Score
from rft.types.task import Task
from rft.worker.threads import in_time
from tests.helpers.answers import make_transcript, task

pytestmark = pytest.mark.e2e

PROMPT = 'def shout(word: str) -> str:\n    """The word in capitals, with an exclamation mark."""\n'
TEST = "def check(candidate):\n    assert candidate('a') == 'A!'\n    assert candidate('') == '!'\n"
ROW = {
    "prompt": PROMPT,
    "test": TEST,
    "entry_point": "shout",
    "canonical_solution": "    return word.upper() + '!'\n",
}
GOOD = "```python\ndef shout(word):\n    return word.upper() + '!'\n```"


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    load_all()
    yield
    code.LOCAL.close()


@pytest.fixture(scope="module")
def local() -> None:
    try:
        code.LOCAL.level()
    except sandbox.SandboxUnavailable as e:
        pytest.skip(str(e))


async def scored(name: str, given: Task, text: str, **args: Any) -> Score:
    return await score(build(name, args), given, make_transcript(text))


# ---------------------------------------------------------------- reading answers and rows


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("so\n```python\nx = 1\n```\nno:\n```py\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("with ```x``` as\n```python\nx = 1\n```\nit is done", "x = 1\n"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        ("```text\nout\n```\n", "```text\nout\n```\n"),
        ("x = 1", "x = 1"),
        ("", ""),
    ],
)
def test_the_program_of_an_answer(answer: str, program: str) -> None:
    assert program_of(answer) == program


def test_the_question_stands_before_the_program() -> None:
    assert program_of("    return 1\n", PROMPT, "shout") == PROMPT + "    return 1\n"
    assert program_of(GOOD, PROMPT, "shout").startswith(PROMPT + "\n\ndef shout")
    assert program_of(GOOD, "Write a def shout in words:", "shout").startswith("def shout")
    assert program_of("  ", PROMPT, "shout") == "  "
    future = "from __future__ import annotations\n"
    whole = program_of(f"```python\n{future}def shout(word): return word\n```", PROMPT, "shout")
    assert whole == f"{future}{PROMPT}\n\ndef shout(word): return word\n" and compile(
        whole, "", "exec"
    )


def test_where_tests_stand() -> None:
    args = CodeArgs()
    assert checks_of(task(**ROW), args) == Tests([TEST], "shout", PROMPT)
    assert checks_of(task(TEST, entry_point="shout", prompt=PROMPT), args) == Tests(
        [TEST], "shout", PROMPT
    )
    pairs = {"inputs": ["1\n", ["2", "3"]], "outputs": ["1", "5"]}
    assert (
        checks_of(task(json.dumps(pairs)), args)
        == checks_of(task(pairs), args)
        == Pairs([("1\n", "1"), ("2\n3", "5")])
    )
    assert checks_of(task({"fn_name": "f", "inputs": ["1\n[2]"], "outputs": ["3"]}), args) == Calls(
        "f", [([1, [2]], 3)]
    )
    assert checks_of(task({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}), args) == Calls(
        "f", [([1, 2], 3)]
    )
    keys = {"fn_name": "f", "inputs": [[{"1": 2}, {"a": 3, "1": 2}]], "outputs": [3]}
    assert checks_of(task(keys), args) == Calls("f", [([{1: 2}, {"a": 3, "1": 2}], 3)])
    assert checks_of(task(["assert 1"], test_setup_code="import math"), args) == Tests(
        ["import math\nassert 1"]
    )
    assert checks_of(task(["1"], test_imports=["import re", "import os"]), args) == Tests(
        ["import re\nimport os\n1"]
    )
    assert checks_of(task({"assert_case": ["assert 1"]}), args) == Tests(["assert 1"])
    assert (
        checks_of(
            task(None, exam="def check(c): pass", name="f"),
            CodeArgs(test_key="exam", entry_point_key="name"),
        ).entry_point
        == "f"
    )
    for truth in (None, {"inputs": ["1"], "outputs": []}, [], 7, {"inputs": [], "outputs": []}):
        with pytest.raises(
            ValueError, match=r"task t\[0\] has no tests: give columns test and entry_point"
        ):
            checks_of(task(truth), args)


# ---------------------------------------------------------------- on this machine


@pytest.mark.usefixtures("local")
async def test_functions_with_a_check() -> None:
    good = await scored("code_reward", task(**ROW), GOOD)
    assert (good.value, good.parts, good.reason) == (1.0, {"tests_passed": 1.0}, "")
    assert (await scored("code_reward", task(**ROW), ROW["canonical_solution"])).value == 1.0
    bad = await scored(
        "code_reward", task(**ROW), "```python\ndef shout(word): return word\n```", wrong=-1
    )
    assert bad.value == -1.0 and bad.reason.startswith(
        "wrong_answer: assert candidate('a') == 'A!'"
    )
    nothing = await scored("code_reward", task(**ROW), "")
    assert (nothing.value, nothing.reason) == (0.0, "no_code: the answer holds no program")
    assert (
        await scored("code_reward", task(**ROW), "```python\nimport os; os._exit(0)\n```")
    ).value == 0.0


@pytest.mark.usefixtures("local")
async def test_a_share_of_the_first_ten_tests() -> None:
    truth = {"inputs": [str(i) for i in range(12)], "outputs": [str(i * i) for i in range(12)]}
    half = "```python\nn = int(input())\nprint(n * n if n < 5 else 0)\n```"
    assert (
        await scored("taco", task(truth), "```python\nprint(int(input()) ** 2)\n```")
    ).value == 1.0
    some = await scored("taco", task(truth), half)
    assert (some.value, some.parts) == (0.5, {"tests_passed": 0.5}) and some.reason.startswith(
        "wrong_answer"
    )
    assert (await scored("code_reward", task(truth), half)).value == 0.0
    late = await scored(
        "apps",
        task(truth),
        "```python\nn = int(input())\nwhile n > 1: pass\nprint(n)\n```",
        timeout_s=0.3,
    )
    assert late.value == 0.2 and late.reason.startswith("timeout")
    assert (
        await scored(
            "codeforces",
            task({"fn_name": "f", "inputs": [[1]], "outputs": [2]}),
            "def f(x): return x + 1",
        )
    ).value == 1.0


@pytest.mark.usefixtures("local")
async def test_numbers_of_more_than_64_bits() -> None:
    calls = {
        "fn_name": "f",
        "inputs": [[30], [31]],
        "outputs": [[math.factorial(30)], [math.factorial(31)]],
    }
    factorial = "import math\ndef f(n): return math.factorial(n)"
    assert (await scored("taco", task(calls), factorial)).value == 1.0
    assert (await scored("taco", task(json.dumps(calls)), factorial + " + (n > 30)")).value == 0.5


@pytest.mark.parametrize(
    "failure",
    [SandboxError("no more processes"), BrokenTests("the tests cannot be run: NameError")],
)
async def test_what_is_not_the_programs_fault_is_not_scored(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def judge(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(code.LOCAL, "judge", judge)
    given = await scored("code_reward", task(**ROW), GOOD)
    assert given.value is None and given.reason == f"{type(failure).__name__}: {failure}"


async def test_a_machine_that_cannot_is_refused_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code, "LOCAL", sandbox.Sandbox(python="/bin/false"))
    with pytest.raises(sandbox.SandboxUnavailable, match="sandbox_url"):
        await build("code_reward", {"enable_overlong_penalty": True}).prepare({})  # type: ignore[attr-defined]
    assert build("code_reward", {}).gold_answer(task(**ROW)) == ROW["canonical_solution"]  # type: ignore[attr-defined]


async def test_the_level_is_part_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that this machine lacks is refused before the first run, and `rft check` says so."""
    tried: list[str] = []
    monkeypatch.setattr(
        sandbox, "_fault", lambda server: tried.append(server.level) or "no Landlock here"
    )
    demanding = build("code_reward", {"sandbox_level": "landlock"})
    shaped = build("code_reward", {"sandbox_level": "landlock", "enable_overlong_penalty": True})
    summed = build(
        "weighted_reward",
        {"rewards": {"code": {"reward": "code_reward", "args": {"sandbox_level": "landlock"}}}},
    )
    with pytest.raises(sandbox.SandboxUnavailable, match="no Landlock here"):
        await demanding.prepare({})  # type: ignore[attr-defined]
    for one in (demanding, shaped, summed):
        (line,) = one.remarks()  # type: ignore[attr-defined]
        assert "landlock: no Landlock here" in line
    assert set(tried) == {"landlock"}
    monkeypatch.setattr(sandbox, "_fault", lambda _: "")
    assert demanding.remarks() == ["programs run at sandbox_level landlock on this machine"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="sandbox_level"):
        build("code_reward", {"sandbox_level": "chroot"})
    with pytest.raises(ConfigError, match="sandbox_url names another one"):
        build("code_reward", {"sandbox_level": "landlock", "sandbox_url": "http://sandbox"})
    assert build("codecontests", {"sandbox_url": "http://sandbox"}).remarks() == []  # type: ignore[attr-defined]


# ---------------------------------------------------------------- by a service


class Service:
    """A sandbox service on loopback.  `script`: what it answers before it does its work, e.g. 429
    or 503.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.script: list[Any] = []
        self.at_once = self.most = 0
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service._lock:
                    service.requests.append(body)
                    service.at_once += 1
                    service.most = max(service.most, service.at_once)
                    step = service.script.pop(0) if service.script else None
                status, answer = (
                    (step, b"busy") if isinstance(step, int) else (200, step or service.work(body))
                )
                with service._lock:
                    service.at_once -= 1
                self.send_response(status)
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/run_code"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def work(self, body: dict[str, Any]) -> bytes:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", body["code"]],
                input=body["stdin"],
                capture_output=True,
                text=True,
                timeout=body["run_timeout"],
                check=False,
            )
        except subprocess.TimeoutExpired:
            return json.dumps(
                {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
            ).encode()
        status = "Failed" if done.returncode else "Success"
        result = {
            "status": "Finished",
            "return_code": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
        }
        return json.dumps({"status": status, "message": "", "run_result": result}).encode()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("no_proxy", "*")
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def remote(service: Service) -> Iterator[RemoteSandbox]:
    made = RemoteSandbox(service.url, max_concurrent=2, first_wait_s=0.001)
    yield made
    made.close()


async def test_a_service_judges_pairs_and_calls(service: Service) -> None:
    args = {
        "sandbox_url": service.url,
        "sandbox_max_concurrent": 3,
        "sandbox_memory_mb": 512,
        "timeout_s": 5,
    }
    truth = {"inputs": ["2", "3"], "outputs": ["4", "9"]}
    assert (await scored("taco", task(truth), "print(int(input()) ** 2)", **args)).value == 1.0
    assert {
        k: service.requests[0][k] for k in ("stdin", "language", "run_timeout", "memory_limit_MB")
    } == {
        "stdin": "2",
        "language": "python",
        "run_timeout": 5,
        "memory_limit_MB": 512,
    }
    assert (await scored("taco", task(truth), "print(4)", **args)).value == 0.5
    failed = await scored("taco", task(truth), "raise ValueError('no')", **args)
    assert (failed.value, failed.reason) == (0.0, "error: ValueError: no")
    calls = {"fn_name": "f", "inputs": [[1, 2]], "outputs": [[1, 2]]}
    assert (
        await scored(
            "taco", task(calls), "class Solution:\n    def f(self, a, b): return (a, b)", **args
        )
    ).value == 1.0
    assert (
        await scored("taco", task(calls), "def f(a, b):\n    print('x')\n    return [b, a]", **args)
    ).value == 0.0
    assert (await scored("taco", task(calls), "import os; os._exit(0)", **args)).value == 0.0
    keys = {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [[2]]}
    for result in ("d[1]", "numpy.int64(d[1])", "numpy.array([d[1]])"):
        assert (
            await scored("taco", task(keys), f"import numpy\ndef f(d): return {result}", **args)
        ).value == 1.0
    with pytest.raises(ConfigError, match="leave sandbox_url away"):
        await scored("code_reward", task(**ROW), GOOD, **args)
    with pytest.raises(ConfigError, match="begins with http"):
        build("code_reward", {"sandbox_url": "host:8080"})


async def test_a_busy_service_is_asked_again(service: Service, remote: RemoteSandbox) -> None:
    broken = json.dumps({"status": "SandboxError", "message": "no worker"}).encode()
    service.script = [429, 503, broken, b"<html>"]
    verdict = await remote.judge("print(1)", Pairs([("", "1")]), ProgramLimits(timeout_s=5))
    assert verdict.right and len(service.requests) == 5
    service.script = [500] * 5
    with pytest.raises(SandboxError, match="gave no result: HTTP 500: busy"):
        await remote.judge("print(1)", Pairs([("", "1")]), ProgramLimits(timeout_s=5))
    service.script = [401]
    with pytest.raises(SandboxError, match="HTTP 401"):
        await remote.judge("print(1)", Pairs([("", "1")]), ProgramLimits(timeout_s=5))
    assert len(service.requests) == 11  # a refusal is not asked again
    late = await remote.judge("while 1: pass", Pairs([("", "1")]), ProgramLimits(timeout_s=0.3))
    assert late.reason == "timeout"


async def test_no_service_is_no_verdict(service: Service) -> None:
    service.server.shutdown()
    service.server.server_close()
    remote = RemoteSandbox(service.url, first_wait_s=0.001)
    with pytest.raises(SandboxError, match=r"gave no result: .*(Refused|Connect call failed)"):
        await remote.judge("print(1)", Pairs([("", "1")]), ProgramLimits(timeout_s=1))
    remote.close()


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"], ids=["head", "body"]
)
async def test_an_answer_has_one_deadline_and_closing_waits_for_none(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many pieces its head or its body comes in."""
    monkeypatch.setenv("no_proxy", "*")
    asked = asyncio.Event()
    sent = 0

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        asked.set()
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"x" if head else b"HTTP/1.1 200 OK\r\nX: "[sent : sent + 1] or b"x")
                sent += 1
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(drips, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/run_code"
    quick = RemoteSandbox(url, grace_s=0.2, first_wait_s=0.001)
    with pytest.raises(SandboxError, match=r"not complete within 0\.4 s"):
        await quick.judge("print(1)", Pairs([("", "1")]), ProgramLimits(timeout_s=0.1))
    assert sent > 10
    asked.clear()
    patient = RemoteSandbox(url)
    job = asyncio.ensure_future(
        patient.judge("print(1)", Pairs([("", "1")]), ProgramLimits(timeout_s=1000))
    )
    await asked.wait()
    patient.close()
    with pytest.raises(SandboxError, match="was closed"):
        await job
    server.close()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=20)  # type: ignore[arg-type]


async def test_so_many_requests_at_a_time(service: Service, remote: RemoteSandbox) -> None:
    many = [
        remote.judge("print(1)", Pairs([("", "1")]), ProgramLimits(timeout_s=10)) for _ in range(6)
    ]
    assert all(v.right for v in await asyncio.gather(*many)) and service.most <= 2


@pytest.mark.e2e
async def test_waiting_for_room_is_not_the_time_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteSandbox("http://sandbox", max_concurrent=1)
    said = json.dumps({"status": "Success", "run_result": {"stdout": "1"}}).encode()

    async def post(*_: Any) -> tuple[int, bytes, float]:
        await asyncio.sleep(0.1)
        return 200, said, 0.0

    monkeypatch.setattr(remote, "_post", post)
    waiting = [remote.judge("print(1)", Pairs([("", "1")]), ProgramLimits()) for _ in range(10)]
    assert all(
        v.right for v in await asyncio.gather(*(in_time(w, 0.7, "the run") for w in waiting))
    )
