"""Losses that are the advantage times a log-prob or a ratio, without a clipped second term.

Invariant: each is the policy gradient where the policy is the one that sampled, up to a constant.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import row_sums, valid
from rft.algorithm.args import Args, GradientArgs
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss


class ToprArgs(GradientArgs):
    """Tapered importance weights for bad answers (arXiv:2503.14286)."""

    ratio: Literal["token", "sequence"] = Field(
        "token",
        description="what is clipped: each token's ratio, as in Trinity-RFT, or the whole "
        "answer's, as in the paper",
    )
    advantage_threshold: float = Field(
        0.0, description="advantages up to this get a ratio clipped to [0, 1], others weight 1"
    )


class OpmdLossArgs(GradientArgs):
    """-A log-prob / (1 + tau) (arXiv:2501.12599)."""

    tau: float = Field(1.0, ge=0, description="regularisation towards the sampling policy")


class SppoArgs(GradientArgs):
    """Softmax PPO (arXiv:2108.05828): -A (log-prob - old) where the ratio is near 1."""

    epsilon: float = Field(
        0.3, gt=0, description="ratios from 1 / (1 + epsilon) to 1 + epsilon count"
    )


class DroArgs(Args):
    """Direct reward optimisation (arXiv:2405.19107)."""

    dro_beta: float = Field(
        1.0, gt=0, description="factor of the squared log ratio that holds the policy back"
    )


@policy_loss("reinforce", args=GradientArgs)
def reinforce(x: LossInputs, args: GradientArgs) -> LossOutput:
    """loss = -A logprob, per token, times x.weights where an off-policy correction gives them.
    Metrics: those of `ratio_metrics`.
    """
    return ratios.output(-valid(x.advantages, x.mask) * valid(x.logprobs, x.mask), x)


@policy_loss("gpg", args=GradientArgs)
def gpg(x: LossInputs, args: GradientArgs) -> LossOutput:
    """Group policy gradient (arXiv:2504.02546): `reinforce` on the advantages of `gpg`."""
    return reinforce(x, args)


@policy_loss("opmd", args=OpmdLossArgs)
def opmd(x: LossInputs, args: OpmdLossArgs) -> LossOutput:
    """Online policy mirror descent (arXiv:2501.12599): loss = -A logprob / (1 + tau), per token.

    Metrics: those of `ratio_metrics`.
    """
    values = -valid(x.advantages, x.mask) * valid(x.logprobs, x.mask) / (1 + args.tau)
    return ratios.output(values, x)


@policy_loss("topr", args=ToprArgs)
def topr(x: LossInputs, args: ToprArgs) -> LossOutput:
    """Tapered off-policy REINFORCE (arXiv:2503.14286):

        loss = -sg(alpha) A logprob,  alpha = clip(ratio, 0, 1) where A <= advantage_threshold, else
        1.

    `ratio: token` takes that of each token; `ratio: sequence` the product over the answer's, as the
    paper does: 20 tokens at -0.1 nats have 0.905 each and 0.135 together.  Bad answers that the
    policy has left behind lose their pull; good ones keep it.  Metrics, as means over valid tokens:
    avg_alpha, those of `ratio_metrics`.
    """
    a = valid(x.advantages, x.mask)
    log_ratio = ratios.log_ratio(x).detach()
    if args.ratio == "sequence":
        log_ratio = row_sums(log_ratio, x)[x.row].clamp(
            -ratios.LOG_RATIO_LIMIT, ratios.LOG_RATIO_LIMIT
        )
    ratio = log_ratio.exp()
    alpha = ratio.clamp(0, 1).masked_fill(a > args.advantage_threshold, 1)
    return ratios.output(-alpha * a * valid(x.logprobs, x.mask), x, avg_alpha=alpha)


@policy_loss("dro", args=DroArgs)
def dro(x: LossInputs, args: DroArgs) -> LossOutput:
    """loss = -A logprob + dro_beta / 2 (logprob - old)^2, per token.

    The paper (arXiv:2405.19107) has the sums of a whole answer and learns a value in place of the
    group's mean; this is the form of one token, as in veRL.
    Tokens whose advantage is 0 are held back too.  Metrics: those of `ratio_metrics`.

    Example: A 1, logprob -0.5, old -0.7, dro_beta 2: 0.5 + 0.04 = 0.54.
    """
    pull = args.dro_beta / 2 * ratios.difference(x).square()
    return ratios.output(pull - valid(x.advantages, x.mask) * valid(x.logprobs, x.mask), x)


@policy_loss("importance_sampling", args=GradientArgs)
def importance_sampling(x: LossInputs, args: GradientArgs) -> LossOutput:
    """loss = -A ratio, ratio = exp(clip(logprob - old, -20, 20)), per token; nothing else is
    clipped.

    Metrics: those of `ratio_metrics`.
    """
    return ratios.output(-valid(x.advantages, x.mask) * ratios.log_ratio(x).exp(), x)


@policy_loss("sppo", args=SppoArgs)
def sppo(x: LossInputs, args: SppoArgs) -> LossOutput:
    """loss = -A (logprob - old) where 1 / (1 + epsilon) <= ratio <= 1 + epsilon, else 0 (which
    still counts in the denominators).

    Metrics, as means over valid tokens: pg_clipfrac (outside the range), those of `ratio_metrics`.
    """
    apart = ratios.difference(x)
    ratio = ratios.log_ratio(x).detach().exp()
    near = (ratio >= 1 / (1 + args.epsilon)) & (ratio <= 1 + args.epsilon)
    values = valid(-valid(x.advantages, x.mask) * apart, near)
    return ratios.output(values, x, pg_clipfrac=~near)


define_algorithm(
    "topr",
    "Tapered off-policy REINFORCE (arXiv:2503.14286).",
    advantage_fn="reinforce",
    policy_loss_fn="topr",
    repeat_times=2,
)
define_algorithm(
    "sppo",
    "Softmax PPO (arXiv:2108.05828).",
    advantage_fn="opmd",
    policy_loss_fn="sppo",
    repeat_times=2,
    entropy_loss_fn="none",
)
define_algorithm(
    "dro",
    "REINFORCE with a squared log ratio in place of a clip (arXiv:2405.19107).",
    advantage_fn_args={"norm_by_std": False},
    policy_loss_fn="dro",
)
