"""What losses on pairs share: a chosen row, then the rejected one.

Invariant: rows alternate chosen, rejected; both of a pair are in the same micro-batch
(`TrainRow.pair`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rft.algorithm.aggregate import row_sums, valid
from rft.algorithm.args import AggMode, Args, Sampled
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm

if TYPE_CHECKING:
    import torch


class PairArgs(Args):
    """For losses on pairs, which are a mean over the step's pairs, whatever `loss_agg_mode`."""

    samples: ClassVar[Sampled] = "none"
    pairs: ClassVar[bool] = True
    agg_mode: ClassVar[AggMode | None] = "seq-mean-token-sum"
    fixed_agg: ClassVar[bool] = True


class ReferencePairArgs(PairArgs):
    """For those that compare with a reference model."""

    reference: ClassVar[bool] = True


def log_ratios(
    x: LossInputs, name: str, over: Callable[[torch.Tensor, LossInputs], torch.Tensor] = row_sums
) -> torch.Tensor:
    """logprob - ref of each row, [rows], the sum `over` its tokens.  Raises ValueError without
    reference log-probs.
    """
    if x.ref_logprobs is None:
        raise ValueError(f"{name} needs x.ref_logprobs; `needs(settings).reference` says so")
    return over(valid(x.logprobs, x.mask) - valid(x.ref_logprobs, x.mask), x)


def margins(values: torch.Tensor, name: str) -> torch.Tensor:
    """Chosen less rejected, [pairs], of a number for each row.  Raises ValueError for an odd number
    of rows.
    """
    if len(values) % 2:
        raise ValueError(
            f"{name} needs pairs, but a micro-batch has {len(values)} rows; mark pairs with "
            f"`TrainRow.pair`"
        )
    return values[0::2] - values[1::2]


def output(losses: torch.Tensor, rewards: torch.Tensor, x: LossInputs) -> LossOutput:
    """`losses`, [pairs], as their mean over the pairs of the step; `rewards`, [rows], are what the
    loss compares.

    Metrics, as means over pairs: chosen_reward, rejected_reward, reward_margin, accuracy_mean
    (margin > 0), chosen_logps and rejected_logps (sums over a row's tokens).
    """
    pairs = x.denominators.rows / 2
    chosen, rejected = rewards.detach().view(-1, 2).T
    chosen_logps, rejected_logps = row_sums(x.logprobs.detach(), x).view(-1, 2).T
    each = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": chosen - rejected,
        "accuracy_mean": (chosen > rejected).to(chosen.dtype),
        "chosen_logps": chosen_logps,
        "rejected_logps": rejected_logps,
    }
    tokens = x.denominators.tokens / pairs  # sums are divided by tokens
    return LossOutput(
        loss=losses.sum() / pairs, sums={name: of.sum() * tokens for name, of in each.items()}
    )


def define(name: str, doc: str) -> None:
    """Registers the algorithm of the pair loss `name`."""
    define_algorithm(
        name,
        doc,
        advantage_fn="none",
        policy_loss_fn=name,
        repeat_times=1,
        data="pairs",
        entropy_loss_fn="none",
    )
