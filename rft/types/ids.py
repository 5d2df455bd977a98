"""Ids of weight versions, groups and experiences.  They sort alike as text and as numbers."""

from __future__ import annotations

from typing import Self

from msgspec import Struct

SEED = 42
"""Default seed."""
MAX_REWARD = 1e18  # its square is still a float32


class Version(Struct, frozen=True, order=True, array_like=True, gc=False):
    """One complete set of weights: the `step`-th optimizer step of trainer start `lineage`.

    `attempt` counts attempts to serve them: a new attempt after a failed canary has a new label, so
    rows of the failed one can be excluded.  Use, staleness and checkpoints compare lineage and step
    only (`published`).

    Example: `Version(2, 30)` prints as "2:30", its second attempt as "2:30.1".  `Version(1, 0)` are
    the initial weights of a new run.
    """

    lineage: int
    step: int
    attempt: int = 0

    def __post_init__(self) -> None:
        if self.lineage < 1 or self.step < 0 or self.attempt < 0:
            raise ValueError(f"version {self}: lineage counts from 1, step and attempt from 0")

    def __str__(self) -> str:
        return f"{self.lineage}:{self.step}" + (f".{self.attempt}" if self.attempt else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "2:30.1", and "2:30" as attempt 0."""
        lineage, _, rest = text.partition(":")
        step, _, attempt = rest.partition(".")
        return cls(int(lineage), int(step), int(attempt or 0))

    @property
    def published(self) -> Version:
        """The version without its attempt."""
        if self.attempt:
            return Version(self.lineage, self.step)
        return self


FIXED = Version(1, 0)
"""The version of weights that never change."""


class GroupId(Struct, frozen=True, order=True, array_like=True, gc=False):
    """All runs of one task in one explore batch.

    `explorer` numbers the explorer processes.
    """

    lineage: int
    explorer: int
    batch: int
    task: int

    def __str__(self) -> str:
        return f"{self.lineage:04d}.{self.explorer:02d}.{self.batch:08d}.{self.task:06d}"

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(*_numbers(text, 4))

    def run(self, run: int, attempt: int = 0, step: int = 0) -> ExperienceId:
        return ExperienceId(self.lineage, self.explorer, self.batch, self.task, run, attempt, step)


class ExperienceId(Struct, frozen=True, order=True, array_like=True, gc=False):
    """lineage.explorer.batch.task.run.attempt.step, e.g. "0001.00.00000012.000003.0007.00.0000"."""

    lineage: int
    explorer: int
    batch: int
    task: int
    run: int
    attempt: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.lineage:04d}.{self.explorer:02d}.{self.batch:08d}.{self.task:06d}.{self.run:04d}.{self.attempt:02d}.{self.step:04d}"

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(*_numbers(text, 7))

    @property
    def group(self) -> GroupId:
        return GroupId(self.lineage, self.explorer, self.batch, self.task)


def _numbers(text: str, count: int) -> list[int]:
    parts = text.split(".")
    if len(parts) != count or not all(p.isdecimal() for p in parts):
        raise ValueError(f"{text!r} is not an id of {count} numbers joined by dots")
    return [int(p) for p in parts]
