"""KL in the reward, KL controllers, off-policy corrections and the value loss against float64
formulas and published vectors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rft.algorithm.args import AGG_MODES
from rft.algorithm.base import Denominators, StepInputs, StepRow
from rft.algorithm.composition import build
from rft.algorithm.controller import EntropyController, KlController
from rft.algorithm.correction import correct, diagnostics
from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.algorithm.value import ValueInputs, explained_variance, value_loss
from rft.config.context import Problems
from rft.types.ports import GroupStats


def row(
    run: int, delta: list[float], *, reward: float = 0.0, group: str = "g", **more: Any
) -> StepRow:
    """`delta`: log-prob of the old policy less the sampler's, for each token."""
    logprobs = np.linspace(-2, -1, len(delta)).astype(np.float32)
    old = (logprobs.astype(np.float64) + delta).astype(np.float32)
    return StepRow(
        group=group, run=run, step=0, reward=reward, logprobs=logprobs, **({"old": old} | more)
    )


def step(*rows: StepRow) -> StepInputs:
    groups = {}
    for name in {r.group for r in rows}:
        rewards = tuple(r.reward for r in rows if r.group == name)
        std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
        groups[name] = GroupStats(
            group=name, rewards=rewards, mean=float(np.mean(rewards)), std=std
        )
    return StepInputs(rows=rows, groups=groups)


# ---------------------------------------------------------------- controllers


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.05, 0.00097952), (0.1, 0.001), (0.11, 0.00101024), (0.5, 0.00102048)]
)
def test_adaptive_controller(kl: float, expected: float) -> None:
    controller = KlController(coef=0.001, target=0.1, horizon=10000)
    controller.update(kl, 1024)
    assert controller.coef == pytest.approx(expected, rel=1e-9)


def test_a_fixed_controller_and_a_broken_kl_change_nothing() -> None:
    fixed = KlController(coef=0.001)
    fixed.update(5.0, 1024)
    assert fixed.coef == 0.001
    adaptive = KlController(coef=0.001, target=0.1, horizon=10)
    for kl in (math.nan, math.inf):
        adaptive.update(kl, 8)
    assert adaptive.coef == 0.001
    adaptive.update(0.0, 1000)  # -0.2 x 100 horizons: never below 0
    assert adaptive.coef == 0.0


def test_an_entropy_is_steered_to_its_target() -> None:
    """Skywork-OR1, by hand: c + 0.005 at or below 0.5 nats, c - 0.005 above, between 0 and 0.02;
    applied in a step whose forerunner was at or below 0.5.
    """
    controller = EntropyController(coef=0.01, target=0.5, delta=0.005, low=0.0, high=0.02)
    factors = []
    coefs = []
    for entropy in (0.4, 0.6, 0.5, 0.1, 0.2, math.nan, 0.9, 0.9, 0.9, 0.9, 0.9):
        factors.append(controller.factor)
        controller.update(entropy, 8)
        coefs.append(controller.coef)
    assert factors == pytest.approx([0, 0.015, 0, 0.015, 0.02, 0.02, 0.02, 0, 0, 0, 0])
    expected = [0.015, 0.01, 0.015, 0.02, 0.02, 0.02, 0.015, 0.01, 0.005, 0, 0]
    assert coefs == pytest.approx(expected)


def test_a_constant_entropy_factor_is_applied_from_the_start() -> None:
    controller = EntropyController(coef=0.01, delta=0.005, low=0.0, high=1.0)
    assert controller.factor == 0.01
    controller.update(0.1, 8)
    assert controller.factor == 0.01


# ---------------------------------------------------------------- KL in the reward

FORMULAS = {
    "k1": lambda d, r: -d,
    "abs": lambda d, r: abs(d),
    "k2": lambda d, r: d * d / 2,
    "k3": lambda d, r: math.exp(d) - d - 1,
    "low_var_kl": lambda d, r: min(10.0, max(-10.0, math.exp(min(20.0, d)) - min(20.0, d) - 1)),
    "corrected_k3": lambda d, r: min(r, 2.0) * (math.exp(d) - d - 1),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("token_rewards", [False, True])
def test_kl_penalty(name: str, token_rewards: bool) -> None:
    settings = AlgorithmSettings(kl_penalty_fn=name, kl_penalty_fn_args={"kl_coef": 0.3})
    algorithm = build(settings)
    assert algorithm.needs.reference and "ref" in algorithm.needs.before
    deltas = [[0.1, -0.2, 0.9], [0.3, -1.0], [25.0], [0.0, 0.4]]
    apart = [[0.5, -0.5, 0.1], [0.2, 25.0], [-0.3], [1.0, -1.0]]
    given = []
    for i, (delta, d) in enumerate(zip(deltas, apart, strict=True)):
        r = row(i % 2, delta, reward=float(i), group=f"g{i // 2}")
        assert r.old is not None
        tokens = np.linspace(0, 1, len(delta)).astype(np.float32) if token_rewards else None
        r = replace(r, ref=(r.old.astype(np.float64) + d).astype(np.float32), token_rewards=tokens)
        given.append(replace(r, reward=float(tokens.sum())) if tokens is not None else r)
    prepared = algorithm.prepare(step(*given), kl_coef=0.2)

    kls = []
    for r in given:
        assert r.old is not None and r.ref is not None
        pairs = zip(r.old.astype(float), r.ref.astype(float), r.logprobs.astype(float), strict=True)
        kls.append(
            [FORMULAS[name](ref - old, math.exp(min(20.0, old - roll))) for old, ref, roll in pairs]
        )
    assert prepared.kl == pytest.approx(np.mean([np.mean(k) for k in kls]), rel=1e-6)
    assert prepared.rewards is not None
    rewards = []
    for r, kl, found in zip(given, kls, prepared.rewards, strict=True):
        base = np.zeros(r.length) if r.token_rewards is None else r.token_rewards.astype(float)
        if r.token_rewards is None:
            base[-1] = r.reward
        assert found == pytest.approx(base - 0.2 * np.array(kl), rel=1e-5, abs=1e-5)
        rewards.append(r.reward - 0.2 * sum(kl))
    # statistics are those of the rewards with penalty
    for i, advantage in enumerate(prepared.advantages):
        group = rewards[i // 2 * 2 : i // 2 * 2 + 2]
        assert advantage == pytest.approx(
            (rewards[i] - np.mean(group)) / (np.std(group, ddof=1) + 1e-6), rel=1e-4, abs=1e-6
        )


def test_kl_penalty_without_coefficient_needs_no_reference() -> None:
    algorithm = build(AlgorithmSettings(kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.0}))
    assert not algorithm.needs.reference
    assert algorithm.prepare(step(row(0, [0.1]), row(1, [0.1], reward=1.0))).kl is None


def test_kl_penalty_in_bypass_reads_the_sampler_and_says_what_is_missing() -> None:
    algorithm = build(AlgorithmSettings(kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 1.0}))
    one = replace(row(0, [0.0]), old=None, ref=np.array([-1.5], np.float32))
    assert algorithm.prepare(step(one)).kl == pytest.approx(float(one.logprobs[0]) + 1.5)
    with pytest.raises(ValueError, match="group g, run 0: a KL in the reward needs the reference"):
        algorithm.prepare(step(replace(one, ref=None)))


# ---------------------------------------------------------------- corrections


def args(**given: Any) -> CorrectionConfig:
    return CorrectionConfig(**given)


def test_token_weights() -> None:
    found = correct(step(row(0, [0.1, 1.0]), row(1, [-3.0])), args(rollout_is="token"))
    assert found.weights is not None and found.keep is None
    assert found.weights[0] == pytest.approx([1.105171, 2.0], abs=1e-6)
    assert found.weights[1] == pytest.approx([math.exp(-3)], rel=1e-5)
    every = [1.105171, 2.0, math.exp(-3)]
    assert found.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(np.mean(every), rel=1e-5)
    ess = sum(every) ** 2 / (3 * sum(w * w for w in every))
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(ess, rel=1e-5)


def test_icepop_zeroes_weights_outside_its_band() -> None:
    """Ratios 1.105171, 7.389056 | 0.367879, 0.740818 with the paper's band from 0.5 to 5."""
    x = step(row(0, [0.1, 2.0]), row(1, [-1.0, -0.3]))
    found = correct(x, args(rollout_is="token", rollout_is_threshold="0.5_5.0"))
    assert found.weights is not None and found.keep is None, "they stay in the denominators"
    assert found.weights[0] == pytest.approx([1.105171, 0.0], abs=1e-6)
    assert found.weights[1] == pytest.approx([0.0, 0.740818], abs=1e-6)
    assert found.metrics["rollout_corr/rollout_is_oob_ratio"] == 0.5
    far = correct(
        step(row(0, [3.0])),
        args(
            rollout_is="sequence", rollout_is_threshold="0.5_5.0", rollout_is_batch_normalize=True
        ),
    )
    assert far.weights is not None and far.weights[0].tolist() == [0.0]
    assert far.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0


def test_sequence_weights_and_their_mean_over_rows() -> None:
    x = step(row(0, [0.1, 0.2, 0.3]), row(1, [-0.5]))
    plain = correct(x, args(rollout_is="sequence", rollout_is_threshold=1.5)).weights
    assert plain is not None
    assert plain[0] == pytest.approx([1.5] * 3) and plain[1] == pytest.approx(
        [math.exp(-0.5)], rel=1e-5
    )
    scaled = correct(
        x,
        args(rollout_is="sequence", rollout_is_threshold=1.5, rollout_is_batch_normalize=True),
    ).weights
    mean = (1.5 + math.exp(-0.5)) / 2  # rows, however long
    assert scaled is not None and scaled[0] == pytest.approx([1.5 / mean] * 3, rel=1e-5)


def test_several_statistics_reject_what_one_of_them_rejects() -> None:
    """Truncated weights of tokens, a mask of single tokens, of sequences by the sum and by the
    geometric mean.
    """
    x = step(row(0, [0.1, -0.9]), row(1, [0.3, 0.3, 0.3]), row(2, [0.1, 0.1]), row(3, [-0.35]))
    names = ("token_k1", "seq_sum_k2", "seq_mean_k1")
    bounds = ("0.5_2", "0.12", "0.75_1.3")
    alone = [
        correct(x, args(rollout_rs=name, rollout_rs_threshold=bound)).keep
        for name, bound in zip(names, bounds, strict=True)
    ]
    together = correct(
        x,
        args(
            rollout_is="token",
            rollout_is_threshold=1.2,
            rollout_rs=",".join(names),
            rollout_rs_threshold=",".join(bounds),
        ),
    )
    assert together.keep is not None and together.weights is not None
    assert [kept.tolist() for kept in together.keep] == [
        [False, False],  # sum of D^2 / 2 is 0.41, and the second token is 2.5 times less likely
        [False] * 3,  # 0.135
        [True, True],
        [False],  # by the mean alone: ratio 1.42
    ]
    for i, kept in enumerate(together.keep):
        assert kept.tolist() == np.logical_and.reduce([keep[i] for keep in alone if keep]).tolist()
    assert together.weights[1] == pytest.approx([1.2] * 3)  # of what is rejected, too
    assert together.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(6 / 8)
    assert together.metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 1 / 8
    assert together.metrics["rollout_corr/rollout_rs_seq_sum_k2_seq_masked_fraction"] == 2 / 4


@pytest.mark.parametrize(
    ("names", "thresholds"),
    [
        ("token_k2,seq_max_k3", 0.5),
        (["token_k2", "seq_max_k3"], "0.5,0.5"),
        ("Token_K2, seq_max_k3", "0.5, 0.5"),
    ],
)
def test_statistics_are_a_list_or_a_text(names: Any, thresholds: Any) -> None:
    found = args(rollout_rs=names, rollout_rs_threshold=thresholds)
    assert found.bounds == {"token_k2": (-math.inf, 0.5), "seq_max_k3": (-math.inf, 0.5)}
    assert CorrectionConfig.model_validate(found.model_dump()) == found
    for none in ("none", None, "None", ()):
        assert args(rollout_rs=none).rollout_rs == ()


REJECTS_LAST = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.5}


def prepared(advantage: str, rewards: list[float], correction: dict[str, Any], **more: Any) -> Any:
    """Runs of four tokens in one group; the policy has left the sampler of the last behind."""
    rows = [
        row(i, [float(i == len(rewards) - 1)] * 4, reward=reward, **more)
        for i, reward in enumerate(rewards)
    ]
    settings = AlgorithmSettings(
        advantage_fn=advantage, rollout_correction=CorrectionConfig(**correction)
    )
    return build(settings).prepare(step(*rows))


def test_what_is_rejected_is_not_whitened() -> None:
    """12 tokens of rewards 0, 0 and 1: mean 1/3, std 0.4924; with the last run 2.75 and 4.344."""
    made = prepared("reinforceplusplus", [0, 0, 1, 10], REJECTS_LAST)
    first = [float(a[0]) for a in made.advantages[:3]]
    assert first == pytest.approx([-0.67700, -0.67700, 1.35401], abs=1e-4)
    assert [bool(keep.any()) for keep in made.keep] == [True, True, True, False]
    whole = prepared("reinforceplusplus", [0, 0, 1, 10], {})
    found = [float(a[0]) for a in whole.advantages[:3]]
    assert found == pytest.approx([-0.63305, -0.63305, -0.40285], abs=1e-4)


@pytest.mark.parametrize("advantage", ["ppo", "reinforceplusplus", "gpg"])
def test_a_rejected_run_moves_no_other_advantage(advantage: str) -> None:
    values = {"values": np.zeros(4, np.float32)}
    made = [
        prepared(advantage, [0, 0.5, 1, last], REJECTS_LAST, **values).advantages[:3]
        for last in (3.0, 7.0)
    ]
    if advantage == "gpg":  # whose group counts it, and whose factor does not
        assert made[0][0][0] == pytest.approx(3 / 2 * (0 - 4.5 / 4))
        return
    assert np.array_equal(made[0], made[1])


def test_statistics_of_groups_count_rejected_runs() -> None:
    """As in veRL: the lease holds them, whatever the step rejects."""
    made = prepared("grpo", [0, 0, 0, 1], REJECTS_LAST)
    assert float(made.advantages[0][0]) == pytest.approx(-0.499999, abs=1e-5)


def k(which: str, delta: float) -> float:
    return {"k1": -delta, "k2": delta * delta / 2, "k3": math.exp(delta) - delta - 1}[which]


@pytest.mark.parametrize("which", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean", "seq_max"])
@pytest.mark.parametrize("threshold", ["0.8_1.3", 1.2, 0.02])
def test_rejection(which: str, level: str, threshold: Any) -> None:
    if (which == "k1") == (threshold == 0.02) or (which != "k1" and isinstance(threshold, str)):
        return
    x = step(
        row(0, [0.1, -0.3, 0.02]),
        row(1, [0.05, 0.1]),
        row(2, [-0.2, 0.2], reward=1.0),
        row(3, [-0.15, -0.2]),
    )
    found = correct(x, args(rollout_rs=f"{level}_{which}", rollout_rs_threshold=threshold))
    low = -math.inf
    high = float(str(threshold).split("_")[-1])
    if which == "k1":
        low = math.log(0.8 if threshold == "0.8_1.3" else 1 / 1.2)
        high = math.log(high)
    assert found.keep is not None and found.weights is None
    masked = 0
    for r, kept in zip(x.rows, found.keep, strict=True):
        assert r.old is not None
        values = [k(which, float(o) - float(p)) for o, p in zip(r.old, r.logprobs, strict=True)]
        inside = [low <= v <= high for v in values]
        statistic = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values)}.get(level, 0.0)
        expected = (
            inside
            if level == "token"
            else [all(inside) if level == "seq_max" else low <= statistic <= high] * len(values)
        )
        assert kept.tolist() == expected
        masked += len(expected) - sum(expected)
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(masked / 9)


def test_an_experts_rows_are_neither_weighted_nor_rejected() -> None:
    expert = replace(row(0, [5.0]), old=None, is_expert=True)
    found = correct(
        step(expert, row(1, [3.0])),
        args(rollout_is="token", rollout_rs="seq_max_k2", rollout_rs_threshold=0.1),
    )
    assert found.weights is not None and found.keep is not None
    assert (
        found.weights[0].tolist() == [1.0]
        and found.keep[0].tolist() == [True]
        and found.keep[1].tolist() == [False]
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rollout_rs": "token_k1"},
            'token_k1 needs rollout_rs_threshold, such as 2.0 or "0.5_2.0"',
        ),
        (
            {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"},
            "write a number above 0, such as 0.01",
        ),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"}, "write a number above 0"),
        (
            {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,3"},
            "rollout_rs_threshold has 2 bounds for 3 statistics",
        ),
        ({"rollout_rs": "token_k1,token_k4", "rollout_rs_threshold": 2}, "rollout_rs"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "write a number above 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "much"}, "write a number above 0"),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
            "an upper bound of a ratio is at least 1",
        ),
        (
            {"rollout_is_threshold": 0.0},
            'rollout_is_threshold 0.0: write a number above 0, such as 2.0, or "lower_upper"',
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "write a number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "1_2_3"}, "write a number above 0"),
        ({"loss_type": "reinforce"}, "reinforce is for bypass_mode: true"),
        ({"rollout_iss": "token"}, "rollout_iss"),
    ],
)
def test_wrong_corrections(given: dict[str, Any], message: str) -> None:
    problems = Problems()
    try:
        args(**given).rules("algorithm.rollout_correction", problems)
    except ValidationError as e:
        problems.error("algorithm.rollout_correction", str(e))
    assert any(message in str(error) for error in problems.errors)


def test_what_a_correction_needs_and_weighs() -> None:
    def made(**given: Any) -> Any:
        return build(AlgorithmSettings(rollout_correction=args(**given)))

    assert made(rollout_is="token").needs.before == {"old"}
    # the clipped ratio holds the weight
    assert made(bypass_mode=True, rollout_is="token").needs.before == frozenset()
    assert made(
        bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0
    ).needs.before == {"old"}
    x = step(row(0, [0.1], reward=1.0), row(1, [0.2]))
    assert made(bypass_mode=True, rollout_is="token").prepare(x).weights is None
    weights = made(bypass_mode=True, rollout_is="token", loss_type="reinforce").prepare(x).weights
    assert weights is not None and weights[1] == pytest.approx([math.exp(0.2)], rel=1e-5)
    with pytest.raises(
        ValueError, match="a correction needs log-probs of the policy before the step"
    ):
        made(rollout_is="token").prepare(step(replace(row(0, [0.1]), old=None)))


def test_diagnostics() -> None:
    deltas = [[0.1, -0.4], [0.3]]
    x = step(row(0, deltas[0]), row(1, deltas[1]))
    found = diagnostics(x)
    every = np.array([0.1, -0.4, 0.3])
    assert found["rollout_corr/kl"] == pytest.approx(-every.mean(), abs=1e-6)
    assert found["rollout_corr/k3_kl"] == pytest.approx(
        np.mean(np.exp(every) - every - 1), rel=1e-5
    )
    assert found["rollout_corr/chi2_token"] == pytest.approx(
        np.mean(np.exp(2 * every)) - 1, rel=1e-5
    )
    probs = [
        np.exp(np.concatenate([getattr(r, name).astype(float) for r in x.rows]))
        for name in ("old", "logprobs")
    ]
    apart = np.abs(probs[0] - probs[1])
    for name, expected in (("mean", apart.mean()), ("max", apart.max()), ("std", apart.std())):
        assert found[f"training/rollout_probs_diff_{name}"] == pytest.approx(expected, rel=1e-5)
    ppl = np.mean([np.exp(-r.logprobs.astype(float).mean()) for r in x.rows])
    assert found["rollout_corr/rollout_ppl"] == pytest.approx(ppl, rel=1e-6)
    assert diagnostics(step(replace(x.rows[0], old=None))) == {}


# ---------------------------------------------------------------- value loss


def values(
    v: list[float],
    old: list[float],
    returns: list[float],
    *,
    mask: list[bool] | None = None,
    rows: list[int] | None = None,
    **more: Any,
) -> ValueInputs:
    def tensor(x: list[float]) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float64)

    mask = mask or [True] * len(v)
    rows = rows or list(range(len(v)))
    counted = [r for r, m in zip(rows, mask, strict=True) if m]
    return ValueInputs(
        **(
            {
                "values": tensor(v).requires_grad_(),
                "old_values": tensor(old),
                "returns": tensor(returns),
                "mask": torch.tensor(mask),
                "row": torch.tensor(rows),
                "num_rows": max(rows) + 1,
                "denominators": Denominators(float(len(counted)), float(len(set(counted))), 4),
                "loss_agg_mode": "token-mean",
            }
            | more
        )
    )


def test_value_loss_vector() -> None:
    out = value_loss(values([1.0, 0.2], [0.2, 0.2], [0.0, 1.0]), 0.5)
    assert out.loss.item() == pytest.approx(0.41)
    assert {n: s.item() / 2 for n, s in out.sums.items()} == pytest.approx(
        {"vf_loss": 0.41, "vf_clipfrac": 0.0, "vpred_mean": 0.6}
    )


@pytest.mark.parametrize("mode", AGG_MODES)
def test_value_loss_gradient_cut_and_formula(mode: Any) -> None:
    rng = np.random.default_rng(1)
    v, old, returns = (rng.normal(size=9).tolist() for _ in range(3))
    rows = [0, 0, 0, 1, 1, 2, 2, 2, 2]
    mask = [True] * 8 + [False]
    v[8] = returns[8] = math.nan
    x = values(v, old, returns, mask=mask, rows=rows, loss_agg_mode=mode)
    loss = value_loss(x, 0.5).loss
    loss.backward()

    def formula(v: list[float]) -> float:
        each = [
            max((a - r) ** 2, (min(max(a, o - 0.5), o + 0.5) - r) ** 2) / 2
            for a, o, r in zip(v, old, returns, strict=True)
        ]
        sums = [
            [e for e, i, m in zip(each, rows, mask, strict=True) if i == g and m] for g in range(3)
        ]
        total = sum(map(sum, sums))
        return {
            "token-mean": total / 8,
            "token-sum": total,
            "prompt-mean": sum(sum(s) / len(s) for s in sums) / 3,
            "run-mean": sum(sum(s) / len(s) for s in sums) / 3,
            "seq-mean-token-sum": total / 3,
            "seq-mean-token-mean": sum(sum(s) / len(s) for s in sums) / 3,
            "seq-mean-token-sum-norm": total / (4 * 3),
        }[mode]

    assert loss.item() == pytest.approx(formula(v), rel=1e-12)
    gradient = x.values.grad
    assert gradient is not None and gradient[8] == 0.0
    for i in range(8):
        up = list(v)
        down = list(v)
        up[i], down[i] = v[i] + 1e-6, v[i] - 1e-6
        assert gradient[i].item() == pytest.approx((formula(up) - formula(down)) / 2e-6, abs=1e-7)
    parts = [
        values(
            v[a:b],
            old[a:b],
            returns[a:b],
            mask=mask[a:b],
            rows=[r - rows[a] for r in rows[a:b]],
            loss_agg_mode=mode,
        )
        for a, b in ((0, 5), (5, 9))
    ]
    cut = sum(
        value_loss(replace(part, denominators=x.denominators), 0.5).loss.item() for part in parts
    )
    assert cut == pytest.approx(loss.item(), rel=1e-12)


def test_explained_variance() -> None:
    returns = np.array([0.0, 1.0, 2.0], np.float32)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.zeros(3, np.float32), returns) == pytest.approx(0.0, abs=2e-5)
