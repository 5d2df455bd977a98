"""veRL's reward of geometry3k's questions, which show a picture."""

from __future__ import annotations

import re

from rft.reward.base import reward_function
from rft.reward.extract import Conclusion, boxed_result
from rft.reward.math import accuracy
from rft.types.completion import Transcript
from rft.types.task import Task

_SHAPE = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


@reward_function("geo3k_reward")
async def geo3k_reward(
    task: Task, transcript: Transcript, *, format_score: float = 0.1, timeout_s: float = 10.0
) -> dict[str, float]:
    """1 - `format_score` if the last \\boxed{...} equals the truth, plus `format_score` for a thought
    in <think>...</think> before a box.
    """
    boxed = Conclusion(boxed_result(transcript.answer) or "", True)
    right = await accuracy(boxed, task, timeout_s)
    shape = _SHAPE.fullmatch(transcript.with_thought) is not None
    return {"accuracy": (1 - format_score) * right, "format": format_score * shape}
