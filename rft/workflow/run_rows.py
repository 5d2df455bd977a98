"""Build the experiences of one run: calls of each row, reward, mask, teacher log-probs.

Depends on no workflow and no reward.
Invariant: a row holds the engine's tokens in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from rft.secrets import redact
from rft.types.completion import Score, Transcript, Turn, VersionSpan
from rft.types.experience import Experience, from_completions
from rft.types.ids import GroupId
from rft.types.task import Task


def experiences(
    task: Task,
    workflow: str,
    transcript: Transcript,
    score: Score | None,
    group: GroupId,
    run: int,
    attempt: int,
) -> tuple[Experience, ...]:
    """Return the rows of one run, numbered by step.

    The reward of a row is the sum of its calls' scores if they have any, else the run's `score`
    (`rft.types.credit`).
    """
    rows = []
    for step, turns in enumerate(cut(transcript)):
        step_score = sum_of_scores(turns)
        row_score = step_score or score or Score(value=None)
        last = turns[-1]
        row = from_completions(
            group.run(run, attempt, step),
            [t.completion for t in turns],
            taskset=task.taskset,
            task_index=task.index,
            workflow=workflow,
            reward=row_score.value,
            credit="run" if step_score is None else "step",
            reward_parts=row_score.parts,
            messages=(*last.messages, last.completion.message),
            tools=last.tools,
            prompt_text=_prompt_text(turns[0]),
            metrics={name: float(value) for name, value in transcript.metrics.items()},
            info={
                **transcript.info,
                **last.info,
                **last.completion.around_text,
                **({"reward_reason": redact(row_score.reason)} if row_score.reason else {}),
                **({"reward_weights": dict(row_score.weights)} if row_score.weights else {}),
            },
        )
        rows.append(_with_teacher(_with_mask(row, turns), turns))
    if transcript.expert:
        rows = list(map(_of_expert, rows))
    if transcript.limited:
        rows[-1] = msgspec.structs.replace(rows[-1], status="truncated")
    return tuple(rows)


def _of_expert(row: Experience) -> Experience:
    """Return the row without log-probs and versions of a policy, which did not write it."""
    return msgspec.structs.replace(
        row,
        is_expert=True,
        has_logprobs=False,
        logprobs=np.zeros_like(row.logprobs),
        version_spans=(),
        sampling=(),
    )


def cut(transcript: Transcript) -> list[tuple[Turn, ...]]:
    """Return the calls of each experience, in order.

    Layout "chains": a call whose prompt begins with another call's tokens continues its chain.
    """
    if transcript.layout == "joined":
        return [transcript.turns]
    if transcript.layout == "steps":
        return [(t,) for t in transcript.turns]
    chains: list[list[Turn]] = []
    # of each chain: number of tokens up to the end of its last call, and their `_prefix_sums`
    ends = np.zeros(len(transcript.turns), np.int64)
    sums = np.zeros(len(transcript.turns), np.uint64)
    for turn in transcript.turns:
        if chains and _continues(turn, chains[-1][-1]):  # the usual case
            chains[-1].append(turn)
            continue
        if chains and len(chains[-1]) > 1:
            last = _prefix_sums(chains[-1][-1])
            ends[len(chains) - 1] = len(last) - 1
            sums[len(chains) - 1] = last[-1]
        prefix_sums = _prefix_sums(turn)
        prefixes = ends[: len(chains)].clip(max=len(turn.completion.prompt_tokens))
        candidates = np.flatnonzero(
            (prefixes == ends[: len(chains)]) & (prefix_sums[prefixes] == sums[: len(chains)])
        ).tolist()
        chain = next(
            (n for n in reversed(candidates) if _continues(turn, chains[n][-1])), len(chains)
        )
        if chain == len(chains):
            chains.append([])
        chains[chain].append(turn)
        ends[chain] = len(prefix_sums) - 1
        sums[chain] = prefix_sums[-1]
    return [tuple(c) for c in chains]


def _prefix_sums(turn: Turn) -> np.ndarray:
    """Return a checksum of each prefix of a call's tokens, the empty one first."""
    c = turn.completion
    sums = np.concatenate([[0], c.prompt_tokens, c.tokens], dtype=np.uint64, casting="unsafe")
    sums *= _powers(len(sums).bit_length())[: len(sums)]
    return np.cumsum(sums, out=sums)


@cache
def _powers(bits: int) -> np.ndarray:
    return np.cumprod(np.full(1 << bits, 0x9E3779B97F4A7C15, np.uint64))


def _continues(turn: Turn, earlier: Turn) -> bool:
    """Return whether the prompt of `turn` begins with the tokens of an earlier call."""
    prompt = turn.completion.prompt_tokens
    c = earlier.completion
    start = len(c.prompt_tokens)
    end = start + len(c.tokens)
    return (
        len(prompt) >= end
        and np.array_equal(prompt[:start], c.prompt_tokens)
        and np.array_equal(prompt[start:end], c.tokens)
    )


def sum_of_scores(turns: Sequence[Turn]) -> Score | None:
    """Return the sum of the scores of single calls; None if no call has one."""
    scores = [t.score for t in turns if t.score is not None]
    if not scores:
        return None
    parts: dict[str, float] = {}
    for score in scores:
        for name, value in score.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    values = [score.value for score in scores if score.value is not None]
    return Score(value=math.fsum(values) if values else None, parts=parts)


def run_reward(transcript: Transcript, score: Score | None) -> float | None:
    """Return the reward of the whole run: of `score`, else the sum over its calls."""
    if score is None:
        score = sum_of_scores(transcript.turns)
    return None if score is None else score.value


def _with_mask(row: Experience, turns: Sequence[Turn]) -> Experience:
    if all(t.mask is None for t in turns):
        return row
    trained = row.loss_mask.copy()
    for t in turns:
        start = len(t.completion.prompt_tokens)
        size = len(t.completion.tokens)
        if t.mask is not None:
            if t.mask.shape != (size,) or t.mask.dtype != np.bool_:
                raise ValueError(
                    f"mask: {t.mask.dtype} {t.mask.shape}, must be bool for {size} tokens"
                )
            trained[start : start + size] &= t.mask
    return msgspec.structs.replace(
        row, loss_mask=trained, logprobs=np.where(trained, row.logprobs, np.float32(0))
    )


def _with_teacher(row: Experience, turns: Sequence[Turn]) -> Experience:
    """Add a teacher's log-probs of the trained tokens, if all calls have them."""
    if any(t.teacher is None for t in turns):
        return row
    logprobs = np.zeros(row.num_tokens, np.float32)
    spans = []
    for t in turns:
        assert t.teacher is not None, "looked at above"
        start = len(t.completion.prompt_tokens)
        values = t.teacher.logprobs
        if len(values) != len(t.completion.tokens):
            raise ValueError(
                f"teacher: {len(values)} log-probs for {len(t.completion.tokens)} tokens"
            )
        end = start + len(values)
        logprobs[start:end] = values
        spans.append(VersionSpan(t.teacher.version, start, end))
    row = msgspec.structs.replace(row, teacher_logprobs=logprobs, teacher_spans=tuple(spans))
    return _with_top(row, turns)


def _with_top(row: Experience, turns: Sequence[Turn]) -> Experience:
    """Add the teacher's most likely tokens, if all calls have them."""
    scores = [t.teacher for t in turns if t.teacher is not None]
    ids = [s.top_ids for s in scores if s.top_ids is not None]
    logprobs = [s.top_logprobs for s in scores if s.top_logprobs is not None]
    if not (len(ids) == len(logprobs) == len(turns)):
        return row
    return msgspec.structs.replace(
        row,
        teacher_top_ids=np.concatenate(ids),
        teacher_top_logprobs=np.concatenate(logprobs),
    )


def _prompt_text(turn: Turn) -> str:
    """Return the last message of a call's prompt, for display."""
    content: Any = turn.messages[-1].get("content") if turn.messages else ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def scored_rows(transcript: Transcript) -> list[bool]:
    """Return for each row whether its calls have a score; empty if no call has one."""
    if all(t.score is None for t in transcript.turns):
        return []  # avoids the cost of cutting
    return [any(t.score is not None for t in turns) for turns in cut(transcript)]
