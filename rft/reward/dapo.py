"""Reward of DAPO's mathematics: the last line "Answer: ..." counts, right +1 and wrong -1."""

from __future__ import annotations

import re

from rft.reward.base import reward_function
from rft.reward.extract import last_boxed
from rft.reward.math import same
from rft.types.completion import Score, Transcript
from rft.types.task import Task

TAIL = 300  # characters at the end of an answer that are looked at, as in veRL
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


@reward_function("math_dapo_reward")
async def math_dapo_reward(task: Task, transcript: Transcript, *, timeout_s: float = 10.0) -> Score:
    """+1 if the last "Answer: ..." of the last 300 characters equals the truth (as text, else for math-verify), -1 if not."""
    given = final_answer(transcript.answer[-TAIL:])
    if task.truth is None:
        raise ValueError(f"task {task.taskset}[{task.index}] has no truth; name its column in format.response_key")
    right = given is not None and (given == _plain(str(task.truth)) or await same(f"\\boxed{{{given}}}", task, timeout_s) == 1)
    return Score(value=1.0 if right else -1.0, parts={"acc": float(right)})


def final_answer(text: str) -> str | None:
    """What stands behind the last "Answer:", without $ signs, a box around it, or a full stop.  None without one."""
    found = _LINE.findall(text)
    return (_plain(found[-1]) or None) if found else None


def _plain(text: str) -> str:
    text = text.strip().removesuffix(".").strip().strip("$").strip()
    return boxed.strip() if (boxed := last_boxed(text)) is not None else text
