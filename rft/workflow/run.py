"""Plays one run of a task and makes a record of it, whatever happens: complete, truncated, or failed with the reason.

What user code raises becomes a failed record; what `rft` itself raises (a dead engine, a failed sync) goes on to the caller.
Invariant: a run gives at least one experience, whose id carries the attempt it came from, within (retries + 1) x the deadline.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from rft.engine.base import PromptTooLong
from rft.errors import RftError
from rft.logs import redact
from rft.reward.base import checked, score_group
from rft.threads import in_thread
from rft.types.completion import Completion, Score, Transcript
from rft.types.experience import Experience, failed
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.workflow.base import RunContext
from rft.workflow.build import Recipe
from rft.workflow.isolated import IsolatedRunFailed, Place
from rft.workflow.record import cut, experiences, value

log = logging.getLogger(__name__)
T = TypeVar("T")
GRACE_S = 1.0  # for a run that passed its deadline to react to being cancelled
_REASON_CHARS = 300
_TRACEBACK_LINES = 12


class RunError(Exception):
    """A run ended without a usable result; the message is the record's reason."""


class RunTimeout(RunError):
    """It passed its deadline."""


Ended = Literal["", "timeout", "group_timeout", "hopeless", "over_rollout"]
"""What ended a run before its time: its own deadline, that of its group, a group that cannot be trained any more, a batch that waits
no longer for its slowest tasks."""


@dataclass(frozen=True)
class Played:
    """One run with what it took.  `run_s` is playing, `reward_s` scoring, both of the last attempt.

    `experiences` are its rows, one or (step-wise) several; `value` is the reward of the whole run.
    """

    experiences: tuple[Experience, ...]
    value: float | None
    run_s: float
    reward_s: float
    attempts: int
    ended: Ended = ""

    @property
    def failed(self) -> bool:
        return self.experiences[0].status == "failed"


@dataclass(frozen=True)
class Limits:
    """What a run may take: seconds per attempt (playing, and again scoring) and how often it is tried again after a failure.

    `max_group_s`: seconds for all runs of a task together, from the moment the first of them begins.  `whole_groups`: a group that
    misses a run is not trained; else half of its runs, and at least two, are enough.  `stop_hopeless`: once too many runs of a group
    have failed, its others are ended.
    """

    max_timeout_s: float
    max_retry_times: int = 0
    max_group_s: float | None = None
    whole_groups: bool = False
    stop_hopeless: bool = False

    def needed(self, num_runs: int) -> int:
        """How many runs of a group must be trainable."""
        return num_runs if self.whole_groups else max(min(2, num_runs), -(-num_runs // 2))


@dataclass(frozen=True)
class Run:
    """A run that was played and is to be scored, or that `error` ended."""

    number: int
    attempt: int
    run_s: float
    transcript: Transcript | None = None
    error: Exception | None = None
    ended: Ended = ""


async def play_one(
    task: Task, recipe: Recipe, context: Callable[[int, int], RunContext], run: int, *, limits: Limits, group: GroupId
) -> Run:
    """Plays run number `run`; a failed attempt is repeated.  `context(run, attempt)` makes its context.  Raises RftError only."""
    attempt = 0
    while True:
        began = time.monotonic()
        try:
            transcript = await _within(
                _play(recipe, _own(task), context(run, attempt)), limits.max_timeout_s, f"workflow {recipe.name}"
            )
            check_transcript(transcript, recipe)
            return Run(run, attempt, time.monotonic() - began, transcript)
        except RftError:
            raise
        except Exception as e:  # user code may raise anything; it becomes a record
            log.debug("run %s failed", group.run(run, attempt), exc_info=True)
            if isinstance(e, PromptTooLong) or attempt >= limits.max_retry_times:
                return Run(run, attempt, time.monotonic() - began, error=e, ended=ended_by(e))
        attempt += 1


async def score_one(task: Task, recipe: Recipe, run: Run, *, limits: Limits, group: GroupId) -> Played:
    """Scores a played run and makes its experiences.  Raises RftError only."""
    began = time.monotonic()
    if run.transcript is None:
        return record(task, recipe, run, None, group, 0.0)
    try:
        verdict = await _score(recipe, task, run.transcript, limits.max_timeout_s)
    except RftError:
        raise
    except Exception as e:
        log.debug("reward of run %s failed", group.run(run.number, run.attempt), exc_info=True)
        run = replace(run, error=e, ended=ended_by(e))
        return record(task, recipe, run, None, group, time.monotonic() - began)
    return record(task, recipe, run, verdict, group, time.monotonic() - began)


async def score_together(task: Task, recipe: Recipe, runs: Sequence[Run], *, limits: Limits, group: GroupId) -> list[Played]:
    """Scores all runs of a task with one call of a group reward, which sees those that have a transcript.  Raises RftError only."""
    began = time.monotonic()
    whole = [r for r in runs if r.transcript is not None]
    verdicts: dict[int, Score] = {}
    failure: Exception | None = None
    if whole and recipe.reward is not None:
        transcripts = [r.transcript for r in whole if r.transcript is not None]
        try:
            work = score_group(recipe.reward, task, transcripts)
            got = await _within(work, limits.max_timeout_s, f"reward {task.reward}")
            verdicts = {r.number: s for r, s in zip(whole, got, strict=True)}
        except RftError:
            raise
        except Exception as e:
            failure = e
    took = time.monotonic() - began
    return [
        record(task, recipe, replace(r, error=r.error or failure), verdicts.get(r.number), group, took if r in whole else 0.0)
        for r in runs
    ]


def record(task: Task, recipe: Recipe, run: Run, verdict: Score | None, group: GroupId, reward_s: float) -> Played:
    """The rows of a run, or the header row that says why there are none."""
    error = run.error
    if error is None and run.transcript is not None:
        try:
            rows = experiences(task, recipe.name, run.transcript, verdict, group, run.number, run.attempt)
            return Played(rows, value(run.transcript, verdict), run.run_s, reward_s, run.attempt + 1, run.ended)
        except Exception as e:  # what a workflow recorded may not fit together
            error = e
    assert error is not None, "a run without a transcript has an error"
    row = _failed(task, recipe, group, run.number, run.attempt, error)
    return Played((row,), None, run.run_s, reward_s, run.attempt + 1, run.ended)


def ended_by(error: Exception) -> Ended:
    return "timeout" if isinstance(error, RunTimeout) else ""


async def play_together(task: Task, recipe: Recipe, contexts: Sequence[RunContext], *, limits: Limits) -> list[Run]:
    """Plays all runs of a task with one call of the workflow's `run_group`.  What it raises ends all of them.  Raises RftError only."""
    began = time.monotonic()
    took = lambda: time.monotonic() - began  # noqa: E731
    try:
        got = await _within(_play(recipe, _own(task), contexts), limits.max_timeout_s, f"workflow {recipe.name}")
        if not isinstance(got, list | tuple) or len(got) != len(contexts):
            raise RunError(f"workflow {recipe.name}: run_group must return a list of {len(contexts)} transcripts")
    except RftError:
        raise
    except Exception as e:
        log.debug("runs of %s failed", contexts[0].request_id, exc_info=True)
        return [Run(c.run, 0, took(), error=e, ended=ended_by(e)) for c in contexts]
    runs = []
    for ctx, transcript in zip(contexts, got, strict=True):
        try:
            check_transcript(transcript, recipe)
            runs.append(Run(ctx.run, 0, took(), transcript))
        except RunError as e:
            runs.append(Run(ctx.run, 0, took(), error=e))
    return runs


async def _play(recipe: Recipe, task: Task, ctx: RunContext | Sequence[RunContext]) -> Any:
    try:
        if recipe.place is not None:
            return await _isolated(recipe, recipe.place, task, ctx)
        if recipe.blocking:
            return await _blocking(recipe, task, ctx)
        made: Any = recipe.make()
        return await (made.run(task, ctx) if isinstance(ctx, RunContext) else made.run_group(task, list(ctx)))
    except SystemExit as e:
        raise RunError(f"workflow {recipe.name} called sys.exit({e.code!r})") from e


def _own(task: Task) -> Task:
    """The task with a row of its own, so that a workflow that changes it changes nothing for other runs and for the reward."""
    return msgspec.structs.replace(task, row=copy.deepcopy(task.row)) if task.row else task


async def _isolated(recipe: Recipe, place: Place, task: Task, ctx: RunContext | Sequence[RunContext]) -> Any:
    """In a process of its own; what is raised there is told with its own traceback."""
    several = [ctx] if isinstance(ctx, RunContext) else ctx
    try:
        done = await place.play(task, recipe.keywords, several, together=recipe.plays_group)
    except IsolatedRunFailed as e:
        first, _, rest = str(e).partition("\n")
        error = RunError(first)
        error.add_note(rest)
        raise error from None
    return done[0] if isinstance(ctx, RunContext) else done


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
        raise RunTimeout(f"timeout: {what} took longer than {timeout_s:g} s")
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
        self.run, self.request_id, self.transcript, self.score_step = ctx.run, ctx.request_id, ctx.transcript, ctx.score_step
        self.models, self.model = ctx.models, ctx.model

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that the event loop runs: `ctx.wait(ctx.model("judge").generate(request))`."""
        if self._over:
            call.close()
            raise RunError("this run has passed its deadline")
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def teach(self, name: str) -> None:
        self.wait(self._ctx.teach(name))

    def chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **overrides: Any) -> Completion:
        return self.wait(self._ctx.chat(messages, tools=tools, **overrides))

    @property
    def completions(self) -> list[Completion]:
        return self._ctx.completions

    def end(self) -> None:
        self._over = True


async def _blocking(recipe: Recipe, task: Task, ctx: RunContext | Sequence[RunContext]) -> Any:
    """A thread of its own for each run: one that never returns holds up nobody, and does not keep the program alive."""
    several = [ctx] if isinstance(ctx, RunContext) else ctx
    blocking = [BlockingContext(c, asyncio.get_running_loop()) for c in several]

    def play() -> Any:
        made: Any = recipe.make()
        return made.run(task, blocking[0]) if isinstance(ctx, RunContext) else made.run_group(task, blocking)

    def error(e: BaseException) -> BaseException:
        return RunError("the workflow raised StopIteration") if isinstance(e, StopIteration) else e

    try:
        return await in_thread(play, f"run-{several[0].request_id}", error=error)
    finally:
        for b in blocking:
            b.end()


def check_transcript(transcript: Any, recipe: Recipe) -> None:
    if not isinstance(transcript, Transcript):
        raise RunError(f"workflow {recipe.name} returned {type(transcript).__name__}; it must return ctx.transcript()")
    if not transcript.turns:
        raise RunError(f"workflow {recipe.name} made no model call")
    if any(t.completion.finish_reason == "abort" for t in transcript.turns):
        raise RunError("the engine aborted a model call")
    for name, number in transcript.metrics.items():
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise RunError(f"workflow {recipe.name}: metric {name!r} is {number!r}; it must be a finite number")
    try:
        msgspec.json.encode(transcript.info)
    except (TypeError, RecursionError) as e:
        raise RunError(f"workflow {recipe.name}: info must be JSON values: {e}") from None


async def _score(recipe: Recipe, task: Task, transcript: Transcript, timeout_s: float) -> Score | None:
    """The score of the whole run; None where its calls have their own."""
    if transcript.score is not None:
        return checked(transcript.score)
    own = [any(t.score is not None for t in turns) for turns in cut(transcript)]
    if any(own):
        if not all(own):
            raise RunError(f"workflow {recipe.name} scored some of its calls and not others; score all, or only the whole run")
        return None
    if recipe.reward is None:
        raise RunError(f"workflow {recipe.name} gave no score and taskset {task.taskset} names no reward")
    result = recipe.reward(
        task, transcript
    )  # an ordinary function has no deadline to wait for: it is done, or it holds up everybody
    if inspect.isawaitable(result):
        result = await _within(result, timeout_s, f"reward {task.reward}")
    return checked(result)


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
