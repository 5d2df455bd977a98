"""Stored rollouts scored again with another reward, old beside new.

Depends on experiences, tasks and a reward, on no ledger and no engine.  Invariant: nothing is
changed; an answer that cannot be scored is counted and left out of every mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from statistics import fmean

import numpy as np

from rft.explorer.stored import scored_or_not
from rft.reward.base import Reward, hook
from rft.types.completion import Completion, Score, Transcript, Turn, VersionSpan
from rft.types.experience import Experience
from rft.types.images import Image, names_in
from rft.types.ports import NO_IMAGES, ChatModel
from rft.types.task import Task, plain_text
from rft.worker import job_pool


@dataclass(frozen=True)
class StoredAnswer:
    """One run of a task, with the reward that it got: that of the ledger, which may have been
    edited.
    """

    task: Task
    group: str
    experience: Experience
    reward: float | None
    images: Mapping[str, bytes] = field(default_factory=dict)  # files that it shows, by name


@dataclass(frozen=True)
class Rescored:
    """Old and new reward of one run; `new` None: it could not be scored, `reason` says so."""

    id: str
    taskset: str
    group: str
    answer: str
    old: float | None
    new: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""


async def rescore(
    rows: Sequence[StoredAnswer],
    reward: Reward,
    *,
    models: Mapping[str, ChatModel],
    timeout_s: float,
    max_concurrent: int,
    progress: Callable[[int], None] = lambda n: None,
) -> list[Rescored]:
    """In the order of `rows`, which has groups, and in them runs, together; a run is scored whole.
    `progress` is called with the number of scored runs.

    Raises RftError (a model is gone, a budget is used up): what was scored until then is lost, but
    for what judges keep in their cache.
    """
    room = asyncio.Semaphore(max_concurrent)
    done = 0

    async def rescore_group(runs: list[list[StoredAnswer]]) -> list[Rescored]:
        nonlocal done
        async with room:
            transcripts = [
                joined([transcript_of(s.experience, s.task, s.images) for s in run]) for run in runs
            ]
            found = await scored_or_not(reward, runs[0][0].task, transcripts, timeout_s)
        done += sum(map(len, runs))
        progress(done)
        return [_rescored(s, r) for run, r in zip(runs, found, strict=True) for s in run]

    # each run alone, except for a reward that sees a group
    runs = [list(rows) for _, rows in groupby(rows, key=lambda s: (s.group, s.experience.id.run))]
    groups = (
        [list(g) for _, g in groupby(runs, key=lambda run: run[0].group)]
        if reward.whole_group
        else [[run] for run in runs]
    )
    try:
        await hook(reward.prepare, models)
        return [r for part in await asyncio.gather(*map(rescore_group, groups)) for r in part]
    finally:
        await hook(reward.close)
        await asyncio.to_thread(job_pool.close_all)


def _rescored(s: StoredAnswer, result: Score | Exception) -> Rescored:
    rescored = (
        Score(value=None, reason=f"{type(result).__name__}: {result}")
        if isinstance(result, Exception)
        else result
    )
    return Rescored(
        id=str(s.experience.id),
        taskset=s.task.taskset,
        group=s.group,
        answer=s.experience.response_text,
        old=s.reward,
        new=rescored.value,
        parts=dict(rescored.parts),
        reason=rescored.reason,
    )


def transcript_of(x: Experience, task: Task, images: Mapping[str, bytes] = NO_IMAGES) -> Transcript:
    """A stored run as its reward saw it: a turn for each answer of the model, with its tokens where
    they can be told apart; `images`: files that it shows, by name.
    """
    images = {**{image.sha256: image.data for image in task.images}, **images}
    messages = list(x.messages) or [*task.chat(), {"role": "assistant", "content": x.response_text}]
    answered = [i for i, m in enumerate(messages) if m.get("role") == "assistant"] or [
        len(messages) - 1
    ]
    pieces = _pieces(x)
    if len(pieces) != len(answered):
        pieces = [np.zeros(0, np.int64)] * (len(answered) - 1) + [np.flatnonzero(x.loss_mask)]
    turns = []
    for i, where in zip(answered, pieces, strict=True):
        answer = messages[i]
        completion = Completion(
            prompt_tokens=x.tokens[: int(where[0])] if len(where) else np.zeros(0, np.int32),
            tokens=x.tokens[where],
            logprobs=x.logprobs[where],
            text=plain_text(answer.get("content")) or "",
            finish_reason="length" if x.status == "truncated" and i == answered[-1] else "stop",
            version_spans=(VersionSpan(x.version_spans[0].version, 0, len(where)),)
            if x.version_spans and len(where)
            else (),
            sampling=task.sampling,
            in_thought=i == answered[-1] and bool(x.info.get("in_thought")),
            stop_text=str(x.info.get("stop_text", "")) if i == answered[-1] else "",
            reasoning=str(answer.get("reasoning_content") or ""),
            tool_calls=tuple(answer.get("tool_calls") or ()),
        )
        # that of a row is its last call's and its run's
        info = dict(x.info) if i == answered[-1] else {}
        names = dict.fromkeys(names_in(messages[:i]))
        turns.append(
            Turn(
                messages=tuple(messages[:i]),
                tools=x.tools,
                completion=completion,
                info=info,
                images=tuple(Image(name, images[name]) for name in names),
            )
        )
    return Transcript(turns=tuple(turns), metrics=dict(x.metrics), info=dict(x.info))


def joined(rows: Sequence[Transcript]) -> Transcript:
    """The run whose rows these are: of several each has its own calls, and perhaps shows those
    before them.
    """
    turns = (
        t
        for row in rows
        for t in row.turns
        if len(rows) == 1 or len(t.completion.tokens) or t is row.turns[-1]
    )
    return Transcript(turns=tuple(turns), metrics=rows[-1].metrics, info=rows[-1].info)


def _pieces(x: Experience) -> list[np.ndarray]:
    """Places of the trained tokens, cut where others stand between them."""
    places = np.flatnonzero(x.loss_mask)
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []


def summary(rows: Sequence[Rescored]) -> dict[str, dict[str, float]]:
    """By taskset, and for "all": {answers, unscored, old, new, changed, correlation, order_kept,
    groups_with_spread_old, ..._new}.

    `changed`: share of the answers whose reward differs by more than 1e-6.  `order_kept`: of the
    pairs inside groups that the old reward tells apart, the share that the new one orders alike:
    what advantages depend on.
    """
    names = list(dict.fromkeys(r.taskset for r in rows))
    by_taskset = {name: _numbers([r for r in rows if r.taskset == name]) for name in names}
    return by_taskset if len(names) == 1 else {**by_taskset, "all": _numbers(rows)}


def _numbers(rows: Sequence[Rescored]) -> dict[str, float]:
    both = [(r.group, r.old, r.new) for r in rows if r.old is not None and r.new is not None]
    out = {"answers": float(len(rows)), "unscored": float(sum(r.new is None for r in rows))}
    if not both:
        return out
    old = np.array([b[1] for b in both])
    new = np.array([b[2] for b in both])
    out |= {
        "old": fmean(old),
        "new": fmean(new),
        "changed": float((np.abs(old - new) > 1e-6).mean()),
    }
    if old.std() > 0 and new.std() > 0:
        out["correlation"] = float(np.corrcoef(old, new)[0, 1])
    groups = [[(a, b) for _, a, b in g] for _, g in groupby(sorted(both), key=lambda x: x[0])]
    pairs = [
        (a[0] - b[0], a[1] - b[1]) for g in groups for a, b in combinations(g, 2) if a[0] != b[0]
    ]
    if pairs:
        out["order_kept"] = fmean(x * y > 0 for x, y in pairs)
    several = [g for g in groups if len(g) > 1]
    if several:
        out["groups_with_spread_old"] = fmean(len({a for a, _ in g}) > 1 for g in several)
        out["groups_with_spread_new"] = fmean(len({b for _, b in g}) > 1 for g in several)
    return out
