"""The result of a train step, on one rank or over all ranks.  Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

MISMATCH = "mismatch/"


class StepResult(Struct, kw_only=True):
    """Result of one step, on one rank or (`combined`) on all ranks.

    `sums` and `maxima` cover the rank's rows; the other fields are equal on all ranks. Over several
    passes `sums` and `grad_norm` are means, `computed_positions` and `seconds` are added; sums and
    maxima that begin with "mismatch/" are of the first pass, whose weights are those before the
    step.
    """

    sums: dict[str, float]
    maxima: dict[str, float]
    trained_tokens: int  # tokens in the computed losses
    computed_positions: int  # positions the model computed, shared prefixes once
    updates: int  # updates of the weights
    skipped: int  # passes with a non-finite gradient; they change nothing
    grad_norm: float
    lr: float
    seconds: dict[str, float]
    # float32 [L] of each row before the step, micro-batch by micro-batch, rank by rank; or empty
    logprobs: list[np.ndarray] = []
    critic: StepResult | None = None

    @property
    def finite(self) -> bool:
        """Return whether the step changed weights, so that its rows are used."""
        return self.updates > 0 or (self.critic is not None and self.critic.finite)

    @property
    def nonfinite(self) -> StepResult | None:
        """Return the result of the policy or the critic if every pass was non-finite, else None."""
        return self if self.skipped and not self.updates else self.critic and self.critic.nonfinite


def combined(results: Sequence[StepResult]) -> StepResult:
    """Combine the results of all ranks: add sums, take the largest maxima."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for result in results:
        for name, value in result.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in result.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    critics = [r.critic for r in results if r.critic is not None]
    return replace(
        results[0],
        sums=sums,
        maxima=maxima,
        trained_tokens=sum(r.trained_tokens for r in results),
        computed_positions=sum(r.computed_positions for r in results),
        seconds={name: max(r.seconds[name] for r in results) for name in results[0].seconds},
        logprobs=[row for r in results for row in r.logprobs],
        critic=combined(critics) if critics else None,
    )
