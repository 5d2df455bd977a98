"""Reward of DAPO's mathematics: the last line "Answer: ..." counts, correct +1 and wrong -1."""

from __future__ import annotations

import re

from rft.reward.base import reward_function
from rft.reward.math import accuracy, result_of
from rft.types.completion import Score, Transcript
from rft.types.task import Task

TAIL = 300  # characters at the end of an answer that are searched, as in veRL
_LINE = re.compile(r"answer[*_]*\s*[:：]\s*([^\n]+)", re.IGNORECASE)


@reward_function("math_dapo_reward")
async def math_dapo_reward(task: Task, transcript: Transcript, *, timeout_s: float = 10.0) -> Score:
    """+1 if the last "Answer: ..." of the last 300 characters equals the truth, -1 if not."""
    right = await accuracy(result_of(stated_answer(transcript.answer[-TAIL:])), task, timeout_s)
    return Score(value=2 * right - 1, parts={"acc": right})


def stated_answer(text: str) -> str:
    """Return the rest of the last line with "Answer:"; "" without such a line."""
    lines = _LINE.findall(text)
    return lines[-1].strip(" *").removesuffix(".").strip(" *") if lines else ""
