"""veRL's reward managers by name: how a function that scores is called.  docs/howto/reward.md says
where ours differ.

    naive   one call for each answer, in a thread
    dapo    as naive, and a plain number is also the part `acc`; the penalty for long answers is `enable_overlong_penalty`
    prime   one call for each answer, in worker processes that are killed at the deadline
    batch   one call with lists: all answers of a task

A reward that is no such function is called in its own way, whatever the manager.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rft.errors import ConfigError
from rft.reward.base import Reward
from rft.reward.wrap import ChangedReward
from rft.types.completion import Score, Transcript
from rft.types.task import Task
from rft.worker.threads import unblocked

PRIME_TIMEOUT_S = 300.0  # veRL's


class ManagerArgs(BaseModel):
    """`reward_timeout_s`: of one call; null: 300 with prime, else only explorer.max_timeout.  A
    call that takes longer leaves its answers unscored.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    reward_manager: Literal["naive", "dapo", "prime", "batch"] | None = None
    reward_timeout_s: float | None = Field(None, gt=0)


def check_manager(manager: ManagerArgs, *, lists: bool, name: str, key: str) -> None:
    """Raises ConfigError if the manager calls functions of the other shape."""
    if manager.reward_manager is not None and (manager.reward_manager == "batch") != lists:
        what = (
            "lists (solution_strs, ground_truths)"
            if lists
            else "one answer (solution_str, ground_truth)"
        )
        use = "batch" if lists else "naive, dapo or prime"
        raise ConfigError(
            f"reward {name!r} takes {what}; its reward_manager is {use}",
            key=key,
            given=manager.reward_manager,
        )


def with_acc(inner: Reward) -> Reward:
    """A plain number is also the part `acc`."""

    def add(task: Task, transcript: Transcript, score: Score) -> Score:
        if score.value is None or score.parts:
            return score
        return Score(value=score.value, parts={"acc": score.value}, reason=score.reason)

    return ChangedReward(inner, add)


async def answer(
    fn: Callable[..., Any], keywords: Mapping[str, Any], manager: ManagerArgs, name: str
) -> Any:
    """What `fn`, which may be async, gives; an unscored Score once its time is up."""
    try:
        return await asyncio.wait_for(
            unblocked(fn, f"reward {name}", **keywords), manager.reward_timeout_s
        )
    except TimeoutError:
        if manager.reward_timeout_s is None:
            raise
        return late(manager.reward_timeout_s)


def late(timeout_s: float) -> Score:
    return Score(value=None, reason=f"timeout: the reward took longer than {timeout_s:g} s")
