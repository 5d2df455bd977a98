"""Steers the factor of a KL term so that the KL comes near a target (arXiv:1909.08593), or keeps it
constant.

Knows one number per train step, no tensors.  Invariant: the factor of a step depends only on the
steps before it, so it is part of a checkpoint and the first step after a resume has the factor that
it would have had.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 0.2  # largest relative error that one step answers to


@dataclass
class KlController:
    """The factor `coef` of a KL term.  `target` None: constant."""

    coef: float
    target: float | None = None  # nats per token
    horizon: int = 10_000  # rows

    def update(self, kl: float, rows: int) -> None:
        """After a step of `rows` sequences whose mean KL was `kl`:  coef <- coef (1 + clip(kl /
        target - 1, +-0.2) rows / horizon).

        Example: target 0.1, horizon 10000, 1024 rows, coef 0.001, kl 0.05: 0.00097952.  A KL that
        is not finite changes nothing, as the step it comes from does not.
        """
        if self.target is None or not abs(kl) < float("inf"):
            return
        error = min(LIMIT, max(-LIMIT, kl / self.target - 1.0))
        self.coef = max(0.0, self.coef * (1.0 + error * rows / self.horizon))
