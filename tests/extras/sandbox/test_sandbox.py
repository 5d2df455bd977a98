"""Programs that are right are called right, at every level; failures of the sandbox itself are
never a program's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.extras.sandbox import code_sandbox as sandbox_module
from rft.extras.sandbox import jobs, wire
from rft.extras.sandbox.code_sandbox import (
    BrokenTests,
    Calls,
    Pairs,
    Sandbox,
    SandboxUnavailable,
    Tests,
    open_server,
)
from rft.extras.sandbox.processes import (
    LEVELS,
    ForkServer,
    ProgramLimits,
    SandboxedProcess,
    SandboxError,
)
from rft.worker.framing import BadMessage
from rft.worker.job_pool import counts

pytestmark = pytest.mark.e2e

LIMITS = ProgramLimits(timeout_s=20)


PROGRAMS = {
    "input and print": ("print(sum(map(int, input().split())))", "1 2 3\n", "6"),
    "guarded by __main__": (
        "import sys\ndef main(): print(len(sys.stdin.read()))\nif __name__ == '__main__': main()",
        "abc",
        "3",
    ),
    "exit with 0": ("import sys\nprint(1)\nsys.exit()", "", "1"),
    "exit and quit": ("try: quit(0)\nexcept SystemExit: print(1)\nexit()", "", "1"),
    "no arguments": (
        "import fileinput, sys\nprint(len(sys.argv), sum(map(int, fileinput.input())))",
        "1\n2\n",
        "1 3",
    ),
    "a thread with a large stack": (
        "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 27)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\nthreading.Thread(target=lambda: "
        "print(deep(20000))).start()",
        "",
        "20000",
    ),
    "output at exit": (
        "import atexit, io, os\nb = io.BytesIO(b'42')\natexit.register(lambda: os.write(1, "
        "b.getvalue()))",
        "",
        "42",
    ),
    "many lines": (
        "import sys\nfor line in sys.stdin: print(int(line) * 2)",
        "1\n" * 30000,
        "2\n" * 30000,
    ),
    "numbers with a point": ("print(1 / 3)", "", "0.33333333"),
    "numbers with many digits": ("print('%.50f' % (1 / 3))", "", "0.3333333333333333"),
    "more than a megabyte that is wanted": (
        "for _ in range(150000): print(12345678)",
        "",
        "12345678\n" * 150000,
    ),
    "does not read its input": ("print('x')", "y" * 300000, "x"),
    "asyncio": (
        "import asyncio\nasync def f(): await asyncio.sleep(0); print('ok')\nasyncio.run(f())",
        "",
        "ok",
    ),
    "modules": (
        "import heapq, numbers, wave, decimal, zoneinfo, sqlite3, "
        "hashlib\nprint(hashlib.md5(b'').hexdigest()[:4])",
        "",
        "d41d",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program(name: str, server: ForkServer) -> None:
    program, given, wanted = PROGRAMS[name]
    verdict = jobs.judge_pairs(server, program, [(given, wanted)], LIMITS)
    assert verdict.right, verdict


TESTS = {
    "plain data": (
        "def f(x): return {'a': (x, [1.5, None, True]), 2: {x}, 'b': b'x', 'c': 1 + 2j, 'r': "
        "range(3)}",
        "assert f(4) == {'a': (4, [1.5, None, True]), 2: {4}, 'b': b'x', 'c': 1 + 2j, 'r': "
        "range(3)}",
    ),
    "keywords": ("def f(x, *, y=1): return x + y", "assert f(1, y=2) == 3"),
    "changes its argument": ("def f(x): x.sort()", "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]"),
    "a generator": ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
    "raises what is expected": (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no')",
        "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert 'no' in str(e)",
    ),
    "objects": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): "
        "self.items.append(x); return self\n"
        "def size(s): return len(s.items)",
        "s = Stack()\ns.push(1).push(2)\nassert s.items == [1, 2] and size(s) == 2",
    ),
    "subclasses of plain types": (
        "from collections import Counter, namedtuple, OrderedDict\nP = namedtuple('P', 'x y')\ndef "
        "f(s): return Counter(s), P(1, 2)",
        "c, p = f('aab')\nassert c == {'a': 2, 'b': 1} and p == (1, 2)",
    ),
    "functions of functions": (
        "def twice(g, x): return g(g(x))\ndef inc(x): return x + 1",
        "assert twice(inc, 1) == 3",
    ),
    "fractions": (
        "from fractions import Fraction\ndef f(): return Fraction(1, 3)",
        "from fractions import Fraction\nassert f() * 3 == 1",
    ),
}


@pytest.mark.parametrize("name", TESTS)
def test_right_functions(name: str, server: ForkServer) -> None:
    program, test = TESTS[name]
    verdict = jobs.judge_tests(server, program, [test], LIMITS)
    assert verdict.right, verdict


def test_helpers_of_the_question_are_the_questions(server: ForkServer) -> None:
    prompt = "def double(x):\n    return 2 * x\n\ndef f(x):\n    '''f.'''\n"
    test = "def check(candidate):\n    assert candidate(2) == double(2) + 1"
    cheat = "def double(x): return 0\ndef f(x): return 1"
    right = jobs.judge_tests(
        server,
        prompt + "def f(x): return double(x) + 1",
        [test],
        LIMITS,
        entry_point="f",
        prompt=prompt,
    )
    assert right.right
    wrong = jobs.judge_tests(server, cheat, [test], LIMITS, entry_point="f", prompt=prompt)
    assert wrong.reason == "wrong_answer" and "candidate(2) == double(2) + 1" in wrong.detail


def test_the_function_may_be_a_method_of_a_solution(server: ForkServer) -> None:
    prompt = "class Solution:\n    def add(self, a, b):\n        pass\n"
    test = "def check(candidate):\n    assert candidate(a=1, b=2) == 3"
    for sign, right in (("+", True), ("-", False)):
        program = f"class Solution:\n    def add(self, a, b): return a {sign} b"
        verdict = jobs.judge_tests(
            server, program, [test], LIMITS, entry_point="Solution().add", prompt=prompt
        )
        assert verdict.right is right, verdict
    assert (
        jobs.judge_tests(server, "x = 1", [test], LIMITS, entry_point="Solution().add").reason
        == "error"
    )


def test_calls_and_shares(server: ForkServer) -> None:
    cases = [([1], 1), ([2], 4), ([3], [9]), ([4], 0)]
    program = "class Solution:\n    def square(self, x): return x * x"
    assert jobs.judge_calls(server, program, "square", cases[:3], LIMITS).right
    some = jobs.judge_calls(server, program, "square", [cases[3], *cases[:3]], LIMITS, all=True)
    assert (some.passed, some.total, some.reason, some.detail) == (
        3,
        4,
        "wrong_answer",
        "square gave '16'",
    )
    missing = jobs.judge_calls(server, "x = 1", "square", cases, LIMITS)
    assert (missing.passed, missing.reason) == (0, "error") and "square" in missing.detail
    # one process makes all calls
    limited = "import resource\ndef seconds(): return resource.getrlimit(resource.RLIMIT_CPU)[0]"
    assert jobs.judge_calls(server, limited, "seconds", [([], 80)] * 3, LIMITS).right, (
        "20 s to load, and 20 s for each call"
    )
    asserts = ["assert g(1) == 1", "assert g(2) == 5", "assert g(3) == 3"]
    assert jobs.judge_tests(server, "def g(x): return x", asserts, LIMITS, all=True).passed == 2
    assert jobs.judge_tests(server, "def g(x): return x", asserts, LIMITS).passed == 1


@pytest.mark.parametrize(
    ("got", "wanted", "equal"),
    [
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (10**400, 1.5, False),
        (float("nan"), 1.0, False),
        (True, 1, False),
        ((1, [2]), [1, (2,)], True),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a"}, {"2": "a"}, False),
        ("1", 1, False),
        ({1}, {1}, True),
        ({1}, [1], False),
        (None, None, True),
    ],
)
def test_equal_values(got: Any, wanted: Any, equal: bool) -> None:
    assert wire.same(got, wanted) is equal


def test_tests_that_are_wrong_say_nothing_about_the_program(server: ForkServer) -> None:
    for test, why in [
        ("assert f(1) == (", "SyntaxError"),
        ("import no_such_module", "No module named"),
        ("def check(c):\n    x += c(1)", "UnboundLocalError"),
    ]:
        with pytest.raises(BrokenTests, match=why):
            jobs.judge_tests(server, "def f(x): return x", [test], LIMITS, entry_point="f")


@pytest.mark.parametrize(
    ("test", "attack", "gold"),
    [
        (
            "for v in c(3):\n    last = v\nassert last == 6",
            "def c(x): return []",
            "def c(x): return [6]",
        ),
        ("if c(3):\n    x = 1\nassert x", "def c(x): return 0", "def c(x): return 1"),
        (
            "import ast\nassert ast.literal_eval(c(3)) == 6",
            "def c(x): return '('",
            "def c(x): return '6'",
        ),
        ("assert eval(c(3)) == 6", "def c(x): return 'y'", "def c(x): return '6'"),
        ("assert compile(c(3), 'c', 'eval')", "def c(x): return '('", "def c(x): return '6'"),
        (
            "import importlib\nassert importlib.import_module(c(3))",
            "def c(x): return 'no_such'",
            "def c(x): return 'ast'",
        ),
        (
            "def check(c):\n    for v in c(3):\n        last = v\n    assert last == 6",
            "def c(x): return ()",
            "def c(x): return [6]",
        ),
    ],
)
def test_what_a_program_returns_cannot_make_tests_look_wrong(
    test: str, attack: str, gold: str, server: ForkServer
) -> None:
    """R3: with a solution beside the row, and without."""
    entry = "c" if "check" in test else ""
    for known in (gold, ""):
        verdict = jobs.judge_tests(server, attack, [test], LIMITS, entry_point=entry, gold=known)
        assert (verdict.passed, verdict.reason) == (0, "wrong_answer"), verdict
        assert jobs.judge_tests(server, gold, [test], LIMITS, entry_point=entry, gold=known).right


def test_a_solution_shows_that_tests_are_wrong(server: ForkServer) -> None:
    """R3: behind an assert that constant programs fail."""
    test = "assert f(2) == 4\nfor v in []:\n    last = v\nassert last"
    with pytest.raises(BrokenTests, match="NameError"):
        jobs.judge_tests(
            server, "def f(x): return x * x", [test], LIMITS, gold="def f(x): return 2 * x"
        )
    with pytest.raises(BrokenTests, match="no_such"):
        jobs.judge_tests(
            server, "def f(x): return x * x", ["assert f(2) == 4\nimport no_such"], LIMITS
        )


@pytest.mark.parametrize(
    ("test", "entry"),
    [
        ("def check(c):\n    assert c(1) == 2", ""),
        ("'Tests.'\nimport math\nLIMIT = 1\ndef test_one():\n    assert f(1) == 2", "f"),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_one(self): "
            "self.assertEqual(f(1), 2)\n"
            "if __name__ == '__main__': unittest.main()",
            "f",
        ),
    ],
)
def test_tests_that_run_nothing_are_passed_by_nobody(
    test: str, entry: str, server: ForkServer
) -> None:
    with pytest.raises(BrokenTests, match="only define"):
        jobs.judge_tests(server, "def f(x): return 7", [test], LIMITS, entry_point=entry)
    assert jobs.judge_tests(
        server, "def f(x): return 2", [test, "assert f(1) == 2"], LIMITS, entry_point=entry
    ).right


@pytest.mark.parametrize(
    "raised",
    [
        "NameError",
        "ImportError",
        "SyntaxError",
        "RecursionError",
        "KeyboardInterrupt",
        "GeneratorExit",
    ],
)
def test_a_program_cannot_make_the_tests_look_wrong(raised: str, server: ForkServer) -> None:
    verdict = jobs.judge_tests(
        server, f"def f(x): raise {raised}('no')", ["assert f(1) == 1"], LIMITS
    )
    assert verdict.reason == "error" and verdict.passed == 0
    assert jobs.judge_tests(server, "pass", ["assert f(1) == 1"], LIMITS).reason == "error"


@pytest.mark.parametrize(
    "said",
    [
        b'["x", 1]',
        b'["d", [[["l", []], 1]]]',
        b'["r", 1, 2, 0]',
        b'["h"]',
        b'["s", [["l", []]]]',
        b'[["l"]]',
        b"{}",
        b"[[[[" * 9999,
        b"\xff",
        b'["F", 1, 0]',
        b'["D", "x"]',
        b'["i", 3]',
    ],
)
def test_what_no_honest_program_sends_is_unreadable(said: bytes) -> None:
    with pytest.raises(BadMessage):
        wire.decode(wire.parse(said))


# ---------------------------------------------------------------- the asynchronous side


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(size=2)
    try:
        made.level()
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    yield made
    made.close()


def test_packages_below_tmp_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """G9: a virtual environment below /tmp was hidden by the private /tmp, and the program wrong."""
    with tempfile.TemporaryDirectory(dir="/tmp") as venv:
        site = Path(venv, "lib", "site-packages")
        site.mkdir(parents=True)
        (site / "greeting.py").write_text("TEXT = 'hello'")
        (Path(venv) / "secret").touch()
        monkeypatch.syspath_prepend(site)
        made = Sandbox(level="namespaces", size=1)
        try:
            made.level()
        except SandboxUnavailable as e:
            pytest.skip(str(e))
        seen = f"greeting.TEXT, os.listdir({venv!r}), os.listdir('/proc')"
        program = f"import greeting, os\nopen('/tmp/own', 'w').close()\nprint({seen})"
        writes = f"open({str(site / 'greeting.py')!r}, 'a')"
        other = "import os; print('own' in os.listdir('/tmp'))"

        async def play() -> list[jobs.Ran]:
            return [await made.run(text, LIMITS) for text in (program, writes, other)]

        imports, appends, again = asyncio.run(play())
        made.close()
    assert imports.output == b"hello ['lib'] []\n", imports.detail
    assert appends.reason == "error"
    assert again.output == b"False\n"


async def test_many_at_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    async def one(i: int) -> bool:
        pairs = Pairs([(f"{i}\n", str(2 * i))])
        return (await sandbox.judge("print(int(input()) * 2)", pairs, LIMITS)).right

    at_once: list[int] = []
    started = [0]
    lock = threading.Lock()
    real_start = ForkServer.start
    real_close = SandboxedProcess.close

    def count(step: int) -> None:
        with lock:
            started[0] += step
            at_once.append(started[0])

    def start(*args: Any, **kwargs: Any) -> SandboxedProcess:
        count(1)
        return real_start(*args, **kwargs)

    def close(self: SandboxedProcess) -> None:
        real_close(self)
        count(-1)

    monkeypatch.setattr(ForkServer, "start", start)
    monkeypatch.setattr(SandboxedProcess, "close", close)
    assert await asyncio.gather(*map(one, range(24))) == [True] * 24
    assert max(at_once) == 2 and len(at_once) == 48


async def test_verdicts_are_remembered_but_timeouts_are_not(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    real = jobs.run
    monkeypatch.setattr(jobs, "run", lambda *a: runs.append(1) or real(*a))
    pairs = Pairs([("", "1")])
    for _ in range(3):
        assert (await sandbox.judge("print(1)", pairs, LIMITS)).right
    assert len(runs) == 1
    for _ in range(2):
        assert (
            await sandbox.judge("while 1: pass", pairs, ProgramLimits(timeout_s=0.1))
        ).reason == "timeout"
    assert len(runs) == 3


async def test_the_server_is_started_again(sandbox: Sandbox) -> None:
    assert (await sandbox.judge("print(1)", Pairs([("", "1")]), LIMITS)).right
    assert sandbox._server is not None and sandbox._server._process is not None
    sandbox._server._process.kill()
    sandbox._server._process.wait()
    assert (await sandbox.judge("print(2)", Pairs([("", "2")]), LIMITS)).right
    assert (await sandbox.judge("def f(x): return x", Tests(["assert f(1) == 1"]), LIMITS)).right
    assert (await sandbox.judge("def f(x): return x", Calls("f", [([1], 1)]), LIMITS)).right
    assert sandbox.restarts == 1 and sandbox.calls == 4


async def test_sandboxes_are_counted_together(sandbox: Sandbox) -> None:
    before = counts().get("sandbox/calls", 0)
    other = Sandbox(size=1)
    for one, program in ((sandbox, "print(1)"), (other, "print(1)"), (other, "print(2)")):
        await one.judge(program, Pairs([("", "1")]), LIMITS)
    other.close()
    assert counts()["sandbox/calls"] == before + 3


def test_a_machine_without_protection_is_refused(tmp_path: Path) -> None:
    """A Python that cannot start, and no level accepted: the message names every level and the
    remedy.
    """
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(
        SandboxUnavailable,
        match=r"namespaces: it ended while starting.*seccomp: .*Landlock",
    ):
        open_server(LEVELS, str(broken))
    with pytest.raises(
        SandboxUnavailable, match=r"namespaces: it.*landlock: it.*sandbox_url"
    ) as refused:
        Sandbox(python=str(broken)).level()
    # which hides files by forbidding them all: it has to be named
    assert "seccomp: it" not in str(refused.value)


def test_a_level_is_a_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that is named is the level that is used; nothing falls back to less than the two
    strongest.
    """
    for level in LEVELS:
        named = Sandbox(level=level)
        with contextlib.suppress(SandboxUnavailable):
            assert named.level() == level
        named.close()
    monkeypatch.setattr(
        sandbox_module, "_fault", lambda server: "" if server.level == "seccomp" else "not here"
    )
    with pytest.raises(
        SandboxUnavailable,
        match=r"namespaces: not here; landlock: not "
        r"here\).*user\.max_user_namespaces.*sandbox_level: seccomp",
    ):
        Sandbox().level()
    assert Sandbox(level="seccomp").level() == "seccomp"


def test_a_program_that_is_not_kept_in_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test believes what a program inside finds, not what was set up."""
    monkeypatch.setattr(jobs, "run", lambda *_: jobs.Ran("", "", b"the network /etc/passwd\n"))
    with pytest.raises(SandboxUnavailable, match="not kept from the network /etc/passwd"):
        open_server(LEVELS, sys.executable)


@pytest.mark.parametrize("fd", [3, 4])
async def test_closing_ends_a_program_that_goes_on(
    fd: int, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one that sends a byte now and then; it gets no verdict."""
    monkeypatch.setattr(sandbox_module, "CLOSE_S", 0.01)
    read = threading.Event()
    send = wire.send

    def sent(sock: Any, message: Any, **kwargs: Any) -> None:
        send(sock, message, **kwargs)
        read.set()

    monkeypatch.setattr(wire, "send", sent)
    program = (
        f"import os, time\nos.write({fd}, bytes([0, 1, 0, 0]))\nwhile True:\n    "
        f"os.write({fd}, b' ')\n    time.sleep(0.05)\n"
    )
    job = asyncio.create_task(
        sandbox.judge(program, Calls("f", [([1], 1)]), ProgramLimits(timeout_s=3600))
    )
    await asyncio.to_thread(read.wait)
    await asyncio.to_thread(sandbox.close)
    with pytest.raises(SandboxError, match="closed while the program ran"):
        await job
    assert (await sandbox.judge("print(1)", Pairs([("", "1")]), LIMITS)).right


async def test_a_sandbox_that_fails_raises(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise SandboxError("no more processes")

    monkeypatch.setattr(ForkServer, "start", broken)
    with pytest.raises(SandboxError, match="no more processes"):
        await sandbox.judge("print(3)", Pairs([("", "3")]), LIMITS)
