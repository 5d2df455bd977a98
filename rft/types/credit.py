"""The reward of a run, and the comparison of runs in a group: the only place of both rules.

A run is one row or several: the chains of an agent's calls (a sub-agent, a compacted history), or
its steps.

    credit of a row    its reward is           the run's reward              a group compares
    run                that of the whole run   the same, once                the run, once
    step               of its own calls        the sum over the run's rows   every row by itself

A run that was scored has that score, whatever the rewards of its calls.
Invariant: cutting a run into more rows of credit "run" changes neither its reward nor the
statistics of its group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from rft.types.completion import Credit
from rft.types.ports import GroupStats


class ScoredRow(NamedTuple):
    """A scored row, for the statistics of its group."""

    reward: float
    run: int  # number of the run
    step: int  # number in the run
    length: int  # trained tokens
    credit: Credit = "run"
    parts: Mapping[str, float] | None = None  # of the reward, by name


def run_rewards(members: Iterable[ScoredRow]) -> dict[int, float]:
    """Return the reward of every run with a scored row."""
    shared: dict[int, list[float]] = defaultdict(list)
    earned: dict[int, list[float]] = defaultdict(list)
    for m in members:
        (shared if m.credit == "run" else earned)[m.run].append(m.reward)
    return {run: math.fsum(rewards) for run, rewards in earned.items()} | {
        run: _shared(r) for run, r in shared.items()
    }


def _shared(rewards: Sequence[float]) -> float:
    """Return the reward shared by the rows of a run; their mean if only some were edited."""
    if min(rewards) == max(rewards):
        return rewards[0]
    return fmean(rewards)


def shared_parts(rows: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the reward parts shared by the rows of a run; the mean of a part if rows differ."""
    names = dict.fromkeys(name for parts in rows for name in parts or ())
    return {name: _shared([p[name] for p in rows if p and name in p]) for name in names}


def parted_runs(members: Iterable[ScoredRow]) -> dict[int, list[float]]:
    """Return the rewards of runs whose rows should share one reward but differ."""
    rewards_by_run: dict[int, list[float]] = defaultdict(list)
    for m in members:
        if m.credit == "run":
            rewards_by_run[m.run].append(m.reward)
    return {run: rewards for run, rewards in rewards_by_run.items() if min(rewards) != max(rewards)}


def group_statistics(
    name: str, members: Sequence[ScoredRow | tuple[float, int, int, int]]
) -> GroupStats:
    """Compute statistics of a group's scored rows, in the order of their ids."""
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
        parts=tuple(dict(m.parts or {}) for m in rows) if any(m.parts for m in rows) else (),
    )


def rewards_of_runs(group: GroupStats) -> dict[int, float]:
    """Return the reward of every scored run of a group."""
    return run_rewards(_members(group))


def compared(group: GroupStats) -> GroupStats:
    """Return statistics with one entry per run, or per row of credit "step", for advantages."""
    units = _units(_members(group))
    if len(units) == len(group.rewards):
        return group
    return group_statistics(group.group, units)


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
            group.parts or [None] * count,
            strict=True,
        )
    ]


def _units(members: Sequence[ScoredRow]) -> list[ScoredRow]:
    """Merge the rows of each run, in the order of the first, except rows of credit "step"."""
    shared = run_rewards(m for m in members if m.credit == "run")
    lengths: dict[int, int] = defaultdict(int)
    parts: dict[int, list[Mapping[str, float] | None]] = defaultdict(list)
    for m in members:
        if m.credit == "run":
            lengths[m.run] += m.length
            parts[m.run].append(m.parts)
    units = []
    for m in members:
        if m.credit == "step":
            units.append(m)
        elif m.run in shared:
            units.append(
                m._replace(
                    reward=shared.pop(m.run),
                    length=lengths[m.run],
                    parts=shared_parts(parts[m.run]),
                )
            )
    return units
