"""Check that the rewards of the training tasksets have the parts that an advantage reads.

Part of the second stage of `rft.preflight.check`: an empty and a gold answer are scored, and the
parts of both scores count.  Invariant: a reward is refused only for parts of scores that it gave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rft.algorithm.needs import needs
from rft.config.context import Problems
from rft.config.plan import Plan
from rft.explorer.stored import transcript
from rft.preflight.gold_answers import REWARD_TIMEOUT_S
from rft.reward.base import Reward, hook, score_each
from rft.types.task import Task
from rft.workflow.recipes import Recipes

if TYPE_CHECKING:
    from rft.taskset.base import Taskset

_ADVICE = "return a dict of parts from it, take weighted_reward, or choose another advantage"


def look(plan: Plan, tasksets: Sequence[Taskset], problems: Problems) -> None:
    """Refuse an advantage that reads reward parts which a training taskset does not have."""
    advantage = plan.learner.algorithm.advantage_fn
    names = needs(plan.learner.algorithm).reward_parts
    if names is None or plan.trainer.alone or plan.mode == "bench":
        return
    recipes = Recipes()
    for taskset in tasksets:
        indices = () if taskset.settings.is_eval else {0, *taskset.rewards().values()}
        for task in map(taskset.task, sorted(indices)):
            reward = recipes.find(task).reward
            name = f"the reward {task.reward} of taskset {task.taskset}"
            text = f"{advantage} reads parts of {name}, which are known in the run only"
            if reward is None:
                problems.note(text)
                continue
            try:
                parts = asyncio.run(_parts(reward, task))
            except Exception as e:  # a plugin may raise anything
                problems.note(f"{text}: here it raised {type(e).__name__}: {e}")
                continue
            if not parts:
                text = f"reads reward parts, and {name} is a number; {_ADVICE}"
                problems.error("algorithm.advantage_fn", text, given=advantage)
            elif missing := set(names) - parts:
                text = f"{', '.join(missing)} is no part of {name}, which has {', '.join(parts)}"
                problems.error("algorithm.advantage_fn_args", text)


async def _parts(reward: Reward, task: Task) -> set[str]:
    """Return the parts of the scores of an empty answer and of the truth.  Raises what the reward
    raises, and TimeoutError.
    """
    transcripts = [transcript(task, answer) for answer in ("", str(task.truth))]
    try:
        scoring = score_each(reward, task, transcripts)
        scores = await asyncio.wait_for(scoring, REWARD_TIMEOUT_S)
    finally:
        await hook(reward.close)
    return {name for score in scores for name in score.parts}
