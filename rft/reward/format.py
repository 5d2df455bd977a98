"""Reward for the shape of an answer: reasoning in <think>, the result in <answer>."""

from __future__ import annotations

from rft.reward.base import reward_function
from rft.reward.extract import has_shape
from rft.reward.readings import note
from rft.types.completion import Transcript
from rft.types.task import Task


@reward_function("format_reward")
def format_reward(
    task: Task, transcript: Transcript, *, right: float = 0.1, wrong: float = -0.1
) -> dict[str, float]:
    """`right` for exactly one <think> block followed by one <answer> block, else `wrong`.

    A tag opened by the prompt counts as part of the answer.
    """
    shape = has_shape(transcript.with_thought)
    note(
        "shape",
        transcript.with_thought,
        "<think>...</think><answer>...</answer>" if shape else "another shape",
        right=shape,
    )
    return {"format": right if shape else wrong}
