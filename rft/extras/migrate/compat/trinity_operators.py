"""Trinity-RFT's operators on experiences: process(exps) -> (exps, metrics), for one group at a
time.

`stage` says what an operator may change ("reward": rewards; "statistics": info; "drop": leaves
experiences out or masks them; the default).  Invariant: rows come back as they went in, but for
what the stage allows.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from functools import cache
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from rft.buffer.operators.base import GroupView, Operator, Result, Stage
from rft.extras.migrate.compat.trinity_experience import EID, TrinityExperience, plain
from rft.types import experience as ours
from rft.types.metrics import Metric


class _Base:
    stage: ClassVar[Stage] = "drop"

    @classmethod
    def __rft_adapt__(cls) -> type:
        adapt: Any = _as_ours
        adapted: type = adapt(cls)
        return adapted

    @property
    def auxiliary_models(self) -> Any:
        raise ValueError(
            "operators of Trinity-RFT's shape get no auxiliary models; write a "
            "rft.buffer.operators.base.Operator"
        )


class ExperienceOperator(_Base, ABC):
    @abstractmethod
    def process(
        self, exps: list[TrinityExperience]
    ) -> tuple[list[TrinityExperience], dict[str, float]]: ...

    def close(self) -> None:
        """Once, after the last group."""


class ExperienceOperatorV1(_Base, ABC):
    async def prepare(self) -> None:
        """Once, before the first group."""

    @abstractmethod
    async def process(
        self, exps: list[TrinityExperience]
    ) -> tuple[list[TrinityExperience], dict[str, float]]: ...

    async def close(self) -> None:
        """Once, after the last group."""


@cache
def _as_ours(cls: Any) -> type:
    class AdaptedOperator(Operator):
        stage = cls.stage
        __signature__ = inspect.signature(cls)

        def __init__(self, **args: Any) -> None:
            self._op = cls(**args)

        async def prepare(self, models: Any) -> None:
            if isinstance(self._op, ExperienceOperatorV1):
                await self._op.prepare()

        async def close(self) -> None:
            if inspect.isawaitable(waiting := self._op.close()):
                await waiting

        def process(
            self, rows: Sequence[ours.Experience], group: GroupView
        ) -> Result | Awaitable[Result]:
            return _back(cls, rows, given := _theirs(rows), self._op.process(list(given)))

    class AwaitedOperator(AdaptedOperator):
        async def process(self, rows: Sequence[ours.Experience], group: GroupView) -> Result:
            return _back(cls, rows, given := _theirs(rows), await self._op.process(list(given)))

    operator = AwaitedOperator if inspect.iscoroutinefunction(cls.process) else AdaptedOperator
    operator.__name__ = cls.__name__
    return operator


def _theirs(rows: Sequence[ours.Experience]) -> list[TrinityExperience]:
    adapted = []
    for row in rows:
        start = max(1, int(row.loss_mask.argmax()))
        adapted.append(
            TrinityExperience(
                eid=EID(row.id.batch, row.id.task, row.id.run, row.id.step, str(row.id)),
                tokens=torch.from_numpy(row.tokens.copy()),
                prompt_length=start,
                logprobs=torch.from_numpy(row.logprobs[start:].copy()),
                action_mask=torch.from_numpy(row.loss_mask[start:].copy()),
                reward=row.reward,
                truncate_status="response_truncated" if row.status == "truncated" else None,
                info={
                    "task_index": {"index": row.task_index, "taskset_id": row.taskset},
                    **row.info,
                },
                metrics={**row.reward_parts, **row.metrics},
                prompt_text=row.prompt_text,
                response_text=row.response_text,
                messages=list(row.messages),
            )
        )
    return adapted


def _back(
    cls: Any, rows: Sequence[ours.Experience], before: Sequence[TrinityExperience], result: Any
) -> Result:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{cls.__name__}.process must return (experiences, metrics)")
    by_id = {id(x): row for x, row in zip(before, rows, strict=True)}
    back = []
    for x in result[0]:
        if id(x) not in by_id:
            raise ValueError(
                f"{cls.__name__} returned an experience it was not given; rows are neither made "
                f"nor copied here"
            )
        back.append(_row(cls, by_id[id(x)], x))
    return Result(back, [Metric(str(k), float(v), "mean") for k, v in result[1].items()])


def _row(cls: Any, row: ours.Experience, x: TrinityExperience) -> ours.Experience:
    if x.reward != row.reward and cls.stage != "reward":
        raise ValueError(f'{cls.__name__} changes rewards: write `stage = "reward"` into the class')
    if cls.stage == "drop":
        mask = row.loss_mask.copy()
        mask[len(mask) - len(x.action_mask) :] &= x.action_mask.numpy()
        return msgspec.structs.replace(
            row, loss_mask=mask, logprobs=np.where(mask, row.logprobs, np.float32(0))
        )
    added = plain({k: v for k, v in x.info.items() if k != "task_index"})
    return msgspec.structs.replace(
        row, reward=None if x.reward is None else float(x.reward), info=added
    )
