"""From a scored transcript to experiences.  Knows no engine and no clock; what does not fit raises ValueError.

Invariant: every token that the policy wrote is in exactly one experience.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rft.logs import redact
from rft.types.completion import Score, Transcript, Turn
from rft.types.experience import Experience, from_completions
from rft.types.ids import GroupId
from rft.types.task import Task


def experiences(
    task: Task, workflow: str, transcript: Transcript, verdict: Score | None, group: GroupId, run: int, attempt: int
) -> tuple[Experience, ...]:
    """The rows of one run, numbered by step.

    A row's reward is that of its own calls where they have one (their sum), else `verdict`, the whole run's.
    """
    rows = []
    for step, turns in enumerate(cut(transcript)):
        score = _score(turns, verdict)
        last = turns[-1]
        row = from_completions(
            group.run(run, attempt, step),
            [t.completion for t in turns],
            taskset=task.taskset,
            task_index=task.index,
            workflow=workflow,
            reward=score.value,
            reward_parts=score.parts,
            messages=(*last.messages, last.completion.message),
            tools=task.tools,
            prompt_text=_prompt_text(turns[0]),
            metrics={name: float(value) for name, value in transcript.metrics.items()},
            info={**transcript.info, **last.info, **({"reward_reason": redact(score.reason)} if score.reason else {})},
        )
        rows.append(_taught(_masked(row, turns), turns))
    if transcript.limited:
        rows[-1] = msgspec.structs.replace(rows[-1], status="truncated")
    return tuple(rows)


def cut(transcript: Transcript) -> list[tuple[Turn, ...]]:
    """The calls of each experience, in order."""
    if transcript.layout == "joined":
        return [transcript.turns]
    if transcript.layout == "steps":
        return [(t,) for t in transcript.turns]
    chains: list[list[Turn]] = []
    for turn in transcript.turns:
        home = next((c for c in reversed(chains) if _continues(turn, c[-1])), None)
        if home is None:
            chains.append([turn])
        else:
            home.append(turn)
    return [tuple(c) for c in chains]


def _continues(turn: Turn, before: Turn) -> bool:
    prompt, old = turn.completion.prompt_tokens, before.completion
    start, end = len(old.prompt_tokens), len(old.prompt_tokens) + len(old.tokens)
    return (
        len(prompt) >= end and np.array_equal(prompt[:start], old.prompt_tokens) and np.array_equal(prompt[start:end], old.tokens)
    )


def _score(turns: Sequence[Turn], verdict: Score | None) -> Score:
    own = [t.score for t in turns if t.score is not None]
    if own:
        parts: dict[str, float] = {}
        for s in own:
            for name, value in s.parts.items():
                parts[name] = parts.get(name, 0.0) + value
        return Score(value=sum(s.value for s in own if s.value is not None), parts=parts)
    return verdict if verdict is not None else Score(value=None)


def value(transcript: Transcript, verdict: Score | None) -> float | None:
    """The reward of the whole run: `verdict`, else the sum of what its calls got (the return)."""
    if verdict is not None:
        return verdict.value
    own = [t.score.value for t in transcript.turns if t.score is not None and t.score.value is not None]
    return sum(own) if own else None


def _masked(row: Experience, turns: Sequence[Turn]) -> Experience:
    """The row without the tokens that its calls leave out of training."""
    if all(t.mask is None for t in turns):
        return row
    keep = row.loss_mask.copy()
    for t in turns:
        start, size = len(t.completion.prompt_tokens), len(t.completion.tokens)
        if t.mask is not None:
            if t.mask.shape != (size,) or t.mask.dtype != np.bool_:
                raise ValueError(f"mask: {t.mask.dtype} {t.mask.shape}, must be bool for {size} tokens")
            keep[start : start + size] &= t.mask
    return msgspec.structs.replace(row, loss_mask=keep, logprobs=np.where(keep, row.logprobs, np.float32(0)))


def _taught(row: Experience, turns: Sequence[Turn]) -> Experience:
    """The row with a teacher's log-probs of its trained tokens, if all of its calls have them."""
    if any(t.teacher_logprobs is None for t in turns):
        return row
    taught = np.zeros(row.num_tokens, np.float32)
    for t in turns:
        start, values = len(t.completion.prompt_tokens), t.teacher_logprobs
        if values is None or len(values) != len(t.completion.tokens):
            raise ValueError(f"teacher: {0 if values is None else len(values)} log-probs for {len(t.completion.tokens)} tokens")
        taught[start : start + len(values)] = values
    return msgspec.structs.replace(row, teacher_logprobs=taught)


def _prompt_text(turn: Turn) -> str:
    """What a call was asked, for people: the last message before the model spoke."""
    content: Any = turn.messages[-1].get("content") if turn.messages else ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()
