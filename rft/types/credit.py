"""The reward of a run, and what the runs of a group are compared by: the one place of both rules.

A run is one row or several: the chains of an agent's calls (a sub-agent, a compacted history), or
its steps.

    credit of a row    its reward is           the run's reward              a group compares
    run                that of the whole run   the same, once                the run, once
    step               of its own calls        the sum over the run's rows   every row by itself

A run that was scored as a whole has that score, whatever its calls earned beside it.
Invariant: cutting a run into more rows of credit "run" changes neither its reward nor the
statistics of its group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from rft.types.completion import Credit
from rft.types.ports import GroupStats


class ScoredRow(NamedTuple):
    """A scored row, as the statistics of its group read it."""

    reward: float
    run: int  # number of the run
    step: int  # number in the run
    length: int  # trained tokens
    credit: Credit = "run"


def run_rewards(members: Iterable[ScoredRow]) -> dict[int, float]:
    """The reward of every run that has a scored row."""
    shared: dict[int, list[float]] = defaultdict(list)
    earned: dict[int, list[float]] = defaultdict(list)
    for m in members:
        (shared if m.credit == "run" else earned)[m.run].append(m.reward)
    return {run: math.fsum(rewards) for run, rewards in earned.items()} | {
        run: _shared(r) for run, r in shared.items()
    }


def _shared(rewards: Sequence[float]) -> float:
    """The reward that the rows of a run share; their mean where only some were edited."""
    return rewards[0] if min(rewards) == max(rewards) else fmean(rewards)


def parted_runs(members: Iterable[ScoredRow]) -> dict[int, list[float]]:
    """Runs whose rows should share a reward and do not, with their rows' rewards."""
    found: dict[int, list[float]] = defaultdict(list)
    for m in members:
        if m.credit == "run":
            found[m.run].append(m.reward)
    return {run: rewards for run, rewards in found.items() if min(rewards) != max(rewards)}


def group_statistics(
    name: str, members: Sequence[ScoredRow | tuple[float, int, int, int]]
) -> GroupStats:
    """Statistics of a group's scored rows, in the order of their ids."""
    rows = [ScoredRow(*m) for m in members]
    rewards = [m.reward for m in _units(rows)]
    mean = sum(rewards) / len(rewards)
    std = (
        (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
        if len(rewards) > 1
        else 0.0
    )
    return GroupStats(
        group=name,
        rewards=tuple(m.reward for m in rows),
        mean=mean,
        std=std,
        runs=tuple(m.run for m in rows),
        steps=tuple(m.step for m in rows),
        lengths=tuple(m.length for m in rows),
        credits=tuple(m.credit for m in rows),
    )


def rewards_of_runs(group: GroupStats) -> dict[int, float]:
    """The reward of every scored run of a group."""
    return run_rewards(_members(group))


def compared(group: GroupStats) -> GroupStats:
    """Statistics with one entry for each run of `group`, or for each row of credit "step": what an
    advantage compares.
    """
    units = _units(_members(group))
    return group if len(units) == len(group.rewards) else group_statistics(group.group, units)


def _members(group: GroupStats) -> list[ScoredRow]:
    count = len(group.rewards)
    credits: Sequence[Credit] = group.credits or ["run"] * count
    runs = group.runs or range(count)
    return [
        ScoredRow(*m)
        for m in zip(
            group.rewards,
            runs,
            group.steps or [0] * count,
            group.lengths or [0] * count,
            credits,
            strict=True,
        )
    ]


def _units(members: Sequence[ScoredRow]) -> list[ScoredRow]:
    """The rows of each run as one member, in the order of the first; rows of credit "step" as they
    are.
    """
    shared = run_rewards(m for m in members if m.credit == "run")
    lengths: dict[int, int] = defaultdict(int)
    for m in members:
        if m.credit == "run":
            lengths[m.run] += m.length
    units = []
    for m in members:
        if m.credit == "step":
            units.append(m)
        elif m.run in shared:
            units.append(m._replace(reward=shared.pop(m.run), length=lengths[m.run]))
    return units
