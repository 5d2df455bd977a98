"""Numbers worked out by hand for every formula of the algorithm room, and "same data, other cut,
same gradient".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rft.algorithm.aggregate import aggregate
from rft.algorithm.base import Denominators, LossInputs, LossOutput, StepInputs, StepRow
from rft.algorithm.grpo import GrpoArgs, grpo
from rft.algorithm.kl import ESTIMATORS, KlArgs
from rft.algorithm.ppo import PpoArgs, ppo
from rft.plugins import REGISTRY
from rft.types.ports import GroupStats


def group(rewards: Sequence[float]) -> GroupStats:
    std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return GroupStats(group="g", rewards=tuple(rewards), mean=statistics.fmean(rewards), std=std)


def advantages(rewards: Sequence[float], **args: object) -> list[float]:
    return grpo(step_of(rewards), GrpoArgs(**args)).tolist()


def step_of(
    *groups: Sequence[float], rewards: Sequence[Sequence[float]] | None = None
) -> StepInputs:
    """Rows with one trained token each.  `rewards`: those of the rows at hand, where they are not
    all of a group's.
    """
    rows = [
        StepRow(group=str(g), run=i, step=0, reward=r, logprobs=np.zeros(1, np.float32))
        for g, of in enumerate(rewards or groups)
        for i, r in enumerate(of)
    ]
    return StepInputs(rows=rows, groups={str(g): group(of) for g, of in enumerate(groups)})


def inputs(
    logprobs: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    advantage: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    ref: Sequence[float] | None = None,
) -> LossInputs:
    """One row of tokens, the whole step."""
    n = len(logprobs)
    keep = torch.tensor(mask if mask is not None else [True] * n)
    return LossInputs(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        old_logprobs=torch.tensor(old if old is not None else [0.0] * n),
        advantages=torch.tensor(advantage if advantage is not None else [1.0] * n),
        mask=keep,
        row=torch.zeros(n, dtype=torch.int64),
        num_rows=1,
        denominators=Denominators(tokens=float(keep.sum()), rows=1, max_response_tokens=n),
        ref_logprobs=None if ref is None else torch.tensor(ref),
    )


# ---------------------------------------------------------------- GRPO


@pytest.mark.parametrize(
    ("rewards", "args", "expected"),
    [
        ((1, 0, 0, 1), {}, (0.866024, -0.866024, -0.866024, 0.866024)),
        ((1, 0, 0, 1), {"epsilon": 1e-4}, (0.865875, -0.865875, -0.865875, 0.865875)),
        ((1, 0, 0, 1), {"norm_by_std": False}, (0.5, -0.5, -0.5, 0.5)),
        # a biased deviation would give -0.577349 and 1.732047
        ((0, 0, 0, 1), {}, (-0.499999, -0.499999, -0.499999, 1.499997)),
    ],
)
def test_grpo(
    rewards: tuple[float, ...], args: dict[str, object], expected: tuple[float, ...]
) -> None:
    assert advantages(rewards, **args) == pytest.approx(expected, abs=1.5e-6)


@pytest.mark.parametrize("rewards", [(1.0,), (0.0,), (0.1,) * 7, (0.3, 0.3, 0.3)])
def test_grpo_gives_exactly_zero_where_nothing_sets_the_group_apart(
    rewards: tuple[float, ...],
) -> None:
    assert advantages(rewards) == [0.0] * len(rewards)
    assert advantages(rewards, norm_by_std=False) == [0.0] * len(rewards)


def test_grpo_uses_the_leased_statistics_not_the_siblings_at_hand() -> None:
    whole = (0, 0, 0, 1)
    assert grpo(step_of(whole, rewards=[[1.0]]), GrpoArgs()).tolist() == pytest.approx(
        [1.499997], abs=1e-6
    )
    two = grpo(step_of(whole, (1, 0, 0, 1), rewards=[[1.0], [1.0]]), GrpoArgs())
    assert two.dtype == np.float32
    assert two.tolist() == pytest.approx([1.499997, 0.866024], abs=1.5e-6)


def test_grpo_refuses_a_reward_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="not finite"):
        grpo(step_of((0, 1), rewards=[[math.nan]]), GrpoArgs())


# ---------------------------------------------------------------- PPO

PPO_CASES = [
    (1.5, 1, -1.2),
    (1.5, -1, 1.5),
    (0.5, 1, -0.5),
    (0.5, -1, 0.8),
    (4, -1, 3),
    (4, 1, -1.2),
    (2, -2, 4),
]
# no gradient: clipped above, below, or by the dual clip
FLAT = {(1.5, 1), (0.5, -1), (4, -1), (4, 1)}


@pytest.mark.parametrize(("ratio", "a", "expected"), PPO_CASES)
def test_ppo_token_loss(ratio: float, a: float, expected: float) -> None:
    x = inputs([math.log(ratio)], advantage=[float(a)])
    out = ppo(x, PpoArgs())
    assert out.loss.item() == pytest.approx(expected, rel=1e-6)
    (grad,) = torch.autograd.grad(out.loss, x.logprobs)
    assert grad.item() == pytest.approx(0.0 if (ratio, a) in FLAT else -a * ratio, rel=1e-6)


def test_ppo_metrics() -> None:
    ratios = [r for r, _, _ in PPO_CASES]
    a = [float(a) for _, a, _ in PPO_CASES]
    out = ppo(inputs([math.log(r) for r in ratios], advantage=a), PpoArgs())
    assert out.loss.item() == pytest.approx(sum(e for *_, e in PPO_CASES) / 7, rel=1e-6)
    assert out.sums["pg_clipfrac"].item() == 3  # (1.5, 1), (.5, -1), (4, 1)
    assert out.sums["pg_clipfrac_lower"].item() == 1  # (4, -1)
    assert out.sums["ppo_kl"].item() == pytest.approx(-sum(math.log(r) for r in ratios), rel=1e-6)
    assert out.sums["ratio"].item() == pytest.approx(sum(ratios), rel=1e-6)
    assert out.maxima["ratio_max"].item() == pytest.approx(4, rel=1e-6)


def test_ppo_bounds_of_their_own() -> None:
    args = PpoArgs(clip_range_low=0.1, clip_range_high=0.28)
    assert ppo(inputs([math.log(1.5)]), args).loss.item() == pytest.approx(-1.28)
    assert ppo(inputs([math.log(0.5)], advantage=[-1.0]), args).loss.item() == pytest.approx(0.9)


def test_ppo_limits_the_log_ratio() -> None:
    x = inputs([25.0], advantage=[-1.0])
    out = ppo(x, PpoArgs(clip_ratio_c=1e9))
    assert out.loss.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert torch.autograd.grad(out.loss, x.logprobs)[0].item() == 0


# ---------------------------------------------------------------- KL


@pytest.mark.parametrize(
    ("name", "d", "expected"),
    [
        ("k1", 0.5, -0.5),
        ("abs", 0.5, 0.5),
        ("k2", 0.5, 0.125),
        ("k3", 0.5, 0.148721),
        ("low_var_kl", 0.5, 0.148721),
        ("k1", -0.5, 0.5),
        ("abs", -0.5, 0.5),
        ("k2", -0.5, 0.125),
        ("k3", -0.5, 0.106531),
        ("low_var_kl", 25.0, 10.0),
        ("k3", 5.0, 142.413159),
    ],
)
def test_kl_value_and_gradient(name: str, d: float, expected: float) -> None:
    for suffix in ("", "+"):
        x = inputs([-1.0], ref=[-1.0 + d])
        out = kl(name + suffix, x)
        assert out.loss.item() == pytest.approx(2 * expected, rel=1e-5, abs=2e-6)
        assert out.sums["kl_loss"].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        (grad,) = torch.autograd.grad(out.loss, x.logprobs)
        own = {
            "k1": 1.0,
            "abs": -math.copysign(1, d),
            "k2": -d,
            "k3": 1 - math.exp(d),
            "low_var_kl": 1 - math.exp(d),
        }[name]
        if (name, d) == ("low_var_kl", 25.0):
            own = 0.0  # clipped
        assert grad.item() == pytest.approx(2 * (-d if suffix else own), rel=1e-5)


def kl(name: str, x: LossInputs) -> LossOutput:
    REGISTRY.scan_package("rft.algorithm")
    out: LossOutput = REGISTRY.get("kl_loss_fn", name).obj(x, KlArgs(kl_coef=2.0))
    return out


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_is_zero_where_the_models_agree(name: str) -> None:
    assert kl(name, inputs([-0.7, -0.1], ref=[-0.7, -0.1])).loss.item() == 0


# ---------------------------------------------------------------- aggregation

VALUES = [[1.0, 2, 3, 0], [4, 0, 0, 0], [9, 9, 9, 9]]
MASK = [[True, True, True, False], [True, False, False, False], [False] * 4]


def matrix(rows: list[int], mode: str) -> tuple[torch.Tensor, LossInputs]:
    values = torch.tensor([VALUES[r] for r in rows]).flatten()
    mask = torch.tensor([MASK[r] for r in rows]).flatten()
    x = LossInputs(
        logprobs=values,
        old_logprobs=values,
        advantages=values,
        mask=mask,
        row=torch.arange(len(rows)).repeat_interleave(4),
        num_rows=len(rows),
        denominators=Denominators(tokens=4, rows=2, max_response_tokens=4),
        loss_agg_mode=mode,  # type: ignore[arg-type]
    )
    return values, x


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 2.5),
        ("token-sum", 10.0),
        ("run-mean", 3.0),
        ("prompt-mean", 3.0),
        ("seq-mean-token-sum", 5.0),
        ("seq-mean-token-mean", 3.0),
        ("seq-mean-token-sum-norm", 1.25),
    ],
)
def test_aggregation(mode: str, expected: float) -> None:
    assert aggregate(*matrix([0, 1, 2], mode)).item() == pytest.approx(expected)
    # micro-batches of one row, one of them masked
    parts = [aggregate(*matrix(rows, mode)).item() for rows in ([2], [1], [0])]
    assert sum(parts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 2.5),
        ("token-sum", 10.0),
        ("run-mean", 2.5),
        ("prompt-mean", 2.5),
        ("seq-mean-token-sum", 10.0),
        ("seq-mean-token-mean", 3.0),
        ("seq-mean-token-sum-norm", 2.5),
    ],
)
def test_aggregation_of_one_run_of_two_rows(mode: str, expected: float) -> None:
    """Losses 1, 2, 3 and 4 of one run: its mean is 2.5, by rows 3; also where its rows are in two
    micro-batches.
    """

    def of(rows: list[int]) -> float:
        values, x = matrix(rows, mode)
        run = replace(x.denominators, num_runs=1.0)
        return aggregate(
            values, replace(x, denominators=run, run_tokens=torch.full_like(values, 4.0))
        ).item()

    assert of([0, 1, 2]) == pytest.approx(expected) == of([2, 1]) + of([0])


def test_every_prompt_weighs_the_same() -> None:
    """Losses 1, 2, 3 and 4, 6 of two runs of one group, and 8 of another: (16 / 5 + 8) / 2."""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0, 8.0], dtype=torch.float64)
    x = LossInputs(
        logprobs=values,
        old_logprobs=values,
        advantages=values,
        mask=torch.ones(6, dtype=torch.bool),
        row=torch.tensor([0, 0, 0, 1, 1, 2]),
        num_rows=3,
        denominators=Denominators(6.0, 3.0, 4, num_runs=3.0, num_groups=2.0),
        loss_agg_mode="prompt-mean",
        run_tokens=torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0, 1.0]),
        group_tokens=torch.tensor([5.0, 5.0, 5.0, 5.0, 5.0, 1.0]),
    )
    assert aggregate(values, x).item() == pytest.approx(5.6)
    runs = replace(x, loss_agg_mode="run-mean")
    assert aggregate(values, runs).item() == pytest.approx((2 + 5 + 8) / 3)


def test_a_step_without_valid_tokens_has_no_loss() -> None:
    with pytest.raises(ValueError, match="no loss"):
        ppo(inputs([0.0], mask=[False]), PpoArgs())
