"""The interface of a reward: a task and a transcript in, a score out.

    @reward("exact_answer")
    def exact_answer(task, transcript): return float(transcript.answer.strip() == task.truth)

A reward is a function, or a class derived from `Reward` that is constructed with the checked
`reward_args`.  Either may be async.  It returns a number, a `Score`, or a dict of parts whose sum
is the value.  A reward that cannot score raises.  Functions with veRL's or TRL's parameter names
are accepted if rft.extras.migrate is installed.
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
    """Mark a function as the reward `name`; `reward_fn_args` are checked against its keyword-only
    arguments.
    """

    def mark(function: F) -> F:
        fields: Any = {
            p.name: (p.annotation, p.default)
            for p in inspect.signature(function, eval_str=True).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        return reward(
            name, args=create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        )(function)

    return mark


RewardResult = float | int | Score | dict[str, float]
THE_TRUTH: Final = "<the truth of the row>"
"""Result of `gold_answer` if the row's truth, in a usual form, is a perfect answer."""


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
        """Raise ConfigError if an auxiliary model that the reward calls is missing.  `tasks`: the
        task of each model, generate or score.
        """

    def check_task(self, task: Task, transcript: Transcript) -> None:
        """Raise ConfigError if no answer to this task can be scored; its key is one of
        `reward_fn_args`.  Used by `rft check`.
        """

    def questions(
        self, task: Task, transcript: Transcript, models: Mapping[str, object]
    ) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return what it would ask auxiliary models, by their names.  Used by `rft check`."""
        return []

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Called once before the first run, with the auxiliary models by name."""

    async def close(self) -> None:
        """Called once after the last run."""

    def gold_answer(self, task: Task) -> str | None:
        """Return an answer that should get full marks, for `rft check`, which does not call
        `prepare`; None without one.
        """
        return THE_TRUTH if type(self).prepare is Reward.prepare else None

    def remarks(self) -> list[str]:
        """Return the lines that `rft check` prints about this machine."""
        return []


class FunctionReward(Reward):
    """A function, or another callable object, as a `Reward`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, task: Task, transcript: Any) -> Any:
        return self.call(task, transcript)


async def hook(call: Callable[..., Any], *args: Any) -> None:
    """Call `prepare` or `close` of a reward, async or not.  Raises RunFailed with the traceback of
    an error.
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
    """Call `fn` and convert its result to a Score.  Raises ValueError unless the result is a finite
    number.
    """
    return checked(await called(fn, task, transcript, timeout_s=timeout_s))


# locks by id of the reward
_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Lock]] = WeakKeyDictionary()


async def called(
    fn: Callable[..., Any], task: Task, transcripts: Any, *, timeout_s: float | None = None
) -> Any:
    """Return the result of a reward; raises OutOfTime, and the errors of the reward.

    An ordinary function of a plugin runs in a thread, one call after another, so that blocking
    delays no other run; its time, and that of an enclosing reward, counts only while it runs.
    """
    what = f"reward {task.reward}"
    with waits("run", what, count=len(transcripts) if isinstance(transcripts, list | tuple) else 1):
        return await _called(fn, task, transcripts, what, timeout_s)


async def _called(
    fn: Callable[..., Any], task: Task, transcripts: Any, what: str, timeout_s: float | None
) -> Any:
    if not blocks(fn):
        return await in_time(
            guarded(fn(task.deep_copy(), transcripts), "the reward"), timeout_s, what
        )
    if _is_quick(fn):
        result = fn(task, transcripts)
    else:
        turns = _TURNS.setdefault(asyncio.get_running_loop(), {})
        async with CLOCK.get().turn(turns.setdefault(id(fn), asyncio.Lock())):
            result = await in_time(
                in_thread(partial(fn, task.deep_copy(), transcripts), "the reward"), timeout_s, what
            )
    if inspect.isawaitable(result):
        result = await in_time(guarded(result, "the reward"), timeout_s, what)
    return result


def _is_quick(fn: Callable[..., Any]) -> bool:
    """Return whether a reward is a function of this package: all of them take linear time, and a
    thread would cost more than the call.
    """
    call = _innermost(fn)
    return (
        inspect.isfunction(call)
        and not inspect.iscoroutinefunction(call)
        and call.__module__.split(".")[0] == "rft"
    )


def _innermost(fn: Callable[..., Any]) -> Any:
    call = fn.call if isinstance(fn, FunctionReward) else fn
    while isinstance(call, partial):
        call = call.func
    return call


def blocks(fn: Callable[..., Any]) -> bool:
    """Return whether a reward is an ordinary (not async) function."""
    call = _innermost(fn)
    return not (
        inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
    )


def checked(result: RewardResult) -> Score:
    """Convert the result of a reward to a Score.  Raises ValueError unless it is a finite number."""
    if isinstance(result, Score):
        value = None if result.value is None else number(result.value, "reward")
        return Score(
            value=value,
            parts=_parts(result.parts),
            reason=result.reason,
            weights=_parts(result.weights),
        )
    if isinstance(result, dict):
        if not (parts := _parts(result)):
            raise ValueError("the reward is a dict without parts; Score(value=None) means unscored")
        return Score(value=number(math.fsum(parts.values()), "reward"), parts=parts)
    return Score(value=number(result, "reward"))


def _parts(parts: Mapping[Any, Any]) -> dict[str, float]:
    return {str(k): number(v, f"reward part {k!r}") for k, v in parts.items()}


async def score_each(fn: Reward, task: Task, transcripts: Sequence[Transcript]) -> list[Score]:
    """Return the scores of several runs of a task in order, from one call or one call per run."""
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
    """Call a reward with `whole_group` once: fn(task, transcripts) returns one result per
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
    """Raise ValueError unless `value` is a finite number that can be stored as a reward."""
    if (converted := as_number(value)) is None or not abs(converted) <= MAX_REWARD:
        allowed = f"a finite number of at most {MAX_REWARD:g} in size"
        raise ValueError(
            f"{what} is {value!r}; it must be {allowed} (None through Score(value=None) means "
            f"unscored)"
        )
    return converted


def as_number(value: Any) -> float | None:
    """Return a Python, NumPy or torch number as float; None for anything else."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    return float(value) if isinstance(value, Real) else None


def to_score(result: Any, name: str) -> Score:
    """Convert a number, or a dict with `score` whose other numbers become parts.  Raises ValueError
    otherwise.
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
