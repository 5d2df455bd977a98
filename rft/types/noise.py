"""How far the log-probs of two computations of one model may be apart in bfloat16 and float16: a
multiple of what rounding does to it.

Rounding moves a log-prob by more the larger a model's logits are, so no number of nats separates
right weights from wrong ones in all models.  The noise is measured: one side computes the same
tokens with other roundings, see `rft.engine.rounding`.  The mean over tokens is judged, because it
is steady.  The largest depends on a few tokens; its limit is wide, and is for rare tokens that are
far off.  `scripts/canary_noise.py` measures how often right weights are refused and wrong ones
pass.
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
    """Differences of log-probs over some tokens, in nats, without their signs."""

    mean: float
    largest: float

    @classmethod
    def of(cls, differences: np.ndarray) -> Self:
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
    """The largest difference of two computations in `dtype` of a model whose rounding makes
    `noise`.
    """
    mean = max(_LEAST_MEAN[dtype], multiple * noise.mean)
    return Difference(mean, max(_LEAST_LARGEST, mean, multiple * _WIDER * noise.largest))
