"""Plays one run of a task and makes a record of it, whatever happens: complete, truncated, or failed with the reason.

What user code raises becomes a failed record; what `rft` itself raises (a dead engine, a failed sync) goes on to the caller.
Invariant: `run_one` gives exactly one experience, whose id carries the attempt it came from, within (retries + 1) x the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from rft.engine.base import PromptTooLong
from rft.errors import RftError
from rft.logs import redact
from rft.reward.base import score
from rft.threads import in_thread
from rft.types.completion import Completion, Score, Transcript
from rft.types.experience import Experience, failed, from_completions
from rft.types.ids import GroupId
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.workflow.base import RunContext
from rft.workflow.build import Recipe

log = logging.getLogger(__name__)
GRACE_S = 1.0  # for a run that passed its deadline to react to being cancelled
_REASON_CHARS = 300
_TRACEBACK_LINES = 12


class RunError(Exception):
    """A run ended without a usable result; the message is the record's reason."""


@dataclass(frozen=True)
class Played:
    """One run with what it took.  `run_s` is playing, `reward_s` scoring, both of the last attempt."""

    experience: Experience
    run_s: float
    reward_s: float
    attempts: int


@dataclass(frozen=True)
class Limits:
    """What a run may take: seconds per attempt (playing, and again scoring) and how often it is tried again after a failure."""

    max_timeout_s: float
    max_retry_times: int = 0


async def run_one(
    task: Task,
    recipe: Recipe,
    model: ChatModel,
    group: GroupId,
    run: int,
    *,
    limits: Limits,
    seed: Callable[[int], int] | None = None,
    request_prefix: str = "",
) -> Played:
    """Plays run number `run` of `group`, scores it and makes its experience.  Raises RftError only."""
    attempt = 0
    while True:
        id = group.run(run, attempt)
        ctx = RunContext(model, task, run=run, request_id=f"{request_prefix}{id}", seed=seed)
        began = time.monotonic()
        scored = None
        try:
            transcript = await _within(_play(recipe, task, ctx), limits.max_timeout_s, f"workflow {recipe.name}")
            _check(transcript, recipe)
            scored = time.monotonic()
            verdict = await _score(recipe, task, transcript, limits.max_timeout_s)
            row = _experience(task, recipe, transcript, verdict, group, run, attempt)
            return Played(row, scored - began, time.monotonic() - scored, attempt + 1)
        except RftError:
            raise
        except Exception as e:  # user code may raise anything; it becomes a record
            log.debug("run %s failed", id, exc_info=True)
            retry = scored is None and not isinstance(e, PromptTooLong) and attempt < limits.max_retry_times
            if not retry:
                now = time.monotonic()
                return Played(
                    _failed(task, recipe, group, run, attempt, e), (scored or now) - began, now - (scored or now), attempt + 1
                )
        attempt += 1


async def _play(recipe: Recipe, task: Task, ctx: RunContext) -> Any:
    try:
        if recipe.blocking:
            return await _blocking(recipe, task, ctx)
        return await recipe.make().run(task, ctx)
    except SystemExit as e:
        raise RunError(f"workflow {recipe.name} called sys.exit({e.code!r})") from e


async def _within(work: Any, timeout_s: float, what: str) -> Any:
    """The result of coroutine `work`.  After `timeout_s` it is cancelled; one that ignores this is left behind."""
    job = asyncio.ensure_future(work)
    try:
        await asyncio.wait({job}, timeout=timeout_s)
        if job.done():
            if job.cancelled():
                raise RunError(f"{what} was cancelled from inside")
            return job.result()
        job.cancel()
        await asyncio.wait({job}, timeout=GRACE_S)
        if not job.done():
            log.warning("%s ignores being cancelled; it is left behind", what)
            job.add_done_callback(_forget)
        elif not job.cancelled() and isinstance(error := job.exception(), RftError):
            raise error
        raise RunError(f"timeout: {what} took longer than {timeout_s:g} s")
    finally:
        if not job.done():
            job.cancel()  # the caller was cancelled


def _forget(job: asyncio.Future[Any]) -> None:
    if not job.cancelled():
        job.exception()


class BlockingContext:
    """A run's context for workflows whose `run` is an ordinary function: the same calls, waiting in the run's own thread."""

    def __init__(self, ctx: RunContext, loop: asyncio.AbstractEventLoop) -> None:
        self._ctx, self._loop = ctx, loop
        self._over = False
        self.run, self.request_id, self.transcript = ctx.run, ctx.request_id, ctx.transcript

    def chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **overrides: Any) -> Completion:
        if self._over:
            raise RunError("this run has passed its deadline")
        return asyncio.run_coroutine_threadsafe(self._ctx.chat(messages, tools=tools, **overrides), self._loop).result()

    @property
    def completions(self) -> list[Completion]:
        return self._ctx.completions

    def end(self) -> None:
        self._over = True


async def _blocking(recipe: Recipe, task: Task, ctx: RunContext) -> Any:
    """A thread of its own for each run: one that never returns holds up nobody, and does not keep the program alive."""
    blocking = BlockingContext(ctx, asyncio.get_running_loop())

    def play() -> Any:
        return recipe.make().run(task, blocking)  # type: ignore[arg-type]

    def error(e: BaseException) -> BaseException:
        return RunError("the workflow raised StopIteration") if isinstance(e, StopIteration) else e

    try:
        return await in_thread(play, f"run-{ctx.request_id}", error=error)
    finally:
        blocking.end()


def _check(transcript: Any, recipe: Recipe) -> None:
    if not isinstance(transcript, Transcript):
        raise RunError(f"workflow {recipe.name} returned {type(transcript).__name__}; it must return ctx.transcript()")
    if not transcript.turns:
        raise RunError(f"workflow {recipe.name} made no model call")
    if any(t.completion.finish_reason == "abort" for t in transcript.turns):
        raise RunError("the engine aborted a model call")
    for name, value in transcript.metrics.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RunError(f"workflow {recipe.name}: metric {name!r} is {value!r}; it must be a finite number")
    try:
        msgspec.json.encode(transcript.info)
    except (TypeError, RecursionError) as e:
        raise RunError(f"workflow {recipe.name}: info must be JSON values: {e}") from None


async def _score(recipe: Recipe, task: Task, transcript: Transcript, timeout_s: float) -> Score:
    if transcript.score is not None:
        return await score(lambda _task, done: done.score, task, transcript)
    if recipe.reward is None:
        raise RunError(f"workflow {recipe.name} gave no score and taskset {task.taskset} names no reward")
    reward = recipe.reward
    got: Score = await _within(score(reward, task, transcript), timeout_s, f"reward {task.reward}")
    return got


def _experience(
    task: Task, recipe: Recipe, transcript: Transcript, verdict: Score, group: GroupId, run: int, attempt: int
) -> Experience:
    last = transcript.turns[-1]
    return from_completions(
        group.run(run, attempt),
        [t.completion for t in transcript.turns],
        taskset=task.taskset,
        task_index=task.index,
        workflow=recipe.name,
        reward=verdict.value,
        reward_parts=verdict.parts,
        messages=(*last.messages, {"role": "assistant", "content": transcript.answer}),
        tools=task.tools,
        prompt_text=_prompt_text(transcript),
        metrics={name: float(value) for name, value in transcript.metrics.items()},
        info=transcript.info,
    )


def _prompt_text(transcript: Transcript) -> str:
    """What the first call was asked, for people: the last message before the model spoke."""
    messages = transcript.turns[0].messages
    content = messages[-1].get("content") if messages else ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def _failed(task: Task, recipe: Recipe, group: GroupId, run: int, attempt: int, error: Exception) -> Experience:
    """The header row: one line of reason, and the end of the traceback for the person who wrote the workflow; without secrets."""
    text = redact(str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")
    lines = redact("".join(traceback.format_exception(error))).splitlines()[-_TRACEBACK_LINES:]
    return failed(
        group.run(run, attempt),
        taskset=task.taskset,
        task_index=task.index,
        workflow=recipe.name,
        reason=text[:_REASON_CHARS] or type(error).__name__,
        info={"traceback": "\n".join(lines)[-4000:], "attempts": attempt + 1},
    )
