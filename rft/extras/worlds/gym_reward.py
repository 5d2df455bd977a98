"""Reward of reasoning-gym tasksets: the data set's own score function on the generated row, in a
process that can be killed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rft.reward.base import reward_function
from rft.reward.extract import answer_block
from rft.reward.readings import note
from rft.types.completion import Transcript
from rft.types.task import Task
from rft.worker.job_pool import WorkerPool
from rft.worker.process import LITERALS

POOL = WorkerPool("reasoning_gym", "rft.extras.worlds.gym_worker", codec=LITERALS)


@reward_function("reasoning_gym")
async def reasoning_gym(
    task: Task, transcript: Transcript, *, timeout_s: Annotated[float, Field(gt=0)] = 10.0
) -> float:
    """Score in [0, 1] of the last <answer> block, else of the answer.  For reasoning_gym:// only."""
    name = task.row.get("metadata", {}).get("source_dataset")
    if name is None:
        raise ValueError(
            f"task {task.taskset}[{task.index}] has no metadata.source_dataset; this reward is for "
            f"reasoning_gym:// tasksets"
        )
    answer = answer_block(transcript.answer).strip()
    score = float(await POOL.call({"name": name, "answer": answer, "entry": task.row}, timeout_s))
    note("last <answer> block, else all", answer, f"by {name}", task.truth, score == 1.0)
    return score
