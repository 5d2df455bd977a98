"""Reward for questions with short answers: compare the last <answer> block with the gold answers,
ignoring case and articles.
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
# signs inside 3.14, -5, C++
_SIGNS = re.compile(r"(?<=\d)[^\w\s](?=\d)|(?<!\w)[-+](?=[\d.])|(?<=\w)[+#]+(?!\w)")


@reward("search_qa_reward")
def search_qa_reward(task: Task, transcript: Transcript) -> float:
    """1 if the last <answer> block equals a gold answer (a text, a number, a list, or {target:
    ...}), else 0.
    """
    tagged = blocks(transcript.answer, "answer")
    golds = targets(task)
    right = bool(tagged) and any(same_answer(tagged[-1], gold) for gold in golds)
    note(
        "last <answer> block",
        tagged[-1] if tagged else None,
        without_articles(tagged[-1]) if tagged else None,
        golds,
        right,
    )
    return float(right)


def targets(task: Task) -> list[str]:
    """Return the gold answers.  Raises UnreadableTruth."""
    truth: Any = truth_of(task)
    truth = truth["target"] if isinstance(truth, dict) and "target" in truth else truth
    golds = truth if isinstance(truth, list) else [truth]
    if not golds or not all(
        isinstance(gold, str | int | float) and without_articles(str(gold)) for gold in golds
    ):
        raise unreadable(task, "a text, a number or a list of them")
    return [str(gold) for gold in golds]


def same_answer(text: str, gold: str) -> bool:
    """Return whether two short answers are one value (50% is not 50), or one text up to case,
    articles and punctuation.
    """
    value = whole_value(text, noun=False)
    gold_value = whole_value(gold, noun=False)
    if value is not None and gold_value is not None:
        return value.same(gold_value, percent_is_number=False)
    return without_articles(text) == without_articles(gold) != ""


def without_articles(text: str) -> str:
    """Return a text in lower case without articles and punctuation, except signs of a number or a
    name (C++); keep them if nothing else is left.
    """
    text = normalized(text).lower()
    signs = {place for sign in _SIGNS.finditer(text) for place in range(*sign.span())}
    words = "".join(
        c for i, c in enumerate(text) if i in signs or unicodedata.category(c)[0] not in "PS"
    )
    return " ".join(_ARTICLES.sub(" ", words).split()) or " ".join(words.split()) or text
