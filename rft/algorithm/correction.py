"""Correction for rows whose sampling policy was not the one that is trained: truncated weights,
rejection, and how far the two are.

With D = log-prob of the trained policy before the step less the sampler's, clipped to +-20.  Three
policies: that policy is also the one of the loss's ratio, and weighting its loss is decoupled PPO
(arXiv:2110.00641).  Two policies (`bypass_mode`): the ratio is taken against the sampler.  Depends
on the host's rows, not on losses. Invariant: what is rejected leaves the loss and its denominators
together, and an expert's rows are neither weighted nor rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rft.algorithm.settings import Bounds, CorrectionConfig

if TYPE_CHECKING:
    from rft.algorithm.base import StepInputs

LIMIT = 20.0  # of a log ratio before the exponential
NEAR = (0.9, 1.1)  # ratios inside are called near


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Per trained token, one array [L_i] for each row: float32 `weights` and bool `keep`; None: all
    1, all.
    """

    weights: list[np.ndarray] | None = None
    keep: list[np.ndarray] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def correct(x: StepInputs, args: CorrectionConfig) -> Corrected:
    """Weights and what is kept, both of all trained tokens of the step.

    Weights: min(w, C) with w = exp D of tokens, or exp sum D of sequences; with a lower bound w
    where it is between the bounds, else 0 (IcePop, arXiv:2510.18855).  Rejection: by k1 = -D, k2 =
    D^2 / 2 or k3 = e^D - D - 1 of a token, or their sum, mean (k1's is the geometric mean of the
    ratios) or largest over a sequence.  k1 is kept between the logarithms of the bounds, which are
    ratios sampler / policy, the others up to the threshold; with seq_max, where every token is.  Of
    several statistics each sees all tokens, and what one rejects is rejected.  Raises ValueError for
    a row without log-probs of the policy before the step.
    """
    if not args.weighted and not args.rollout_rs:
        return Corrected()
    delta = {i: _delta(x, i) for i, row in enumerate(x.rows) if not row.is_expert and row.length}
    metrics: dict[str, float] = {}
    weights = None
    if args.weighted and delta:
        weights = _weights(x, delta, args)
        used = np.concatenate([weights[i] for i in delta])
        metrics |= {
            "rollout_corr/rollout_is_mean": float(used.mean()),
            "rollout_corr/rollout_is_max": float(used.max()),
            "rollout_corr/rollout_is_min": float(used.min()),
            "rollout_corr/rollout_is_oob_ratio": float(np.mean(used == 0)),
            "rollout_corr/rollout_is_eff_sample_size": effective(used),
        }
    if not args.rollout_rs or not delta:
        return Corrected(weights=weights, metrics=metrics)
    accepted = [np.ones(row.length, np.bool_) for row in x.rows]
    for name, bounds in args.bounds.items():
        by_name = {i: _accepted(d, name, bounds) for i, d in delta.items()}
        if len(args.rollout_rs) > 1:
            metrics |= _rejected(by_name, f"rollout_rs_{name}_")
        for i, mask in by_name.items():
            accepted[i] &= mask
    metrics |= _rejected({i: accepted[i] for i in delta}, "rollout_rs_")
    return Corrected(weights=weights, keep=accepted, metrics=metrics)


def _rejected(accepted: dict[int, np.ndarray], name: str) -> dict[str, float]:
    """Shares of tokens, and of sequences of which no token is left."""
    masks = list(accepted.values())
    return {
        f"rollout_corr/{name}masked_fraction": 1.0 - float(np.mean(np.concatenate(masks))),
        f"rollout_corr/{name}seq_masked_fraction": float(np.mean([not m.any() for m in masks])),
    }


def _delta(x: StepInputs, i: int) -> np.ndarray:
    row = x.rows[i]
    if row.old is None:
        raise ValueError(
            f"group {row.group}, run {row.run}: a correction needs log-probs of the policy before "
            f"the step"
        )
    return np.clip(row.old.astype(np.float64) - row.logprobs.astype(np.float64), -LIMIT, LIMIT)


def _weights(
    x: StepInputs, delta: dict[int, np.ndarray], args: CorrectionConfig
) -> list[np.ndarray]:
    lower, upper = args.weight_bounds
    sequences = args.rollout_is == "sequence"
    weights = {}
    for i, d in delta.items():
        ratio = np.exp(np.full(len(d), np.clip(d.sum(), -LIMIT, LIMIT)) if sequences else d)
        inside = (ratio >= (lower or 0.0)) & (ratio <= upper)
        weights[i] = np.minimum(ratio, upper) if lower is None else np.where(inside, ratio, 0.0)
    if args.rollout_is_batch_normalize:
        mean = np.mean(np.concatenate([w[:1] if sequences else w for w in weights.values()]))
        weights = {i: w / mean if mean else w for i, w in weights.items()}
    return [
        weights[i].astype(np.float32) if i in weights else np.ones(row.length, np.float32)
        for i, row in enumerate(x.rows)
    ]


def _accepted(d: np.ndarray, statistic: str, bounds: Bounds) -> np.ndarray:
    """bool [L]: which tokens stay; all or none of them where the statistic is a sequence's."""
    level, _, which = statistic.rpartition("_")
    value = -d if which == "k1" else d**2 / 2 if which == "k2" else np.expm1(d) - d
    lower, upper = bounds
    inside = (value >= lower) & (value <= upper)
    match level:
        case "token":
            return inside
        case "seq_sum":
            passes = lower <= value.sum() <= upper
        case "seq_mean":
            passes = lower <= value.mean() <= upper
        case _:
            passes = inside.all()
    return np.full(len(d), bool(passes))


def effective(weights: np.ndarray) -> float:
    """Effective sample size as a share: (sum w)^2 / (n sum w^2), 1 where all weights are equal, 0
    where all are 0.
    """
    squares = len(weights) * np.square(weights).sum()
    return float(weights.sum() ** 2 / squares) if squares else 0.0


def diagnostics(x: StepInputs) -> dict[str, float]:
    """How far the policy before the step is from the samplers, over the tokens whose `old` was
    computed; empty where there is none.

    In nats per token; perplexities are of the rows' mean log-probs, averaged over the rows.
    """
    rows = [row for row in x.rows if row.old is not None and not row.is_expert]
    if not rows:
        return {}
    old = np.concatenate([row.old for row in rows if row.old is not None]).astype(np.float64)
    rollout = np.concatenate([row.logprobs for row in rows]).astype(np.float64)
    delta = np.clip(old - rollout, -LIMIT, LIMIT)
    apart = np.abs(np.exp(old) - np.exp(rollout))
    ours = np.array([-row.old.astype(np.float64).mean() for row in rows if row.old is not None])
    theirs = np.array([-row.logprobs.astype(np.float64).mean() for row in rows])
    metrics = {
        "rollout_corr/kl": float(-delta.mean()),
        "rollout_corr/k3_kl": float((np.expm1(delta) - delta).mean()),
        "rollout_corr/chi2_token": float(np.exp(2 * delta).mean() - 1),
        "rollout_corr/training_ppl": float(np.exp(ours).mean()),
        "rollout_corr/rollout_ppl": float(np.exp(theirs).mean()),
        "training/rollout_probs_diff_mean": float(apart.mean()),
        "training/rollout_probs_diff_max": float(apart.max()),
        "training/rollout_probs_diff_std": float(apart.std()),
    }
    if len(old) > 1 and np.ptp(old) > 0 and np.ptp(rollout) > 0:
        metrics["training/rollout_actor_probs_pearson_corr"] = float(
            np.corrcoef(np.exp(old), np.exp(rollout))[0, 1]
        )
    return metrics
