"""PPO on the policy's own rows and imitation of an expert's in one step; CHORD (arXiv:2508.11408)
moves the weight between them.

Invariant: each part is a mean over its own rows of the whole step, however these are spread over
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rft.algorithm.aggregate import nothing, part
from rft.algorithm.args import Args, ClippedArgs, Sampled
from rft.algorithm.base import (
    BufferStrategy,
    LossInputs,
    LossOutput,
    define_algorithm,
    policy_loss,
    sample_strategy,
)
from rft.algorithm.imitation import likelihood, uncertain
from rft.algorithm.ppo import PpoArgs, ppo

if TYPE_CHECKING:
    import torch

Imitate = Callable[[LossInputs], LossOutput]


class MixArgs(ClippedArgs):
    """PPO on the policy's own rows and SFT on an expert's."""

    samples: ClassVar[Sampled] = "own"

    mu: float = Field(
        0.1, ge=0, le=1, description="weight of the SFT part; the PPO part has 1 - mu"
    )


class MixChordArgs(ClippedArgs):
    """As mix, with a weight that follows the step (arXiv:2508.11408)."""

    samples: ClassVar[Sampled] = "own"

    mu_warmup_steps: int = Field(0, ge=0, description="train steps from 0 to mu_peak")
    mu_decay_steps: int = Field(0, ge=0, description="train steps from mu_peak to mu_valley")
    mu_peak: float = Field(0.1, ge=0, le=1, description="largest weight of the SFT part")
    mu_valley: float = Field(0.1, ge=0, le=1, description="weight of the SFT part at the end")
    enable_phi_function: bool = Field(True, description="the SFT part is sft_phi, else sft")


class MixSampleArgs(Args):
    """Rows of an expert's data set beside the policy's own, which are as with `default`."""

    expert_data_ratio: float = Field(
        0.5, gt=0, lt=1, description="share of the expert's rows in a train batch, rounded up"
    )
    sft_dataset_name: str = Field(
        "sft_dataset", description="which of buffer.trainer_input.auxiliary_buffers holds them"
    )


@sample_strategy("mix", args=MixSampleArgs)
class ExpertRows(BufferStrategy):
    """Some rows of each step come from the expert's data set."""


@policy_loss("mix", args=MixArgs)
def mix(x: LossInputs, args: MixArgs) -> LossOutput:
    """loss = (1 - mu) PPO(own rows) + mu SFT(an expert's rows), each with the tokens and rows of
    its own part as denominators.

    A part that the step has no rows of is 0.  Metrics: mu; usual/... those of `ppo` as means over
    own tokens, usual/pg_loss; expert/sft_loss.
    """
    return _mixed(x, args.mu, args.low, args.high, likelihood)


@policy_loss("mix_chord", args=MixChordArgs)
def mix_chord(x: LossInputs, args: MixChordArgs) -> LossOutput:
    """`mix` with mu of train step x.step (see `mu_at`), and sft_phi in place of sft unless
    `enable_phi_function` is off.
    """
    return _mixed(
        x,
        mu_at(x.step, args),
        args.low,
        args.high,
        uncertain if args.enable_phi_function else likelihood,
    )


def mu_at(step: int, args: MixChordArgs) -> float:
    """mu of train step `step` (from 1): linear from 0 to mu_peak, then half a cosine to mu_valley,
    then constant.

    Example: warm-up 2, decay 4, peak 0.8, valley 0.2: steps 1, 2, 4, 6, 7 have 0.4, 0.8, 0.5, 0.2,
    0.2.
    """
    if step < args.mu_warmup_steps:
        return args.mu_peak * step / args.mu_warmup_steps
    done = step - args.mu_warmup_steps
    if done >= args.mu_decay_steps:
        return args.mu_valley
    return (
        args.mu_valley
        + (args.mu_peak - args.mu_valley) * (1 + math.cos(math.pi * done / args.mu_decay_steps)) / 2
    )


def _mixed(x: LossInputs, mu: float, low: float, high: float, imitate: Imitate) -> LossOutput:
    tokens = x.denominators.tokens
    loss = nothing(x)
    maxima: dict[str, torch.Tensor] = {}
    sums = {"mu": mu * x.mask.to(x.logprobs.dtype).sum()}
    if (policy := part(x, expert=False)) is not None:
        out = ppo(policy, PpoArgs.model_validate({"clip_range_low": low, "clip_range_high": high}))
        loss = loss + (1 - mu) * out.loss
        each = tokens / policy.denominators.tokens
        sums |= {f"usual/{name}": value * each for name, value in out.sums.items()}
        sums["usual/pg_loss"] = out.loss.detach() * tokens
        maxima = {f"usual/{name}": value for name, value in out.maxima.items()}
    if (expert := part(x, expert=True)) is not None:
        out = imitate(expert)
        loss = loss + mu * out.loss
        sums["expert/sft_loss"] = out.loss.detach() * tokens
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


define_algorithm(
    "mix",
    "GRPO and SFT on an expert's rows.",
    policy_loss_fn="mix",
    entropy_loss_fn="mix",
    sample_strategy="mix",
)
define_algorithm(
    "mix_chord",
    "The same with a weight that follows the step (arXiv:2508.11408).",
    policy_loss_fn="mix_chord",
    entropy_loss_fn="mix",
    sample_strategy="mix",
)
