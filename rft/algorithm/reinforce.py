"""Losses that are the advantage times a log-prob or a ratio, without a clipped second term.

Invariant: each is the policy gradient where the policy is the one that sampled, up to a constant.
"""

from __future__ import annotations

import torch

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import aggregate, masked_sum, valid, weighted
from rft.algorithm.base import LossInputs, LossOutput, policy_loss
from rft.algorithm.loss_args import GradientArgs, OpmdLossArgs, SppoArgs, ToprArgs


@policy_loss("reinforce", args=GradientArgs)
def reinforce(x: LossInputs, args: GradientArgs) -> LossOutput:
    """loss = -A logprob, per token, times x.weights where an off-policy correction gives them.  Metrics: those of `ratio.told`."""
    return _output(-valid(x.advantages, x.mask) * valid(x.logprobs, x.mask), x)


@policy_loss("gpg", args=GradientArgs)
def gpg(x: LossInputs, args: GradientArgs) -> LossOutput:
    """Group policy gradient (arXiv:2504.02546): `reinforce` on the advantages of `gpg`."""
    return reinforce(x, args)


@policy_loss("opmd", args=OpmdLossArgs)
def opmd(x: LossInputs, args: OpmdLossArgs) -> LossOutput:
    """Online policy mirror descent (arXiv:2501.12599): loss = -A logprob / (1 + tau), per token.

    Metrics, as means over valid tokens: opmd_loss, those of `ratio.told`.
    """
    values = -valid(x.advantages, x.mask) * valid(x.logprobs, x.mask) / (1 + args.tau)
    out = _output(values, x)
    out.sums["opmd_loss"] = out.loss.detach() * x.denominators.tokens
    return out


@policy_loss("topr", args=ToprArgs)
def topr(x: LossInputs, args: ToprArgs) -> LossOutput:
    """Tapered off-policy REINFORCE (arXiv:2503.14286), with ratios of tokens:

        loss = -sg(alpha) A logprob,  alpha = clip(ratio, 0, 1) where A <= advantage_threshold, else 1.

    Bad answers that the policy has left behind lose their pull; good ones keep it.  Metrics, as means over valid tokens: topr_loss,
    avg_alpha, those of `ratio.told`.
    """
    a = valid(x.advantages, x.mask)
    ratio = ratios.log_ratio(x).detach().exp()
    alpha = torch.where(a <= args.advantage_threshold, ratio.clamp(0, 1), torch.ones_like(ratio))
    out = _output(-alpha * a * valid(x.logprobs, x.mask), x)
    out.sums["topr_loss"] = out.loss.detach() * x.denominators.tokens
    out.sums["avg_alpha"] = masked_sum(alpha, x.mask)
    return out


@policy_loss("importance_sampling", args=GradientArgs)
def importance_sampling(x: LossInputs, args: GradientArgs) -> LossOutput:
    """loss = -A ratio, ratio = exp(clip(logprob - old, -20, 20)), per token; nothing else is clipped.

    Metrics: those of `ratio.told`.
    """
    return _output(-valid(x.advantages, x.mask) * ratios.log_ratio(x).exp(), x)


@policy_loss("sppo", args=SppoArgs)
def sppo(x: LossInputs, args: SppoArgs) -> LossOutput:
    """loss = -A (logprob - old) where 1 / (1 + epsilon) <= ratio <= 1 + epsilon, else 0 (which still counts in the denominators).

    Metrics, as means over valid tokens: pg_clipfrac (outside the range), those of `ratio.told`.
    """
    apart = ratios.difference(x)
    ratio = ratios.log_ratio(x).detach().exp()
    near = (ratio >= 1 / (1 + args.epsilon)) & (ratio <= 1 + args.epsilon)
    out = _output(valid(-valid(x.advantages, x.mask) * apart, near), x)
    out.sums["pg_clipfrac"] = ratios.share(~near, x)
    return out


def _output(values: torch.Tensor, x: LossInputs) -> LossOutput:
    sums, maxima = ratios.told(ratios.log_ratio(x), x)
    return LossOutput(loss=aggregate(weighted(values, x), x), sums=sums, maxima=maxima)
