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

from rft.algorithm.args import AGG_MODES
from rft.algorithm.base import Denominators, StepInputs, StepRow
from rft.algorithm.composition import build
from rft.algorithm.controller import KlController
from rft.algorithm.correction import CorrectionArgs, correct, diagnostics
from rft.algorithm.settings import AlgorithmSettings
from rft.algorithm.value import ValueInputs, explained_variance, value_loss
from rft.errors import ConfigErrors
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
    controller = KlController(0.001, 0.1, 10000)
    controller.update(kl, 1024)
    assert controller.coef == pytest.approx(expected, rel=1e-9)


def test_a_fixed_controller_and_a_broken_kl_change_nothing() -> None:
    fixed = KlController(0.001)
    fixed.update(5.0, 1024)
    assert fixed.coef == 0.001
    adaptive = KlController(0.001, 0.1, 10)
    for kl in (math.nan, math.inf):
        adaptive.update(kl, 8)
    assert adaptive.coef == 0.001
    adaptive.update(0.0, 1000)  # -0.2 x 100 horizons: never below 0
    assert adaptive.coef == 0.0


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


def args(**given: Any) -> CorrectionArgs:
    return CorrectionArgs(**given)


def test_token_weights() -> None:
    found = correct(step(row(0, [0.1, 1.0]), row(1, [-3.0])), args(rollout_is="token"), None)
    assert found.weights is not None and found.keep is None
    assert found.weights[0] == pytest.approx([1.105171, 2.0], abs=1e-6)
    assert found.weights[1] == pytest.approx([math.exp(-3)], rel=1e-5)
    every = [1.105171, 2.0, math.exp(-3)]
    assert found.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(np.mean(every), rel=1e-5)
    ess = sum(every) ** 2 / (3 * sum(w * w for w in every))
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(ess, rel=1e-5)


def test_sequence_weights_and_their_mean_over_rows() -> None:
    x = step(row(0, [0.1, 0.2, 0.3]), row(1, [-0.5]))
    plain = correct(x, args(rollout_is="sequence", rollout_is_threshold=1.5), None).weights
    assert plain is not None
    assert plain[0] == pytest.approx([1.5] * 3) and plain[1] == pytest.approx(
        [math.exp(-0.5)], rel=1e-5
    )
    scaled = correct(
        x,
        args(rollout_is="sequence", rollout_is_threshold=1.5, rollout_is_batch_normalize=True),
        None,
    ).weights
    mean = (1.5 + math.exp(-0.5)) / 2  # rows, however long
    assert scaled is not None and scaled[0] == pytest.approx([1.5 / mean] * 3, rel=1e-5)


def test_tokens_that_do_not_count_are_in_no_statistic() -> None:
    keep = [np.array([True, False]), np.array([True])]
    x = step(row(0, [0.2, 9.0]), row(1, [-0.1]))
    found = correct(
        x,
        args(rollout_is="token", rollout_is_threshold=100.0, rollout_is_batch_normalize=True),
        keep,
    )
    mean = (math.exp(0.2) + math.exp(-0.1)) / 2
    assert found.weights is not None and found.weights[0] == pytest.approx(
        [math.exp(0.2) / mean, 0.0], rel=1e-5
    )


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
    found = correct(x, args(rollout_rs=f"{level}_{which}", rollout_rs_threshold=threshold), None)
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
        None,
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
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "much"}, "write a number above 0"),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
            "an upper bound of a ratio is at least 1",
        ),
        (
            {"rollout_is_threshold": 0.0},
            "rollout_is_threshold: 0.0: input should be greater than 0",
        ),
        ({"loss_type": "reinforce"}, "reinforce is for bypass_mode: true"),
        ({"rollout_iss": "token"}, "rollout_iss"),
    ],
)
def test_wrong_corrections(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigErrors, match=message):
        build(AlgorithmSettings(rollout_correction=given))


def test_what_a_correction_needs_and_weighs() -> None:
    def made(**given: Any) -> Any:
        return build(AlgorithmSettings(rollout_correction=given))

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
