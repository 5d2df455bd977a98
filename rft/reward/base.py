"""The protocol of a reward: a task and a transcript in, a score out.

    @reward("exact_answer")
    def exact_answer(task, transcript): return float(transcript.answer.strip() == task.truth)

A reward is a function or an object with `__call__`; a class is constructed with the checked `reward_args`.  It may be async.
One with `whole_group = True` is called once for all runs of a task, with a list of transcripts, and returns a list.  One with
`async def prepare(models)` is given the auxiliary models by name before the first run.
It returns a number, a `Score`, or a dict of parts whose sum is the value.  One that cannot score raises.  A function with veRL's
or TRL's parameter names is taken as it is (`rft.reward.functions`, `rft.reward.lists`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from rft.plugins import kind
from rft.types.completion import Score, Transcript
from rft.types.task import Task

reward = kind("reward")

RewardResult = float | int | Score | dict[str, float]
Reward = Callable[[Task, Transcript], Any]


async def score(fn: Reward, task: Task, transcript: Transcript) -> Score:
    """Calls `fn` and makes a checked Score of what it returns.  Raises ValueError on anything that is not a finite number."""
    result = fn(task, transcript)
    if inspect.isawaitable(result):
        result = await result
    return checked(result)


def checked(result: RewardResult) -> Score:
    """A Score of what a reward returned.  Raises ValueError on anything that is not a finite number."""
    if isinstance(result, dict):
        parts = {str(k): _number(v, f"reward part {k!r}") for k, v in result.items()}
        return Score(value=math.fsum(parts.values()), parts=parts)
    if isinstance(result, Score):
        if result.value is not None:
            _number(result.value, "reward")
        for name, part in result.parts.items():
            _number(part, f"reward part {name!r}")
        return result
    return Score(value=_number(result, "reward"))


async def score_group(fn: Any, task: Task, transcripts: Sequence[Transcript]) -> list[Score]:
    """Calls a group reward (`fn.whole_group` is true): fn(task, transcripts) gives one result for each transcript, in order."""
    results = fn(task, transcripts)
    if inspect.isawaitable(results):
        results = await results
    if not isinstance(results, list | tuple) or len(results) != len(transcripts):
        got = len(results) if isinstance(results, list | tuple) else type(results).__name__
        raise ValueError(f"a group reward must return a list with one result for each of {len(transcripts)} runs, not {got}")
    return [checked(r) for r in results]


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise ValueError(f"{what} is {value!r}; it must be a finite number (None through Score(value=None) means unscored)")
