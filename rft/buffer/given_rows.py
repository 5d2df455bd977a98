"""Base of readers whose rows are fixed before training: those of another run or of a data set.

Invariant: the rows of a step follow from the step alone, so only a checkpoint's statement is
recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rft.errors import ConfigError
from rft.types.experience import Experience
from rft.types.ids import ExperienceId
from rft.types.images import ImagePlace
from rft.types.ports import Consumption, Lease


class GivenRows:
    """A `ports.BufferReader` of fixed rows.  A subclass defines `rows_of` and the config `key`."""

    key: str

    def __init__(self, source: Path | str) -> None:
        self._source = str(source)

    def rows_of(self, step: int) -> Lease:
        """Return the rows of `step`.  Raises EndOfData after the last step."""
        raise NotImplementedError

    async def lease(
        self,
        step: int,
        *,
        groups: int | None,
        rows: int | None,
        deadline_s: float,
        max_staleness: int | None,
        until: int | None = None,
    ) -> Lease:
        """Return the rows of `step`; the other arguments have no effect."""
        return self.rows_of(step)

    def consumed(self, step: int) -> Consumption:
        """Return the consumption of all steps up to `step`."""
        raise NotImplementedError

    def go_on(self, step: int, consumption: Consumption) -> None:
        """Raise ConfigError unless the checkpoint of `step` had these rows in this order."""
        if consumption != self.consumed(step):
            raise ConfigError(
                f"its rows, their order or how many a step takes are not what the checkpoint of "
                f"step {step} was trained with, so the run "
                "cannot go on where it was.  Restore them, or choose another `name`, with "
                "resume_from_path to begin with its weights",
                key=self.key,
                given=self._source,
            )

    async def use(self, step: int, logprobs: bytes | None = None) -> None:
        """Record nothing: the rows follow from the step."""

    async def discard(self, step: int, reason: str) -> None:
        """Record nothing; the trainer logs the step."""

    async def consumption(self, step: int) -> Consumption:
        return self.consumed(step)


def expert_row(
    id: ExperienceId,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    *,
    taskset: str,
    task_index: int,
    messages: tuple[dict[str, Any], ...] = (),
    images: tuple[ImagePlace, ...] = (),
    info: dict[str, Any] | None = None,
) -> Experience:
    """Return a sequence to imitate: without reward and without log-probs of a sampling policy."""
    return Experience(
        id=id,
        taskset=taskset,
        task_index=task_index,
        workflow="",
        status="complete",
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=np.zeros(len(tokens), np.float32),
        has_logprobs=False,
        is_expert=True,
        messages=messages,
        images=images,
        info=info or {},
    )
