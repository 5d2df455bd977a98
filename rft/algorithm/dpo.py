"""Preferences against a reference model: DPO (arXiv:2305.18290) and IPO (arXiv:2310.12036)."""

from __future__ import annotations

from pydantic import Field

from rft.algorithm import pairs
from rft.algorithm.aggregate import row_means, row_sums
from rft.algorithm.base import LossInputs, LossOutput, policy_loss


class DpoArgs(pairs.ReferencePairArgs):
    """Direct preference optimisation (arXiv:2305.18290)."""

    beta: float = Field(0.1, gt=0, description="factor of the implicit reward")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of preferences taken to be the wrong way round"
    )


class IpoArgs(pairs.ReferencePairArgs):
    """Identity preference optimisation (arXiv:2310.12036)."""

    beta: float = Field(
        0.1, gt=0, description="the paper's tau: the margin comes near 1 / (2 beta)"
    )
    per_token: bool = Field(
        False, description="log ratios are means over a row's tokens, as in TRL, not their sums"
    )


@policy_loss("dpo", args=DpoArgs)
def dpo(x: LossInputs, args: DpoArgs) -> LossOutput:
    """With the implicit reward of a row r = beta (sum of its tokens' logprob - ref) and the margin
    m = r_chosen - r_rejected:

        loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m),  e = label_smoothing,

    as the mean over the step's pairs, whatever `loss_agg_mode`.  Raises ValueError for an odd
    number of rows and without reference log-probs.  Metrics, as means over pairs:
    chosen_reward, rejected_reward, reward_margin, accuracy_mean (m > 0), chosen_logps and
    rejected_logps (sums over a row's tokens).
    """
    from torch.nn.functional import logsigmoid

    rewards = args.beta * pairs.log_ratios(x, "DPO")
    margin = pairs.margins(rewards, "DPO")
    e = args.label_smoothing
    losses = -(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin)
    return pairs.output(losses, rewards, x)


@policy_loss("ipo", args=IpoArgs)
def ipo(x: LossInputs, args: IpoArgs) -> LossOutput:
    """With h = the log ratio (logprob - ref, summed over the row) of the chosen row less that of
    the rejected one:

        loss = (h - 1 / (2 beta))^2,

    as the mean over the step's pairs: the margin has a target and does not grow for ever.  Equation
    17 of the paper; TRL takes means over the row's tokens (`per_token`).  Metrics and errors: those
    of `dpo`, with beta times the log ratio as the reward.

    Example: h 3 and beta 0.1: (3 - 5)^2 = 4.
    """
    ratios = pairs.log_ratios(x, "IPO", row_means if args.per_token else row_sums)
    h = pairs.margins(ratios, "IPO")
    return pairs.output((h - 0.5 / args.beta).square(), args.beta * ratios, x)


pairs.define("dpo", "Direct preference optimisation (arXiv:2305.18290).")
pairs.define("ipo", "DPO with a target for the margin (arXiv:2310.12036).")
