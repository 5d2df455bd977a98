"""What readers have in common whose rows are given before training begins: another run's, or those
of a data set.

Invariant: which rows a step takes follows from the step alone, so nothing is recorded of them but
what a checkpoint states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rft.errors import ConfigError
from rft.types.experience import Experience
from rft.types.ids import ExperienceId
from rft.types.ports import Consumption, Lease


class GivenRows:
    """A `ports.BufferReader`.  A subclass has the `key` that names its `source`, and the rows of a
    step.
    """

    key: str

    def __init__(self, source: Path | str) -> None:
        self._source = str(source)

    def rows_of(self, step: int) -> Lease:
        """The rows of `step`.  Raises EndOfData after the last step."""
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
        """The rows follow from the step alone, so the other arguments have no effect."""
        return self.rows_of(step)

    def consumed(self, step: int) -> Consumption:
        """What all steps up to `step` took."""
        raise NotImplementedError

    def go_on(self, step: int, consumption: Consumption) -> None:
        """Raises ConfigError unless the checkpoint of `step` was trained on these rows in this
        order.
        """
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
        """Nothing to record: the step says it."""

    async def discard(self, step: int, reason: str) -> None:
        """The same; the trainer's log names the step."""

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
) -> Experience:
    """A given sequence to imitate: without a reward, and without log-probs of a sampling policy."""
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
    )
