"""Plays one run of a task and makes a record of it, whatever happens: complete, truncated, or
failed with the reason.

What user code raises becomes a failed record; what `rft` itself raises (a dead engine, a failed
sync) goes on to the caller. Invariant: a run gives at least one experience, whose id carries the
attempt it came from, within (retries + 1) x the deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, get_args

import msgspec
import numpy as np

from rft.engine.base import PromptTooLong
from rft.errors import PluginStopped, RftError
from rft.reward import exchanges
from rft.reward.base import as_number, called, checked, number, score_group
from rft.secrets import redact
from rft.types.completion import Layout, Score, Transcript, Turn
from rft.types.experience import Experience, failed, from_completions
from rft.types.ids import GroupId
from rft.types.readonly import hint
from rft.types.task import Task
from rft.worker.threads import OutOfTime, contained, in_thread, in_time, last_lines
from rft.worker.waiting import waits
from rft.workflow.base import RunContext
from rft.workflow.isolated import IsolatedRunFailed, Place
from rft.workflow.recipes import Recipe

log = logging.getLogger(__name__)
T = TypeVar("T")
_REASON_CHARS = 300
_GOLD_CHARS = 200
_LAYOUTS = get_args(Layout)


def experiences(
    task: Task,
    workflow: str,
    transcript: Transcript,
    verdict: Score | None,
    group: GroupId,
    run: int,
    attempt: int,
) -> tuple[Experience, ...]:
    """The rows of one run, numbered by step.

    A row's reward is that of its own calls where they have one (their sum), else `verdict`, the
    whole run's: `rft.types.credit`.
    """
    rows = []
    for step, turns in enumerate(cut(transcript)):
        own = _own_score(turns)
        score = own or verdict or Score(value=None)
        last = turns[-1]
        row = from_completions(
            group.run(run, attempt, step),
            [t.completion for t in turns],
            taskset=task.taskset,
            task_index=task.index,
            workflow=workflow,
            reward=score.value,
            credit="run" if own is None else "step",
            reward_parts=score.parts,
            messages=(*last.messages, last.completion.message),
            tools=last.tools,
            prompt_text=_prompt_text(turns[0]),
            metrics={name: float(value) for name, value in transcript.metrics.items()},
            info={
                **transcript.info,
                **last.info,
                **last.completion.around_text,
                **({"reward_reason": redact(score.reason)} if score.reason else {}),
            },
        )
        rows.append(_taught(_masked(row, turns), turns))
    if transcript.limited:
        rows[-1] = msgspec.structs.replace(rows[-1], status="truncated")
    return tuple(rows)


def _gold(task: Task) -> dict[str, Any]:
    """What the reward compared the answer with, for people, where it is short."""
    if not isinstance(task.truth, str | int | float) or len(text := str(task.truth)) > _GOLD_CHARS:
        return {}
    # half characters cannot be stored
    return {"gold_answer": redact(text.encode("utf-8", "backslashreplace").decode())}


def cut(transcript: Transcript) -> list[tuple[Turn, ...]]:
    """The calls of each experience, in order."""
    if transcript.layout == "joined":
        return [transcript.turns]
    if transcript.layout == "steps":
        return [(t,) for t in transcript.turns]
    chains: list[list[Turn]] = []
    # tokens up to the end of each chain's last call
    ends = np.zeros(len(transcript.turns), np.int64)
    sums = np.zeros(len(transcript.turns), np.uint64)  # `_prefix_sums` there
    for turn in transcript.turns:
        if chains and _continues(turn, chains[-1][-1]):  # as in nearly every run
            chains[-1].append(turn)
            continue
        if chains and len(chains[-1]) > 1:
            last = _prefix_sums(chains[-1][-1])
            ends[len(chains) - 1], sums[len(chains) - 1] = len(last) - 1, last[-1]
        mine = _prefix_sums(turn)
        begun = ends[: len(chains)].clip(max=len(turn.completion.prompt_tokens))
        alike = np.flatnonzero(
            (begun == ends[: len(chains)]) & (mine[begun] == sums[: len(chains)])
        ).tolist()
        home = next((n for n in reversed(alike) if _continues(turn, chains[n][-1])), len(chains))
        if home == len(chains):
            chains.append([])
        chains[home].append(turn)
        ends[home], sums[home] = len(mine) - 1, mine[-1]
    return [tuple(c) for c in chains]


def _prefix_sums(turn: Turn) -> np.ndarray:
    """A number for each prefix, the empty one first: equal prefixes have equal numbers (others
    hardly ever).
    """
    c = turn.completion
    found = np.concatenate([[0], c.prompt_tokens, c.tokens], dtype=np.uint64, casting="unsafe")
    found *= _powers(len(found).bit_length())[: len(found)]
    return np.cumsum(found, out=found)


@cache
def _powers(bits: int) -> np.ndarray:
    return np.cumprod(np.full(1 << bits, 0x9E3779B97F4A7C15, np.uint64))


def _continues(turn: Turn, before: Turn) -> bool:
    prompt = turn.completion.prompt_tokens
    old = before.completion
    start = len(old.prompt_tokens)
    end = len(old.prompt_tokens) + len(old.tokens)
    return (
        len(prompt) >= end
        and np.array_equal(prompt[:start], old.prompt_tokens)
        and np.array_equal(prompt[start:end], old.tokens)
    )


def _own_score(turns: Sequence[Turn]) -> Score | None:
    """The sum of the calls' own scores, where they have any."""
    own = [t.score for t in turns if t.score is not None]
    if not own:
        return None
    parts: dict[str, float] = {}
    for s in own:
        for name, value in s.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    values = [s.value for s in own if s.value is not None]
    return Score(value=math.fsum(values) if values else None, parts=parts)


def value(transcript: Transcript, verdict: Score | None) -> float | None:
    """The reward of the whole run: `verdict`, else the sum of what its calls got (the return)."""
    if verdict is not None:
        return verdict.value
    own = [
        t.score.value for t in transcript.turns if t.score is not None and t.score.value is not None
    ]
    return math.fsum(own) if own else None


def _masked(row: Experience, turns: Sequence[Turn]) -> Experience:
    if all(t.mask is None for t in turns):
        return row
    keep = row.loss_mask.copy()
    for t in turns:
        start = len(t.completion.prompt_tokens)
        size = len(t.completion.tokens)
        if t.mask is not None:
            if t.mask.shape != (size,) or t.mask.dtype != np.bool_:
                raise ValueError(
                    f"mask: {t.mask.dtype} {t.mask.shape}, must be bool for {size} tokens"
                )
            keep[start : start + size] &= t.mask
    return msgspec.structs.replace(
        row, loss_mask=keep, logprobs=np.where(keep, row.logprobs, np.float32(0))
    )


def _taught(row: Experience, turns: Sequence[Turn]) -> Experience:
    """The row with a teacher's log-probs of its trained tokens, if all of its calls have them."""
    if any(t.teacher_logprobs is None for t in turns):
        return row
    taught = np.zeros(row.num_tokens, np.float32)
    for t in turns:
        start = len(t.completion.prompt_tokens)
        values = t.teacher_logprobs
        if values is None or len(values) != len(t.completion.tokens):
            raise ValueError(
                f"teacher: {0 if values is None else len(values)} log-probs for "
                f"{len(t.completion.tokens)} tokens"
            )
        taught[start : start + len(values)] = values
    return msgspec.structs.replace(row, teacher_logprobs=taught)


def _prompt_text(turn: Turn) -> str:
    """What a call was asked, for people: the last message before the model spoke."""
    content: Any = turn.messages[-1].get("content") if turn.messages else ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


class RunError(Exception):
    """A run ended without a usable result; the message is the record's reason."""


Ended = Literal["", "timeout", "group_timeout", "hopeless", "over_rollout"]
"""What ended a run before its time: its own deadline, that of its group, a group that cannot be
trained any more, a batch that waits no longer for its slowest tasks.
"""


@dataclass(frozen=True)
class PlayedRun:
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
class RunLimits:
    """What a run may take: seconds per attempt (playing, and again scoring) and how often it is
    tried again after a failure.

    `max_group_s`: seconds for all runs of a task together, from the moment the first of them
    begins.  `whole_groups`: a group that misses a run is not trained; else half of its runs, and at
    least two, are enough.  `stop_hopeless`: once too many runs of a group have failed, its others
    are ended.  `reproducible`: a trainer has to compute how its tokens were drawn; `drawn`: that
    they were.
    """

    max_timeout_s: float
    max_retry_times: int = 0
    max_group_s: float | None = None
    whole_groups: bool = False
    stop_hopeless: bool = False
    reproducible: bool = False
    drawn: bool = False

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


@dataclass(frozen=True)
class TaskRuns:
    """How the runs of one task are played and scored.  Every method raises RftError only."""

    task: Task
    recipe: Recipe
    limits: RunLimits
    group: GroupId

    async def play_one(self, context: Callable[[int, int], RunContext], run: int) -> Run:
        """Plays run number `run`; a failed attempt is repeated.  `context(run, attempt)` makes its
        context.  Raises RftError only.
        """

        async def play(attempt: int) -> Transcript:
            transcript = await self._played(context(run, attempt))
            self._check(transcript)
            return transcript  # type: ignore[no-any-return]

        transcript, how = await self._tried(play)
        return replace(how, number=run, transcript=transcript)

    async def score_one(self, run: Run) -> PlayedRun:
        """Scores a played run and makes its experiences.  Raises RftError only."""
        began = time.monotonic()
        if (transcript := run.transcript) is None:
            return self.record(run)
        try:
            with exchanges.noted() as asked:
                verdict = await _score(
                    self.recipe, self.task, transcript, self.limits.max_timeout_s
                )
        except RftError:
            raise
        except Exception as e:
            log.debug(
                "reward of run %s failed", self.group.run(run.number, run.attempt), exc_info=True
            )
            run = replace(run, error=e, ended=ended_by(e))
            return self.record(run, None, time.monotonic() - began)
        by_reward = verdict is not None and transcript.score is None
        beside = {
            **(_gold(self.task) if by_reward else {}),
            **({exchanges.KEY: asked} if asked else {}),
        }
        if beside:
            run = replace(
                run,
                transcript=msgspec.structs.replace(transcript, info={**beside, **transcript.info}),
            )
        return self.record(run, verdict, time.monotonic() - began)

    async def score_together(self, runs: Sequence[Run]) -> list[PlayedRun]:
        """Scores all runs of a task with one call of a group reward, which sees those that have a
        transcript.  Raises RftError only.
        """
        began = time.monotonic()
        whole = [r for r in runs if r.transcript is not None]
        verdicts: dict[int, Score] = {}
        failure: Exception | None = None
        if whole and self.recipe.reward is not None:
            transcripts = [r.transcript for r in whole if r.transcript is not None]
            try:
                got = await score_group(
                    self.recipe.reward, self.task, transcripts, timeout_s=self.limits.max_timeout_s
                )
                verdicts = {r.number: s for r, s in zip(whole, got, strict=True)}
            except RftError:
                raise
            except Exception as e:
                failure = e
        took = time.monotonic() - began
        if failure is not None:
            runs = [
                replace(r, error=failure, ended=ended_by(failure)) if r in whole else r
                for r in runs
            ]
        return [
            self.record(r, verdicts.get(r.number), 0.0 if r.transcript is None else took)
            for r in runs
        ]

    def record(self, run: Run, verdict: Score | None = None, reward_s: float = 0.0) -> PlayedRun:
        """The rows of a run, or the header row that says why there are none."""
        error = run.error
        if error is None and run.transcript is not None:
            try:
                rows = experiences(
                    self.task,
                    self.recipe.name,
                    run.transcript,
                    verdict,
                    self.group,
                    run.number,
                    run.attempt,
                )
                for row in rows:
                    if row.reward is not None:
                        # each was small enough to be stored
                        number(row.reward, f"the reward of the calls of {row.id}")
                return PlayedRun(
                    rows,
                    value(run.transcript, verdict),
                    run.run_s,
                    reward_s,
                    run.attempt + 1,
                    run.ended,
                )
            except Exception as e:  # what a workflow recorded may not fit together
                error = e
        assert error is not None, "a run without a transcript has an error"
        row = _failed(self.task, self.recipe, self.group, run.number, run.attempt, error)
        return PlayedRun((row,), None, run.run_s, reward_s, run.attempt + 1, run.ended)

    async def play_together(self, context: Callable[[int, int], RunContext]) -> list[Run]:
        """Plays all runs of a task with one call of the workflow's `run_group`, which is repeated
        where it fails.  Raises RftError only.
        """
        numbers = range(self.task.num_runs)

        async def play(attempt: int) -> Sequence[Any]:
            got = await self._played([context(run, attempt) for run in numbers])
            if not isinstance(got, list | tuple) or len(got) != len(numbers):
                raise RunError(
                    f"workflow {self.recipe.name}: run_group must return a list of {len(numbers)} "
                    f"transcripts"
                )
            return got

        transcripts, how = await self._tried(play)
        if transcripts is None:
            return [replace(how, number=n) for n in numbers]
        runs = []
        for n, transcript in zip(numbers, transcripts, strict=True):
            try:
                self._check(transcript)
                runs.append(replace(how, number=n, transcript=transcript))
            except RunError as e:
                runs.append(replace(how, number=n, error=e))
        return runs

    async def _tried(self, play: Callable[[int], Awaitable[T]]) -> tuple[T | None, Run]:
        """What `play(attempt)` gives, repeated after a failure, and how that went, without number
        and transcript.
        """
        attempt = 0
        while True:
            began = time.monotonic()
            try:
                return await play(attempt), Run(0, attempt, time.monotonic() - began)
            except RftError:
                raise
            except Exception as e:  # user code may raise anything; it becomes a record
                log.debug("attempt %d of %s failed", attempt, self.group, exc_info=True)
                if isinstance(e, PromptTooLong) or attempt >= self.limits.max_retry_times:
                    return None, Run(
                        0, attempt, time.monotonic() - began, error=e, ended=ended_by(e)
                    )
            attempt += 1

    async def _played(self, ctx: RunContext | Sequence[RunContext]) -> Any:
        what = f"workflow {self.recipe.name}"
        with waits("run", what, count=1 if isinstance(ctx, RunContext) else len(ctx)):
            return await in_time(
                play(self.recipe, self.task.own(), ctx), self.limits.max_timeout_s, what
            )

    def _check(self, transcript: Any) -> None:
        check_transcript(transcript, self.recipe)
        if not self.task.sampling.temperature:  # a greedy run, for a baseline, is not trained
            return
        limits = self.limits
        also = ", or a top_p, top_k, min_p, min_tokens or penalty"
        for n, s in enumerate(t.completion.sampling for t in transcript.turns):
            if (limits.drawn and not s.temperature) or (limits.reproducible and not s.reproducible):
                raise RunError(
                    f"workflow {self.recipe.name}: model call {n} has temperature "
                    f"0{also if limits.reproducible else ''}: "
                    "the trainer cannot compute such log-probs.  For a call that is not trained "
                    "write "
                    "ctx.policy.generate(ctx.request(messages, ...))"
                )


def ended_by(error: Exception) -> Ended:
    return "timeout" if isinstance(error, OutOfTime) else ""


async def play(recipe: Recipe, task: Task, ctx: RunContext | Sequence[RunContext]) -> Any:
    """What the workflow gives for one run, or for all runs of the task."""
    if recipe.place is not None:
        return await _isolated(recipe, recipe.place, task, ctx)
    if recipe.blocking:
        return await _blocking(recipe, task, ctx)
    with contained(f"workflow {recipe.name}"):
        made: Any = recipe.make()
        return await (
            made.run(task, ctx) if isinstance(ctx, RunContext) else made.run_group(task, list(ctx))
        )


async def _isolated(
    recipe: Recipe, place: Place, task: Task, ctx: RunContext | Sequence[RunContext]
) -> Any:
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


class BlockingContext:
    """A run's context for workflows whose `run` is an ordinary function: what is awaited there is
    waited for in the run's own thread.
    """

    def __init__(self, ctx: RunContext, loop: asyncio.AbstractEventLoop) -> None:
        self._ctx = ctx
        self._loop = loop
        self._over = False
        self._calls: set[Future[Any]] = set()  # under way

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ctx, name)
        return (
            (lambda *a, **k: self.wait(found(*a, **k)))
            if inspect.iscoroutinefunction(found)
            else found
        )

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that the event loop runs:
        `ctx.wait(ctx.model("judge").generate(request))`.
        """
        if self._over:
            call.close()
            raise RunError("this run is over")
        under_way = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._calls.add(under_way)
        under_way.add_done_callback(self._calls.discard)
        if self._over:  # since a moment ago
            under_way.cancel()
        return under_way.result()

    def end(self) -> None:
        """Its calls end, too."""
        self._over = True
        for call in list(self._calls):
            call.cancel()


async def _blocking(recipe: Recipe, task: Task, ctx: RunContext | Sequence[RunContext]) -> Any:
    """A thread of its own for each run: one that never returns holds up nobody, and does not keep
    the program alive.
    """
    several = [ctx] if isinstance(ctx, RunContext) else ctx
    blocking = [BlockingContext(c, asyncio.get_running_loop()) for c in several]

    def play() -> Any:
        with contained(f"workflow {recipe.name}"):
            made: Any = recipe.make()
            return (
                made.run(task, blocking[0])
                if isinstance(ctx, RunContext)
                else made.run_group(task, blocking)
            )

    try:
        return await in_thread(play, f"run-{several[0].request_id}")
    finally:
        for b in blocking:
            b.end()


def check_transcript(transcript: Any, recipe: Recipe) -> None:
    if not isinstance(transcript, Transcript):
        raise RunError(
            f"workflow {recipe.name} returned {type(transcript).__name__}; it must return "
            f"ctx.transcript()"
        )
    if not transcript.turns:
        raise RunError(f"workflow {recipe.name} made no model call")
    if any(t.completion.finish_reason == "abort" for t in transcript.turns):
        raise RunError("the engine aborted a model call")
    if transcript.layout not in _LAYOUTS:
        raise RunError(
            f"workflow {recipe.name}: layout is {transcript.layout!r}; it must be one of "
            f"{', '.join(_LAYOUTS)}"
        )
    for name, given in transcript.metrics.items():
        if (found := as_number(given)) is None or not math.isfinite(found):
            raise RunError(
                f"workflow {recipe.name}: metric {name!r} is {given!r}; it must be a finite number"
            )
    try:
        msgspec.json.encode(transcript.info)
    except (TypeError, RecursionError) as e:
        raise RunError(f"workflow {recipe.name}: info must be JSON values: {e}") from None


async def _score(
    recipe: Recipe, task: Task, transcript: Transcript, timeout_s: float
) -> Score | None:
    """The score of the whole run; None where its calls have their own."""
    # else the cut, which takes time, says nothing new
    scored = any(t.score is not None for t in transcript.turns)
    own = [any(t.score is not None for t in turns) for turns in cut(transcript)] if scored else []
    if transcript.score is not None:
        given = checked(transcript.score)
        earned = _own_score(transcript.turns)
        steps = None if earned is None else earned.value
        if own == [True] and not math.isclose(
            math.nan if given.value is None else given.value, steps or 0.0, abs_tol=1e-9
        ):
            raise RunError(
                f"workflow {recipe.name} scored the run with {given.value} and its calls with "
                f"{steps}; both are one row: give one of them"
            )
        return given
    if any(own):
        if not all(own):
            raise RunError(
                f"workflow {recipe.name} scored some of its calls and not others; score all, or "
                f"only the whole run"
            )
        return None
    if recipe.reward is None:
        raise RunError(
            f"workflow {recipe.name} gave no score and taskset {task.taskset} names no reward"
        )
    return checked(await called(recipe.reward, task, transcript, timeout_s=timeout_s))


def reason_of(error: BaseException) -> str:
    """In words; what we say ourselves needs no name of an exception."""
    if isinstance(error, RunError | PluginStopped | OutOfTime):
        return str(error)
    return f"{type(error).__name__}: {error}{hint(error)}"


def _failed(
    task: Task, recipe: Recipe, group: GroupId, run: int, attempt: int, error: Exception
) -> Experience:
    """The header row: one line of reason, and the end of the traceback for the person who wrote the
    workflow; without secrets.
    """
    text = redact(reason_of(error))
    return failed(
        group.run(run, attempt),
        taskset=task.taskset,
        task_index=task.index,
        workflow=recipe.name,
        reason=text[:_REASON_CHARS] or type(error).__name__,
        info={"traceback": last_lines(error)[-4000:], "attempts": attempt + 1},
    )
