"""Reward by comparison without formulas: the last value of an answer, or its text, against the truth."""

from __future__ import annotations

from typing import Literal

from rft.reward.answer_values import last_value, whole_value
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
    """`right` if the answer equals the task's truth, else `wrong`.  Raises UnreadableTruth for a truth that is not one value.

    `compare`: "number" takes the last value of the answer (docs/howto/reward.md, "Values"), "text" the whole answer.
    """
    truth = str(truth_of(task))
    if compare == "number":
        gold = whole_value(truth)
        if gold is None:
            raise unreadable(task, "one number, fraction, amount or date; else use compare: text, or a reward of mathematics")
        value = last_value(transcript.answer)
        equal = value is not None and value.same(gold)
        note("last value", transcript.answer, value, gold, equal)
    else:
        text, gold_text = (_comparable(t, ignore_case) for t in (transcript.answer, truth))
        if not gold_text:
            raise unreadable(task, "a text")
        equal = text == gold_text
        note("text", transcript.answer, text, gold_text, equal)
    return right if equal else wrong


def _comparable(text: str, ignore_case: bool) -> str:
    """In one spelling and without the full stop at the end."""
    text = normalized(text).rstrip(" .。")
    return text.casefold() if ignore_case else text
