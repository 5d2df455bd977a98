"""Prompts as the engine makes them, and those of tasks that are the same or nearly the same.

Knows tasksets and a model's chat template; no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft.config.context import Problems
from rft.config.conversation_check import renderer
from rft.config.model_folder import ModelFiles
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.taskset.base import Taskset
from rft.taskset.near_duplicates import earlier, signatures, words
from rft.types.task import Task

ROWS_COMPARED = 50_000  # of a set, for the same prompts
ROWS_NEAR = 1000  # of a set, for nearly the same
ALIKE = 0.7  # of the sequences of 3 words and signs of two prompts that are near-duplicates
NUMBER = re.compile(r"\d+")
_CASED = re.compile(r"\s+")


def rendered(task: Task, model: ModelFiles, engine: EngineSettings) -> str:
    """The prompt as the engine makes it.  Raises ValueError where the workflow makes its own from
    the row.
    """
    return renderer(task, model, engine)(task.chat())


@dataclass(frozen=True)
class TaskText:
    """What is compared of a task: its prompt without regard to case and white space, its numbers,
    its gold answer.
    """

    index: int
    text: str
    numbers: tuple[str, ...]
    truth: str

    @classmethod
    def of(cls, task: Task) -> TaskText:
        try:
            said: Any = " ".join(str(m.get("content", "")) for m in task.chat())
        except ValueError:  # the workflow makes its own prompt from the row
            said = json.dumps(task.row, sort_keys=True, default=str)
        text = _CASED.sub(" ", said).strip().casefold()
        return cls(
            task.index,
            text,
            tuple(NUMBER.findall(text)),
            json.dumps(task.truth, sort_keys=True, default=str),
        )


def near(
    texts: Sequence[TaskText], labels: Sequence[object] | None = None
) -> list[tuple[int, int]]:
    """Pairs (later, earlier) that are nearly the same without being the same.

    About `ALIKE` of their words in threes, and the same numbers in the same order: sums that differ
    by a digit are different tasks.
    """
    found = signatures([words(t.text) for t in texts], size=128, shingle=3)
    pairs = earlier(found, threshold=ALIKE, labels=labels)
    return [
        (i, j)
        for i, j in pairs
        if texts[i].text != texts[j].text and texts[i].numbers == texts[j].numbers
    ]


def shared_prompts(
    train: Sequence[TaskText], held_out: Sequence[TaskText], sample: int = 1 << 62
) -> tuple[list[tuple[TaskText, TaskText]], ...]:
    """(row held out, row of training) that are the same; and nearly the same, of at most `sample`
    rows of each.
    """
    known = {t.text: t for t in train}
    mine = _spread(list(known.values()), sample)
    both = [*mine, *_spread([t for t in held_out if t.text not in known], sample)]
    alike = near(both, [i < len(mine) for i in range(len(both))])
    return [(t, known[t.text]) for t in held_out if t.text in known], [
        (both[i], both[j]) for i, j in alike
    ]


def overlap(opened: Sequence[Taskset], problems: Problems) -> None:
    """For `rft check`: warns of evaluation prompts that are in a training set; near-duplicates
    among a sample of each.
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
