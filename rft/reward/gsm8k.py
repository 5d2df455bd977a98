"""Reward of GSM8K: the number behind the last "####", or the last number of the answer, letter by letter the gold number.

Commas, $ signs and a full stop are no part of a number; 72.0 is not 72.
"""

from __future__ import annotations

import re
from typing import Literal

from rft.reward.base import reward_function
from rft.types.completion import Transcript
from rft.types.task import Task

TAIL = 300  # characters at the end of an answer that are looked at, as in veRL
_MARKED = re.compile(r"####\s*\$?(-?[\d.,]+)")
_NUMBER = re.compile(r"(?:-|(?<![\d.,]))[.,]*+\d[\d.,]*")


@reward_function("gsm8k_reward")
def gsm8k_reward(
    task: Task, transcript: Transcript, *, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0
) -> float:
    """1 if the number after #### (in the last 300 characters) is the gold number, commas aside; no number 0, another `format_score`.

    `method`: "strict" wants #### in front of the number, "flexible" takes the last number.
    """
    if task.truth is None:
        raise ValueError(f"task {task.taskset}[{task.index}] has no truth; name its column in format.response_key")
    given = final_number(transcript.answer[-TAIL:], method)
    if given is None:
        return 0.0
    return 1.0 if given == _plain(str(task.truth).rpartition("####")[2]) else format_score


def final_number(text: str, method: Literal["strict", "flexible"]) -> str | None:
    """ "#### 1,234" gives 1234.  None where there is none."""
    found = (_MARKED if method == "strict" else _NUMBER).findall(text)
    return _plain(found[-1]) if found else None


def _plain(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").removesuffix(".")
