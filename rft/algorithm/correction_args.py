"""Arguments of the off-policy correction.  Imports neither torch nor numpy: `rft check` reads them in its first stage."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from rft.algorithm.argbase import Args

# fmt: off
Rejection = Literal[
    "none", "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k1", "seq_max_k2", "seq_max_k3",
]
# fmt: on


class CorrectionArgs(Args):
    """`algorithm.rollout_correction`."""

    rollout_is: Literal["none", "token", "sequence"] = Field("none", description="importance weights of tokens or of sequences")
    rollout_is_threshold: float = Field(2.0, gt=0, description="largest weight")
    rollout_is_batch_normalize: bool = Field(False, description="divide weights by their mean")
    rollout_rs: Rejection = Field("none", description="statistic by which tokens or sequences are rejected")
    rollout_rs_threshold: float | str | None = Field(None, description="largest value of it that is kept")
    bypass_mode: bool = Field(False, description="the ratio of the loss is taken against the sampler")
    loss_type: Literal["ppo_clip", "reinforce"] = Field("ppo_clip", description="loss with bypass_mode")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rollout_rs != "none":
            _ = self.bounds  # raises ValueError for wrong ones
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type reinforce is for bypass_mode: true")
        return self

    @property
    def weighted(self) -> bool:
        """Whether losses are multiplied by weights; a clipped ratio against the sampler holds them already."""
        return self.rollout_is != "none" and (not self.bypass_mode or self.loss_type == "reinforce")

    @property
    def measured(self) -> bool:
        """Whether the step needs log-probs of the policy as it is before it."""
        return not self.bypass_mode or self.weighted or self.rollout_rs != "none"

    @property
    def bounds(self) -> tuple[float, float]:
        """(lower, upper) of the kept values; for k1 the logarithms of the written ones, the lower being 1 / upper where only that is."""
        given = self.rollout_rs_threshold
        if given is None:
            raise ValueError(f"rollout_rs {self.rollout_rs} needs rollout_rs_threshold, such as {_example(self.rollout_rs)}")
        first, _, second = str(given).partition("_")
        try:
            numbers = [float(n) for n in ((first, second) if second else (first,))]
        except ValueError:
            numbers = []
        k1 = self.rollout_rs.endswith("k1")
        if (
            not numbers
            or not all(0 < n < float("inf") for n in numbers)
            or (len(numbers) == 2 and not (k1 and numbers[0] <= numbers[1]))
        ):
            raise ValueError(
                f"rollout_rs_threshold {given!r} of {self.rollout_rs}: write a number above 0, such as {_example(self.rollout_rs)}"
            )
        if not k1:
            return -float("inf"), numbers[0]
        lower, upper = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
        if lower > upper:
            raise ValueError(f"rollout_rs_threshold {given!r} of {self.rollout_rs}: an upper bound of a ratio is at least 1")
        return math.log(lower), math.log(upper)


def _example(statistic: str) -> str:
    return '2.0 or "0.5_2.0"' if statistic.endswith("k1") else "0.01"
