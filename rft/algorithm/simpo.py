"""Preferences without a reference model: SimPO (arXiv:2405.14734) and ORPO (arXiv:2403.07691)."""

from __future__ import annotations

from pydantic import Field

from rft.algorithm import pairs
from rft.algorithm.aggregate import row_means
from rft.algorithm.base import LossInputs, LossOutput, policy_loss

MAX_LOGPROB = -1e-6  # a certain row has finite odds


class SimpoArgs(pairs.PairArgs):
    """Mean log-probs as rewards, with a margin (arXiv:2405.14734)."""

    beta: float = Field(2.0, gt=0, description="factor of the mean log-prob")
    gamma: float = Field(1.0, ge=0, description="margin that the chosen row has to win by")


class OrpoArgs(pairs.PairArgs):
    """Imitation of the chosen row and an odds ratio (arXiv:2403.07691)."""

    beta: float = Field(0.1, gt=0, description="the paper's lambda: weight of the odds ratio")


@policy_loss("simpo", args=SimpoArgs)
def simpo(x: LossInputs, args: SimpoArgs) -> LossOutput:
    """With the reward of a row r = beta (mean of its tokens' logprob):

        loss = -log sigmoid(r_chosen - r_rejected - gamma),

    as the mean over the step's pairs.  TRL (`loss_type: simpo` of its CPO) has the same, with beta
    0.1 and simpo_gamma 0.5 by default; the paper's beta is 2 to 10 and gamma about half of it.
    Metrics and errors: those of `dpo`.

    Example: means -0.5 and -1: -log sigmoid(1 - 1) = 0.693147.
    """
    from torch.nn.functional import logsigmoid

    rewards = args.beta * row_means(x.logprobs, x)
    losses = -logsigmoid(pairs.margins(rewards, "SimPO") - args.gamma)
    return pairs.output(losses, rewards, x)


@policy_loss("orpo", args=OrpoArgs)
def orpo(x: LossInputs, args: OrpoArgs) -> LossOutput:
    """With l = mean of a row's logprob, at most -1e-6, and its log odds o = l - log(1 - exp l):

        loss = -l_chosen - beta log sigmoid(o_chosen - o_rejected),

    as the mean over the step's pairs.  TRL's first term also counts the tokens of the prompt.
    Metrics and errors: those of `dpo`, with log odds as rewards.

    Example: l -0.5 and -1: 0.5 + 0.1 x 0.320300 = 0.532030.
    """
    from torch.nn.functional import logsigmoid

    means = row_means(x.logprobs, x).clamp(max=MAX_LOGPROB)
    odds = means - (-means.expm1()).log()
    losses = -means[0::2] - args.beta * logsigmoid(pairs.margins(odds, "ORPO"))
    return pairs.output(losses, odds, x)


pairs.define(
    "simpo", "Preferences by mean log-probs, without a reference model (arXiv:2405.14734)."
)
pairs.define("orpo", "Imitation with preferences in one loss (arXiv:2403.07691).")
