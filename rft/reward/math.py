"""Rewards for mathematical answers, compared by math-verify in processes of our own that can be killed.

A verdict comes from math-verify or not at all: a worker that hangs or dies makes the reward raise, so the run is not scored.
"""

from __future__ import annotations

from rft.reward.base import reward_function
from rft.reward.extract import blocks, has_shape, last_boxed, thinks_first
from rft.types.completion import Transcript
from rft.types.task import Task
from rft.worker.job_pool import WorkerPool

POOL = WorkerPool("math_verify", "rft.reward.math_worker")


@reward_function("math_reward")
async def math_reward(
    task: Task, transcript: Transcript, *, format_score: float = 0.1, timeout_s: float = 10.0
) -> dict[str, float]:
    """Accuracy 1 or 0, plus `format_score` for <think>/<answer> tags in the right place, else minus it; 0 leaves the shape out.

    The last <answer> block counts, else the whole text.
    """
    found = blocks(transcript.answer, "answer")
    parts = {"accuracy": await same(found[-1] if found else transcript.answer, task, timeout_s)}
    if format_score:
        parts["format"] = format_score if has_shape(transcript.answer) else -format_score
    return parts


@reward_function("accuracy_reward")
async def accuracy_reward(task: Task, transcript: Transcript, *, timeout_s: float = 10.0) -> dict[str, float]:
    """1 if math-verify finds the truth in the answer, else 0."""
    return {"accuracy": await same(transcript.answer, task, timeout_s)}


@reward_function("math_boxed_reward")
async def math_boxed_reward(
    task: Task, transcript: Transcript, *, with_think: bool = False, format_score_coef: float = 0.0, timeout_s: float = 10.0
) -> dict[str, float]:
    """1 if the last \\boxed{...} equals the truth, else 0; an answer without a box is 0.

    `format_score_coef`: taken away, with `with_think`, from an answer that does not begin with <think>...</think>.
    """
    parts = {"accuracy": await _boxed(task, transcript.answer, timeout_s)}
    if with_think and format_score_coef:
        parts["format"] = 0.0 if thinks_first(transcript.answer) else -format_score_coef
    return parts


async def _boxed(task: Task, answer: str, timeout_s: float) -> float:
    boxed = last_boxed(answer)
    if boxed is None:
        return 0.0
    if task.truth is not None and boxed.strip() == str(task.truth).strip():  # also where math-verify could not read the truth
        return 1.0
    return await same(f"\\boxed{{{boxed}}}", task, timeout_s)


async def same(answer: str, task: Task, timeout_s: float) -> float:
    """1.0 if `answer` is mathematically equal to the task's truth, else 0.0.  Raises what WorkerPool.call raises."""
    if task.truth is None:
        raise ValueError(f"task {task.taskset}[{task.index}] has no truth; name its column in format.response_key")
    verdict = await POOL.call({"answer": answer, "truth": str(task.truth)}, timeout_s)
    return 1.0 if verdict is True else 0.0
