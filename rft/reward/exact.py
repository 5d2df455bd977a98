"""Rewards by plain comparison: the last number of an answer, or its text, against the truth.  No parsing of formulas."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from rft.reward.base import reward_function
from rft.types.completion import Transcript
from rft.types.task import Task

# an optional sign that is not a minus between two operands, digits with or without thousands commas, decimals, an exponent
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d{1,3}\b)?")


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
    """`right` if the answer equals the task's truth, else `wrong`.  Raises ValueError if the truth itself cannot be compared.

    `compare`: "number" takes the last number of the answer, "text" the whole answer without surrounding blanks.
    """
    if task.truth is None:
        raise ValueError(f"task {task.taskset}[{task.index}] has no truth; name its column in format.response_key")
    answer, truth = transcript.answer, str(task.truth)
    if compare == "number":
        wanted = last_number(truth)
        if wanted is None:
            raise ValueError(f"truth {truth!r} of task {task.taskset}[{task.index}] holds no number; use compare: text")
        return right if last_number(answer) == wanted else wrong
    answer, truth = answer.strip(), truth.strip()
    if ignore_case:
        answer, truth = answer.casefold(), truth.casefold()
    return right if answer == truth else wrong


def last_number(text: str) -> Decimal | None:
    """The last number written in `text`: "3 + 4 = 7." gives 7, "5-3" gives 3, "1,234.50" gives 1234.5."""
    found = _NUMBER.findall(re.sub(r"[-\u2212]\\?\$|\u2212", "-", text))  # a typeset minus, or one before a dollar sign
    return Decimal(found[-1].replace(",", "")) if found else None
