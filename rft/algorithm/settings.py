"""Which parts an algorithm is made of, with the arguments of each.  Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rft.algorithm.args import Rejection
from rft.schema.base import Diagnostics, IgnoreCase, Section, key

_NullIsNone = BeforeValidator(lambda value: "none" if value is None else value)
Bounds = tuple[float, float]  # lower, upper


def _listed(value: Any) -> Any:
    """`"a, b"` as `("a", "b")`; none and null as no entry."""
    if isinstance(value, str):
        value = tuple(name.strip() for name in value.lower().split(","))
    return (
        ()
        if value is None or value == ("none",)
        else tuple(value)
        if isinstance(value, list)
        else value
    )


class CorrectionConfig(Section):
    """Weights and rejection for tokens sampled by an older or less exact policy."""

    rollout_is: Annotated[Literal["none", "token", "sequence"], IgnoreCase, _NullIsNone] = key(
        "none", "Importance weights of tokens or of whole sequences."
    )
    rollout_is_threshold: float | str = key(
        2.0,
        'Largest weight, to which larger ones are cut; "lower_upper": weights outside are 0 '
        "(IcePop).",
    )
    rollout_is_batch_normalize: bool = key(False, "Divide weights by their mean.")
    rollout_rs: Annotated[tuple[Rejection, ...], BeforeValidator(_listed)] = key(
        (),
        "Statistics by which tokens or sequences are rejected, a list or a text with commas; what "
        "one of them rejects is rejected.",
    )
    rollout_rs_threshold: float | str | None = key(
        None,
        "Largest accepted value, one for all statistics of rollout_rs or, with commas, one for "
        'each; for k1 a ratio sampler / policy, or "lower_upper".',
    )
    bypass_mode: bool = key(False, "Take the engines' log-probs as the old ones (two policies).")
    loss_type: Annotated[Literal["ppo_clip", "reinforce"], IgnoreCase] = key(
        "ppo_clip", "Loss with bypass_mode; reinforce: -advantage x log-prob x weight."
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        for name, bounds in (
            ("rollout_is_threshold", lambda: self.weight_bounds),
            ("rollout_rs_threshold", lambda: self.bounds),
        ):
            try:
                bounds()
            except ValueError as e:
                diagnostics.error(f"{at}.{name}", str(e))
        if self.rollout_is == "none":
            names = ("rollout_is_threshold", "rollout_is_batch_normalize")
            self.warn_unused(at, names, "no rollout_is is written", diagnostics)
        elif not self.weighted:
            diagnostics.warn(
                f"{at}.rollout_is has no effect with bypass_mode: true and loss_type ppo_clip: the "
                f"clipped ratio holds the weight"
            )
        if not self.rollout_rs:
            self.warn_unused(at, ("rollout_rs_threshold",), "no rollout_rs is written", diagnostics)
        if self.loss_type == "reinforce" and not self.bypass_mode:
            diagnostics.error(at, "loss_type reinforce is for bypass_mode: true")

    @property
    def weighted(self) -> bool:
        """Whether losses are multiplied by weights; a clipped ratio against the sampler holds them
        already.
        """
        return self.rollout_is != "none" and (not self.bypass_mode or self.loss_type == "reinforce")

    @property
    def measured(self) -> bool:
        """Whether log-probs of the policy before the step are needed."""
        return not self.bypass_mode or self.weighted or bool(self.rollout_rs)

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        """(lower, upper) of the weights; without a lower bound larger weights are cut, with it
        weights outside are 0.  Raises ValueError where rollout_is_threshold is no such bound.
        """
        numbers = _numbers(self.rollout_is_threshold)
        if not numbers:
            raise ValueError(
                f"rollout_is_threshold {self.rollout_is_threshold!r}: write a number above 0, such "
                f'as 2.0, or "lower_upper", such as "0.5_5.0"'
            )
        return (numbers[0] if len(numbers) == 2 else None), numbers[-1]

    @property
    def bounds(self) -> dict[Rejection, Bounds]:
        """The accepted values of each statistic of rollout_rs, for k1 as logarithms.

        Raises ValueError where rollout_rs_threshold is missing or no such bound.
        """
        written = self.rollout_rs_threshold
        thresholds = str(written).split(",")
        if self.rollout_rs and written is None:
            raise ValueError(
                f"rollout_rs {self.rollout_rs[0]} needs rollout_rs_threshold, such as "
                f"{_example(self.rollout_rs[0])}"
            )
        if self.rollout_rs and len(thresholds) not in (1, len(self.rollout_rs)):
            raise ValueError(
                f"rollout_rs_threshold has {len(thresholds)} bounds for {len(self.rollout_rs)} "
                f"statistics of rollout_rs; write one for each, or one for all"
            )
        if len(thresholds) == 1:
            thresholds *= len(self.rollout_rs)
        return {
            name: _accepted(name, threshold)
            for name, threshold in zip(self.rollout_rs, thresholds, strict=True)
        }


def _accepted(statistic: str, written: float | str) -> Bounds:
    numbers = _numbers(written)
    k1 = statistic.endswith("k1")
    if not numbers or (len(numbers) == 2 and not k1):
        raise ValueError(
            f"rollout_rs_threshold {written!r} of {statistic}: write a number above 0, such as "
            f"{_example(statistic)}"
        )
    if not k1:
        return -float("inf"), numbers[0]
    if len(numbers) == 1 and numbers[0] < 1:
        raise ValueError(
            f"rollout_rs_threshold {written!r} of {statistic}: an upper bound of a ratio is at "
            f"least 1"
        )
    lower = numbers[0] if len(numbers) == 2 else 1.0 / numbers[0]
    return math.log(lower), math.log(numbers[-1])


def _numbers(written: float | str) -> list[float]:
    """A number above 0, or two in ascending order that "_" joins; empty where it is neither."""
    try:
        numbers = [float(n) for n in str(written).split("_")]
    except ValueError:
        return []
    fine = len(numbers) <= 2 and 0 < numbers[0] <= numbers[-1] < math.inf
    return numbers if fine else []


def _example(statistic: str) -> str:
    return '2.0 or "0.5_2.0"' if statistic.endswith("k1") else "0.01"


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Parts of the algorithm by name, each with its checked arguments."""

    algorithm_type: str = "grpo"
    advantage_fn: str = "grpo"
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)
    policy_loss_fn: str = "ppo"
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    kl_loss_fn: str = "none"
    kl_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    entropy_loss_fn: str = "none"
    entropy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    sample_strategy: str = "default"
    sample_strategy_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    kl_penalty_fn: str = "none"
    kl_penalty_fn_args: dict[str, Any] = field(default_factory=dict)
    # old log-probs = the engine's; False: the trainer's own before the step, or
    bypass_old_logprobs: bool = True
    proximal_window: bool = False  # those of the weights that were published last
    rollout_correction: CorrectionConfig | None = None
