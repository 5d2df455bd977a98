"""Reward of GSM8K: compare the value after the last "####", or the last value of the answer, with
the gold number.
"""

from __future__ import annotations

from typing import Literal

from rft.reward.answer_values import agree, first_value, gold_value, last_value
from rft.reward.base import reward_function
from rft.types.completion import Transcript
from rft.types.task import Task

TAIL = 300  # characters at the end of an answer that are searched, as in veRL
MARK = "####"


@reward_function("gsm8k_reward")
def gsm8k_reward(
    task: Task,
    transcript: Transcript,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """1 if the value after #### is the gold number; 0 without a value, `format_score` for another.

    Only the last 300 characters are searched. `method`: "strict" requires #### before the value,
    "flexible" uses the last value.
    """
    text = transcript.answer[-TAIL:]
    value = last_value(text)
    if method == "strict":
        _, marked, text = text.rpartition(MARK)
        value = first_value(text.strip().partition("\n")[0]) if marked else None
    right = agree(f"{method}: {MARK} or last value", text, value, gold_value(task, behind=MARK))
    return 1.0 if right else 0.0 if value is None else format_score
