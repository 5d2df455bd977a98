"""Check that a task's gold answer gets full marks from its own reward, in any usual answer form.

Depends on tasks and rewards, on no engine and no model.  Invariant: nothing is generated, and an
exception of a reward is reported, not hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rft.config.context import Problems
from rft.explorer.stored import transcript
from rft.reward.base import THE_TRUTH, Reward, hook, score_each
from rft.reward.judges import text_of
from rft.reward.readings import UnreadableTruth
from rft.types.completion import Score
from rft.types.task import Task

REWARD_TIMEOUT_S = 30.0
FULL = 1.0
_FORMS: tuple[str, ...] = (
    "{}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>\n.\n</think>\n<answer>{}</answer>",
    "<think>.</think>\\boxed{{{}}}",
    "#### {}",
    "Answer: {}",
)


@dataclass(frozen=True)
class GoldScore:
    """The scores of a row's gold answer and of an empty answer.

    `failed`: what the reward did instead of giving a score, with the `error` that it raised.
    `unreadable`: no answer to this row can be scored.
    """

    index: int
    gold: str
    best: float | None = None
    empty: float | None = None
    failed: str = ""
    error: str = ""
    late: bool = False
    unreadable: bool = False

    def failure(self, answer: str) -> str:
        """Describe what the reward did on `answer`, with its error."""
        return f"{self.failed} on {answer}" + (f": {self.error}" if self.error else "")

    @property
    def full(self) -> bool:
        """Return whether the gold answer gets full marks, and more than an empty answer."""
        if self.best is None or self.empty is None:
            return False
        return self.best >= FULL and self.best > self.empty


def check_gold_answer(
    task: Task, reward: Reward | None, key: str, problems: Problems, hung: set[str]
) -> float | None:
    """Return the best score of the gold answer, with a warning if it is not full marks.

    None if the reward needs no gold answer and the task has none.
    """
    score = score_gold_answers([task], [reward], hung=hung)[0]
    if score is None:
        return None
    if score.unreadable:
        problems.error(key, unreadable_message(task, score))
    elif score.failed:
        answer = "the gold answer of" if task.truth is not None else "an empty answer to"
        failure = score.failure(f"{answer} row {task.index}")
        problems.warn(f"{key}: the reward {task.reward} {failure}")
    elif not score.full:
        problems.warn(
            f"{key}: the gold answer {score.gold[:60]!r} of row {task.index} scores {score.best:g} "
            f"with {task.reward} and an empty answer {score.empty:g}; it should get the highest "
            f"score (1), and more than an empty one.  Is format.response_key the right column, "
            f"and the reward the right one?"
        )
    return score.best


def unreadable_message(task: Task, score: GoldScore) -> str:
    """Return the message for a row whose answers cannot be scored."""
    return (
        f"the reward {task.reward} cannot score row {task.index}: {score.error}.  Correct the "
        f"row, or leave it out"
    )


def score_gold_answers(
    tasks: Sequence[Task],
    rewards: Sequence[Reward | None],
    on_progress: Callable[[int], None] = lambda n: None,
    *,
    hung: set[str] | None = None,
) -> list[GoldScore | None]:
    """Return one score per task; None without a reward, or without a gold answer if none is needed.

    `on_progress` gets the number of scored tasks.  `hung`: names of rewards that timed out, which
    are skipped; a reward that times out is added.
    """
    return asyncio.run(_score_all(tasks, rewards, on_progress, hung))


async def _score_all(
    tasks: Sequence[Task],
    rewards: Sequence[Reward | None],
    on_progress: Callable[[int], None],
    hung: set[str] | None,
) -> list[GoldScore | None]:
    scores: list[GoldScore | None] = []
    opened: dict[int, Reward] = {}  # only these need closing
    # index and score of the best form so far: it is tried first, and an equal score suffices
    best_form: tuple[int, float] | None = None
    try:
        for task, reward in zip(tasks, rewards, strict=True):
            if reward is None or task.reward in (hung or ()):
                score = None
            else:
                score, best_form = await _score_task(task, reward, best_form, opened)
            if hung is not None and score is not None and score.late:
                hung.add(str(task.reward))
            scores.append(score)
            on_progress(len(scores))
        return scores
    finally:
        for reward in opened.values():
            await hook(reward.close)


async def _score_task(
    task: Task, reward: Reward, best_form: tuple[int, float] | None, opened: dict[int, Reward]
) -> tuple[GoldScore | None, tuple[int, float] | None]:
    gold = answer = ""

    async def score(text: str) -> Score:
        nonlocal answer
        answer = text
        scoring = score_each(reward, task, [transcript(task, text)])
        (result,) = await asyncio.wait_for(scoring, REWARD_TIMEOUT_S)
        return result

    try:
        if (solution := reward.gold_answer(task)) is None:
            return None, best_form
        opened[id(reward)] = reward
        empty = await score("")
        if task.truth is None:  # and the reward needs none
            return None, best_form
        # if the truth is not an answer, e.g. tests of a program, the row has a solution, too
        gold, forms = solution, _FORMS[:1]
        if solution is THE_TRUTH:
            gold, forms = _text(task.truth), _FORMS
        first, enough = best_form or (0, float("inf"))
        scores: dict[int, Score] = {}
        for i in sorted(range(len(forms)), key=lambda i: (i != first, i)):
            scores[i] = await score(forms[i].format(gold))
            if _number(scores[i]) >= enough:
                break
        form = max(scores, key=lambda i: _number(scores[i]))
        best = scores[form].value
        if best is not None:
            full = (form, best) if best >= FULL else best_form
            return GoldScore(task.index, gold, best, _number(empty)), full
        failure = partial(GoldScore, failed="gave no score", error=scores[form].reason)
    except TimeoutError:
        failure = partial(GoldScore, failed=f"took longer than {REWARD_TIMEOUT_S:g} s", late=True)
    except UnreadableTruth as e:
        failure = partial(GoldScore, failed="cannot read the truth", error=str(e), unreadable=True)
    except Exception as e:  # plugin code may raise anything; it is reported, not hidden
        text = f"{type(e).__name__}: {e}  (answer {answer[:60]!r})"
        failure = partial(GoldScore, failed="raised", error=text)
    return failure(task.index, gold), best_form


def _number(score: Score) -> float:
    return float("-inf") if score.value is None else score.value


def _text(truth: Any) -> str:
    """Return the gold answer as text, or the first of several."""
    while isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    if isinstance(truth, list) and truth and isinstance(truth[0], str):
        truth = truth[0]
    return text_of(truth)
