"""Calibration: an answer also states its confidence, and is scored for how well it fits (RLCR,
arXiv:2507.16806).
"""

from __future__ import annotations

import math
import re

from pydantic import BaseModel, ConfigDict

from rft.reward.answer_values import whole_value
from rft.reward.base import reward_function
from rft.reward.extract import blocks
from rft.reward.math import accuracy, result_of
from rft.types.completion import Score, Transcript
from rft.types.task import Task

_TAG = re.compile(r"</?(?:think|answer|analysis|confidence)>")
_SHAPE = [
    f"<{mark}{name}>"
    for name in ("think", "answer", "analysis", "confidence")
    for mark in ("", "/")
]
_SURE = 0.01  # a confidence nearer to 0 or 1 counts as certain


class RlcrWeights(BaseModel):
    """Weight of each part.  The last two parts serve as metrics; Trinity-RFT's default weights for
    them are negligible.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    format: float = 0.5
    accuracy: float = 0.5
    brier: float = 0.5
    mean_confidence: float = 1e-5
    confidence_one_or_zero: float = 1e-5


@reward_function("rlcr_reward")
async def rlcr_reward(
    task: Task,
    transcript: Transcript,
    *,
    weights: RlcrWeights | None = None,
    timeout_s: float = 10.0,
) -> Score:
    """Sum of weight x part over format, accuracy, brier and two metrics of the confidence.

    The parts are format, accuracy, brier, mean_confidence and confidence_one_or_zero. format is 1
    for an answer that ends with <think>, <answer>, <analysis> and <confidence> blocks, q in [0, 1]
    in the last block, and only white space between and after them; else accuracy and brier are 0.
    brier = 1 - (accuracy - q)^2: a proper scoring rule, highest if q is the probability of being
    right.  The parts are logged without their weights.

    Example: a right answer with q = 0.8 has format 1, accuracy 1, brier 0.96: 1.480008 with the
    default weights.
    """
    reading = _read(transcript.with_thought)
    confidences = blocks(transcript.answer, "confidence")
    stated = _number(confidences[-1]) if confidences else None
    parts = {
        "format": float(reading is not None),
        "accuracy": 0.0,
        "brier": 0.0,
        "mean_confidence": stated or 0.0,
        "confidence_one_or_zero": float(stated is not None and not _SURE <= stated <= 1 - _SURE),
    }
    if reading is not None:
        answer, stated = reading
        parts["accuracy"] = await accuracy(result_of(answer), task, timeout_s)
        parts["brier"] = 1.0 - (parts["accuracy"] - stated) ** 2
    each = (weights or RlcrWeights()).model_dump()
    return Score(value=math.fsum(each[name] * part for name, part in parts.items()), parts=parts)


def _read(text: str) -> tuple[str, float] | None:
    """Return the answer and the confidence of a well-formed text: tags are not nested, and the last
    eight are its end.
    """
    tags = list(_TAG.finditer(text))
    opened = tags[::2]
    closed = tags[1::2]
    if len(opened) != len(closed) or any(
        c[0] != f"</{o[0][1:]}" for o, c in zip(opened, closed, strict=True)
    ):
        return None
    last = tags[-len(_SHAPE) :]
    between = [text[a.end() : b.start()] for a, b in zip(last[1::2], last[2::2], strict=False)]
    if [tag[0] for tag in last] != _SHAPE or "".join([*between, text[last[-1].end() :]]).strip():
        return None
    q = _number(text[last[6].end() : last[7].start()])
    return None if q is None else (text[last[2].end() : last[3].start()], q)


def _number(text: str) -> float | None:
    """Read a probability: 0.8, 80%, 4/5."""
    value = whole_value(text)
    return (
        float(value.amount)
        if value is not None and value.dimension in ("", "%") and 0 <= value.amount <= 1
        else None
    )
