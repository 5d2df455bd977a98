"""Advantages of the parts of a reward: GDPO against its formula in float64, and runs that lack a
part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rft.algorithm.base import StepInputs, StepRow
from rft.algorithm.catalog import check_args
from rft.algorithm.composition import build
from rft.algorithm.gdpo import INCOMPLETE
from rft.algorithm.needs import needs
from rft.algorithm.settings import AlgorithmSettings
from rft.errors import ConfigErrors
from rft.types.credit import compared, group_statistics

Parts = Mapping[str, float]
EXAMPLE = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 0.0}]


def step(*groups: Sequence[Parts], lengths: Sequence[int] = (2, 1, 3, 1)) -> StepInputs:
    rows = [
        StepRow(
            group=f"g{g}",
            run=run,
            step=0,
            reward=math.fsum(parts.values()),
            reward_parts=parts,
            logprobs=np.zeros(lengths[run % len(lengths)], np.float32),
        )
        for g, runs in enumerate(groups)
        for run, parts in enumerate(runs)
    ]
    names = dict.fromkeys(row.group for row in rows)
    return StepInputs(
        rows=rows,
        groups={
            name: group_statistics(name, [row.scored for row in rows if row.group == name])
            for name in names
        },
    )


def prepared(x: StepInputs, **args: Any) -> Any:
    settings = AlgorithmSettings(advantage_fn="gdpo", advantage_fn_args=args)
    return build(settings).prepare(x)


def numbers(x: StepInputs, **args: Any) -> list[float]:
    return [float(a[0]) for a in prepared(x, **args).advantages]


def test_gdpo_by_hand() -> None:
    """a: mean .5, std .577350; b: mean .25, std .5; the sums have std 1.776168."""
    found = numbers(step(EXAMPLE), norm_by_batch=False)
    assert found == pytest.approx([0.366025, -1.366025, 2.366025, -1.366025], abs=1e-5)
    assert numbers(step(EXAMPLE)) == pytest.approx(
        [0.206078, -0.769094, 1.332110, -0.769094], abs=1e-5
    )
    weighted = numbers(step(EXAMPLE), weights={"a": 2.0}, norm_by_batch=False, norm_by_std=False)
    assert weighted == pytest.approx([1, -1, 1, -1])


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_is_its_formula_over_the_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(3, 4, 2)) * [1.0, 30.0]
    weights = {"a": 1.5, "b": -0.25}
    x = step(*([{"a": a, "b": b} for a, b in group] for group in values.tolist()))
    sums = np.zeros((3, 4))
    for k, weight in enumerate(weights.values()):
        part = values[:, :, k]
        std = np.sqrt(((part - part.mean(1, keepdims=True)) ** 2).sum(1, keepdims=True) / 3)
        sums += weight * (part - part.mean(1, keepdims=True)) / (std + 1e-6)
    expected = (sums - sums.mean()) / (np.sqrt(((sums - sums.mean()) ** 2).sum() / 11) + 1e-6)
    assert numbers(x, weights=weights) == pytest.approx(expected.ravel().tolist(), abs=1e-5)


def test_equal_sums_of_unlike_parts_differ() -> None:
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}]
    found = numbers(step(parts), weights={"a": 1.0, "b": 0.5})
    assert found[0] > found[1] > found[2]


def test_a_group_without_spread_has_no_advantage() -> None:
    x = step([{"a": 0.1}] * 3, [{"a": 0.0}, {"a": 1.0}])
    assert numbers(x)[:3] == [0.0, 0.0, 0.0]


def test_a_run_without_a_part_leaves_the_step(caplog: pytest.LogCaptureFixture) -> None:
    lacking = [*EXAMPLE[:3], {"a": 0.0}]
    found = prepared(step(EXAMPLE[:3], lacking))
    assert [bool(keep.all()) for keep in found.keep] == [True] * 6 + [False]
    assert found.metrics[INCOMPLETE] == 1.0
    assert "the reward of run 3 of group g1 has no part b, so it is not trained" in caplog.text
    others = [float(a[0]) for a in found.advantages][:6]
    assert others == pytest.approx(numbers(step(EXAMPLE[:3], EXAMPLE[:3])))  # in no statistic


def test_a_group_may_have_parts_of_its_own() -> None:
    found = prepared(step([{"a": 0.0}, {"a": 1.0}], [{"c": 5.0}, {"c": 3.0}]))
    assert all(keep.all() for keep in found.keep) and found.metrics[INCOMPLETE] == 0.0
    assert [float(a[0]) > 0 for a in found.advantages] == [False, True, True, False]


@pytest.mark.parametrize(
    ("parts", "args", "message"),
    [
        ([{}, {}], {}, "has no part at all .it has none., nor has another run"),
        (
            [{"a": 1.0}, {"a": 0.0}],
            {"weights": {"b": 1.0}},
            "has no part b .it has a., nor has another run",
        ),
    ],
)
def test_a_step_without_its_parts_is_an_error(
    parts: list[Parts], args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        numbers(step(parts), **args)


def test_parts_of_parts_count_by_name_alone() -> None:
    parts = [{"a": 0.0, "a/x": 9.0}, {"a": 1.0, "a/x": 9.5}, {"a": 1.0, "a/x": 2.0}]
    alone = [{"a": run["a"]} for run in parts]
    assert numbers(step(parts)) == numbers(step(alone))
    assert numbers(step(parts), weights={"a/x": 1.0})[2] < 0


def test_rows_of_a_run_share_its_parts() -> None:
    members = [row.scored for row in step(EXAMPLE).rows]
    cut = [members[0], *(members[1]._replace(step=i) for i in range(3)), *members[2:]]
    assert compared(group_statistics("g", cut)).parts == tuple(EXAMPLE)


def test_an_algorithm_says_which_parts_it_reads() -> None:
    def read(advantage: str, **args: Any) -> tuple[str, ...] | None:
        return needs(AlgorithmSettings(advantage_fn=advantage, advantage_fn_args=args)).reward_parts

    assert read("grpo") is None
    assert read("gdpo") == ()
    assert read("gdpo", weights={"a": 1.0, "b": 2.0}) == ("a", "b")
    with pytest.raises(ConfigErrors, match="a weight other than 0"):
        check_args("advantage_fn", "gdpo", {"weights": {"a": 0.0}})
