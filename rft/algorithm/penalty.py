"""KL in the reward: takes KL(policy || reference) from the rewards of the tokens, before the
advantages.

Depends on the runs of a step, not on where their log-probs come from nor how the factor is steered.
Invariant: a group's statistics are those of the rewards that its runs have afterwards, so
advantages compare like with like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from rft.algorithm.args import NoArgs
from rft.algorithm.base import StepInputs, StepRow, kl_penalty
from rft.algorithm.kl import ESTIMATORS, MAX_RATIO, KlArgs, k3
from rft.types.credit import group_statistics
from rft.types.ports import GroupStats

if TYPE_CHECKING:
    from rft.algorithm.kl import Estimator


def penalised(x: StepInputs, kls: Sequence[np.ndarray], coef: float) -> tuple[StepInputs, float]:
    """(the step with r = s - coef kl for every trained token, the mean over its runs of their mean
    kl in nats per token).

    `kls`: one array [L_i] per run.  A run's reward loses what its tokens lose; an expert's stay as
    they are and do not count. Statistics of a group are taken again over its runs in the step:
    those that a filter dropped have no known KL and are left out.
    """
    rows = [
        row
        if row.is_expert
        else replace(
            row,
            token_rewards=(row.rewards - coef * kl).astype(np.float32),
            reward=row.reward - coef * float(np.sum(kl, dtype=np.float64)),
        )
        for row, kl in zip(x.rows, kls, strict=True)
    ]
    means = [kl.mean() for row, kl in zip(x.rows, kls, strict=True) if not row.is_expert]
    return replace(x, rows=rows, groups=statistics_of(x, rows)), float(
        np.mean(means)
    ) if means else 0.0


def statistics_of(x: StepInputs, rows: Sequence[StepRow]) -> dict[str, GroupStats]:
    """Statistics of the groups of `x` over the policy's `rows`."""
    members: dict[str, list[StepRow]] = defaultdict(list)
    for row in rows:
        if not row.is_expert:
            members[row.group].append(row)
    order = attrgetter("run", "step")
    return dict(x.groups) | {
        name: group_statistics(name, [row.scored for row in sorted(of_group, key=order)])
        for name, of_group in members.items()
    }


def _estimates(x: StepInputs, estimate: Estimator, *, corrected: bool) -> list[np.ndarray]:
    """The estimator of every trained token, float64 [L_i], from log-probs of the reference and of
    the policy before the step where the rows have them, else of the sampler.

    `corrected`: times exp(old - sampler), at most 2, by which a sampled token counts for the old
    policy.
    """
    import torch

    estimates = []
    for row in x.rows:
        if row.is_expert:
            estimates.append(np.zeros(row.length))
            continue
        if row.ref is None:
            raise ValueError(
                f"group {row.group}, run {row.run}: a KL in the reward needs the reference model's "
                f"log-probs"
            )
        old = (row.logprobs if row.old is None else row.old).astype(np.float64)
        kl = estimate(torch.from_numpy(row.ref.astype(np.float64) - old)).numpy()
        if corrected:
            kl = kl * np.minimum(
                np.exp(np.clip(old - row.logprobs.astype(np.float64), -20, 20)), MAX_RATIO
            )
        estimates.append(kl)
    return estimates


def _register(name: str, estimate: Estimator, *, corrected: bool = False) -> None:
    @kl_penalty(name, args=KlArgs)
    def penalty(x: StepInputs, args: KlArgs) -> list[np.ndarray]:
        return _estimates(x, estimate, corrected=corrected)


for _name, _estimate in ESTIMATORS.items():
    _register(_name, _estimate)
_register("corrected_k3", k3, corrected=True)


@kl_penalty("none", args=NoArgs)
def none(x: StepInputs, args: NoArgs) -> list[np.ndarray]:
    """No KL."""
    return [np.zeros(row.length) for row in x.rows]
