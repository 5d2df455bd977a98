"""Group-relative REINFORCE and its variations (arXiv:2509.24203): which tokens count, how much, and what is added."""

from __future__ import annotations

from dataclasses import replace

import torch

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import aggregate, row_means, valid, weighted
from rft.algorithm.base import LossInputs, LossOutput, policy_loss
from rft.algorithm.loss_args import RecLossArgs


@policy_loss("rec", args=RecLossArgs)
def rec(x: LossInputs, args: RecLossArgs) -> LossOutput:
    """With ratio = sg(exp(clip(logprob - old, -20, 20))), q = exp(mean of logprob - old over the sequence), stopped:

        loss = -A w logprob [counts] + regulariser

        clip_mode        a token counts where
          none             always
          two-side         1 - low <= ratio <= 1 + high
          one-side         A >= 0 and ratio <= 1 + high, or A <= 0 and ratio >= 1 - low
          gspo-one-side    as one-side with q in place of ratio; aggregated by seq-mean-token-mean, whatever `loss_agg_mode`
          ring             as two-side, or A >= 0 and ratio <= 1 - low', or A <= 0 and ratio >= 1 + high'
        weight           w = 1, ratio (importance_sampling), q (gspo_importance_sampling), exp(A / temp) (advantage)
        regulariser      none; k2: c (logprob - old)^2; forward-kl: -c logprob; it has no factor 1/2, no weight and no range

    Metrics, as means over valid tokens: pg_clipfrac (does not count), those of `ratio.told`.
    """
    a, own = valid(x.advantages, x.mask), valid(x.logprobs, x.mask)
    apart = ratios.difference(x)
    ratio = ratios.log_ratio(x).detach().exp()
    sequence = row_means(ratios.log_ratio(x).detach(), x).exp()[x.row]
    counts = _counts(a, ratio, sequence, args)
    values = weighted(valid(-a * _weight(a, ratio, sequence, args) * own, counts), x)
    match args.regularizer:
        case "k2":
            values = values + args.regularizer_coef * apart.square()
        case "forward-kl":
            values = values - args.regularizer_coef * own
        case "none":
            pass
    if args.clip_mode == "gspo-one-side":
        x = replace(x, loss_agg_mode="seq-mean-token-mean")
    sums, maxima = ratios.told(ratios.log_ratio(x), x)
    sums["pg_clipfrac"] = ratios.share(~counts, x)
    return LossOutput(loss=aggregate(values, x), sums=sums, maxima=maxima)


def _counts(a: torch.Tensor, ratio: torch.Tensor, sequence: torch.Tensor, args: RecLossArgs) -> torch.Tensor:
    low, high = 1 - args.epsilon_low, 1 + args.epsilon_high
    match args.clip_mode:
        case "none":
            return torch.ones_like(a, dtype=torch.bool)
        case "two-side":
            return (ratio >= low) & (ratio <= high)
        case "one-side":
            return ((a >= 0) & (ratio <= high)) | ((a <= 0) & (ratio >= low))
        case "gspo-one-side":
            return ((a >= 0) & (sequence <= high)) | ((a <= 0) & (sequence >= low))
        case "ring":
            good, bad = ratio <= 1 - args.epsilon_low_prime, ratio >= 1 + args.epsilon_high_prime
            return ((ratio >= low) & (ratio <= high)) | ((a >= 0) & good) | ((a <= 0) & bad)


def _weight(a: torch.Tensor, ratio: torch.Tensor, sequence: torch.Tensor, args: RecLossArgs) -> torch.Tensor:
    match args.weight:
        case "none":
            return torch.ones_like(a)
        case "importance_sampling":
            return ratio
        case "gspo_importance_sampling":
            return sequence
        case "advantage":
            return (a / args.temp).exp()
