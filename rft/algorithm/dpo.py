"""Direct preference optimisation (arXiv:2305.18290) on pairs of a chosen and a rejected row.

Invariant: rows alternate chosen, rejected; both of a pair are in the same micro-batch
(`TrainRow.pair`).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rft.algorithm.aggregate import row_sums, valid
from rft.algorithm.args import AggMode, Args, Sampled
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss


class DpoArgs(Args):
    """Direct preference optimisation (arXiv:2305.18290)."""

    reference: ClassVar[bool] = True
    samples: ClassVar[Sampled] = "none"
    pairs: ClassVar[bool] = True
    agg_mode: ClassVar[AggMode | None] = "seq-mean-token-sum"
    fixed_agg: ClassVar[bool] = True

    beta: float = Field(0.1, gt=0, description="factor of the implicit reward")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of preferences taken to be the wrong way round"
    )


@policy_loss("dpo", args=DpoArgs)
def dpo(x: LossInputs, args: DpoArgs) -> LossOutput:
    """With the implicit reward of a row r = beta (sum of its tokens' logprob - ref) and the margin
    m = r_chosen - r_rejected:

        loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m),  e = label_smoothing,

    as the mean over the step's pairs, whatever `loss_agg_mode`.  Raises ValueError for an odd
    number of rows and without reference log-probs.  Metrics, as means over pairs: dpo_loss,
    chosen_reward, rejected_reward, reward_margin, accuracy_mean (m > 0), chosen_logps and
    rejected_logps (sums over a row's tokens).
    """
    from torch.nn.functional import logsigmoid

    if x.num_rows % 2:
        raise ValueError(
            f"DPO needs pairs, but a micro-batch has {x.num_rows} rows; mark pairs with "
            f"`TrainRow.pair`"
        )
    if x.ref_logprobs is None:
        raise ValueError("DPO needs x.ref_logprobs; `needs(settings).reference` says so")
    rewards = args.beta * row_sums(valid(x.logprobs, x.mask) - valid(x.ref_logprobs, x.mask), x)
    logps = row_sums(valid(x.logprobs.detach(), x.mask), x)
    chosen = rewards[0::2]
    rejected = rewards[1::2]
    margin = chosen - rejected
    e = args.label_smoothing
    pairs = x.denominators.rows / 2
    loss = (-(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin)).sum() / pairs
    each = x.denominators.tokens / pairs  # sums are divided by tokens
    return LossOutput(
        loss=loss,
        sums={
            "dpo_loss": loss.detach() * x.denominators.tokens,
            "chosen_reward": chosen.detach().sum() * each,
            "rejected_reward": rejected.detach().sum() * each,
            "reward_margin": margin.detach().sum() * each,
            "chosen_logps": logps[0::2].sum() * each,
            "rejected_logps": logps[1::2].sum() * each,
            "accuracy_mean": (margin.detach() > 0).to(margin.dtype).sum() * each,
        },
    )


define_algorithm(
    "dpo",
    "Direct preference optimisation (arXiv:2305.18290).",
    advantage_fn="none",
    policy_loss_fn="dpo",
    repeat_times=1,
    data="pairs",
    entropy_loss_fn="none",
)
