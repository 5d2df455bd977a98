"""Tolerance between log-probs of two computations of one model in bfloat16 and float16: a multiple of
its rounding noise.

Rounding moves a log-prob more the larger a model's logits are, so no fixed number of nats separates
right weights from wrong ones.  The noise is measured: one side computes the same tokens with other
roundings (`rft.engine.rounding`).  The mean over tokens decides, because it is steady; the largest
depends on few tokens, so its limit is wide.  `scripts/canary_noise.py` measures how often right
weights are refused and wrong ones pass.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np

MULTIPLE = 3.0  # of the mean noise
_WIDER = 2.0  # the multiple of the largest noise, relative to that of the mean
# nats: the types' rounding of logits of about 10, where none is measured
_LEAST_MEAN = {"bfloat16": 0.02, "float16": 0.004}
_LEAST_LARGEST = 1.0  # nats


class Difference(Struct, frozen=True):
    """Absolute differences of log-probs over some tokens, in nats."""

    mean: float
    largest: float

    @classmethod
    def from_values(cls, differences: np.ndarray) -> Self:
        size = abs(differences.astype("float64"))
        return cls(float(size.mean()), float(size.max()))

    def within(self, limit: Difference) -> bool:
        """False where a difference is not a finite number."""
        return (
            math.isfinite(self.largest)
            and self.mean <= limit.mean
            and self.largest <= limit.largest
        )

    def __str__(self) -> str:
        return f"{self.mean:.2e} nats on average and {self.largest:.2e} at most"


def allowed(noise: Difference, dtype: str, multiple: float = MULTIPLE) -> Difference:
    """Return the tolerance between two computations in `dtype` of a model with this `noise`."""
    mean = max(_LEAST_MEAN[dtype], multiple * noise.mean)
    return Difference(mean, max(_LEAST_LARGEST, mean, multiple * _WIDER * noise.largest))
