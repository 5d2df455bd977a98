"""Random hostile answers against every reward that parses text or runs code: none passes, each is
over in time, nothing is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
import psutil
import pytest

from rft.plugins import load_all
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.types.task import Task
from rft.worker import job_pool
from rft.worker.job_pool import WorkerPool
from rft.worker.process import WorkerProcess
from tests.attacks.hostile_answers import TRUTH, programs, texts
from tests.attacks.table import attack
from tests.helpers.answers import make_transcript as said
from tests.helpers.answers import task

TIMEOUT_S = 3.0
GROWTH = 400 << 20  # bytes that this process may grow by
TABLE = {str(n): value for n, value in ((3, 918273645), (17, 564738291), (99, 102938475))}
HUMAN_EVAL = {
    "prompt": "def f(n):\n",
    "entry_point": "f",
    "test": "def check(candidate):\n"
    + "".join(f"    assert candidate({n}) == {v}\n" for n, v in TABLE.items()),
}
INTEGRAL = {
    "question": "?",
    "answer": "x**3/3 + C",
    "metadata": {
        "source_dataset": "simple_integration",
        "integrand": "x**2 + 31*x",
        "variable": "x",
        "expected_expression": "x**3/3 + 31*x**2/2",
    },
}


def _row(of: Task, row: dict[str, Any]) -> Task:
    return msgspec.structs.replace(of, row=row)


# task, arguments, least score of a right answer
TEXT: dict[str, tuple[Task, dict[str, Any], float]] = {
    "math_reward": (task(TRUTH), {"timeout_s": TIMEOUT_S}, 0.5),
    "accuracy_reward": (task(TRUTH), {"timeout_s": TIMEOUT_S}, 0.5),
    "math_boxed_reward": (
        task(TRUTH),
        {"timeout_s": TIMEOUT_S, "with_think": True, "format_score_coef": 0.1},
        0.5,
    ),
    "math_dapo_reward": (task(TRUTH), {"timeout_s": TIMEOUT_S}, 0.5),
    "rlcr_reward": (
        task(TRUTH),
        {"timeout_s": TIMEOUT_S, "weights": {"format": 0.0, "brier": 0.0}},
        0.4,
    ),
    "gsm8k_reward": (task(TRUTH), {"method": "flexible"}, 0.5),
    "exact_answer": (task(TRUTH), {}, 0.5),
    "search_qa_reward": (task(["Quetzalcoatlus northropi"]), {}, 0.5),
    "countdown_reward": (task({"numbers": [3, 5, 7, 11], "target": 9973}), {}, 0.5),
    "final_answer": (task(TRUTH), {}, 0.5),
    "reasoning_gym": (_row(task(INTEGRAL["answer"]), INTEGRAL), {"timeout_s": TIMEOUT_S}, 0.5),
}
CODE: dict[str, tuple[Task, dict[str, Any], float]] = {
    "code_reward": (task(**HUMAN_EVAL), {"timeout_s": TIMEOUT_S, "memory_mb": 256}, 0.5),
    "prime_code_reward": (
        task(
            {"fn_name": "f", "inputs": [[int(n)] for n in TABLE], "outputs": list(TABLE.values())}
        ),
        {"timeout_s": TIMEOUT_S, "memory_mb": 256},
        0.01,
    ),
}
PIPED = (
    task({"inputs": list(TABLE), "outputs": [str(v) for v in TABLE.values()]}),
    {"timeout_s": TIMEOUT_S, "memory_mb": 256},
    0.01,
)


STARTING: list[
    float
] = []  # seconds that the call under way has waited for a worker to be up, and for one that was killed to be gone


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    load_all()
    yield
    job_pool.close_all()


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(of: type, name: str) -> None:
        method = getattr(of, name)

        def call(self: Any) -> None:
            began = time.monotonic()
            method(self)
            STARTING.append(time.monotonic() - began)

        monkeypatch.setattr(of, name, call)

    timed(WorkerProcess, "wait_ready")
    timed(WorkerPool, "_reap")


LATE = [0.0]  # seconds in which this process was not let run: what a busy machine adds to a call


async def _watch() -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.05)
        LATE[0] += time.monotonic() - began - 0.05


async def _attack(
    name: str,
    of: Task,
    args: dict[str, Any],
    least: float,
    answers: Iterable[str],
    *,
    timed: bool = False,
) -> None:
    me = psutil.Process()
    job_pool.close_all()
    fn = build(name, args)
    await fn.prepare({})
    await score(fn, of, said(f"Answer: \\boxed{{1}} for {name}"))  # starts what is started once
    before = me.memory_info().rss
    children = {p.pid for p in me.children(recursive=True)}
    slowest = 0.0
    late = 0
    watch = asyncio.ensure_future(_watch())
    for answer in answers:
        began, STARTING[:], LATE[0] = time.monotonic(), [], 0.0
        try:
            given = await score(fn, of, said(answer))
        except TimeoutError:
            given = None  # unscored, in time
            late = late + 1
        slowest = max(slowest, time.monotonic() - began - sum(STARTING) - LATE[0])
        assert given is None or given.value is None or given.value < least, (
            f"{name} gives {given} for {answer[:500]!r}"
        )
    watch.cancel()
    if timed:
        assert slowest <= (TIMEOUT_S + 1) * (2 if "code" in name else 1), f"{name}: {slowest:.1f} s"
    grown = me.memory_info().rss - before
    print(
        f"{name}: slowest {slowest:.1f} s, {late} ended at the deadline of {TIMEOUT_S:g} s, grew "
        f"by {grown >> 20} MB"
    )
    assert grown < GROWTH
    await fn.close()
    job_pool.close_all()
    left = [p for p in me.children(recursive=True) if p.pid not in children]
    _, living = psutil.wait_procs(left, timeout=20)
    assert not living


@attack("–", "40 random hostile texts to each reward that parses text", "none passes")
@pytest.mark.e2e
@pytest.mark.parametrize("name", TEXT)
async def test_random_texts(name: str) -> None:
    await _attack(name, *TEXT[name], texts(7, 40))


@attack("–", "8 random hostile programs to each reward that runs code", "none passes")
@pytest.mark.e2e
@pytest.mark.parametrize("name", CODE)
async def test_random_programs(name: str) -> None:
    await _attack(name, *CODE[name], programs(7, 8))


@attack("–", "500 of them", "none passes, each is over in time, nothing is left")
@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT)
async def test_five_hundred_random_texts(name: str) -> None:
    await _attack(name, *TEXT[name], texts(11, 500), timed=True)


@attack("–", "500 of them", "none passes, each is over in time, nothing is left")
@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(5))
@pytest.mark.parametrize("kind", [*CODE, "piped"])
async def test_five_hundred_random_programs(kind: str, hundred: int) -> None:
    name, parts = ("prime_code_reward", PIPED) if kind == "piped" else (kind, CODE[kind])
    await _attack(
        name, *parts, islice(programs(13, 500), 100 * hundred, 100 * hundred + 100), timed=True
    )


@attack(
    "L",
    "an answer whose comparison takes memory without end",
    "the worker that compares may take so much, and no more",
)
async def test_the_worker_that_compares_has_a_memory_limit() -> None:
    await score(build("math_boxed_reward", {"timeout_s": 60}), task("4"), said("\\boxed{3 + 1}"))
    workers = [
        p
        for p in psutil.Process().children(recursive=True)
        if "rft.reward.math_worker" in p.cmdline()
    ]
    assert workers and all(0 < p.rlimit(psutil.RLIMIT_AS)[1] < 16 << 30 for p in workers)


@attack("L", "a box with an equation that does not hold, or with several numbers", "wrong")
@pytest.mark.parametrize(
    "box",
    [
        "\\boxed{3=4}",
        "\\boxed{5 = 4}",
        "\\boxed{1+1=4}",
        "\\boxed{4\\text{ apples, 5 pears}}",
        "\\boxed{4, 5}",
        "\\boxed{4 \\text{ or } 5}",
    ],
)
async def test_a_box_that_contradicts_itself_is_wrong(box: str) -> None:
    assert (
        await score(build("math_boxed_reward", {"timeout_s": 60}), task("4"), said(box))
    ).value == 0.0


@attack("–", "right boxes with units and equations that hold", "right")
@pytest.mark.parametrize(
    "box",
    [
        "\\boxed{x=4}",
        "\\boxed{2+2=4}",
        "\\boxed{4\\text{ apples}}",
        "\\boxed{4\\text{ cm}}",
        "\\boxed{4}",
        "\\boxed{\\frac{8}{2}}",
    ],
)
async def test_a_right_box_stays_right(box: str) -> None:
    assert (
        await score(build("math_boxed_reward", {"timeout_s": 60}), task("4"), said(box))
    ).value == 1.0
