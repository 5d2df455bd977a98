"""Rewards for mathematical answers: values are compared exactly, everything else by math-verify in
killable processes.

Invariant: without a verdict there is no score: if a worker hangs or dies the reward raises.
"""

from __future__ import annotations

import re

from rft.reward.answer_values import last_value, rewritten, whole_value
from rft.reward.base import reward_function
from rft.reward.extract import (
    Conclusion,
    answer_block,
    boxed_result,
    conclusion,
    has_shape,
    thinks_first,
)
from rft.reward.measures import unit_of
from rft.reward.readings import note, truth_of, unreadable
from rft.reward.spelling import normalized
from rft.types.completion import Transcript
from rft.types.task import Task
from rft.worker.job_pool import WorkerPool

POOL = WorkerPool("math_verify", "rft.reward.math_worker")
LONGEST = 1000  # characters of a result that math-verify compares
_TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(rf"{_TEXT.pattern}[\s.$]*$")
_LABEL = re.compile(r"\(([A-Za-z])\)")
_SIGNS = str.maketrans(
    {
        "π": r"\pi ",
        "√": r"\sqrt ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "−": "-",
    }
)
# words, or letters of scripts without spaces
_PROSE = re.compile(r"(?<![\\\w])[^\W\d_]{2,}|[\u0400-\u1fff\u2e80-\uffff]")


@reward_function("math_reward")
async def math_reward(
    task: Task, transcript: Transcript, *, format_score: float = 0.1, timeout_s: float = 10.0
) -> dict[str, float]:
    """Accuracy 1 or 0, plus `format_score` for correct <think>/<answer> tags, else minus it.

    `format_score` 0 ignores the shape.  The last <answer> block counts, else the whole text.
    """
    parts = {
        "accuracy": await accuracy(result_of(answer_block(transcript.answer)), task, timeout_s)
    }
    if format_score:
        parts["format"] = format_score if has_shape(transcript.with_thought) else -format_score
    return parts


@reward_function("accuracy_reward")
async def accuracy_reward(
    task: Task, transcript: Transcript, *, timeout_s: float = 10.0
) -> dict[str, float]:
    """1 if the answer's conclusion equals the truth, else 0."""
    return {"accuracy": await accuracy(result_of(answer_block(transcript.answer)), task, timeout_s)}


@reward_function("math_boxed_reward")
async def math_boxed_reward(
    task: Task,
    transcript: Transcript,
    *,
    with_think: bool = False,
    format_score_coef: float = 0.0,
    timeout_s: float = 10.0,
) -> dict[str, float]:
    """1 if the last \\boxed{...} equals the truth, else 0; an answer without a box is 0.

    `format_score_coef`: subtracted, with `with_think`, unless the answer begins with
    <think>...</think>.
    """
    parts = {
        "accuracy": await accuracy(
            Conclusion(boxed_result(transcript.answer) or "", True), task, timeout_s
        )
    }
    if with_think and format_score_coef:
        parts["format"] = 0.0 if thinks_first(transcript.with_thought) else -format_score_coef
    return parts


def result_of(text: str) -> Conclusion:
    """Return the result that a text states: the whole text if it is one value."""
    return conclusion(text) if whole_value(text) is None else Conclusion(text, True)


async def accuracy(result: Conclusion, task: Task, timeout_s: float) -> float:
    """Return 1.0 if the result of an answer equals the task's truth, else 0.0.

    For a truth in GSM8K's form, "explanation #### value", the value counts.  Raises
    UnreadableTruth, and the errors of WorkerPool.call.
    """
    truth = str(truth_of(task)).rpartition("####")[2].strip()
    equal = await same_result(result, truth, timeout_s)
    if equal is None:
        raise unreadable(task, "a value, a text, or a formula that math-verify can read")
    value = whole_value(result.text) or last_value(result.text)
    gold = whole_value(truth)
    note("result", result.text, value or "read by math-verify", gold or truth, equal)
    return float(equal)


async def same_result(result: Conclusion, truth: str, timeout_s: float) -> bool | None:
    """Return whether two results are equal; None for an unreadable truth."""
    gold = whole_value(truth)
    text = _as_text(result.text)
    gold_text = _as_text(truth)
    if not gold_text:
        return None
    if text == gold_text:
        return True
    value = whole_value(result.text)
    prose = not result.formula and _PROSE.search(text) is not None
    if value is None and prose:
        value = last_value(result.text)
    if gold is not None and (value is not None or prose or not text or gold.dimension == "date"):
        return value is not None and gold.same(value)
    if _PROSE.search(gold_text) or len(text) > LONGEST:
        return False
    formula = "" if prose and value is None else _formula(result.text)
    equal: bool | None = await POOL.call(
        {"answer": formula, "truth": _formula(truth) if gold is None else str(gold.number)},
        timeout_s,
    )
    return equal


def _as_text(text: str) -> str:
    return _LABEL.sub(r"\1", _TEXT.sub(r"\1", normalized(text)).strip(" .$*")).casefold()


def _formula(text: str) -> str:
    """Prepare text for math-verify: in a box, without a unit at its end, with LaTeX's names of
    signs.
    """
    unit = _UNIT.search(text)
    text = text if unit is None or unit_of(rewritten(unit[1])) is None else text[: unit.start()]
    return f"\\boxed{{{text.translate(_SIGNS)}}}"
