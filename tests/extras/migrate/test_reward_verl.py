"""Rewards of veRL's data sources, functions with its signature, and the overlong penalty."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rft.errors import ConfigError, PluginError
from rft.extras.migrate.score_functions.data_sources import REWARDS, translate
from rft.plugins import REGISTRY, load_all
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.types.completion import Score
from tests.helpers.answers import make_transcript, task


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Any:
    load_all()
    from rft.reward.math import POOL

    yield
    POOL.close()


async def scored(name: str, truth: Any, text: str, **args: Any) -> Score:
    return await score(build(name, args), task(truth), make_transcript(text))


@pytest.mark.parametrize(
    ("text", "args", "value"),
    [
        ("so 70 + 2\n#### 72", {}, 1.0),
        ("#### 1\n#### $1,072", {}, 0.0),
        ("#### 72.", {}, 1.0),
        ("#### 72.0", {}, 1.0),
        ("#### -72", {}, 0.0),
        ("the answer is 72", {}, 0.0),
        ("the answer is 72.", {"method": "flexible"}, 1.0),
        ("72 of 80", {"method": "flexible", "format_score": 0.1}, 0.1),
        ("none", {"method": "flexible", "format_score": 0.1}, 0.0),
        ("#### 72" + "x" * 300, {}, 0.0),
    ],
)
async def test_gsm8k(text: str, args: dict[str, Any], value: float) -> None:
    assert (await scored("openai/gsm8k", "72", text, **args)).value == value
    assert (await scored("gsm8k_reward", "70 + 2 = 72\n#### 72", text, **args)).value == value


async def test_gsm8k_commas() -> None:
    assert (await scored("gsm8k_reward", "1,072", "#### $1072")).value == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Answer: 34", 1.0),
        ("answer: 3\nAnswer: $\\boxed{34}$.", 1.0),
        ("Answer: \\frac{68}{2}", 1.0),
        ("Answer: 35", -1.0),
        ("\\boxed{34}", -1.0),
        ("Answer: 34\n" + "x" * 300, -1.0),
    ],
)
async def test_dapo(text: str, value: float) -> None:
    given = await scored("aime2024", "34", text)
    assert (given.value, given.parts) == (value, {"acc": max(value, 0.0)})


async def test_math_and_numina() -> None:
    assert (await scored("lighteval/MATH", "\\frac12", "it is \\boxed{0.5}")).value == 1.0
    for boxed in ("\\textbf{34}", "34\\text{ or 35}", "\\text{34}\\text{ or 35}"):
        assert (await scored("lighteval/MATH", "34", f"\\boxed{{{boxed}}}")).value == float(
            "or" not in boxed
        )
    assert (
        await scored("HuggingFaceH4/MATH-500", "\\text{Evelyn}", "\\boxed{\\text{Evelyn}}")
    ).value == 1.0
    assert (await scored("DigitalLearningGmbH/MATH-lighteval", "1/2", "it is 0.5")).value == 0.0
    assert (await scored("numina_olympiads", "12", "so $x = 12$")).value == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a square</think> so \\boxed{4}", 1.0),
        ("\\boxed{4}", 0.9),
        ("<think>a square</think> so \\boxed{5}", 0.1),
        ("<think>a square</think> so 4", 0.0),
    ],
)
async def test_geometry(text: str, value: float) -> None:
    given = await scored("hiyouga/geometry3k", "4", text)
    assert given.value == pytest.approx(value) and given.parts.keys() == {"accuracy", "format"}


@pytest.mark.parametrize(
    "truth", ["The Beatles", ["Stones", "the beatles"], {"target": ["Beatles"]}]
)
async def test_search_answers(truth: Any) -> None:
    assert (
        await scored("searchR1_nq", truth, "<answer>x</answer> <answer> Beatles! </answer>")
    ).value == 1.0
    assert (await scored("searchR1_nq", truth, "Beatles")).value == 0.0


@pytest.mark.extra
def test_every_data_source_has_a_documented_reward() -> None:
    for name in REWARDS.values():
        assert REGISTRY.get("reward", name).obj.__doc__
    assert translate("math_dapo", {}) == ("math_dapo_reward", {})
    assert translate("aime24", {}) and translate("nobody", {}) is None
    assert translate("codecontests", {}) == ("prime_code_reward", {})
    with pytest.raises(PluginError, match="unknown reward 'nobody/knows'"):
        build("nobody/knows", {})


async def test_sandbox_arguments_matter_to_programs_only() -> None:
    build("openai/gsm8k", {"sandbox_url": "http://sandbox", "method": "flexible"})
    with pytest.raises(ConfigError, match="unknown argument 'sandbox_url'"):
        build("gsm8k_reward", {"sandbox_url": "http://sandbox"})


# ---------------------------------------------------------------- functions

FUNCTIONS = """
import threading
import numpy as np

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str == ground_truth

def parts(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, *, scale=1.0):
    return {"score": np.float32(scale * 0.5 + bonus), "acc": np.bool_(True), "pred": "x", "thread": threading.get_ident()}

def all_given(solution_str, ground_truth, **kwargs):
    assert kwargs == {"data_source": "my/data", "extra_info": {"index": 3}, "any": 1}, kwargs
    return 1

def defaults(data_source, solution_str, ground_truth, extra_info):
    assert (data_source, extra_info) == ("t", {})
    return 1

async def slow(data_source, solution_str, ground_truth, extra_info=None):
    return 0.25

def raises(data_source, solution_str, ground_truth, extra_info=None):
    raise OSError("no table")

def nan(data_source, solution_str, ground_truth, extra_info=None):
    return float("nan")

def nan_part(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": float("nan")}

def text(data_source, solution_str, ground_truth, extra_info=None):
    return "good"

def nothing(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}

def leaves(data_source, solution_str, ground_truth, extra_info=None):
    raise SystemExit(3)

def needs(data_source, solution_str, ground_truth, key):
    return 1
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "score.py"
    file.write_text(FUNCTIONS)
    return file


async def test_functions_with_verls_signature(functions: Path) -> None:
    assert (await scored(f"{functions}:plain", "4", "4")).value == 1.0
    given = await scored(f"{functions}:parts", "4", "4", bonus=0.5, scale=2)
    assert given.value == 1.5 and given.parts["acc"] == 1.0 and "pred" not in given.parts
    assert given.parts["thread"] != threading.get_ident()
    row = task("4", data_source="my/data", extra_info={"index": 3})
    assert (
        await score(build(f"{functions}:all_given", {"any": 1}), row, make_transcript("4"))
    ).value == 1.0
    assert (await scored(f"{functions}:defaults", "4", "4")).value == 1.0
    assert (await scored(f"{functions}:slow", "4", "4")).value == 0.25
    assert (await scored(f"{functions}:needs", "4", "4", key="x")).value == 1.0


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("raises", OSError, "no table"),
        ("nan", ValueError, "is nan; it must be a finite number"),
        ("nan_part", ValueError, "'acc' is nan"),
        ("text", ValueError, "is .good.; it must be a finite number"),
        ("nothing", ValueError, "a dict without 'score'; it has acc"),
        ("leaves", RuntimeError, r"called sys.exit\(3\)"),
    ],
)
async def test_functions_that_cannot_score_raise(
    functions: Path, name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await scored(f"{functions}:{name}", "4", "4")


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("parts", {"bonsu": 1}, "unknown argument 'bonsu' .* Known: bonus, scale"),
        ("plain", {"ground_truth": 1}, "unknown argument 'ground_truth'"),
        ("needs", {}, "cannot be called with these arguments: missing a required argument: 'key'"),
    ],
)
def test_arguments_are_checked(
    functions: Path, name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(f"{functions}:{name}", args, key="reward_fn_args")


async def test_a_function_that_hangs_is_left_at_its_deadline(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text(
        "import threading\nEND = threading.Event()\ndef f(data_source, solution_str, "
        "ground_truth):\n    END.wait(60)\n    return 1\n"
    )
    reward = build(f"{file}:f", {})
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(score(reward, task("4"), make_transcript("4")), 0.1)
    finally:
        REGISTRY.get("reward", f"{file}:f").obj.__globals__["END"].set()


# ---------------------------------------------------------------- overlong


@pytest.mark.parametrize(
    ("length", "cost"), [(1, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -1.0), (4000, -1.0)]
)
async def test_overlong_penalty(length: int, cost: float) -> None:
    """90 tokens at most, the last 10 of them cost up to 1."""
    args = {
        "enable_overlong_penalty": True,
        "cache_length": 10,
        "penalty_factor": 1.0,
        "max_response_length": 90,
    }
    given = await score(build("math_dapo", args), task("34"), make_transcript("Answer: 34", length))
    assert given.value == pytest.approx(1.0 + cost) and given.parts == {
        "acc": 1.0,
        "overlong": pytest.approx(cost),
    }


async def test_a_cache_longer_than_an_answer_is_refused() -> None:
    on = {"enable_overlong_penalty": True, "cache_length": 10, "max_response_length": 9}
    with pytest.raises(
        ConfigError,
        match=r"cache_length: the overlong penalty's cache_length is longer than the longest "
        r"answer \(9",
    ):
        await score(build("math_dapo", on), task("34"), make_transcript("", 0))


async def test_overlong_penalty_of_any_reward(functions: Path) -> None:
    on = {"enable_overlong_penalty": True, "cache_length": 20, "penalty_factor": 0.5}
    # the taskset's longest answer: 100
    given = await score(build(f"{functions}:plain", on), task("4"), make_transcript("4", 90))
    assert given.value == pytest.approx(1 - 0.25)
    off = {**on, "enable_overlong_penalty": False}
    assert (
        await score(build("exact_answer", off), task("4"), make_transcript("4", 90))
    ).value == 1.0
    with pytest.raises(ConfigError, match=r"overlong penalty: cache_length: .* given 0"):
        build("exact_answer", {**on, "cache_length": 0}, key="k")
