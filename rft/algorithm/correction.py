"""Correction for rows whose sampling policy was not the one that is trained: truncated weights,
rejection, and how far the two are.

With D = log-prob of the trained policy before the step less the sampler's, clipped to +-20.  Three
policies: that policy is also the one of the loss's ratio, and weighting its loss is decoupled PPO
(arXiv:2110.00641).  Two policies (`bypass_mode`): the ratio is taken against the sampler.  Knows
the host's rows, not losses. Invariant: what is rejected leaves the loss and its denominators
together, and an expert's rows are neither weighted nor rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rft.algorithm.args import Args, Rejection

if TYPE_CHECKING:
    from rft.algorithm.base import StepInputs

LIMIT = 20.0  # of a log ratio before the exponential
NEAR = (0.9, 1.1)  # ratios inside are called near


class CorrectionArgs(Args):
    """`algorithm.rollout_correction`."""

    rollout_is: Literal["none", "token", "sequence"] = Field(
        "none", description="importance weights of tokens or of sequences"
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="largest weight")
    rollout_is_batch_normalize: bool = Field(False, description="divide weights by their mean")
    rollout_rs: Rejection = Field(
        "none", description="statistic by which tokens or sequences are rejected"
    )
    rollout_rs_threshold: float | str | None = Field(
        None, description="largest value of it that is kept"
    )
    bypass_mode: bool = Field(
        False, description="the ratio of the loss is taken against the sampler"
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        "ppo_clip", description="loss with bypass_mode"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rollout_rs != "none":
            _ = self.bounds  # raises ValueError for wrong ones
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type reinforce is for bypass_mode: true")
        return self

    @property
    def weighted(self) -> bool:
        """Whether losses are multiplied by weights; a clipped ratio against the sampler holds them
        already.
        """
        return self.rollout_is != "none" and (not self.bypass_mode or self.loss_type == "reinforce")

    @property
    def measured(self) -> bool:
        """Whether log-probs of the policy before the step are needed."""
        return not self.bypass_mode or self.weighted or self.rollout_rs != "none"

    @property
    def bounds(self) -> tuple[float, float]:
        """(lower, upper) of the kept values; for k1 the logarithms of the written ones, the lower
        being 1 / upper where only that is.
        """
        given = self.rollout_rs_threshold
        if given is None:
            raise ValueError(
                f"rollout_rs {self.rollout_rs} needs rollout_rs_threshold, such as "
                f"{_example(self.rollout_rs)}"
            )
        first, _, second = str(given).partition("_")
        try:
            numbers = [float(n) for n in ((first, second) if second else (first,))]
        except ValueError:
            numbers = []
        k1 = self.rollout_rs.endswith("k1")
        if (
            not numbers
            or not all(0 < n < float("inf") for n in numbers)
            or (len(numbers) == 2 and not (k1 and numbers[0] <= numbers[1]))
        ):
            raise ValueError(
                f"rollout_rs_threshold {given!r} of {self.rollout_rs}: write a number above 0, "
                f"such as {_example(self.rollout_rs)}"
            )
        if not k1:
            return -float("inf"), numbers[0]
        lower, upper = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
        if lower > upper:
            raise ValueError(
                f"rollout_rs_threshold {given!r} of {self.rollout_rs}: an upper bound of a ratio "
                f"is at least 1"
            )
        return math.log(lower), math.log(upper)


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Per trained token, one array [L_i] for each row: float32 `weights` and bool `keep`; None: all
    1, as it was.
    """

    weights: list[np.ndarray] | None = None
    keep: list[np.ndarray] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def correct(x: StepInputs, args: CorrectionArgs, keep: Sequence[np.ndarray] | None) -> Corrected:
    """Weights and what is kept.  `keep`: tokens that count so far; others have weight 0 and are in
    no statistic.

    Weights: min(exp D, C) of tokens, or min(exp sum D, C) of sequences.  Rejection: by k1 = -D, k2
    = D^2 / 2 or k3 = e^D - D - 1 of a token, or their sum, mean (k1's is the geometric mean of the
    ratios) or largest over a sequence.  k1 is kept between the logarithms of the bounds, which are
    ratios sampler / policy, the others up to the threshold; with seq_max, where every token is.
    Raises ValueError for a row without log-probs of the policy before the step.
    """
    if not args.weighted and args.rollout_rs == "none":
        return Corrected()
    masks = [np.ones(row.length, np.bool_) for row in x.rows] if keep is None else list(keep)
    delta = {
        i: _delta(x, i) for i, row in enumerate(x.rows) if not row.is_expert and masks[i].any()
    }
    metrics: dict[str, float] = {}
    weights = None
    if args.weighted and delta:
        weights = _weights(delta, masks, args)
        used = np.concatenate([weights[i][masks[i]] for i in delta])
        metrics |= {
            "rollout_corr/rollout_is_mean": float(used.mean()),
            "rollout_corr/rollout_is_max": float(used.max()),
            "rollout_corr/rollout_is_min": float(used.min()),
            "rollout_corr/rollout_is_eff_sample_size": effective(used),
        }
    if args.rollout_rs == "none" or not delta:
        return Corrected(weights=weights, metrics=metrics)
    kept = [
        masks[i] & _accepted(delta[i], masks[i], args) if i in delta else masks[i]
        for i in range(len(masks))
    ]
    before = sum(int(masks[i].sum()) for i in delta)
    after = sum(int(kept[i].sum()) for i in delta)
    metrics["rollout_corr/rollout_rs_masked_fraction"] = 1.0 - after / before
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = float(
        np.mean([not kept[i].any() for i in delta])
    )
    return Corrected(weights=weights, keep=kept, metrics=metrics)


def _delta(x: StepInputs, i: int) -> np.ndarray:
    row = x.rows[i]
    if row.old is None:
        raise ValueError(
            f"group {row.group}, run {row.run}: a correction needs log-probs of the policy before "
            f"the step"
        )
    return np.clip(row.old.astype(np.float64) - row.logprobs.astype(np.float64), -LIMIT, LIMIT)


def _weights(
    delta: dict[int, np.ndarray], masks: list[np.ndarray], args: CorrectionArgs
) -> list[np.ndarray]:
    limit = args.rollout_is_threshold
    sequences = args.rollout_is == "sequence"
    made = {}
    for i, d in delta.items():
        log = np.full(len(d), np.clip(d[masks[i]].sum(), -LIMIT, LIMIT)) if sequences else d
        made[i] = np.minimum(np.exp(log), limit)
    if args.rollout_is_batch_normalize:
        mean = np.mean(
            [w[0] for w in made.values()]
            if sequences
            else np.concatenate([w[masks[i]] for i, w in made.items()])
        )
        made = {i: w / mean for i, w in made.items()}
    return [
        np.where(mask, made[i], 0.0).astype(np.float32)
        if i in made
        else np.ones(len(mask), np.float32)
        for i, mask in enumerate(masks)
    ]


def _accepted(d: np.ndarray, mask: np.ndarray, args: CorrectionArgs) -> np.ndarray:
    """bool [L]: which tokens stay; all or none of them where the statistic is a sequence's."""
    level, _, which = args.rollout_rs.rpartition("_")
    value = -d if which == "k1" else d**2 / 2 if which == "k2" else np.expm1(d) - d
    lower, upper = args.bounds
    if level == "token":
        return (value >= lower) & (value <= upper)
    inside = value[mask]
    match level:
        case "seq_sum":
            found = lower <= inside.sum() <= upper
        case "seq_mean":
            found = lower <= inside.mean() <= upper
        case _:
            found = bool(((inside >= lower) & (inside <= upper)).all())
    return np.full(len(d), bool(found))


def effective(weights: np.ndarray) -> float:
    """Effective sample size as a share: (sum w)^2 / (n sum w^2), 1 where all weights are equal."""
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


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
    found = {
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
        found["training/rollout_actor_probs_pearson_corr"] = float(
            np.corrcoef(np.exp(old), np.exp(rollout))[0, 1]
        )
    return found


def _example(statistic: str) -> str:
    return '2.0 or "0.5_2.0"' if statistic.endswith("k1") else "0.01"
