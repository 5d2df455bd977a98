"""Answers with a label each, good or bad, in place of pairs: KTO (arXiv:2402.01306).

Invariant: the reference point is taken over all rows of the step, under the weights before it, and
has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from rft.algorithm import pairs
from rft.algorithm.aggregate import row_means
from rft.algorithm.args import AggMode, Args, Computed, Sampled
from rft.algorithm.base import (
    KEEP,
    LossInputs,
    LossOutput,
    StepInputs,
    define_algorithm,
    policy_extra,
    policy_loss,
)

POINT = "kto_point"
SHARES = {True: "kto_desirable", False: "kto_undesirable"}  # by label


class KtoArgs(Args):
    """Kahneman-Tversky optimisation (arXiv:2402.01306)."""

    samples: ClassVar[Sampled] = "none"
    labels: ClassVar[bool] = True
    before: ClassVar[frozenset[Computed]] = frozenset({"old", "ref"})
    agg_mode: ClassVar[AggMode | None] = "seq-mean-token-sum"
    fixed_agg: ClassVar[bool] = True

    beta: float = Field(0.1, gt=0, description="factor of the log ratio")
    desirable_weight: float = Field(1.0, ge=0, description="weight of rows with label true")
    undesirable_weight: float = Field(1.0, ge=0, description="weight of rows with label false")


@policy_loss("kto", args=KtoArgs)
def kto(x: LossInputs, args: KtoArgs) -> LossOutput:
    """With r = sum of a row's (logprob - ref), the reference point z (`reference_point`), w the
    weight of the row's label:

        loss = w (1 - sigmoid(beta (r - z))) if the label is true, else w (1 - sigmoid(beta (z - r))),

    as the mean over the step's labelled rows, whatever `loss_agg_mode`: L_KTO of the paper.  TRL
    takes z over the micro-batch of each device, under the weights of the pass, and shifts answers
    the other way round.  Raises ValueError without reference log-probs.

    Metrics: kto_point (z); as means over the rows of a label chosen_reward and rejected_reward
    (beta r), which a step without such rows leaves out, with both reward_margin; accuracy_mean
    (share of rows whose r is on the label's side of z).

    Example: beta 0.1, z 1; r 3 labelled true and r -1 labelled false: both 1 - sigmoid(0.2) = 0.450166.
    """
    import torch

    ratios = pairs.log_ratios(x, "KTO")
    shares = {
        label: row_means(x.extra[name], x) for label, name in SHARES.items() if name in x.extra
    }
    zero = torch.zeros_like(ratios)
    good, bad = ((shares.get(label, zero) > 0).to(ratios.dtype) for label in (True, False))
    side = (good - bad) * (ratios - row_means(x.extra[POINT], x))
    weight = args.desirable_weight * good + args.undesirable_weight * bad
    loss = (weight * torch.sigmoid(-args.beta * side)).sum() / x.denominators.rows
    tokens = x.denominators.tokens  # sums are divided by them
    each = (good + bad) / x.denominators.rows
    sums = {
        "kto_point": (each * row_means(x.extra[POINT], x)).sum() * tokens,
        "accuracy_mean": (each * (side.detach() > 0)).sum() * tokens,
    }
    rewards = args.beta * ratios.detach()
    for label, name in ((True, "chosen_reward"), (False, "rejected_reward")):
        if label in shares:
            sums[name] = (shares[label] * rewards).sum() * tokens
    if len(shares) == 2:
        sums["reward_margin"] = sums["chosen_reward"] - sums["rejected_reward"]
    return LossOutput(loss=loss, sums=sums)


@policy_extra("kto", args=KtoArgs)
def reference_point(
    x: StepInputs, advantages: Sequence[np.ndarray], args: KtoArgs
) -> Mapping[str, Sequence[np.ndarray]]:
    """z = max(0, mean of sum(logprob - ref)) over the rows without a label, each the prompt of one row
    with the answer of the next: KL(policy || reference) as the paper estimates it.

    Returns z for each token, for each label that the step has 1 / (number of such rows) on these,
    and which rows have a loss: those with a label.  Example: sums 3, -1 and 1: z 1.
    """
    labels = [row.info.get("label") for row in x.rows]
    sums = [
        float((x.current(row) - row.ref).sum())
        for row, label in zip(x.rows, labels, strict=True)
        if label is None and row.ref is not None
    ]
    if not sums:
        raise ValueError("KTO needs rows without a label, prompts with the answers of others")
    values = {POINT: [max(0.0, float(np.mean(sums)))] * len(labels)}
    values[KEEP] = [float(label is not None) for label in labels]
    for label, name in SHARES.items():
        if number := labels.count(label):
            values[name] = [float(other is label) / number for other in labels]
    return {
        name: [np.full(row.length, v, np.float32) for row, v in zip(x.rows, of_rows, strict=True)]
        for name, of_rows in values.items()
    }


define_algorithm(
    "kto",
    "Preferences from a label for each answer (arXiv:2402.01306).",
    advantage_fn="none",
    policy_loss_fn="kto",
    repeat_times=1,
    data="labels",
    entropy_loss_fn="none",
)
