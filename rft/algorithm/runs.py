"""The runs of a step: the rows of each run joined, so that advantages compare runs whatever rows
they were cut into.

    rows of the step    run 0: [a b]   run 1: [c] [d e]        what an advantage sees   [a b]   [c d e]

A row whose reward is that of its own calls (credit "step") is a run of its own here.  Depends on no
advantage and no loss. Invariant: cutting a run of credit "run" into more rows changes nothing that
an advantage sees but the names of its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from rft.algorithm.args import declared
from rft.algorithm.base import Advantages, StepInputs, StepRow
from rft.plugins import kind
from rft.types.credit import compared, run_rewards, shared_parts

F = TypeVar("F", bound=Callable[..., Any])
_advantage = kind("advantage_fn")
_ARRAYS = (
    "logprobs",
    "old",
    "ref",
    "entropy",
    "sum_squares",
    "discriminator_mean",
    "values",
    "teacher",
    "weights",
)


@dataclass(frozen=True)
class Runs:
    """`x` with one row for each run, and of each of these the numbers of the step's rows, in the
    order of their steps.
    """

    x: StepInputs
    rows: Sequence[Sequence[int]]
    lengths: Sequence[int]  # trained tokens of the step's rows

    def of_rows(self, values: Sequence[Any]) -> list[Any]:
        """What each row has of its run's value: the same number, or its part of an array with a
        number for each token.
        """
        arrays: list[Any] = [None] * len(self.lengths)
        for numbers, value in zip(self.rows, values, strict=True):
            cuts = np.cumsum([self.lengths[i] for i in numbers])[:-1]
            parts = [value] * len(numbers) if np.ndim(value) == 0 else np.split(value, cuts)
            for i, part in zip(numbers, parts, strict=True):
                arrays[i] = part
        return arrays


def apart(x: StepInputs) -> Runs:
    """Every row by itself."""
    return Runs(x, [[i] for i in range(len(x.rows))], [row.length for row in x.rows])


def joined(x: StepInputs) -> Runs:
    """The rows of each run as one, in the order of the first; statistics are those of runs."""
    places: dict[tuple[str, int, int], list[int]] = {}
    for i, row in enumerate(x.rows):
        places.setdefault((row.group, row.run, -1 if row.credit == "run" else row.step), []).append(
            i
        )
    numbers = [sorted(indices, key=lambda i: x.rows[i].step) for indices in places.values()]
    rows = [_joined([x.rows[i] for i in indices]) for indices in numbers]
    groups = {name: compared(group) for name, group in x.groups.items()}
    keep = x.keep and [np.concatenate([x.keep[i] for i in indices]) for indices in numbers]
    return Runs(
        replace(x, rows=rows, groups=groups, keep=keep), numbers, [row.length for row in x.rows]
    )


def _joined(rows: Sequence[StepRow]) -> StepRow:
    first = rows[0]
    if len(rows) == 1:
        return first
    joined_fields: dict[str, Any] = {}
    for name in _ARRAYS:
        parts = [getattr(row, name) for row in rows]
        joined_fields[name] = None if any(part is None for part in parts) else np.concatenate(parts)
    if any(row.token_rewards is not None for row in rows):
        joined_fields["token_rewards"] = np.concatenate([row.rewards for row in rows]).astype(
            np.float32
        )
    reward = run_rewards(row.scored for row in rows)[first.run]
    reward_parts = shared_parts([row.reward_parts for row in rows])
    info = {name: value for row in rows for name, value in row.info.items()}
    return replace(first, reward=reward, reward_parts=reward_parts, info=info, **joined_fields)


def advantage(name: str, *, args: type | None = None) -> Callable[[F], F]:
    """Registers an advantage: fn(x, args) -> a number for each run, an array with a number for each
    token of it, or `Advantages`.

    Called with rows of which some are of one run, it sees the run and gives each row its part,
    unless its `Args` say `compares_rows`.
    """

    def register(fn: F) -> F:
        @functools.wraps(fn)
        def of_runs(x: StepInputs, args: Any) -> Any:
            runs = joined(x)
            if declared(args).compares_rows or len(runs.rows) == len(x.rows):
                return fn(x if declared(args).compares_rows else runs.x, args)
            advantages = fn(runs.x, args)
            return (
                split(advantages, runs)
                if isinstance(advantages, Advantages)
                else runs.of_rows(advantages)
            )

        return _advantage(name, args=args)(cast(F, of_runs))

    return register


def split(advantages: Advantages, runs: Runs) -> Advantages:
    """Advantages of runs as those of their rows."""
    returns = None if advantages.returns is None else runs.of_rows(advantages.returns)
    keep = None if advantages.keep is None else runs.of_rows(advantages.keep)
    return replace(advantages, values=runs.of_rows(advantages.values), returns=returns, keep=keep)
