"""Whether the gold answer of a task gets full marks from its own reward, in any of the usual forms
of an answer.

Knows tasks and rewards; no engine and no model.  Invariant: nothing is generated, and a reward that
raises is reported, not hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
_FORMS = (
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
    """What the gold answer of a row gets.  `failed`: what the reward did where it could not be
    scored, with the `error` that it raised.

    `unreadable`: no answer to this row can be scored.
    """

    index: int
    gold: str
    best: float | None
    empty: float | None
    failed: str = ""
    error: str = ""
    late: bool = False
    unreadable: bool = False

    def told(self, what: str) -> str:
        """Of one that could not be scored: what the reward did on `what`."""
        return f"{self.failed} on {what}" + (f": {self.error}" if self.error else "")

    @property
    def full(self) -> bool:
        """Full marks, and more than an answer that says nothing."""
        return (
            self.best is not None
            and self.empty is not None
            and self.best >= FULL
            and self.best > self.empty
        )


def gold_of(
    task: Task, reward: Reward | None, key: str, problems: Problems, hung: set[str]
) -> float | None:
    """The best score of the gold answer; a warning if that is not full marks.  None where it says
    nothing about an answer.
    """
    found = scored([task], [reward], hung=hung)[0]
    if found is None:
        return None
    if found.unreadable:
        problems.error(key, refusal(task, found))
    elif found.failed:
        what = "the gold answer of" if task.truth is not None else "an empty answer to"
        problems.warn(f"{key}: the reward {task.reward} {found.told(f'{what} row {task.index}')}")
    elif not found.full:
        problems.warn(
            f"{key}: the gold answer {found.gold[:60]!r} of row {task.index} scores {found.best:g} "
            f"with {task.reward} and an empty answer "
            f"{found.empty:g}; it should get the highest score (1), and more than an empty one.  "
            f"Is format.response_key the right column, "
            "and the reward the right one?"
        )
    return found.best


def refusal(task: Task, score: GoldScore) -> str:
    """The message for a row to which no answer can be scored."""
    return (
        f"the reward {task.reward} cannot score row {task.index}: {score.error}.  Correct the "
        f"row, or leave it out"
    )


def scored(
    tasks: Sequence[Task],
    rewards: Sequence[Reward | None],
    told: Callable[[int], None] = lambda n: None,
    *,
    hung: set[str] | None = None,
) -> list[GoldScore | None]:
    """Of each task; None where it has no reward, or no gold answer and a reward that needs none.
    `told` hears how many are done.

    `hung`: rewards that took too long, by name; given, they are not asked again.
    """
    return asyncio.run(_all(tasks, rewards, told, hung))


async def _all(
    tasks: Sequence[Task],
    rewards: Sequence[Reward | None],
    told: Callable[[int], None],
    hung: set[str] | None,
) -> list[GoldScore | None]:
    found: list[GoldScore | None] = []
    asked: dict[int, Reward] = {}  # the others may not be ready even to be closed
    # the form that was best before, and what it got: it is tried first, and enough
    known: tuple[int, float] | None = None
    try:
        for task, reward in zip(tasks, rewards, strict=True):
            one, known = await _one(
                task, None if task.reward in (hung or ()) else reward, known, asked
            )
            if hung is not None and one is not None and one.late:
                hung.add(str(task.reward))
            found.append(one)
            told(len(found))
        return found
    finally:
        for reward in asked.values():
            await hook(reward.close)


async def _one(
    task: Task, reward: Reward | None, known: tuple[int, float] | None, asked: dict[int, Reward]
) -> tuple[GoldScore | None, tuple[int, float] | None]:
    if reward is None:
        return None, known
    gold = said = ""

    async def score(text: str) -> Score:
        nonlocal said
        said = text
        (result,) = await asyncio.wait_for(
            score_each(reward, task, [transcript(task, text)]), REWARD_TIMEOUT_S
        )
        return result

    try:
        if (solution := reward.gold_answer(task)) is None:
            return None, known
        asked[id(reward)] = reward
        empty, found = await score(""), dict[int, Score]()
        if task.truth is None:  # and the reward needs none
            return None, known
        # where the truth is no answer, e.g. tests of a program, there is a solution beside it
        gold, forms = (
            (_text(task.truth), _FORMS) if solution is THE_TRUTH else (solution, _FORMS[:1])
        )
        first, enough = known or (0, float("inf"))
        for i in sorted(range(len(forms)), key=lambda i: (i != first, i)):
            found[i] = await score(forms[i].format(gold))
            if _value(found[i]) >= enough:
                break
        which = max(found, key=lambda i: _value(found[i]))
        best = found[which].value
        if best is None:
            return GoldScore(
                task.index, gold, None, None, "gave no score", found[which].reason
            ), known
        return GoldScore(task.index, gold, best, _value(empty)), (
            which,
            best,
        ) if best >= FULL else known
    except TimeoutError:
        return GoldScore(
            task.index, gold, None, None, f"took longer than {REWARD_TIMEOUT_S:g} s", late=True
        ), known
    except UnreadableTruth as e:
        return GoldScore(
            task.index, gold, None, None, "cannot read the truth", str(e), unreadable=True
        ), known
    except Exception as e:  # plugin code may raise anything; it is reported, not hidden
        return GoldScore(
            task.index,
            gold,
            None,
            None,
            "raised",
            f"{type(e).__name__}: {e}  (answer {said[:60]!r})",
        ), known


def _value(score: Score) -> float:
    return float("-inf") if score.value is None else score.value


def _text(truth: Any) -> str:
    """The gold answer as one would say it: of several, the first."""
    while isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    return text_of(
        truth[0] if isinstance(truth, list) and truth and isinstance(truth[0], str) else truth
    )
