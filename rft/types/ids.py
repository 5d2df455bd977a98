"""Names of things that travel: weight versions, groups, experiences.  They sort as text the way they sort as numbers."""

from __future__ import annotations

from typing import Self

from msgspec import Struct


class Version(Struct, frozen=True, order=True, array_like=True, gc=False):
    """One complete set of weights: the `step`-th optimizer step of trainer start `lineage`.

    Example: `Version(2, 30)` prints as "2:30".  `Version(1, 0)` are the weights a fresh run starts from.
    """

    lineage: int
    step: int

    def __post_init__(self) -> None:
        if self.lineage < 1 or self.step < 0:
            raise ValueError(f"version {self.lineage}:{self.step}: lineage counts from 1 and step from 0")

    def __str__(self) -> str:
        return f"{self.lineage}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        lineage, _, step = text.partition(":")
        return cls(int(lineage), int(step))


class GroupId(Struct, frozen=True, order=True, array_like=True, gc=False):
    """All runs of one task in one explore batch.  `explorer` numbers the explorer processes."""

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
