"""Reward by comparison without formulas: the last value or the text of an answer against the truth."""

from __future__ import annotations

from typing import Literal

from rft.reward.answer_values import agree, gold_value, last_value
from rft.reward.base import reward_function
from rft.reward.readings import note, truth_of, unreadable
from rft.reward.spelling import normalized
from rft.types.completion import Transcript
from rft.types.task import Task


@reward_function("exact_answer")
def exact_answer(
    task: Task,
    transcript: Transcript,
    *,
    compare: Literal["number", "text"] = "number",
    ignore_case: bool = False,
    right: float = 1.0,
    wrong: float = 0.0,
) -> float:
    """`right` if the answer equals the task's truth, else `wrong`.

    `compare`: "number" takes the last value of the answer (docs/howto/reward.md, "Values"), "text"
    the whole answer.  Raises UnreadableTruth for a truth that is not one value.
    """
    answer = transcript.answer
    if compare == "number":
        equal = agree("last value", answer, last_value(answer), gold_value(task))
    else:
        text, gold = (_comparable(t, ignore_case) for t in (answer, str(truth_of(task))))
        if not gold:
            raise unreadable(task, "a text")
        equal = text == gold
        note("text", answer, text, gold, equal)
    return right if equal else wrong


def _comparable(text: str, ignore_case: bool) -> str:
    """Normalize the spelling and drop the final full stop."""
    text = normalized(text).rstrip(" .。")
    return text.casefold() if ignore_case else text
