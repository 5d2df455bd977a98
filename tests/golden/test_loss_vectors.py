"""Every policy loss against its formula, written here once more in float64 loops, and its gradient
against finite differences.

A formula gets two sets of log-probs, one that moves and one that a stopped gradient would see, so
differences of the formula are the gradient that the loss should have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm.args import AGG_MODES
from rft.algorithm.base import Denominators, LossInputs, LossOutput, StepInputs, StepRow
from rft.algorithm.catalog import algorithm_defaults, losses, shipped
from rft.algorithm.composition import build
from rft.algorithm.covariance import ClipCovArgs, KlCovArgs
from rft.algorithm.expert_mix import MixChordArgs, mu_at
from rft.algorithm.forking_tokens import ForkingArgs
from rft.algorithm.m2po import M2poArgs
from rft.algorithm.settings import AlgorithmSettings
from rft.plugins import REGISTRY
from rft.types.ports import GroupStats

K = 7  # of seq-mean-token-sum-norm
Array = np.ndarray
Rows = list[list[int]]


@dataclass(frozen=True)
class Step:
    """A whole step, float64 [N]; `rows` are the positions of the valid tokens of each row."""

    logprobs: Array
    old: Array
    ref: Array
    a: Array
    mask: Array
    row: Array
    expert: Array
    extra: dict[str, Array]

    @property
    def rows(self) -> Rows:
        return [
            np.flatnonzero((self.row == i) & self.mask).tolist() for i in range(self.row.max() + 1)
        ]

    def inputs(
        self, mode: str = "token-mean", *, dtype: torch.dtype = torch.float64, **more: Any
    ) -> LossInputs:
        def tensor(values: Array) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype)

        live = tensor(self.logprobs).requires_grad_()
        hidden = ~torch.tensor(self.mask)
        teacher = tensor(self.ref).clamp(max=-0.02)
        valid = [r for r in self.rows if r]
        of_experts = [r for r in valid if self.expert[r[0]]]
        return LossInputs(
            logprobs=live,
            # of the token, and of all others together
            top_logprobs=against_all(live, hidden),
            teacher_top_logprobs=against_all(teacher, hidden),
            old_logprobs=tensor(self.old),
            advantages=tensor(self.a),
            mask=torch.tensor(self.mask),
            row=torch.tensor(self.row),
            num_rows=len(self.rows),
            denominators=Denominators(
                sum(map(len, valid)),
                len(valid),
                K,
                expert_tokens=sum(map(len, of_experts)),
                expert_rows=len(of_experts),
            ),
            ref_logprobs=tensor(self.ref),
            is_expert=torch.tensor(self.expert),
            extra={name: tensor(values) for name, values in self.extra.items()},
            loss_agg_mode=mode,  # type: ignore[arg-type]
            **more,
        )


def against_all(logprobs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    safe = logprobs.masked_fill(hidden, -1.0)
    both = torch.stack([safe, (-safe.exp()).log1p()], 1)
    return both.masked_fill(hidden[:, None], math.nan)


def step(
    seed: int, *, lengths: tuple[int, ...] = (3, 5, 2, 4, 1, 6), experts: bool = False
) -> Step:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    row = np.repeat(np.arange(len(lengths)), lengths)
    mask = rng.random(n) < 0.8
    mask[np.cumsum((0, *lengths[:-1]))] = True  # every row has a valid token
    logprobs = -rng.exponential(1.0, n) - 0.05
    return Step(
        logprobs=logprobs,
        old=logprobs + rng.normal(0, 0.4, n),
        ref=logprobs + rng.normal(0, 0.5, n),
        a=np.where(rng.random(n) < 0.1, 0.0, rng.normal(0, 1, n)),
        mask=mask,
        row=row,
        expert=(row % 3 == 1) if experts else np.zeros(n, np.bool_),
        extra={
            name: (rng.random(n) < 0.4).astype(np.float64)
            for name in ("m2po_kept", "cov_chosen", "fork")
        }
        | labelled(row),
    )


def labelled(row: Array) -> dict[str, Array]:
    """What `kto` reads for rows [N] of which every other one is good."""
    good = (row % 2 == 0).astype(np.float64)
    return {
        "kto_point": np.full(len(row), 0.3),
        "kto_desirable": good / len(np.unique(row[good > 0])),
        "kto_undesirable": (1 - good) / len(np.unique(row[good == 0])),
    }


def aggregated(values: list[float], rows: Rows, mode: str) -> float:
    rows = [r for r in rows if r]
    sums = [math.fsum(values[t] for t in r) for r in rows]
    match mode:
        case "token-mean":
            return math.fsum(sums) / sum(map(len, rows))
        case "seq-mean-token-sum":
            return math.fsum(sums) / len(rows)
        case "token-sum":
            return math.fsum(sums)
        case "seq-mean-token-mean" | "run-mean" | "prompt-mean":  # each row is a run
            return math.fsum(s / len(r) for s, r in zip(sums, rows, strict=True)) / len(rows)
    return math.fsum(sums) / (K * len(rows))


# ---------------------------------------------------------------- formulas
# (step, log-probs that move, log-probs that do not, aggregation mode) -> loss

Formula = Callable[[Step, Array, Array, str], float]
# (log-prob, stopped log-prob, old log-prob, advantage) -> token loss
Token = Callable[[float, float, float, float], float]


def per_token(f: Token) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        return aggregated([f(*v) for v in zip(live, still, s.old, s.a, strict=True)], s.rows, mode)

    return formula


def clip(v: float, low: float, high: float) -> float:
    return min(max(v, low), high)


def ppo_token(low: float, high: float, c: float = 3.0) -> Token:
    def f(live: float, still: float, old: float, a: float) -> float:
        rho = math.exp(live - old)
        worse = max(-a * rho, -a * clip(rho, 1 - low, 1 + high))
        return min(worse, -a * c) if a < 0 else worse

    return f


def ppo_sequences(delta: float) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        f = ppo_token(0.2, 0.2)
        values = [f(*v) for v in zip(live, still, s.old, s.a, strict=True)]
        for r in s.rows:
            far = sum(s.old[t] - still[t] for t in r) / len(r) > delta
            for t in r:
                if far and s.a[t] < 0:
                    values[t] = 0.0
        return aggregated(values, s.rows, mode)

    return formula


def sequence_mean(s: Step, values: Array) -> dict[int, float]:
    return {t: sum(values[u] - s.old[u] for u in r) / len(r) for r in s.rows for t in r}


def gspo(low: float, high: float) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        q = sequence_mean(s, still)
        values = [0.0] * len(live)
        for t, mean in q.items():
            rho = math.exp(live[t] - still[t] + mean)
            values[t] = max(-s.a[t] * rho, -s.a[t] * clip(rho, 1 - low, 1 + high))
        return aggregated(values, s.rows, mode)

    return formula


def geo_mean(low: float, high: float) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        total = 0.0
        for r in s.rows:
            exponent = 0.0
            for t in r:
                sign = float(np.sign(s.a[t]))
                v = live[t] - s.old[t]
                exponent += sign * min(sign * v, sign * clip(v, -low, high))
            total -= sum(s.a[t] for t in r) / len(r) * math.exp(exponent / len(r))
        return total / len(s.rows)

    return formula


def cispo(low: float, high: float, masked: tuple[float, float] | None = None) -> Formula:
    def f(live: float, still: float, old: float, a: float) -> float:
        rho = math.exp(still - old)
        if masked is not None and (
            (a > 0 and rho > 1 + masked[1]) or (a < 0 and rho < 1 - masked[0])
        ):
            return 0.0
        return -clip(rho, 1 - low, 1 + high) * a * live

    return per_token(f)


def sapo(live: float, still: float, old: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(live - old) - 1)))


def dppo(kl: bool, low: float, high: float, cap: float = 20.0) -> Formula:
    def f(live: float, still: float, old: float, a: float) -> float:
        p = math.exp(still)
        q = math.exp(old)
        moved = p - q
        if kl:
            rest = (1 - q + 1e-8) / (1 - p + 1e-8)  # below 0 where q, drawn at random, is above 1
            d = q * math.log(q / p) + (1 - q) * math.log(rest) if rest > 0 else 0.0
            moved = math.copysign(d, moved)
        gone = (a > 0 and moved > high) or (a < 0 and moved < -low)
        return 0.0 if gone else -a * min(p / q, cap) * live

    return per_token(f)


def vespo(pos: tuple[float, float], neg: tuple[float, float]) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        values = [0.0] * len(live)
        for r in s.rows:
            w = math.exp(sum(still[t] - s.old[t] for t in r))
            for t in r:
                k, rate = pos if s.a[t] >= 0 else neg
                values[t] = -s.a[t] * w**k * math.exp(rate * (1 - w)) * live[t]
        return aggregated(values, s.rows, mode)

    return formula


def topr(live: float, still: float, old: float, a: float) -> float:
    return -a * live * (clip(math.exp(still - old), 0, 1) if a <= 0 else 1)


def sppo(live: float, still: float, old: float, a: float) -> float:
    return -a * (live - old) if 1 / 1.3 <= math.exp(still - old) <= 1.3 else 0.0


def rec(
    mode: str = "none",
    weight: str = "none",
    regularizer: str = "none",
    coef: float = 0.0,
    temp: float = 1.0,
) -> Formula:
    def formula(s: Step, live: Array, still: Array, agg: str) -> float:
        q = sequence_mean(s, still)
        values = [0.0] * len(live)
        for t, mean in q.items():
            a = s.a[t]
            rho = math.exp(still[t] - s.old[t])
            seq = math.exp(mean)
            one_side = lambda v: (a >= 0 and v <= 1.2) or (a <= 0 and v >= 0.8)  # noqa: B023, E731
            counts = {
                "none": True,
                "two-side": 0.8 <= rho <= 1.2,
                "one-side": one_side(rho),
                "gspo-one-side": one_side(seq),
                "ring": 0.8 <= rho <= 1.2 or (a >= 0 and rho <= 0.4) or (a <= 0 and rho >= 3.0),
            }[mode]
            w = {
                "none": 1.0,
                "importance_sampling": rho,
                "gspo_importance_sampling": seq,
                "advantage": math.exp(a / temp),
            }[weight]
            values[t] = -a * w * live[t] * counts
            values[t] += {
                "none": 0.0,
                "k2": coef * (live[t] - s.old[t]) ** 2,
                "forward-kl": -coef * live[t],
            }[regularizer]
        return aggregated(values, s.rows, "run-mean" if mode == "gspo-one-side" else agg)

    return formula


def sft_phi(cutoff: float) -> Token:
    def f(live: float, still: float, old: float, a: float) -> float:
        p = min(math.exp(still), cutoff)
        return -min(live, math.log(cutoff)) * p * (1 - p)

    return f


def dpo(beta: float, smoothing: float) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        r = [beta * sum(live[t] - s.ref[t] for t in row) for row in s.rows]
        total = 0.0
        for chosen, rejected in zip(r[0::2], r[1::2], strict=True):
            p = 1 / (1 + math.exp(rejected - chosen))
            total += -(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p)
        return total / (len(r) / 2)

    return formula


def ipo(beta: float, per_token: bool) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        r = [
            sum(live[t] - s.ref[t] for t in row) / (len(row) if per_token else 1) for row in s.rows
        ]
        pairs = list(zip(r[0::2], r[1::2], strict=True))
        return sum((c - d - 1 / (2 * beta)) ** 2 for c, d in pairs) / len(pairs)

    return formula


def simpo(beta: float, gamma: float) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        r = [beta * sum(live[t] for t in row) / len(row) for row in s.rows]
        pairs = list(zip(r[0::2], r[1::2], strict=True))
        return sum(math.log1p(math.exp(-(c - d - gamma))) for c, d in pairs) / len(pairs)

    return formula


def orpo(beta: float) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        p = [math.exp(sum(live[t] for t in row) / len(row)) for row in s.rows]
        total = 0.0
        for chosen, rejected in zip(p[0::2], p[1::2], strict=True):
            ratio = chosen / (1 - chosen) / (rejected / (1 - rejected))
            total -= math.log(chosen) + beta * math.log(ratio / (1 + ratio))
        return total / (len(p) / 2)

    return formula


def kto(beta: float, desirable: float, undesirable: float) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        total = 0.0
        for row in s.rows:
            over = beta * (sum(live[t] - s.ref[t] for t in row) - s.extra["kto_point"][row[0]])
            if s.extra["kto_desirable"][row[0]]:
                total += desirable * (1 - 1 / (1 + math.exp(-over)))
            else:
                total += undesirable * (1 - 1 / (1 + math.exp(over)))
        return total / len(s.rows)

    return formula


def mix(mu: float, imitate: Token, low: float = 0.2, high: float = 0.2) -> Formula:
    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        own = [r for r in s.rows if r and not s.expert[r[0]]]
        theirs = [r for r in s.rows if r and s.expert[r[0]]]
        total = 0.0
        for share, f, rows in ((1 - mu, ppo_token(low, high), own), (mu, imitate, theirs)):
            if rows:
                total += share * aggregated(
                    [f(*v) for v in zip(live, still, s.old, s.a, strict=True)], rows, mode
                )
        return total

    return formula


def marked(name: str, f: Callable[[float, float, float, bool], float]) -> Formula:
    """f(log-prob, old, advantage, is the token marked)."""

    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        values = [f(*v) for v in zip(live, s.old, s.a, s.extra[name] > 0, strict=True)]
        return aggregated(values, s.rows, mode)

    return formula


def nll(live: float, still: float, old: float, a: float) -> float:
    return -live


def plain_ppo(live: float, old: float, a: float) -> float:
    return max(-a * math.exp(live - old), -a * clip(math.exp(live - old), 0.8, 1.2))


def divergence(
    kind: str, b: float = 0.5, clip: float = math.inf, ratio: float | None = None
) -> Formula:
    """Of the token against all others, for the policy and for the teacher (`ref`)."""

    def part(t: float, s: float) -> float:
        value = {
            "forward": lambda: t * math.log(t / s),
            "reverse": lambda: s * math.log(s / t),
            "jsd": lambda: (
                b * t * math.log(t / (b * t + (1 - b) * s))
                + (1 - b) * s * math.log(s / (b * t + (1 - b) * s))
            ),
            "skew_forward": lambda: t * math.log(t / (b * t + (1 - b) * s)),
            "skew_reverse": lambda: s * math.log(s / (b * s + (1 - b) * t)),
        }[kind]()
        return min(value, clip)

    def formula(s: Step, live: Array, still: Array, mode: str) -> float:
        values = []
        for now, fixed, old, ref, expert in zip(live, still, s.old, s.ref, s.expert, strict=True):
            p, t = math.exp(now), math.exp(min(ref, -0.02))
            sampled = ratio is not None and not expert
            weight = min(math.exp(fixed - old), ratio) if sampled else 1.0
            values.append(weight * (part(t, p) + part(1 - t, 1 - p)))
        return aggregated(values, s.rows, mode)

    return formula


PG = per_token(lambda live, still, old, a: -a * live)
IS = per_token(lambda live, still, old, a: -a * math.exp(live - old))
DPPO_KL = dict(algorithm_defaults("dppo_kl").policy_loss_fn_args)
CASES: list[tuple[str, dict[str, Any], Formula]] = [
    *(
        ("distill_top", {"divergence": kind, "beta": b}, divergence(kind, b))
        for kind in ("forward", "reverse", "jsd", "skew_forward", "skew_reverse")
        for b in (0.5, 0.1)
    ),
    ("distill_top", {"clip": 0.05}, divergence("reverse", clip=0.05)),
    ("distill_top", {"importance_clip": 1.1}, divergence("reverse", ratio=1.1)),
    ("ppo", {}, per_token(ppo_token(0.2, 0.2))),
    (
        "ppo",
        {"clip_range_low": 0.1, "clip_range_high": 0.28, "clip_ratio_c": 1.2},
        per_token(ppo_token(0.1, 0.28, 1.2)),
    ),
    ("ppo", {"enable_sequence_masking": True, "delta_sequence_masking": 0.02}, ppo_sequences(0.02)),
    (
        "ppo",
        {"fallback_to_policy_gradient": True},
        per_token(lambda live, still, old, a: -a * math.exp(live - still)),
    ),
    ("gspo", {"clip_range": 0.1}, gspo(0.1, 0.1)),
    ("gspo", {}, gspo(3e-4, 4e-4)),
    ("gspo", {"clip_range": 0.1, "clip_range_high": 0.3}, gspo(0.1, 0.3)),
    ("geo_mean", {}, geo_mean(0.2, 0.2)),
    ("geo_mean", {"clip_range": 0.4, "clip_range_low": 0.3}, geo_mean(0.3, 0.4)),
    ("cispo", {}, cispo(1.0, 0.28)),
    ("cispo", {"clip_range_low": 0.2, "clip_range_high": 0.1}, cispo(0.2, 0.1)),
    (
        "cispo",
        {"enable_mask_clip": True, "mask_clip_range_low": 0.1, "mask_clip_range_high": 0.2},
        cispo(1.0, 0.28, (0.1, 0.2)),
    ),
    ("sapo", {}, per_token(sapo)),
    ("dppo_tv", {}, dppo(False, 0.15, 0.15)),
    (
        "dppo_tv",
        {"clip_range_low": 0.02, "clip_range_high": 0.2, "clip_ratio_c": 1.1},
        dppo(False, 0.02, 0.2, 1.1),
    ),
    ("dppo_kl", {}, dppo(True, 0.15, 0.15)),
    ("dppo_kl", DPPO_KL, dppo(True, 0.05, 0.05)),
    ("dppo_kl", {"clip_range_low": 0.001, "clip_range_high": 0.02}, dppo(True, 0.001, 0.02)),
    ("vespo", {}, vespo((2, 3), (3, 2))),
    ("vespo", {"k_pos": 1.0, "lambda_neg": 0.5}, vespo((1, 3), (3, 0.5))),
    ("dro", {}, per_token(lambda live, still, old, a: -a * live + (live - old) ** 2 / 2)),
    (
        "dro",
        {"dro_beta": 0.3},
        per_token(lambda live, still, old, a: -a * live + 0.15 * (live - old) ** 2),
    ),
    ("reinforce", {}, PG),
    ("gpg", {}, PG),
    ("importance_sampling", {}, IS),
    ("topr", {}, per_token(topr)),
    ("opmd", {"tau": 3.0}, per_token(lambda live, still, old, a: -a * live / 4)),
    ("sppo", {}, per_token(sppo)),
    *(
        ("rec", {"clip_mode": m}, rec(m))
        for m in ("none", "two-side", "one-side", "gspo-one-side", "ring")
    ),
    *(
        ("rec", {"weight": w, "temp": 0.7}, rec(weight=w, temp=0.7))
        for w in ("importance_sampling", "advantage")
    ),
    ("rec", {"weight": "gspo_importance_sampling"}, rec(weight="gspo_importance_sampling")),
    *(
        (
            "rec",
            {"regularizer": r, "regularizer_coef": 0.3, "clip_mode": "two-side"},
            rec("two-side", "none", r, 0.3),
        )
        for r in ("k2", "forward-kl")
    ),
    ("sft", {}, per_token(nll)),
    ("sft_is", {}, per_token(lambda live, still, old, a: -live * math.exp(still))),
    ("sft_phi", {}, per_token(sft_phi(1.0))),
    ("sft_phi", {"cutoff_prob": 0.5}, per_token(sft_phi(0.5))),
    ("dpo", {}, dpo(0.1, 0.0)),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2}, dpo(0.7, 0.2)),
    ("ipo", {}, ipo(0.1, False)),
    ("ipo", {"beta": 0.4, "per_token": True}, ipo(0.4, True)),
    ("simpo", {}, simpo(2.0, 1.0)),
    ("simpo", {"beta": 0.5, "gamma": 0.0}, simpo(0.5, 0.0)),
    ("orpo", {}, orpo(0.1)),
    ("orpo", {"beta": 0.8}, orpo(0.8)),
    ("kto", {}, kto(0.1, 1.0, 1.0)),
    (
        "kto",
        {"beta": 0.7, "desirable_weight": 0.5, "undesirable_weight": 1.5},
        kto(0.7, 0.5, 1.5),
    ),
    (
        "forking_tokens",
        {},
        marked("fork", lambda live, old, a, f: f * ppo_token(0.2, 0.2)(live, live, old, a)),
    ),
    ("mix", {"mu": 0.3}, mix(0.3, nll)),
    ("mix", {"mu": 0.3, "clip_range_low": 0.1, "clip_range_high": 0.3}, mix(0.3, nll, 0.1, 0.3)),
    ("mix_chord", {"mu_warmup_steps": 10, "mu_peak": 0.5}, mix(0.05, sft_phi(1.0))),
    (
        "mix_chord",
        {"mu_warmup_steps": 4, "mu_peak": 0.8, "enable_phi_function": False},
        mix(0.2, nll),
    ),
    ("m2po", {}, marked("m2po_kept", lambda live, old, a, kept: -a * math.exp(live - old) * kept)),
    (
        "clip_cov",
        {},
        marked(
            "cov_chosen", lambda live, old, a, chosen: 0.0 if chosen else plain_ppo(live, old, a)
        ),
    ),
    (
        "kl_cov",
        {"ppo_kl_coef": 0.6},
        marked(
            "cov_chosen",
            lambda live, old, a, chosen: -a * math.exp(live - old) + 0.6 * abs(live - old) * chosen,
        ),
    ),
]


def test_every_loss_has_a_formula() -> None:
    assert (
        {name for name, _, _ in CASES}
        == set(losses())
        == {n for k, n in shipped() if k == "policy_loss_fn"}
    )


def loss(name: str, x: LossInputs, args: dict[str, Any]) -> LossOutput:
    REGISTRY.scan_package("rft.algorithm")
    out: LossOutput = REGISTRY.get("policy_loss_fn", name).obj(
        x, losses()[name].model_validate(args)
    )
    return out


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize(
    ("name", "args", "formula"), CASES, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(CASES)]
)
def test_value_and_gradient(name: str, args: dict[str, Any], formula: Formula, mode: str) -> None:
    for seed in (1, 2):
        s = step(seed, experts=losses()[name].samples == "own")
        x = s.inputs(mode)
        out = loss(name, x, args)
        assert out.loss.item() == pytest.approx(formula(s, s.logprobs, s.logprobs, mode), rel=1e-9)
        (grad,) = torch.autograd.grad(out.loss, x.logprobs)
        h = 1e-6
        expected = []
        for t in range(len(s.logprobs)):
            up = s.logprobs.copy()
            down = s.logprobs.copy()
            up[t] += h
            down[t] -= h
            expected.append(
                (formula(s, up, s.logprobs, mode) - formula(s, down, s.logprobs, mode)) / (2 * h)
            )
        np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-6, atol=1e-8)
        assert not any(
            v.requires_grad or v.ndim for v in [*out.sums.values(), *out.maxima.values()]
        )


@pytest.mark.parametrize("name", losses())
def test_weights_multiply_token_losses(name: str) -> None:
    """Where a loss is a sum over tokens, twice the weight is twice the loss; imitation and
    preferences have no sampler to correct.
    """
    s = step(3, experts=losses()[name].samples == "own")
    alone, twice = (
        loss(name, s.inputs(weights=w), {}).loss.item()
        for w in (None, torch.full((len(s.a),), 2.0))
    )
    rated = losses()[name].samples == "all"
    if losses()[name].samples != "own":
        assert twice == pytest.approx(alone * (2 if rated else 1))
    uneven = torch.tensor(np.random.default_rng(0).random(len(s.a)))
    if name == "ppo":
        f = ppo_token(0.2, 0.2)
        values = []
        for t, v in enumerate(zip(s.logprobs, s.logprobs, s.old, s.a, strict=True)):
            values.append(f(*v) * uneven[t].item())
        assert loss(name, s.inputs(weights=uneven), {}).loss.item() == pytest.approx(
            aggregated(values, s.rows, "token-mean")
        )


@pytest.mark.parametrize("name", losses())
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_the_mask_hides_is_harmless(name: str, bad: float) -> None:
    s = step(4, experts=losses()[name].samples == "own")
    hide = lambda values: np.where(s.mask, values, bad)  # noqa: E731
    dirty = replace(
        s,
        **{field: hide(getattr(s, field)) for field in ("logprobs", "old", "ref", "a")},
        extra={name: hide(values) for name, values in s.extra.items()},
    )
    a = s.inputs(weights=torch.ones(len(s.a)))
    b = dirty.inputs(weights=torch.tensor(hide(np.ones(len(s.a)))))
    clean = loss(name, a, {})
    shown = loss(name, b, {})
    torch.testing.assert_close(shown.loss, clean.loss)
    torch.testing.assert_close(
        torch.autograd.grad(shown.loss, b.logprobs), torch.autograd.grad(clean.loss, a.logprobs)
    )
    for metric, value in clean.sums.items():
        torch.testing.assert_close(shown.sums[metric], value, msg=metric)


@pytest.mark.parametrize("name", losses())
def test_rows_without_advantage_are_left_out_only_where_they_have_no_gradient(name: str) -> None:
    s = step(5, experts=losses()[name].samples == "own")
    x = replace(s, a=np.zeros_like(s.a)).inputs()
    out = loss(name, x, {})
    (grad,) = torch.autograd.grad(out.loss, x.logprobs)
    assert losses()[name].model_validate({}).zero_without_advantage == (
        out.loss.item() == 0 and not grad.any()
    )


def test_a_regulariser_needs_every_row() -> None:
    of = losses()["rec"].model_validate
    assert of({"regularizer": "k2"}).zero_without_advantage
    assert not of({"regularizer": "k2", "regularizer_coef": 0.1}).zero_without_advantage


def test_float32_is_near_float64() -> None:
    for name in losses():
        s = step(6, experts=losses()[name].samples == "own")
        exact, near = (
            loss(name, s.inputs(dtype=d), {}).loss.item() for d in (torch.float64, torch.float32)
        )
        assert near == pytest.approx(exact, rel=2e-5, abs=1e-6), name


# ---------------------------------------------------------------- KL losses


def kl_token(name: str, live: float, ref: float, old: float) -> float:
    d = ref - live
    if name == "low_var_kl":
        d = clip(d, -20, 20)
        return clip(math.exp(d) - d - 1, -10, 10)
    k3 = math.exp(d) - d - 1
    return {
        "k1": -d,
        "abs": abs(d),
        "k2": d * d / 2,
        "k3": k3,
        "corrected_k3": min(math.exp(live - old), 2.0) * k3,
        "unbiased_k3": math.exp(live - old) * k3,
    }[name]


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("name", [n for k, n in shipped() if k == "kl_loss_fn" and n != "none"])
def test_kl_value_and_gradient(name: str, mode: str) -> None:
    """`name+` has the gradient of k2 and the value of `name`."""
    REGISTRY.scan_package("rft.algorithm")
    s = step(11)
    s.old[0] = s.logprobs[0] - 1  # a ratio above 2

    def formula(live: Array, name: str) -> float:
        return 0.5 * aggregated(
            [kl_token(name, *v) for v in zip(live, s.ref, s.old, strict=True)], s.rows, mode
        )

    x = s.inputs(mode)
    out = REGISTRY.get("kl_loss_fn", name).obj(
        x, shipped()["kl_loss_fn", name].model_validate({"kl_coef": 0.5})
    )
    assert out.loss.item() == pytest.approx(formula(s.logprobs, name.rstrip("+")), rel=1e-9)
    (grad,) = torch.autograd.grad(out.loss, x.logprobs)
    pull = "k2" if name.endswith("+") else name
    expected = []
    for t in range(len(s.logprobs)):
        h = np.zeros(len(s.logprobs))
        h[t] = 1e-6
        expected.append((formula(s.logprobs + h, pull) - formula(s.logprobs - h, pull)) / 2e-6)
    np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-6, atol=1e-8)


def test_an_expert_has_no_old_policy_to_correct_for() -> None:
    s = replace(step(12), expert=np.ones(21, bool))

    def kl(name):
        loss = REGISTRY.get("kl_loss_fn", name).obj
        return loss(s.inputs(), shipped()["kl_loss_fn", name].model_validate({})).loss

    assert kl("corrected_k3").item() == pytest.approx(kl("k3").item())


# ---------------------------------------------------------------- numbers by hand


def single(d: list[float], a: float = 1.0) -> Step:
    """One row of tokens with log-prob - old = d."""
    n = len(d)
    return Step(
        np.array(d) - 1,
        np.full(n, -1.0),
        np.full(n, -1.0),
        np.full(n, a),
        np.ones(n, bool),
        np.zeros(n, int),
        np.zeros(n, bool),
        {},
    )


def test_gspo_ratio() -> None:
    s = single([0.1, -0.1, 0.3])
    out = loss("gspo", s.inputs("seq-mean-token-mean"), {"clip_range": 1.0})
    assert out.loss.item() == pytest.approx(-1.105171, abs=1e-6)
    assert loss(
        "gspo", single([30.0]).inputs(), {"clip_range_high": 1e9}
    ).loss.item() == pytest.approx(-math.exp(10))


@pytest.mark.parametrize(
    ("ratio", "a", "gate"), [(1, 1, 2), (1.5, 1, 2.489837), (1.5, -1, 2.393585)]
)
def test_sapo_gate(ratio: float, a: float, gate: float) -> None:
    out = loss("sapo", single([math.log(ratio)], a).inputs(), {})
    assert out.loss.item() == pytest.approx(-a * gate, abs=1e-6)
    assert out.sums["avg_soft_gate"].item() == pytest.approx(gate, abs=1e-6)


def test_sapo_fades_where_the_policy_has_gone_far() -> None:
    x = single([0.0, 3.0]).inputs()
    (grad,) = torch.autograd.grad(loss("sapo", x, {}).loss, x.logprobs)
    assert grad[0].item() == pytest.approx(-0.5)  # the policy gradient: -A / 2 tokens
    assert abs(grad[1].item()) < 1e-6


@pytest.mark.parametrize(
    ("name", "p", "q", "a", "value"),
    [
        ("dppo_tv", 0.6, 0.4, 1, 0.0),  # risen by 0.2 > 0.15
        ("dppo_tv", 0.6, 0.4, -1, 1.5 * math.log(0.6)),  # the gradient brings it back
        ("dppo_tv", 0.003, 0.001, 1, -3 * math.log(0.003)),  # a ratio of 3 between rare tokens
        # 0.4 log(0.4 / 0.6) + 0.6 log(0.6 / 0.4) = 0.0811 nats > 0.05
        ("dppo_kl", 0.6, 0.4, 1, 0.0),
        ("dppo_kl", 0.6, 0.4, -1, 1.5 * math.log(0.6)),
        ("dppo_kl", 0.5, 0.4, 1, -1.25 * math.log(0.5)),  # 0.0201 nats
        ("dro", math.exp(-0.5), math.exp(-0.7), 1, 0.52),
    ],
)
def test_numbers_of_one_token(name: str, p: float, q: float, a: float, value: float) -> None:
    s = replace(single([0.0], a), logprobs=np.log([p]), old=np.log([q]))
    args = DPPO_KL if name == "dppo_kl" else {}
    assert loss(name, s.inputs(), args).loss.item() == pytest.approx(value, abs=1e-9)


def test_vespo_weighs_a_sequence_by_the_gamma_kernel() -> None:
    """w = exp(0.2) = 1.221403: w^2 exp(3 (1 - w)) = 0.767814, w^3 exp(2 (1 - w)) = 1.170223."""
    for a, phi in ((1.0, 0.767814), (-1.0, 1.170223)):
        s = single([0.1, 0.1], a)
        out = loss("vespo", s.inputs(), {})
        assert out.loss.item() == pytest.approx(a * phi * 0.9, abs=1e-6)
        assert out.sums["phi"].item() / 2 == pytest.approx(phi, abs=1e-6)


def test_luspo_is_gspo_times_the_length_of_an_answer() -> None:
    s = step(13)
    long = loss("gspo", s.inputs("seq-mean-token-sum"), {}).loss
    q = sequence_mean(s, s.logprobs)
    expected = 0.0
    for r in s.rows:
        for t in r:
            ratio = math.exp(q[t])
            clipped = clip(ratio, 1 - 3e-4, 1 + 4e-4)
            expected += max(-s.a[t] * ratio, -s.a[t] * clipped)
    assert long.item() == pytest.approx(expected / len(s.rows), rel=1e-9)
    luspo = algorithm_defaults("luspo")
    assert (luspo.policy_loss_fn, luspo.loss_agg_mode) == ("gspo", "seq-mean-token-sum")


def test_mu_follows_the_step() -> None:
    args = MixChordArgs.model_validate(
        {"mu_warmup_steps": 2, "mu_decay_steps": 4, "mu_peak": 0.8, "mu_valley": 0.2}
    )
    assert [mu_at(t, args) for t in (1, 2, 3, 4, 5, 6, 7)] == pytest.approx(
        [0.4, 0.8, 0.712132, 0.5, 0.287868, 0.2, 0.2], abs=1e-6
    )
    assert mu_at(1, MixChordArgs.model_validate({})) == 0.1


def test_mix_of_one_kind_of_rows() -> None:
    own = step(7)
    out = loss("mix", own.inputs(), {"mu": 0.25})
    assert out.loss.item() == pytest.approx(0.75 * loss("ppo", own.inputs(), {}).loss.item())
    assert "expert/sft_loss" not in out.sums and out.sums["mu"].item() / own.mask.sum() == 0.25
    theirs = replace(own, expert=np.ones(len(own.a), bool))
    assert loss("mix", theirs.inputs(), {"mu": 0.25}).loss.item() == pytest.approx(
        0.25 * loss("sft", own.inputs(), {}).loss.item()
    )


def test_dpo_says_what_is_wrong_and_counts_pairs() -> None:
    s = step(8)
    out = loss("dpo", s.inputs(), {"beta": 1.0})
    rewards = [sum(s.logprobs[t] - s.ref[t] for t in r) for r in s.rows]
    each = s.mask.sum()
    assert out.sums["chosen_reward"].item() / each == pytest.approx(np.mean(rewards[0::2]))
    assert out.sums["rejected_reward"].item() / each == pytest.approx(np.mean(rewards[1::2]))
    assert out.sums["accuracy_mean"].item() / each == pytest.approx(
        np.mean(np.array(rewards[0::2]) > np.array(rewards[1::2]))
    )
    with pytest.raises(ValueError, match="pairs, but a micro-batch has 5 rows"):
        loss("dpo", step(8, lengths=(3, 5, 2, 4, 1)).inputs(), {})
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss("dpo", replace_inputs(s.inputs(), ref_logprobs=None), {})


def replace_inputs(x: LossInputs, **changes: Any) -> LossInputs:
    return replace(x, **changes)


def pair_of(chosen: list[float], rejected: list[float], ref: float = 0.0) -> Step:
    """Two rows with these log-probs; `ref`: of every token under the reference model."""
    logprobs = np.array([*chosen, *rejected])
    n = len(logprobs)
    return Step(
        logprobs=logprobs,
        old=logprobs,
        ref=np.full(n, ref),
        a=np.zeros(n),
        mask=np.ones(n, bool),
        row=np.repeat([0, 1], [len(chosen), len(rejected)]),
        expert=np.zeros(n, bool),
        extra={},
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # log ratios (-1 + 6) and (-1 + 3): h 3, (3 - 5)^2
        ("ipo", 4.0),
        ("simpo", math.log(2)),  # 2 (-0.5 + 1) - 1 = 0
        ("orpo", 0.532030),  # 0.5 - 0.1 log sigmoid(0.974077)
    ],
)
def test_numbers_of_one_pair(name: str, value: float) -> None:
    x = pair_of([-0.5, -0.5], [-1.0], ref=-3.0).inputs()
    out = loss(name, x, {})
    assert out.loss.item() == pytest.approx(value, abs=1e-6)
    assert out.sums["accuracy_mean"].item() == 3, "3 tokens"


@pytest.mark.parametrize("name", [n for n, model in losses().items() if model.pairs])
def test_losses_of_pairs_refuse_an_odd_number_of_rows(name: str) -> None:
    with pytest.raises(ValueError, match="pairs, but a micro-batch has 5 rows"):
        loss(name, step(8, lengths=(3, 5, 2, 4, 1)).inputs(), {})
    if losses()[name].reference:
        with pytest.raises(ValueError, match="ref_logprobs"):
            loss(name, replace_inputs(step(8).inputs(), ref_logprobs=None), {})


def test_numbers_of_kto_by_hand() -> None:
    """r 3 and good, r -1 and bad, z 1: both 1 - sigmoid(0.2) = 0.450166; twice for bad ones."""
    x = pair_of([-0.5, -0.5], [-1.0]).inputs()
    ref = torch.tensor([-2.0, -2.0, 0.0], dtype=torch.float64)
    extra = {
        "kto_point": torch.ones(3, dtype=torch.float64),
        "kto_desirable": torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64),
        "kto_undesirable": torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64),
    }
    out = loss("kto", replace_inputs(x, ref_logprobs=ref, extra=extra), {"undesirable_weight": 2.0})
    assert out.loss.item() == pytest.approx(0.450166 * 3 / 2, abs=1e-6)
    (grad,) = torch.autograd.grad(out.loss, x.logprobs)
    slope = 0.1 * 0.450166 * 0.549834 / 2  # beta sigmoid' of two rows
    assert grad.tolist() == pytest.approx([-slope, -slope, 2 * slope], abs=1e-7)
    told = {name: value.item() / 3 for name, value in out.sums.items()}
    assert told == pytest.approx(
        {
            "kto_point": 1.0,
            "accuracy_mean": 1.0,
            "chosen_reward": 0.3,
            "rejected_reward": -0.1,
            "reward_margin": 0.4,
        }
    )
    del extra["kto_undesirable"]
    alone = loss("kto", replace_inputs(x, ref_logprobs=ref, extra=extra), {})
    assert "rejected_reward" not in alone.sums and "reward_margin" not in alone.sums
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss("kto", replace_inputs(x, extra=extra, ref_logprobs=None), {})


def test_the_reference_point_is_that_of_the_whole_step() -> None:
    """Prompts with the answers of others: sums 3, -1 and 1, mean 1; below 0 it is 0."""
    from rft.algorithm.kto import KtoArgs, reference_point

    def rows(sign: float) -> StepInputs:
        made = []
        for i, (total, label) in enumerate(((3.0, True), (-1.0, False), (1.0, True))):
            for run, info in enumerate(({"label": label}, {})):
                ref = np.array([0.0, -sign * total if run else -9.0], np.float32)
                made.append(
                    StepRow(
                        group=f"1.0.0.{i}",
                        run=run,
                        step=0,
                        reward=0.0,
                        logprobs=np.zeros(2, np.float32),
                        old=np.zeros(2, np.float32),
                        ref=ref,
                        is_expert=True,
                        info=info,
                    )
                )
        return StepInputs(rows=made, groups={})

    found = reference_point(rows(1.0), [], KtoArgs())
    assert found["kto_point"][0].tolist() == [1.0, 1.0]
    assert [keep.tolist() for keep in found["keep"]] == [[1, 1], [0, 0]] * 3
    assert [v[0] for v in found["kto_desirable"]] == [0.5, 0, 0, 0, 0.5, 0]
    assert [v[0] for v in found["kto_undesirable"]] == [0, 0, 1, 0, 0, 0]
    assert reference_point(rows(-1.0), [], KtoArgs())["kto_point"][0].tolist() == [0.0, 0.0]
    lone = replace(rows(1.0), rows=rows(1.0).rows[::2])
    with pytest.raises(ValueError, match="rows without a label"):
        reference_point(lone, [], KtoArgs())


def test_orpo_of_a_certain_answer_is_finite() -> None:
    x = pair_of([0.0, 0.0], [-1.0]).inputs(dtype=torch.float32)
    out = loss("orpo", x, {})
    (grad,) = torch.autograd.grad(out.loss, x.logprobs)
    assert math.isfinite(out.loss.item()) and bool(grad.isfinite().all())


def test_topr_clips_the_ratio_of_the_whole_answer_as_in_the_paper() -> None:
    """20 tokens at -0.1 nats: 0.905 each, 0.135 together."""
    tokens = torch.full((20,), -1.1, requires_grad=True)
    x = LossInputs(
        logprobs=tokens,
        old_logprobs=torch.full((20,), -1.0),
        advantages=torch.full((20,), -1.0),
        mask=torch.ones(20, dtype=torch.bool),
        row=torch.zeros(20, dtype=torch.int64),
        num_rows=1,
        denominators=Denominators(20.0, 1.0, 20),
    )
    for ratio, weight in (("token", math.exp(-0.1)), ("sequence", math.exp(-2.0))):
        out = loss("topr", x, {"ratio": ratio})
        (grad,) = torch.autograd.grad(out.loss, tokens)
        assert out.sums["avg_alpha"].item() / 20 == pytest.approx(weight, rel=1e-5)
        assert grad.tolist() == pytest.approx([weight / 20] * 20, rel=1e-5)


def test_metrics_divide_to_means() -> None:
    s = step(9)
    n = s.mask.sum()
    cispo_out = loss(
        "cispo",
        s.inputs(),
        {"enable_mask_clip": True, "mask_clip_range_low": 0.1, "mask_clip_range_high": 0.2},
    )
    rho = np.exp(s.logprobs - s.old)
    gone = ((s.a > 0) & (rho > 1.2)) | ((s.a < 0) & (rho < 0.9))
    assert cispo_out.sums["unmasked_frac"].item() / n == pytest.approx(1 - gone[s.mask].mean())
    topr_out = loss("topr", s.inputs(), {})
    alpha = np.where(s.a <= 0, np.clip(rho, 0, 1), 1)
    assert topr_out.sums["avg_alpha"].item() / n == pytest.approx(alpha[s.mask].mean())
    masked = loss(
        "ppo", s.inputs(), {"enable_sequence_masking": True, "delta_sequence_masking": 0.02}
    )
    far = sum(
        s.a[t] < 0
        for r in s.rows
        for t in r
        if sum(s.old[u] - s.logprobs[u] for u in r) / len(r) > 0.02
    )
    assert masked.sums["seq_mask/masked_tokens"].item() == far
    assert far > 0


def test_the_metrics_page_names_what_each_loss_tells() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(
        encoding="utf-8"
    )
    of_all = {
        n.removeprefix("actor/") for n in re.findall(r"^\| \*?`(actor/[^`]+)`", page, re.MULTILINE)
    }
    table = page.split("| Loss | Name | Meaning |")[1].split("\n\n")[0]
    told: dict[str, set[str]] = {}
    for names, metrics in re.findall(r"^\| ([a-z][^|]*) \| ([^|]*) \|", table, re.MULTILINE):
        for name in names.split(", "):
            told[name] = {m.removeprefix("actor/") for m in re.findall(r"`([^`]+)`", metrics)}
    for name in losses():
        args = {"enable_sequence_masking": True} if name == "ppo" else {}
        out = loss(name, step(10, experts=losses()[name].samples == "own").inputs(), args)
        assert (out.sums.keys() | out.maxima.keys()) - of_all == told.get(name, set()), name


# ---------------------------------------------------------------- choices over the whole step


def rows_of(log_ratios: list[list[float]], logprobs: list[list[float]] | None = None) -> StepInputs:
    """Rows whose log-probs before the step are `logprobs` (-1 each) and whose samplers' are less by
    `log_ratios`.
    """
    rows = []
    for i, d in enumerate(log_ratios):
        now = np.array([-1.0] * len(d) if logprobs is None else logprobs[i], np.float32)
        rows.append(
            StepRow(
                group="g",
                run=i,
                step=0,
                reward=0.0,
                logprobs=(now - np.float32(d)).astype(np.float32),
                old=now,
            )
        )
    return StepInputs(
        rows=rows,
        groups={"g": GroupStats(group="g", rewards=(0.0,), mean=0.0, std=0.0)},
        step=3,
        seed=5,
    )


def extra(name: str, x: StepInputs, advantages: list[list[float]], args: Any) -> list[list[float]]:
    REGISTRY.scan_package("rft.algorithm")
    (found,) = (
        REGISTRY.get("policy_extra", name)
        .obj(x, [np.array(a, np.float32) for a in advantages], args)
        .values()
    )
    assert all(f.dtype == np.float32 for f in found)
    return [f.tolist() for f in found]


def test_m2po_keeps_the_nearest_tokens_of_the_whole_step() -> None:
    args = M2poArgs.model_validate({})
    x = rows_of([[0.1, 0.3, -0.5], [0.2, -0.1]])
    # squares .01, .09 | .04 of those with A > 0 that went up: running means .01, .025, .0467
    assert extra("m2po", x, [[1, 1, 1], [1, 1]], args) == [[1, 0, 1], [1, 1]]
    # .01 kept, .05 > .04
    assert extra("m2po", x, [[0, 1, 1], [-1, -1]], args) == [[1, 0, 1], [1, 1]]
    assert extra(
        "m2po", x, [[1, 1, 1], [1, 1]], M2poArgs.model_validate({"m2_threshold": 0.05})
    ) == [[1, 1, 1], [1, 1]]
    hidden = replace(x, keep=[np.array([True, False, True]), np.array([True, True])])
    assert extra("m2po", hidden, [[1, 1, 1], [1, 1]], args) == [[1, 1, 1], [1, 1]], (
        "tokens that do not count are not judged"
    )
    assert extra("m2po", replace(x, bypass=False), [[1, 1, 1], [1, 1]], args) == [
        [1, 1, 1],
        [1, 1],
    ], "the ratio is 1"


def test_forking_tokens_are_those_of_highest_entropy_in_the_step() -> None:
    x = rows_of([[0.0, 0.0], [0.0, 0.0], [0.0]])
    entropy = ([0.9, 0.1], [0.2, 0.8], [0.3])
    rows = [replace(r, entropy=np.float32(h)) for r, h in zip(x.rows, entropy, strict=True)]
    x = replace(x, rows=rows)
    args = ForkingArgs.model_validate({"share": 0.4})
    assert extra("forking_tokens", x, [[1, 1], [1, 1], [1]], args) == [[1, 0], [0, 1], [0]]
    hidden = replace(x, keep=[np.array([False, True]), np.ones(2, bool), np.ones(1, bool)])
    found = extra("forking_tokens", hidden, [[1, 1], [1, 1], [1]], ForkingArgs.model_validate({}))
    assert found[1:] == [[0, 1], [0]], "a fifth of the four tokens that count"


def test_kl_cov_takes_the_largest_covariances() -> None:
    x = rows_of([[0, 0, 0], [0, 0]], [[-1, -2, -3], [-0.1, -4]])
    a = [[1.0, 0.0, -1.0], [2.0, -1.5]]
    flat = np.concatenate([np.array(v) for v in a])
    logprobs = np.array([-1, -2, -3, -0.1, -4])
    c = (flat - flat.mean()) * (logprobs - logprobs.mean())
    for share, count in ((1e-4, 1), (0.4, 2), (0.7, 3), (1.0, 5)):
        found = np.concatenate(
            extra("kl_cov", x, a, KlCovArgs.model_validate({"kl_cov_ratio": share}))
        )
        assert set(np.flatnonzero(found)) == set(np.argsort(-c)[:count])
    hidden = replace(x, keep=[np.ones(3, bool), np.array([False, True])])
    assert extra("kl_cov", hidden, a, KlCovArgs.model_validate({}))[1][0] == 0


def test_clip_cov_draws_among_covariances_in_the_range() -> None:
    rng = np.random.default_rng(1)
    ratios = [rng.normal(0, 0.3, 200).tolist() for _ in range(5)]
    logprobs = [(-rng.exponential(1, 200)).tolist() for _ in range(5)]
    a = [rng.normal(0, 1, 200).tolist() for _ in range(5)]
    x = rows_of(ratios, logprobs)
    args = ClipCovArgs.model_validate(
        {"clip_cov_ratio": 0.02, "clip_cov_lb": 0.1, "clip_cov_ub": 0.9}
    )
    found = np.concatenate(extra("clip_cov", x, a, args))
    flat = np.concatenate([np.float32(v) for v in a]).astype(np.float64)
    lp = np.concatenate([np.float32(v) for v in logprobs])
    c = (flat - flat.mean()) * (lp.astype(np.float64) - lp.astype(np.float64).mean())
    rho = np.exp(np.concatenate([x.log_ratio(r) for r in x.rows]))
    clipped = -flat * np.clip(rho, 0.8, 1.2) > -flat * rho
    chosen = np.flatnonzero(found)
    assert (
        len(chosen) == 20
        and not clipped[chosen].any()
        and (c[chosen] > 0.1).all()
        and (c[chosen] < 0.9).all()
    )
    assert extra("clip_cov", x, a, args) == extra("clip_cov", x, a, args), (
        "the same step draws the same"
    )
    other = np.flatnonzero(np.concatenate(extra("clip_cov", replace(x, step=4), a, args)))
    assert set(other) != set(chosen)
    none = ClipCovArgs.model_validate({"clip_cov_lb": 100.0, "clip_cov_ub": 101.0})
    assert not np.concatenate(extra("clip_cov", x, a, none)).any()


@pytest.mark.parametrize("name", ["m2po", "clip_cov", "kl_cov"])
def test_what_a_loss_reads_of_the_step_is_prepared(name: str) -> None:
    x = rows_of([[0.1, 0.3], [0.2, -0.1]])
    x = replace(x, groups={"g": GroupStats(group="g", rewards=(1.0, 0.0), mean=0.5, std=0.7)})
    algorithm = build(AlgorithmSettings(policy_loss_fn=name))
    assert algorithm.needs.before == {"old"}
    (arrays,) = algorithm.prepare(x).extra.values()
    assert [len(a) for a in arrays] == [2, 2]
