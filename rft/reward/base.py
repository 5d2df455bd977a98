"""What a reward is: a task and a transcript in, a score out.

    @reward("exact_answer")
    def exact_answer(task, transcript): return float(transcript.answer.strip() == task.truth)

A reward is a function, or a class derived from `Reward` that is constructed with the checked
`reward_args`.  Either may be async. It returns a number, a `Score`, or a dict of parts whose sum is
the value.  One that cannot score raises.  A function with veRL's or TRL's parameter names is taken
as it is (`rft.reward.functions`, `rft.reward.lists`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, create_model

from rft.plugins import kind
from rft.types.completion import Score, Transcript
from rft.types.ids import MAX_REWARD
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.worker.threads import CLOCK, blamed, guarded, in_thread, in_time, unblocked
from rft.worker.waiting import waits

reward = kind("reward")
F = TypeVar("F", bound=Callable[..., Any])


def reward_function(name: str) -> Callable[[F], F]:
    """Marks a function as the reward `name`; its keyword-only arguments are the model that
    `reward_fn_args` are checked against.
    """

    def mark(function: F) -> F:
        given: Any = {
            p.name: (p.annotation, p.default)
            for p in inspect.signature(function, eval_str=True).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        return reward(
            name, args=create_model(name, __config__=ConfigDict(extra="forbid"), **given)
        )(function)

    return mark


RewardResult = float | int | Score | dict[str, float]
THE_TRUTH: Final = "<the truth of the row>"
"""What `gold_answer` returns where the row's truth, in one of the usual forms, is a perfect answer.
"""


class Reward:
    """Base of rewards.  Override `__call__`; the other methods are hooks that do nothing.

    With `whole_group` the reward is called once for all runs of a task, with a list of transcripts,
    and returns a list of results.
    """

    whole_group: bool = False

    def __call__(self, task: Task, transcript: Any, /) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} needs a method __call__(self, task, transcript)"
        )

    def check_models(self, models: Mapping[str, object], tasks: Mapping[str, str]) -> None:
        """Raises ConfigError if an auxiliary model that the reward calls is missing.  `tasks`: what
        each is for, generate or score.
        """

    def check_task(self, task: Task, transcript: Transcript) -> None:
        """For `rft check`, of some answer: raises ConfigError, its key one of `reward_fn_args`,
        where none to this task can be scored.
        """

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Called once before the first run, with the auxiliary models by name."""

    async def close(self) -> None:
        """Called once after the last run."""

    def gold_answer(self, task: Task) -> str | None:
        """An answer that should get full marks, for `rft check`; None where there is none to try:
        it calls no `prepare`.
        """
        return THE_TRUTH if type(self).prepare is Reward.prepare else None

    def remarks(self) -> list[str]:
        """What `rft check` prints of this machine."""
        return []


class FunctionReward(Reward):
    """A function, or another callable object, as a `Reward`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, task: Task, transcript: Any) -> Any:
        return self.call(task, transcript)


async def hook(call: Callable[..., Any], *args: Any) -> None:
    """Calls `prepare` or `close` of a reward, which need not be async.  Raises RunFailed with the
    traceback of what it raises.
    """
    what = f"{call.__qualname__} of a reward"
    with blamed(f"{what} failed"):
        await unblocked(call, what, *args)


async def score(
    fn: Callable[[Task, Transcript], Any],
    task: Task,
    transcript: Transcript,
    *,
    timeout_s: float | None = None,
) -> Score:
    """Calls `fn` and makes a checked Score of what it returns.  Raises ValueError on anything that
    is not a finite number.
    """
    return checked(await called(fn, task, transcript, timeout_s=timeout_s))


# by id of the reward
_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Lock]] = WeakKeyDictionary()


async def called(
    fn: Callable[..., Any], task: Task, given: Any, *, timeout_s: float | None = None
) -> Any:
    """What a reward returns; raises OutOfTime, and what the reward raises.

    An ordinary function of a plugin runs in a thread, one call after another, so that one that
    sleeps or blocks delays no other run; its time counts from when its turn comes, also that of a
    reward which it is a part of.
    """
    what = f"reward {task.reward}"
    with waits("run", what, count=len(given) if isinstance(given, list | tuple) else 1):
        return await _called(fn, task, given, what, timeout_s)


async def _called(
    fn: Callable[..., Any], task: Task, given: Any, what: str, timeout_s: float | None
) -> Any:
    if not blocks(fn):
        return await in_time(guarded(fn(task.own(), given), "the reward"), timeout_s, what)
    if _is_quick(fn):
        result = fn(task, given)
    else:
        turns = _TURNS.setdefault(asyncio.get_running_loop(), {})
        async with CLOCK.get().turn(turns.setdefault(id(fn), asyncio.Lock())):
            result = await in_time(
                in_thread(partial(fn, task.own(), given), "the reward"), timeout_s, what
            )
    if inspect.isawaitable(result):
        result = await in_time(guarded(result, "the reward"), timeout_s, what)
    return result


def _is_quick(fn: Callable[..., Any]) -> bool:
    """Whether a reward is a function of this package, all of which take linear time; a thread would
    cost more than the call.
    """
    call = _innermost(fn)
    return (
        inspect.isfunction(call)
        and not inspect.iscoroutinefunction(call)
        and call.__module__.startswith("rft.reward.")
    )


def _innermost(fn: Callable[..., Any]) -> Any:
    call = fn.call if isinstance(fn, FunctionReward) else fn
    while isinstance(call, partial):
        call = call.func
    return call


def blocks(fn: Callable[..., Any]) -> bool:
    """Whether a reward is an ordinary function."""
    call = _innermost(fn)
    return not (
        inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
    )


def checked(result: RewardResult) -> Score:
    """A Score of what a reward returned.  Raises ValueError on anything that is not a finite
    number.
    """
    if isinstance(result, Score):
        value = None if result.value is None else number(result.value, "reward")
        return Score(value=value, parts=_parts(result.parts), reason=result.reason)
    if isinstance(result, dict):
        if not (parts := _parts(result)):
            raise ValueError("the reward is a dict without parts; Score(value=None) means unscored")
        return Score(value=number(math.fsum(parts.values()), "reward"), parts=parts)
    return Score(value=number(result, "reward"))


def _parts(given: Mapping[Any, Any]) -> dict[str, float]:
    return {str(k): number(v, f"reward part {k!r}") for k, v in given.items()}


async def score_each(fn: Reward, task: Task, transcripts: Sequence[Transcript]) -> list[Score]:
    """The scores of several runs of a task, in order, by one call or by a call for each."""
    if fn.whole_group:
        return await score_group(fn, task, transcripts)
    return list(await asyncio.gather(*(score(fn, task, t) for t in transcripts)))


async def score_group(
    fn: Callable[..., Any],
    task: Task,
    transcripts: Sequence[Transcript],
    *,
    timeout_s: float | None = None,
) -> list[Score]:
    """One call of a reward with `whole_group`: fn(task, transcripts) gives one result for each
    transcript, in order.
    """
    results = await called(fn, task, transcripts, timeout_s=timeout_s)
    if not isinstance(results, list | tuple) or len(results) != len(transcripts):
        got = len(results) if isinstance(results, list | tuple) else type(results).__name__
        raise ValueError(
            f"a group reward must return a list with one result for each of {len(transcripts)} "
            f"runs, not {got}"
        )
    return [checked(r) for r in results]


def number(value: Any, what: str) -> float:
    """Raises ValueError on anything that is not a finite number, or too large to be stored as a
    reward.
    """
    if (found := as_number(value)) is None or not abs(found) <= MAX_REWARD:
        allowed = f"a finite number of at most {MAX_REWARD:g} in size"
        raise ValueError(
            f"{what} is {value!r}; it must be {allowed} (None through Score(value=None) means "
            f"unscored)"
        )
    return found


def as_number(value: Any) -> float | None:
    """A number, also one of numpy or torch; None for anything else."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    return float(value) if isinstance(value, Real) else None


def to_score(result: Any, name: str) -> Score:
    """A number, or a dict with `score`, whose other numbers become parts.  Raises ValueError on
    anything else.
    """
    if not isinstance(result, dict):
        return Score(value=number(result, f"reward {name!r}"))
    if "score" not in result:
        raise ValueError(
            f"reward {name!r} returned a dict without 'score'; it has "
            f"{', '.join(map(str, result)) or 'no keys'}"
        )
    parts = {
        str(k): number(v, f"reward {name!r}: {k!r}")
        for k, v in result.items()
        if k != "score" and as_number(v) is not None
    }
    return Score(value=number(result["score"], f"reward {name!r}: 'score'"), parts=parts)
