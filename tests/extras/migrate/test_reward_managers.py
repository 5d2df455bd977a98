"""veRL's managers by name, functions in TRL's shape, and weighted parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.errors import ConfigError
from rft.extras.migrate.score_functions import one_answer as functions
from rft.plugins import load_all
from rft.reward.base import score, score_group
from rft.reward.build_reward import build
from rft.types.completion import Score
from tests.helpers.answers import make_transcript, task

FILE = """
import os, threading, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "hang": threading.Event().wait()
    if solution_str == "die": os._exit(3)
    if solution_str == "raise": raise KeyError("no")
    if solution_str == "parts": return {"score": 1, "acc": True, "pid": os.getpid()}
    return float(solution_str == ground_truth) + bonus

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str)

def together(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    assert len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos)
    best = max(map(len, solution_strs))
    return [{"score": scale * len(s) / best, "acc": s == g} for s, g in zip(solution_strs, ground_truths)]

def trl(prompts, completions, answer, completion_ids, **kwargs):
    text = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if t == "skip" else float(t == a) + 0.1 * (p == "?") for t, a, p in zip(text, answer, prompts)]

async def trl_async(completions, **kwargs):
    assert kwargs["level"] == [3] * len(completions)
    return [float(isinstance(c, list)) for c in completions]

def trl_slow(completions): threading.Event().wait()

def trl_short(completions): return [1.0]

def trl_more(completions, missing): return [0.0 for _ in completions]

class Outer:
    @staticmethod
    def inner(solution_str, ground_truth): return 1.0
"""


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    load_all()
    yield
    functions.POOL.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(FILE)
    return path


# ---------------------------------------------------------------- managers


async def test_naive_and_dapo(file: Path) -> None:
    naive = build(f"{file}:compute_score", {"reward_manager": "naive", "bonus": 0.5})
    assert await score(naive, task("yes"), make_transcript("yes")) == Score(value=1.5)
    dapo = build(
        f"{file}:compute_score",
        {
            "reward_manager": "dapo",
            "enable_overlong_penalty": True,
            "cache_length": 20,
            "penalty_factor": 1.0,
        },
    )
    assert await score(dapo, task("yes"), make_transcript("yes", 80)) == Score(
        value=1.0, parts={"acc": 1.0, "overlong": 0.0}
    )
    assert await score(dapo, task("yes"), make_transcript("yes", 90)) == Score(
        value=0.5, parts={"acc": 1.0, "overlong": -0.5}
    )
    parts = await score(dapo, task("yes"), make_transcript("parts", 100))
    assert parts.value == 0.0 and parts.parts["acc"] == 1.0


@pytest.mark.e2e
async def test_prime_scores_in_processes_that_are_killed(file: Path) -> None:
    prime = build(
        f"{file}:compute_score", {"reward_manager": "prime", "reward_timeout_s": 30, "bonus": 1}
    )
    texts = ["yes", "no", "parts"]
    given = await asyncio.gather(*(score(prime, task("yes"), make_transcript(t)) for t in texts))
    assert [g.value for g in given] == [2.0, 1.0, 1.0] and given[2].parts["pid"] != os.getpid()
    assert (
        await score(
            build(f"{file}:later", {"reward_manager": "prime"}),
            task("yes"),
            make_transcript("four"),
        )
    ).value == 4.0
    with pytest.raises(RuntimeError, match="KeyError: 'no'"):
        await score(prime, task("yes"), make_transcript("raise"))
    with pytest.raises(RuntimeError, match="exit status 3"):
        await score(prime, task("yes"), make_transcript("die"))
    short = build(f"{file}:compute_score", {"reward_manager": "prime", "reward_timeout_s": 0.2})
    late = await score(short, task("yes"), make_transcript("hang"))
    assert late == Score(value=None, reason="timeout: the reward took longer than 0.2 s")
    assert functions.POOL.timeouts == 1 and functions.POOL.memo_hits == 0


async def test_a_thread_that_hangs_leaves_its_run_unscored(file: Path) -> None:
    naive = build(f"{file}:compute_score", {"reward_timeout_s": 0.1})
    assert (await score(naive, task("yes"), make_transcript("hang"))).value is None


async def test_batch_gets_all_answers_of_a_task(file: Path) -> None:
    batch = build(f"{file}:together", {"reward_manager": "batch", "scale": 2.0})
    given = await score_group(
        batch, task("yes"), [make_transcript("yes"), make_transcript("nobody")]
    )
    assert given == [Score(value=1.0, parts={"acc": 1.0}), Score(value=2.0, parts={"acc": 0.0})]
    shaped = build(f"{file}:together", {"enable_overlong_penalty": True, "cache_length": 20})
    given = await score_group(
        shaped, task("yes"), [make_transcript("yes", 1), make_transcript("yes", 100)]
    )
    assert [g.value for g in given] == [1.0, 0.0]


async def test_each_answer_has_a_truth_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "eats.py").write_text(
        "def batch(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(a == t.pop() and i.pop('n') == 1) for a, t, i in zip(solution_strs, "
        "ground_truths, extra_infos)]\n"
        "def trl(completions, answer):\n    return [float(c == a.pop()) for c, a in "
        "zip(completions, answer)]\n"
    )
    given = task(["x", "yes"], answer=["x", "yes"], extra_info={"n": 1})
    said = [make_transcript("yes"), make_transcript("yes")]
    for name in ("batch", "trl"):
        scores = await score_group(build(f"{tmp_path}/eats.py:{name}", {}), given, said)
        assert [s.value for s in scores] == [1.0, 1.0]


def test_a_manager_and_a_function_have_to_fit(file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"args: reward .*together' takes lists .*; its reward_manager is batch"
    ):
        build(f"{file}:together", {"reward_manager": "prime"}, key="args")
    with pytest.raises(
        ConfigError, match=r"takes one answer .*; its reward_manager is naive, dapo or prime"
    ):
        build(f"{file}:compute_score", {"reward_manager": "batch"})
    with pytest.raises(
        ConfigError,
        match="reward_manager: Input should be 'naive', 'dapo', 'prime' or 'batch', given 'swift'",
    ):
        build(f"{file}:compute_score", {"reward_manager": "swift"})
    with pytest.raises(ConfigError, match="reward_timeout_s"):
        build("exact_answer", {"reward_timeout_s": 0})
    # rewards of ours are called in their own way
    for manager in ("naive", "dapo", "prime", "batch"):
        build("exact_answer", {"reward_manager": manager})
    from rft.extras.migrate.score_functions.reward_managers import ManagerArgs
    from rft.plugins import import_file

    inner = import_file(file).Outer.inner
    inner.__qualname__ = "make.<locals>.inner"
    with pytest.raises(ConfigError, match="top of its file"):
        functions.reward_of(inner, {}, ManagerArgs(reward_manager="prime"), name="inner", key="")


# ---------------------------------------------------------------- TRL


async def test_functions_written_for_trl(file: Path) -> None:
    fn = build(f"{file}:trl", {})
    given = await score_group(
        fn,
        task(answer="yes"),
        [make_transcript("yes"), make_transcript("no"), make_transcript("skip")],
    )
    assert [g.value for g in given] == [1.1, 0.1, None] and given[
        2
    ].reason == "the function returned None"
    chats = build(f"{file}:trl_async", {})
    messages = ({"role": "user", "content": "?"},)
    assert [
        g.value
        for g in await score_group(
            chats, task(level=3, messages=messages), [make_transcript("a"), make_transcript("b")]
        )
    ] == [1.0, 1.0]
    assert [g.value for g in await score_group(chats, task(level=3), [make_transcript("a")])] == [
        0.0
    ]
    with pytest.raises(ValueError, match="returned 1 results for 2 answers"):
        await score_group(
            build(f"{file}:trl_short", {}),
            task("yes"),
            [make_transcript("a"), make_transcript("b")],
        )
    with pytest.raises(ValueError, match="wants missing; the rows of t have answer"):
        await score_group(build(f"{file}:trl_more", {}), task(answer="yes"), [make_transcript("a")])
    with pytest.raises(ConfigError, match="unknown argument 'answr'"):
        build(f"{file}:trl_short", {"answr": 1})
    slow = build(f"{file}:trl_slow", {"reward_timeout_s": 0.1})
    assert [
        g.value
        for g in await score_group(slow, task("yes"), [make_transcript("a"), make_transcript("b")])
    ] == [None, None]


# ---------------------------------------------------------------- weighted parts


async def test_weighted_parts_are_all_kept(file: Path) -> None:
    rewards = {
        "right": {"reward": "exact_answer", "weight": 2.0, "args": {"compare": "text"}},
        "short": {"reward": "length_reward", "weight": 0.5, "args": {"most": 4}},
    }
    both = build("weighted_reward", {"rewards": rewards})
    assert await score(both, task("yes"), make_transcript("yes", 4)) == Score(
        value=2.0,
        parts={"right": 1.0, "short": 0.0, "short/length": 0.0},
        weights={"right": 2.0, "short": 0.5},
    )
    assert (await score(both, task("yes"), make_transcript("yes", 6))).value == 2.0 - 0.25
    with pytest.raises(ConfigError, match=r"rewards.right.args: unknown argument 'compere'"):
        build(
            "weighted_reward",
            {"rewards": {"right": {"reward": "exact_answer", "args": {"compere": 1}}}},
        )
    with pytest.raises(ConfigError, match="at least 1"):
        build("weighted_reward", {"rewards": {}})


async def test_parts_that_are_unscored(file: Path) -> None:
    def rewards(optional: bool) -> dict[str, Any]:
        trl = {"reward": f"{file}:trl", "optional": optional}
        return {
            "rewards": {
                "trl": trl,
                "length": {"reward": "length_reward", "weight": 3, "args": {"least": 2}},
            }
        }

    group = [make_transcript("yes"), make_transcript("skip")]
    strict = await score_group(build("weighted_reward", rewards(False)), task(answer="yes"), group)
    assert [s.value for s in strict] == [1.1 - 1.5, None] and strict[
        1
    ].reason == "trl is unscored: the function returned None"
    loose = await score_group(build("weighted_reward", rewards(True)), task(answer="yes"), group)
    assert [s.value for s in loose] == [1.1 - 1.5, -1.5]


@pytest.mark.parametrize(
    ("tokens", "value"),
    [(0, -1.0), (1, -0.5), (2, 0.0), (4, 0.0), (5, -0.25), (8, -1.0), (99, -1.0)],
)
async def test_length(tokens: int, value: float) -> None:
    assert await score(
        build("length_reward", {"least": 2, "most": 4}), task("yes"), make_transcript("x", tokens)
    ) == Score(value=value, parts={"length": value})
