"""Reward of questions with short answers: the text in the last <answer> block against the gold
answers, letter case and articles aside.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from rft.reward.answer_values import whole_value
from rft.reward.base import reward
from rft.reward.extract import blocks
from rft.reward.readings import note, truth_of, unreadable
from rft.reward.spelling import normalized
from rft.types.completion import Transcript
from rft.types.task import Task

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# of 3.14, -5, C++
_SIGNS = re.compile(r"(?<=\d)[^\w\s](?=\d)|(?<!\w)[-+](?=[\d.])|(?<=\w)[+#]+(?!\w)")


@reward("search_qa_reward")
def search_qa_reward(task: Task, transcript: Transcript) -> float:
    """1 if the last <answer> block is one of the gold answers (a text, a number, a list, or
    {target: ...}), else 0.
    """
    tagged = blocks(transcript.answer, "answer")
    golds = targets(task)
    right = bool(tagged) and any(same_answer(tagged[-1], gold) for gold in golds)
    note(
        "last <answer> block",
        tagged[-1] if tagged else None,
        plain(tagged[-1]) if tagged else None,
        golds,
        right,
    )
    return float(right)


def targets(task: Task) -> list[str]:
    """The gold answers.  Raises UnreadableTruth."""
    given: Any = truth_of(task)
    given = given["target"] if isinstance(given, dict) and "target" in given else given
    golds = given if isinstance(given, list) else [given]
    if not golds or not all(
        isinstance(gold, str | int | float) and plain(str(gold)) for gold in golds
    ):
        raise unreadable(task, "a text, a number or a list of them")
    return [str(gold) for gold in golds]


def same_answer(text: str, gold: str) -> bool:
    """Whether two short answers are one value, or one text up to case, articles and punctuation."""
    value = whole_value(text, noun=False)
    gold_value = whole_value(gold, noun=False)
    if value is not None and gold_value is not None:
        return value.same(gold_value)
    return plain(text) == plain(gold) != ""


def plain(text: str) -> str:
    """Lower case, without articles and punctuation but for signs of a number or a name (C++); with
    them where nothing else is left.
    """
    text = normalized(text).lower()
    kept = {place for sign in _SIGNS.finditer(text) for place in range(*sign.span())}
    words = "".join(
        c for i, c in enumerate(text) if i in kept or unicodedata.category(c)[0] not in "PS"
    )
    return " ".join(_ARTICLES.sub(" ", words).split()) or " ".join(words.split()) or text
