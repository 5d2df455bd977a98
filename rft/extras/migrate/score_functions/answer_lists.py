"""Functions that score lists of answers: TRL's f(prompts, completions, **columns) and the one that
veRL's batch manager calls.

They are known by the names of their parameters and are called once with all answers of a task.
Invariant: a list of another length, or with something that is no number, raises; None leaves that
answer unscored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rft.extras.migrate.score_functions.one_answer import parameters_of
from rft.extras.migrate.score_functions.reward_managers import ManagerArgs, answer
from rft.images.decode import decode
from rft.reward.base import Reward, to_score
from rft.types.completion import Score, Transcript
from rft.types.task import Task

BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL = ("prompts", "completions", "completion_ids")


def is_batch(obj: Any) -> bool:
    return _takes(obj, {"solution_strs", "ground_truths"})


def is_trl(obj: Any) -> bool:
    return _takes(obj, {"completions"})


def _takes(obj: Any, names: set[str]) -> bool:
    return inspect.isroutine(obj) and names <= set(inspect.signature(obj).parameters)


class ListReward(Reward):
    """`fn` as a reward of whole groups; `args` are further keyword arguments of it."""

    whole_group = True

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Mapping[str, Any],
        manager: ManagerArgs,
        *,
        name: str,
        key: str,
    ) -> None:
        self._fn = fn
        self._args = dict(args)
        self._manager = manager
        self._name = name
        self._batch = is_batch(fn)
        self._named, self._any = parameters_of(
            fn, BATCH if self._batch else TRL, args, name=name, key=key
        )
        parameters = inspect.signature(fn).parameters
        self._needed = {n for n in self._named if parameters[n].default is inspect.Parameter.empty}

    async def __call__(self, task: Task, transcripts: Sequence[Transcript]) -> list[Score]:
        keywords = {
            **(_batch(task, transcripts) if self._batch else _trl(task, transcripts)),
            **self._args,
        }
        keywords = {n: v for n, v in keywords.items() if self._any or n in self._named}
        if missing := sorted(self._needed - keywords.keys()):
            raise ValueError(
                f"reward {self._name!r} wants {', '.join(missing)}; the rows of {task.taskset} "
                f"have {', '.join(task.row)}"
            )
        results = await answer(self._fn, keywords, self._manager, self._name)
        if isinstance(results, Score):
            return [results] * len(transcripts)
        results = results.tolist() if hasattr(results, "tolist") else results
        if not isinstance(results, list | tuple) or len(results) != len(transcripts):
            got = (
                f"{len(results)} results"
                if isinstance(results, list | tuple)
                else type(results).__name__
            )
            raise ValueError(f"reward {self._name!r} returned {got} for {len(transcripts)} answers")
        return [_unscored if r is None else to_score(r, self._name) for r in results]


_unscored = Score(value=None, reason="the function returned None")


def _batch(task: Task, transcripts: Sequence[Transcript]) -> dict[str, list[Any]]:
    copies = [task.deep_copy() for _ in transcripts]
    return {
        "data_sources": [task.row.get("data_source", task.taskset)] * len(copies),
        "solution_strs": [t.turns[-1].completion.written for t in transcripts],
        "ground_truths": [t.truth for t in copies],
        "extra_infos": [t.row.get("extra_info") or {} for t in copies],
    }


def shown(value: Any, files: Mapping[str, bytes]) -> Any:
    """Return a column of images, which a row holds by their names, as pictures."""
    if not isinstance(value, list) or not value or not all(name in files for name in value):
        return value
    return [decode(files[name]) for name in value]


def _trl(task: Task, transcripts: Sequence[Transcript]) -> dict[str, list[Any]]:
    """Conversational where the task has messages, else texts; every further column of the row as a
    list.
    """
    chats = bool(task.messages)
    files = {image.sha256: image.data for image in task.images}
    copies = [task.deep_copy() for _ in transcripts]
    texts = [t.turns[-1].completion.written for t in transcripts]
    return {
        **{
            name: [shown(t.row[name], files) for t in copies]
            for name in task.row
            if name not in ("prompt", "completion")
        },
        "prompts": [list(t.messages) if chats else t.prompt for t in copies],
        "completions": [
            [{"role": "assistant", "content": text}] if chats else text for text in texts
        ],
        "completion_ids": [t.turns[-1].completion.tokens.tolist() for t in transcripts],
    }
