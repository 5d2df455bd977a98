"""Reward of questions with short answers: the text in the last <answer> block against the gold answers, letter case and articles aside."""

from __future__ import annotations

import re
import string
from typing import Any

from rft.reward.base import reward
from rft.reward.extract import blocks
from rft.types.completion import Transcript
from rft.types.task import Task

_ARTICLES = re.compile(r"\b(a|an|the)\b")


@reward("search_qa_reward")
def search_qa_reward(task: Task, transcript: Transcript) -> float:
    """1 if the last <answer> block is one of the gold answers (a text, a list, or {target: ...}), else 0."""
    found = blocks(transcript.answer, "answer")
    return float(bool(found) and plain(found[-1]) in {plain(t) for t in targets(task)})


def targets(task: Task) -> list[str]:
    given: Any = task.truth["target"] if isinstance(task.truth, dict) and "target" in task.truth else task.truth
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not given or not all(isinstance(t, str) for t in given):
        raise ValueError(
            f"the truth of task {task.taskset}[{task.index}] is {task.truth!r}; it must be a text or a list of texts"
        )
    return given


def plain(text: str) -> str:
    """Lower case, without punctuation and articles, single blanks."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())
