"""Render prompts like the engine, and find tasks with equal or nearly equal prompts.

Depends on tasksets and a model's chat template, on no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft.config.context import Problems
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.preflight.conversation_check import renderer
from rft.taskset.base import Taskset
from rft.taskset.chatfiles import ChatFiles
from rft.taskset.near_duplicates import earlier, signatures, words
from rft.types.task import Task

ROWS_COMPARED = 50_000  # rows per set compared for equal prompts
ROWS_NEAR = 1000  # rows per set compared for nearly equal prompts
ALIKE = 0.7  # shared share of 3-word sequences of near-duplicates
NUMBER = re.compile(r"\d+")
_CASED = re.compile(r"\s+")


def rendered(task: Task, model: ChatFiles, engine: EngineSettings) -> str:
    """Return the prompt as the engine builds it.

    Raises ValueError if the workflow builds its own prompt from the row.
    """
    return renderer(task, model, engine)(task.chat())


@dataclass(frozen=True)
class TaskText:
    """Compared content of a task: prompt without case and extra white space, numbers, gold answer."""

    index: int
    text: str
    numbers: tuple[str, ...]
    truth: str

    @classmethod
    def of(cls, task: Task) -> TaskText:
        try:
            prompt: Any = " ".join(str(m.get("content", "")) for m in task.chat())
        except ValueError:  # the workflow builds its own prompt from the row
            prompt = json.dumps(task.row, sort_keys=True, default=str)
        text = _CASED.sub(" ", prompt).strip().casefold()
        return cls(
            task.index,
            text,
            tuple(NUMBER.findall(text)),
            json.dumps(task.truth, sort_keys=True, default=str),
        )


def near(
    texts: Sequence[TaskText], labels: Sequence[object] | None = None
) -> list[tuple[int, int]]:
    """Return pairs (later, earlier) of prompts that are nearly equal but not equal.

    They share about `ALIKE` of their 3-word sequences, and have the same numbers in the same order:
    sums that differ by a digit are different tasks.
    """
    prompt_signatures = signatures([words(t.text) for t in texts], size=128, shingle=3)
    pairs = earlier(prompt_signatures, threshold=ALIKE, labels=labels)
    return [
        (i, j)
        for i, j in pairs
        if texts[i].text != texts[j].text and texts[i].numbers == texts[j].numbers
    ]


def shared_prompts(
    train: Sequence[TaskText], held_out: Sequence[TaskText], sample: int = 1 << 62
) -> tuple[list[tuple[TaskText, TaskText]], ...]:
    """Return the pairs (held-out row, training row) with equal prompts, and those with nearly equal
    prompts among at most `sample` rows of each.
    """
    trained = {t.text: t for t in train}
    sample_trained = _spread(list(trained.values()), sample)
    both = [*sample_trained, *_spread([t for t in held_out if t.text not in trained], sample)]
    alike = near(both, [i < len(sample_trained) for i in range(len(both))])
    return [(t, trained[t.text]) for t in held_out if t.text in trained], [
        (both[i], both[j]) for i, j in alike
    ]


def overlap(opened: Sequence[Taskset], problems: Problems) -> None:
    """For `rft check`: warn of evaluation prompts that occur in a training set; near-duplicates in
    a sample of each.
    """
    evals = [t.settings.name for t in opened if t.settings.is_eval]
    trains = [t.settings.name for t in opened if not t.settings.is_eval]
    if not evals or not trains:
        return
    texts: dict[str, list[TaskText]] = {}
    for taskset in opened:
        name = taskset.settings.name
        try:
            texts[name] = [
                TaskText.of(taskset.task(i)) for i in range(min(len(taskset), ROWS_COMPARED))
            ]
        except (ConfigError, ValueError):
            texts[name] = []
    for train, held_out in ((t, h) for t in trains for h in evals):
        same, alike = shared_prompts(texts[train], texts[held_out], ROWS_NEAR)
        if same:
            problems.warn(
                f"{len(same)} of {len(texts[held_out])} prompts of {held_out} are also in {train}: "
                f"its accuracy is not that of unseen tasks"
            )
        if alike:
            problems.warn(
                f"{len(alike)} of the prompts of {held_out} that were compared are nearly the same "
                f"as one of {train}, e.g. row "
                f"{alike[0][0].index} and row {alike[0][1].index}; `rft data audit` compares all "
                f"of them"
            )


def _spread(texts: Sequence[TaskText], most: int) -> list[TaskText]:
    return (
        list(texts) if len(texts) <= most else [texts[i * len(texts) // most] for i in range(most)]
    )
