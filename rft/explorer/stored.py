"""Score stored answers with a reward, for `rft bench --input`.  Depends on no engine.

Invariant: an answer that cannot be scored is counted and left out of every mean; it never counts as
0.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from rft.errors import ConfigError, RftError
from rft.explorer.evaluate import PASS, at_k
from rft.reward.base import Reward, score, score_group
from rft.taskset.base import Taskset
from rft.taskset.messages import ABSENT, lookup
from rft.types.completion import Completion, Score, Transcript, Turn
from rft.types.ports import ChatModel
from rft.types.task import Task
from rft.types.thoughts import was_opened
from rft.worker import job_pool
from rft.workflow.base import NO_MODELS
from rft.workflow.recipes import Recipe, Recipes


@dataclass(frozen=True)
class Scored:
    """One row: the rewards of its answers (None = not scorable), and the reason of the first
    failure.
    """

    source: str
    rewards: tuple[float | None, ...]
    reason: str = ""


async def score_stored(
    taskset: Taskset,
    *,
    response_key: str,
    group_key: str,
    timeout_s: float,
    max_concurrent: int,
    models: Mapping[str, ChatModel] = NO_MODELS,
) -> list[Scored]:
    """Score column `response_key` (a text, or a list of texts) of every row; results are split by
    column `group_key`.

    Raises ConfigError for a row without answers and for a taskset without a reward.
    """
    recipes = Recipes()
    room = asyncio.Semaphore(max_concurrent)
    tasks = [
        (task, _answers(task, response_key)) for task in map(taskset.task, range(len(taskset)))
    ]

    async def score_task(task: Task, answers: Sequence[str]) -> Scored:
        group = lookup(task.row, group_key)
        source = task.taskset if group is ABSENT else str(group)
        async with room:
            return await _row(task, await recipes.get(task), answers, source, timeout_s)

    try:
        await recipes.prepare(models)
        return list(await asyncio.gather(*(score_task(task, answers) for task, answers in tasks)))
    finally:
        await recipes.close()
        await asyncio.to_thread(job_pool.close_all)


async def _row(
    task: Task, recipe: Recipe, answers: Sequence[str], source: str, timeout_s: float
) -> Scored:
    reward = recipe.reward
    if reward is None:
        raise ConfigError(
            "names no reward; write default_reward_fn_type for it, or --reward-fn",
            key=f"taskset {task.taskset}.reward_fn",
        )
    results = await scored_or_not(reward, task, [transcript(task, a) for a in answers], timeout_s)
    first = next((r for r in results if isinstance(r, Exception)), None)
    reason = "" if first is None else f"row {task.index}: {type(first).__name__}: {first}"
    return Scored(source, tuple(r.value if isinstance(r, Score) else None for r in results), reason)


async def scored_or_not(
    reward: Reward, task: Task, transcripts: Sequence[Transcript], timeout_s: float
) -> list[Score | Exception]:
    """Return each run's score, or the exception that prevented it.  Raises RftError (a lost model,
    an exhausted budget).
    """
    results: Sequence[Score | BaseException]
    if reward.whole_group:
        (scores,) = await asyncio.gather(
            score_group(reward, task, transcripts, timeout_s=timeout_s), return_exceptions=True
        )
        results = [scores] * len(transcripts) if isinstance(scores, BaseException) else scores
    else:
        results = await asyncio.gather(
            *(score(reward, task, t, timeout_s=timeout_s) for t in transcripts),
            return_exceptions=True,
        )
    for result in results:
        if isinstance(result, RftError) or not isinstance(result, Exception | Score):
            raise result  # an error of rft, or cancellation
    return list(results)  # type: ignore[arg-type]


def _answers(task: Task, key: str) -> list[str]:
    column = lookup(task.row, key)
    answers = [column] if isinstance(column, str) else column
    if (
        not isinstance(answers, list | tuple)
        or not answers
        or not all(isinstance(a, str) for a in answers)
    ):
        problem = f"{key!r} is {column!r:.80}"
        if column is ABSENT:
            problem = f"has no column {key!r}; it has {', '.join(map(str, task.row))}"
        raise ConfigError(
            f"row {task.index} {problem}; a text or a list of texts is needed",
            key="--response-key",
            given=key,
        )
    return list(answers)


def transcript(task: Task, text: str) -> Transcript:
    """Return the answer as a sampled transcript.  It has no tokens: rewards that count tokens see
    0.
    """
    empty = np.zeros(0, np.int32)
    completion = Completion(
        prompt_tokens=empty,
        tokens=empty,
        logprobs=empty.astype(np.float32),
        text=text,
        finish_reason="stop",
        version_spans=(),
        sampling=task.sampling,
        in_thought=was_opened(text),
    )
    return Transcript(turns=(Turn(messages=tuple(task.chat()), completion=completion),))


def summary(rows: Sequence[Scored]) -> dict[str, dict[str, float]]:
    """Return metrics by source and for "all": {rows, answers, unscored, mean, pass_rate, best@k,
    worst@k, pass@k}.

    `mean` averages rows over the mean of their scored answers; at-k metrics require the same number
    of answers in every row.
    """
    by_source: defaultdict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    if len(by_source) > 1:
        by_source["all"] = list(rows)
    return {source: _numbers(scores) for source, scores in by_source.items()}


def _numbers(rows: Sequence[Scored]) -> dict[str, float]:
    scored: list[list[float]] = [[x for x in r.rewards if x is not None] for r in rows]
    complete = [r for r in scored if r]
    answers = sum(len(r.rewards) for r in rows)
    out: dict[str, Any] = {
        "rows": float(len(rows)),
        "answers": float(answers),
        "unscored": float(answers - sum(map(len, scored))),
    }
    if complete:
        out["mean"] = fmean(fmean(r) for r in complete)
        out["pass_rate"] = fmean(fmean(x >= PASS for x in r) for r in complete)
    if len(counts := {len(r.rewards) for r in rows}) == 1 and (n := counts.pop()) > 1:
        out |= {name.removeprefix("/"): value for name, value in at_k("", complete, n).items()}
    return out
