"""Perform one run of a task, score it and build its rows: complete, truncated, or failed with a
reason.

An error of user code becomes a failed row; an error of `rft` itself (an engine that cannot be
restarted, a failed sync) is raised.
Invariant: a run yields at least one row, within (retries + 2) x the deadline: the attempts, then
the reward.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec

from rft.engine.base import PromptTooLong
from rft.errors import RftError
from rft.reward import exchanges
from rft.reward.base import called, checked, number, score_group
from rft.secrets import redact
from rft.types.completion import Score, Transcript
from rft.types.experience import Experience, failed
from rft.types.ids import GroupId
from rft.types.ports import NO_IMAGES
from rft.types.task import Task
from rft.worker.threads import OutOfTime, in_time, last_lines
from rft.worker.waiting import waits
from rft.workflow.base import RunContext
from rft.workflow.call_workflow import RunError, call_workflow, check_transcript, reason_of
from rft.workflow.isolated import IsolatedRunFailed
from rft.workflow.recipes import Recipe
from rft.workflow.run_rows import experiences, run_reward, scored_rows, sum_of_scores

log = logging.getLogger(__name__)
T = TypeVar("T")
_REASON_CHARS = (100, 197)  # of its beginning and its end
_GOLD_CHARS = 200

Ended = Literal["", "timeout", "group_timeout", "hopeless", "over_rollout"]
"""Reason for ending a run early: its deadline, its group's deadline, an untrainable group, a batch
that does not wait for its slowest tasks.
"""


@dataclass(frozen=True)
class PlayedRun:
    """One run and its cost.  `run_s`: of the workflow, `reward_s`: of the reward, both of the last
    attempt.

    `experiences` are its rows, one or (step-wise) several; `value` is the reward of the whole run.
    """

    experiences: tuple[Experience, ...]
    value: float | None
    run_s: float
    reward_s: float
    attempts: int
    ended: Ended = ""
    images: Mapping[str, bytes] = field(default_factory=dict)  # files that its calls show, by name

    @property
    def failed(self) -> bool:
        return self.experiences[0].status == "failed"


@dataclass(frozen=True)
class RunLimits:
    """Seconds per attempt (for the workflow, and as many for the reward), and retries after a
    failure.

    `max_group_s`: seconds for all runs of a task together, from the start of the first.
    `whole_groups`: a group that misses a run is not trained; else half of its runs, and at least
    two, are enough.  `stop_hopeless`: end the other runs of a group once too many have failed.
    `reproducible`: a trainer must be able to recompute the sampling distribution; `sampled`: tokens
    must be sampled, not chosen greedily.  `teacher_top`: how many of a teacher's likeliest tokens
    are kept at each position.
    """

    max_timeout_s: float
    max_retry_times: int = 0
    max_group_s: float | None = None
    whole_groups: bool = False
    stop_hopeless: bool = False
    reproducible: bool = False
    sampled: bool = False
    teacher_top: int = 0

    def needed(self, num_runs: int) -> int:
        """Return the number of runs of a group that must be trainable."""
        return num_runs if self.whole_groups else max(min(2, num_runs), -(-num_runs // 2))


@dataclass(frozen=True)
class Run:
    """A run to be scored, or ended by `error`."""

    number: int
    attempt: int
    run_s: float
    transcript: Transcript | None = None
    error: Exception | None = None
    ended: Ended = ""


@dataclass(frozen=True)
class TaskRuns:
    """Performs and scores the runs of one task.  Methods but `reward` raise RftError only."""

    task: Task
    recipe: Recipe
    limits: RunLimits
    group: GroupId

    async def play_one(self, context: Callable[[int, int], RunContext], run: int) -> Run:
        """Perform run number `run`, again after a failed attempt; `context(run, attempt)` makes its
        context.
        """

        async def play(attempt: int) -> Transcript:
            (transcript,) = await self._play([context(run, attempt)])
            self._check(transcript)
            return transcript  # type: ignore[no-any-return]

        transcript, attempt = await self._retry(play)
        return replace(attempt, number=run, transcript=transcript)

    async def play_together(self, context: Callable[[int, int], RunContext]) -> list[Run]:
        """Perform all runs of a task with one call of the workflow's `run_group`, again after a
        failed attempt.
        """
        numbers = range(self.task.num_runs)

        async def play(attempt: int) -> list[Any]:
            return await self._play([context(run, attempt) for run in numbers])

        transcripts, attempt = await self._retry(play)
        if transcripts is None:
            return [replace(attempt, number=n) for n in numbers]
        runs = []
        for n, transcript in zip(numbers, transcripts, strict=True):
            try:
                if isinstance(transcript, Exception):
                    raise transcript
                self._check(transcript)
                runs.append(replace(attempt, number=n, transcript=transcript))
            except RftError:
                raise
            except Exception as e:  # of this run's user code
                runs.append(replace(attempt, number=n, error=e, ended=ended_by(e)))
        return runs

    async def reward(self, transcript: Transcript) -> Score:
        """Call the reward for one run, finished or not.  Raises ValueError without such a reward,
        and the errors of user code.
        """
        reward = self.recipe.reward
        if reward is None or reward.whole_group:
            what = (
                "no reward" if reward is None else "a reward that sees all runs of a task at once"
            )
            raise ValueError(
                f"workflow {self.recipe.name} asks for the reward of its run, and taskset "
                f"{self.task.taskset} names {what}; name one that scores each run alone"
            )
        timeout_s = self.limits.max_timeout_s
        return checked(await called(reward, self.task, transcript, timeout_s=timeout_s))

    async def score_one(self, run: Run) -> PlayedRun:
        """Score a played run and make its experiences."""
        start = time.monotonic()
        transcript = run.transcript
        if transcript is None:
            return self.make_rows(run)
        try:
            with exchanges.noted() as judge_exchanges:
                score = await self._score(transcript)
        except RftError:
            raise
        except Exception as e:
            log.debug(
                "reward of run %s failed", self.group.run(run.number, run.attempt), exc_info=True
            )
            run = replace(run, error=e, ended=ended_by(e))
            return self.make_rows(run, None, time.monotonic() - start)
        info: dict[str, Any] = {}
        if score is not None and transcript.score is None:
            info = _gold(self.task)
        if judge_exchanges:
            info[exchanges.KEY] = judge_exchanges
        if info:
            info |= transcript.info
            run = replace(run, transcript=msgspec.structs.replace(transcript, info=info))
        return self.make_rows(run, score, time.monotonic() - start)

    async def score_together(self, runs: Sequence[Run]) -> list[PlayedRun]:
        """Score the runs of a task that have a transcript with one call of a group reward."""
        start = time.monotonic()
        played = {r.number: r.transcript for r in runs if r.transcript is not None}
        scores: dict[int, Score] = {}
        error: Exception | None = None
        if played and self.recipe.reward is not None:
            try:
                results = await score_group(
                    self.recipe.reward,
                    self.task,
                    list(played.values()),
                    timeout_s=self.limits.max_timeout_s,
                )
                scores = dict(zip(played, results, strict=True))
            except RftError:
                raise
            except Exception as e:
                error = e
        seconds = time.monotonic() - start
        played_runs = []
        for run in runs:
            scored = run.number in played
            if scored and error is not None:
                run = replace(run, error=error, ended=ended_by(error))
            reward_s = seconds if scored else 0.0
            played_runs.append(self.make_rows(run, scores.get(run.number), reward_s))
        return played_runs

    def make_rows(self, run: Run, score: Score | None = None, reward_s: float = 0.0) -> PlayedRun:
        """Make the rows of a run, or the row without tokens that has the reason of its failure."""
        error = run.error
        value: float | None = None
        if error is None and run.transcript is not None:
            try:
                rows = experiences(
                    self.task,
                    self.recipe.name,
                    run.transcript,
                    score,
                    self.group,
                    run.number,
                    run.attempt,
                )
                for row in rows:
                    if row.reward is not None:
                        # each score fits into storage, their sum may not
                        number(row.reward, f"the reward of the calls of {row.id}")
                value = run_reward(run.transcript, score)
            except Exception as e:  # a workflow's transcript may be inconsistent
                error = e
        if error is not None:
            rows = (self._failed(run, error),)
        images = NO_IMAGES if run.transcript is None else image_files(rows, run.transcript)
        return PlayedRun(rows, value, run.run_s, reward_s, run.attempt + 1, run.ended, images)

    def _failed(self, run: Run, error: Exception) -> Experience:
        """Make the row of a failed run: one line of reason, and the end of the traceback, without
        secrets; beside the info of its transcript.
        """
        info = {} if run.transcript is None else run.transcript.info
        return failed(
            self.group.run(run.number, run.attempt),
            taskset=self.task.taskset,
            task_index=self.task.index,
            workflow=self.recipe.name,
            reason=_without_middle(redact(reason_of(error))) or type(error).__name__,
            info={**info, "traceback": last_lines(error)[-4000:], "attempts": run.attempt + 1},
        )

    async def _retry(self, play: Callable[[int], Awaitable[T]]) -> tuple[T | None, Run]:
        """Call `play(attempt)` until it succeeds or retries are used up.

        Returns its result (None after failure), and the last attempt as a Run without number and
        transcript.
        """
        attempt = 0
        while True:
            start = time.monotonic()
            try:
                return await play(attempt), Run(0, attempt, time.monotonic() - start)
            except RftError:
                raise
            except Exception as e:  # user code may raise anything; it becomes a failed row
                log.debug("attempt %d of %s failed", attempt, self.group, exc_info=True)
                if isinstance(e, PromptTooLong) or attempt >= self.limits.max_retry_times:
                    seconds = time.monotonic() - start
                    return None, Run(0, attempt, seconds, error=e, ended=ended_by(e))
            attempt += 1

    async def _play(self, contexts: list[RunContext]) -> list[Any]:
        what = f"workflow {self.recipe.name}"
        with waits("run", what, count=len(contexts)):
            return await in_time(
                play(self.recipe, self.task.deep_copy(), contexts), self.limits.max_timeout_s, what
            )

    def _check(self, transcript: Any) -> None:
        """Raise RunError for an invalid transcript, and for calls that cannot be trained."""
        check_transcript(transcript, self.recipe.name)
        # a greedy baseline run, never trained; tasksets with temperature 0 are refused at the start
        if not self.task.sampling.temperature:
            return
        limits = self.limits
        for n, s in enumerate(t.completion.sampling for t in transcript.turns):
            if (limits.sampled and not s.temperature) or (
                limits.reproducible and not s.reproducible
            ):
                changed = ", or a top_p, top_k, min_p, min_tokens or penalty"
                raise RunError(
                    f"workflow {self.recipe.name}: model call {n} has temperature "
                    f"0{changed if limits.reproducible else ''}: the trainer cannot compute such "
                    "log-probs.  For a call that is not trained write "
                    "ctx.policy.generate(ctx.request(messages, ...))"
                )

    async def _score(self, transcript: Transcript) -> Score | None:
        """Return the score of the whole run; None if each of its rows has a score of its own."""
        workflow = f"workflow {self.recipe.name}"
        row_has_score = scored_rows(transcript)  # for each row; empty: no call has one
        if transcript.score is not None:
            score = checked(transcript.score)
            if row_has_score == [True]:
                _check_same(score, sum_of_scores(transcript.turns), workflow)
            return score
        if any(row_has_score):
            if not all(row_has_score):
                raise RunError(
                    f"{workflow} scored some of its calls and not others; score all, or only the "
                    f"whole run"
                )
            return None
        if self.recipe.reward is None:
            raise RunError(
                f"{workflow} gave no score and taskset {self.task.taskset} names no reward; name "
                f"one in default_reward_fn_type, or return a score (a program posts it to /v1/reward)"
            )
        return await self.reward(transcript)


def image_files(rows: Sequence[Experience], transcript: Transcript) -> Mapping[str, bytes]:
    """Return the files of the images in the rows of a run, by name."""
    shown = {place.sha256 for row in rows for place in row.images}
    if not shown:
        return NO_IMAGES
    return {image.sha256: image.data for image in transcript.images if image.sha256 in shown}


def _check_same(score: Score, steps: Score | None, workflow: str) -> None:
    """Raise RunError if the score of a run of one row differs from that of its calls."""
    step_value = None if steps is None else steps.value
    value = math.nan if score.value is None else score.value
    if not math.isclose(value, step_value or 0.0, abs_tol=1e-9):
        raise RunError(
            f"{workflow} scored the run with {score.value} and its calls with {step_value}; both "
            f"are one row: give one of them"
        )


def _gold(task: Task) -> dict[str, Any]:
    """Return a short truth as `info`, for display."""
    if not isinstance(task.truth, str | int | float) or len(text := str(task.truth)) > _GOLD_CHARS:
        return {}
    # surrogates cannot be stored
    return {"gold_answer": redact(text.encode("utf-8", "backslashreplace").decode())}


def _without_middle(reason: str) -> str:
    """Return a text of at most 300 characters: programs say at the end why they failed."""
    start, end = _REASON_CHARS
    return reason if len(reason) <= start + 3 + end else f"{reason[:start]} … {reason[-end:]}"


def ended_by(error: Exception) -> Ended:
    return "timeout" if isinstance(error, OutOfTime) else ""


async def play(recipe: Recipe, task: Task, contexts: Sequence[RunContext]) -> list[Any]:
    """Call the workflow for these runs of a task, in this process or, if the class is `isolated`,
    in another.
    """
    if recipe.isolation is None:
        return await call_workflow(
            recipe.name,
            recipe.make,
            task,
            contexts,
            whole_group=recipe.plays_group,
            blocking=recipe.blocking,
        )
    try:
        return await recipe.isolation.play(
            task, recipe.keywords, contexts, whole_group=recipe.plays_group
        )
    except IsolatedRunFailed as e:
        first, _, rest = str(e).partition("\n")
        error = RunError(first)
        error.add_note(rest)
        raise error from None
