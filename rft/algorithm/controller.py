"""Steer the factor of a loss term so that what it measures comes near a target, or keep it constant.

Depends on one number per train step, on no tensors.  Invariant: the factor of a step depends only
on the steps before it, so it is part of a checkpoint and the first step after a resume has the
factor that it would have had.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from msgspec import Struct

LIMIT = 0.2  # largest relative error that one step answers to


class Steered(Struct, frozen=True):
    """State of a factor, as a checkpoint holds it."""

    coef: float
    measured: float | None


@dataclass(kw_only=True)
class Controller:
    """The factor of one term.  `target` None: the constant `coef`."""

    coef: float
    target: float | None = None  # nats per token
    measured: float | None = None  # in the last step that changed the weights

    @property
    def factor(self) -> float:
        """Of the next step."""
        return self.coef

    @property
    def state(self) -> Steered:
        return Steered(self.coef, self.measured)

    def restore(self, state: Steered) -> None:
        self.coef, self.measured = state.coef, state.measured

    def update(self, measured: float, rows: int) -> None:
        """After a step of `rows` sequences.  A number that is not finite changes nothing, as the step
        it comes from does not.
        """
        if self.target is None or not isfinite(measured):
            return
        self.measured = measured
        self.coef = self._next(measured, self.target, rows)

    def _next(self, measured: float, target: float, rows: int) -> float:
        return self.coef


@dataclass(kw_only=True)
class KlController(Controller):
    """Of a KL term (arXiv:1909.08593).

    After a step:  coef <- coef (1 + clip(KL / target - 1, +-0.2) rows / horizon).

    Example: target 0.1, horizon 10000, 1024 rows, coef 0.001, KL 0.05: 0.00097952.
    """

    horizon: int = 10_000  # rows

    def _next(self, measured: float, target: float, rows: int) -> float:
        error = min(LIMIT, max(-LIMIT, measured / target - 1.0))
        return max(0.0, self.coef * (1.0 + error * rows / self.horizon))


@dataclass(kw_only=True)
class EntropyController(Controller):
    """Of an entropy bonus (Skywork-OR1, arXiv:2505.22312).

    The factor is coef where the entropy of the step before was at or below the target, else 0, and
    0 in the first step.  After a step: coef <- coef + delta where its entropy was at or below the
    target, else coef - delta, between the bounds.

    Example: coef 0.01, target 0.5, delta 0.005; entropies 0.4, 0.6, 0.5 give factors 0, 0.015, 0,
    0.015.
    """

    delta: float
    low: float
    high: float

    @property
    def factor(self) -> float:
        if self.target is None:
            return self.coef
        return self.coef if self.measured is not None and self.measured <= self.target else 0.0

    def _next(self, measured: float, target: float, rows: int) -> float:
        change = self.delta if measured <= target else -self.delta
        return min(self.high, max(self.low, self.coef + change))
