"""Reward of reasoning-gym tasksets: the data set's own `score_answer` on the row it made."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rft.reward.base import reward
from rft.types.completion import Transcript
from rft.types.task import Task


@reward("reasoning_gym")
def reasoning_gym(task: Task, transcript: Transcript) -> float:
    """Score in [0, 1] of the last <answer> block, else of the whole answer.  For reasoning_gym:// tasksets."""
    name = task.row.get("metadata", {}).get("source_dataset")
    if name is None:
        raise ValueError(
            f"task {task.taskset}[{task.index}] has no metadata.source_dataset; this reward is for reasoning_gym:// tasksets"
        )
    answer = transcript.answer
    if "<answer>" in answer:
        answer = answer.rpartition("<answer>")[2].partition("</answer>")[0]
    return float(_scorer(name)(answer=answer.strip(), entry=task.row))


@lru_cache(maxsize=128)
def _scorer(name: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)
