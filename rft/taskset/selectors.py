"""Choose the next rows of a taskset: the plugin kind "selector" and the five built-in selectors.

A selector sees lengths, numeric columns and pass rates, never prompts.
Invariant: `rows` depends only on the view, the arguments, the learnt pass rates and the request; a
run that learns the same makes the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rft.plugins import kind

selector = kind("selector")


@dataclass(frozen=True)
class View:
    """A selector's view of its taskset.  `rng(*words)` returns the same generator for the same
    words, taskset and seeds.
    """

    length: int
    features: np.ndarray  # float64 [length, number of feature_keys]
    rng: Callable[..., np.random.Generator]


class TaskSelector:
    """Order of one taskset.  `__init__` takes the view, then the checked `kwargs` of data_selector
    as keyword arguments.
    """

    # minimum and maximum number of feature_keys
    num_features: ClassVar[tuple[int, int | None]] = (0, 0)
    learns: ClassVar[bool] = False  # needs pass rates; such a selector is for training only

    def __init__(self, view: View, **args: Any) -> None:
        self.view = view

    def rows(self, batch: int, first: int, count: int) -> Sequence[int]:
        """Return the rows for tasks `first` to `first + count` (of this taskset, counted over the
        run), which belong to explore batch `batch`.
        """
        raise NotImplementedError

    def learn(self, rows: np.ndarray, pass_rates: np.ndarray) -> None:
        """Learn the pass rates (0 to 1) of the tasks of one closed batch.

        Called in order, once for each batch that has pass rates.
        """
        raise NotImplementedError


class NoSelectorArgs(BaseModel):
    """For a selector without arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@selector("sequential", args=NoSelectorArgs)
class Sequential(TaskSelector):
    """Takes rows in file order, repeatedly."""

    def rows(self, batch: int, first: int, count: int) -> Sequence[int]:
        return [n % self.view.length for n in range(first, first + count)]


@selector("shuffle", args=NoSelectorArgs)
class Shuffle(TaskSelector):
    """Takes rows in a new permutation in each epoch."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: view.rng("shuffle", epoch).permutation(view.length)
        )

    def rows(self, batch: int, first: int, count: int) -> Sequence[int]:
        places = (divmod(n, self.view.length) for n in range(first, first + count))
        return [int(self._permutation(epoch)[at]) for epoch, at in places]


@selector("random", args=NoSelectorArgs)
class Random(TaskSelector):
    """Draws rows for each batch, without repetition inside a batch."""

    def rows(self, batch: int, first: int, count: int) -> Sequence[int]:
        rows = self.view.rng("random", batch).choice(
            self.view.length, size=count, replace=count > self.view.length
        )
        return [int(row) for row in rows]


@selector("offline_easy2hard", args=NoSelectorArgs)
class OfflineEasyToHard(TaskSelector):
    """Takes rows sorted once by feature_keys, the largest first, repeatedly.

    Of equal rows the later one comes first.
    """

    num_features = (1, None)

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._order = np.lexsort(view.features.T[::-1])[::-1]

    def rows(self, batch: int, first: int, count: int) -> Sequence[int]:
        return [int(self._order[n % self.view.length]) for n in range(first, first + count)]


class DifficultyArgs(BaseModel):
    """Arguments of difficulty_based, named as in BOTS (arXiv:2510.26374)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    m: int = Field(16, ge=1, description="Runs that one observed pass rate counts as.")
    lamb: float = Field(
        0.2, ge=0, le=1, description="Fraction of past observations forgotten in each batch."
    )
    rho: float = Field(
        0.2, ge=0, le=1, description="Weight of interpolated against observed pass rates."
    )
    target_reward: float = Field(1.0, ge=0, le=1, description="Target pass rate.")
    tau: float = Field(1.0, ge=0, description="Sampling temperature; 0 takes the best ones.")
    do_sample: bool = Field(
        False, description="Draw the pass rate from the posterior instead of taking its mean."
    )
    adaptive_rho: bool = Field(
        False, description="Halve rho when interpolation is off by 0.25 or more on average."
    )


_DISCOUNT = 0.9  # of the capability coefficient's moving average
_FAR_OFF = 0.25  # mean error of the interpolation from which an adaptive rho is halved


@selector("difficulty_based", args=DifficultyArgs)
class DifficultyBased(TaskSelector):
    """Takes rows whose estimated pass rate is nearest to `target_reward` (BOTS).

    Estimates are Beta posteriors updated with pass rates.  The two feature_keys are pass rates of a
    weaker and a stronger reference model.  With c, the policy's position between them, every row's
    pass rate is estimated as p = weak + c (strong - weak), or as observed in this batch.  Then,
    with s observed passes of m:

        alpha <- (1 - lamb) alpha + lamb + (1 - rho) s + rho m p,   and beta the same with failures.   arXiv:2510.26374
    """

    num_features = (2, 2)
    learns = True

    def __init__(self, view: View, **args: Any) -> None:
        super().__init__(view)
        self.args = DifficultyArgs(**args)
        self.alpha = np.ones(view.length)
        self.beta = np.ones(view.length)
        self.rho = self.args.rho
        self.capability: float | None = None  # 0 = the weaker model, 1 = the stronger model

    def rows(self, batch: int, first: int, count: int) -> Sequence[int]:
        rng = self.view.rng("difficulty", batch)
        length = self.view.length
        expected = (
            rng.beta(self.alpha, self.beta)
            if self.args.do_sample
            else self.alpha / (self.alpha + self.beta)
        )
        score = -np.abs(self.args.target_reward - expected)
        rows: list[int] = []
        while len(rows) < count:  # more tasks than rows: repeat rows
            size = min(count - len(rows), length)
            # Gumbel-top-k: softmax sampling without replacement
            keys = score if self.args.tau == 0 else score / self.args.tau + rng.gumbel(size=length)
            rows += np.argsort(-keys, kind="stable")[:size].tolist()
        return rows

    def learn(self, rows: np.ndarray, pass_rates: np.ndarray) -> None:
        a = self.args
        weak = self.view.features[:, 0]
        strong = self.view.features[:, 1]
        low = weak[rows].mean()
        high = strong[rows].mean()
        estimate = float((pass_rates.mean() - low) / (high - low + 1e-6))
        old = estimate if self.capability is None else self.capability
        self.capability = _DISCOUNT * old + (1 - _DISCOUNT) * estimate
        expected = np.clip(weak + self.capability * (strong - weak), 0, 1)
        if a.adaptive_rho and np.abs(expected[rows] - pass_rates).mean() >= _FAR_OFF:
            self.rho /= 2
        expected[rows] = pass_rates
        passes = np.zeros(self.view.length)
        failures = np.zeros(self.view.length)
        passes[rows], failures[rows] = a.m * pass_rates, a.m * (1 - pass_rates)
        self.alpha = (
            (1 - a.lamb) * self.alpha + a.lamb + (1 - self.rho) * passes + self.rho * a.m * expected
        )
        self.beta = (
            (1 - a.lamb) * self.beta
            + a.lamb
            + (1 - self.rho) * failures
            + self.rho * a.m * (1 - expected)
        )
