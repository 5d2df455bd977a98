"""Group in group: advantages of whole episodes, and of steps that began in the same state (GiGPO,
arXiv:2505.10978).

Depends on no tokens.  A run's steps are rows of their own; what happened in them stands in their
info.  Invariant: episodes and states are compared within their task, unless states of the whole
batch are asked for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rft.algorithm.args import Args
from rft.algorithm.base import Advantages, StepInputs, StepRow, define_algorithm
from rft.algorithm.group_stats import described, equal, members, unbiased_std
from rft.algorithm.returns import to_go
from rft.algorithm.runs import advantage


class GigpoArgs(Args):
    """Group in group: episodes of a task, and steps that begin in the same state
    (arXiv:2505.10978).
    """

    compares_rows: ClassVar[bool] = True
    reads: ClassVar[str] = (
        "the state of every step, and its reward where it has one, from the entries of info named "
        "by env_state_hash_key and "
        "step_reward_key"
    )

    omega: float = Field(1.0, ge=0, description="weight of the step advantage")
    gamma: float = Field(1.0, ge=0, le=1, description="discount per step")
    fnorm: Literal["none", "std"] = Field("none", description="what centred rewards are divided by")
    epsilon: float = Field(1e-6, gt=0, description="added to the divisor")
    states_of: Literal["task", "batch"] = Field(
        "task",
        description="steps in one state are compared within their task (the paper), or within the "
        "batch (Trinity-RFT)",
    )
    step_reward_key: str = Field(
        "step_reward", description="entry of the experience's info with the reward of the step"
    )
    env_state_hash_key: str = Field(
        "env_state_hash", description="entry of the experience's info that names the state"
    )

    @property
    def wants(self) -> tuple[str, ...]:
        return (f"info.{self.env_state_hash_key}",) if self.omega > 0 else ()

    @property
    def whole_groups(self) -> bool:
        return True


@advantage("gigpo", args=GigpoArgs)
def gigpo(x: StepInputs, args: GigpoArgs) -> Advantages:
    """A = A_E + omega A_S, one number per row, on all of its tokens.

    r_t is info[step_reward_key]; where no row of the task has that key, the reward of the run's
    last step and 0 before it.  A step that an operator dropped counts, too, where rows have the
    reward of their step; with that of the run its r_t is not known. A_E = N(sum of r_t) over the
    runs of the task.  A_S = N(sum of gamma^(k - t) r_k, k >= t) over the rows of the task
    (`states_of: batch`: of the step) with the same info[env_state_hash_key].  N(y) = (y - mean) /
    (d + epsilon) with d = 1, or with `fnorm: std` the unbiased standard deviation; 0 where there is
    one y, or all are equal.

    Values: float32 [L_i] per row.  Raises ValueError for a row without a state hash while omega >
    0, and for a task some of whose rows have a step reward and some have not.
    """
    rows = [row for row, _ in members(x)]
    episodes, returns = _returns(x, rows, args)
    of_run = {
        name: dict(zip(runs, _normal(list(runs.values()), args), strict=True))
        for name, runs in episodes.items()
    }
    score = np.array([of_run[row.group][row.run] for row in rows])
    states: dict[Hashable, list[int]] = defaultdict(list)
    if args.omega > 0:
        for i, row in enumerate(rows):
            states[
                row.group if args.states_of == "task" else "", _state(row, args.env_state_hash_key)
            ].append(i)
    for same in states.values():
        score[same] += args.omega * _normal([returns[i] for i in same], args)
    shared = sum(len(same) > 1 for same in states.values())
    return Advantages(
        values=[np.full(row.length, s, np.float32) for row, s in zip(rows, score, strict=True)],
        metrics={"gigpo/anchor_group_hit_ratio": shared / len(states)} if states else {},
    )


def _returns(
    x: StepInputs, rows: Sequence[StepRow], args: GigpoArgs
) -> tuple[dict[str, dict[int, float]], list[float]]:
    """(sum of rewards by group and run, discounted return of every row)."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.group].append(i)
    episodes: dict[str, dict[int, float]] = {}
    returns = [0.0] * len(rows)
    for name, indices in groups.items():
        present = [args.step_reward_key in rows[i].info for i in indices]
        if any(present) != all(present):
            missing = rows[indices[present.index(False)]]
            raise ValueError(
                f'group {name}: info["{args.step_reward_key}"] is there for {sum(present)} of '
                f"{len(present)} rows; run {missing.run}, step "
                f"{missing.step} has none.  Write it for every step of the task or for none"
            )
        stats = described(x.groups[name])
        members = sorted(zip(stats.runs, stats.steps, stats.rewards, strict=True))
        if any(present):
            step_rewards = {
                (rows[i].run, rows[i].step): _number(rows[i], args.step_reward_key) for i in indices
            }
            # the rows of a run do not share its reward
            apart = len({(run, r) for run, _, r in members}) > len(set(stats.runs))
            by_step = apart and all(
                rows[i].reward == step_rewards[rows[i].run, rows[i].step] for i in indices
            )
            members = [
                (run, step, step_rewards.get((run, step), r))
                for run, step, r in members
                if by_step or (run, step) in step_rewards
            ]
        runs: dict[int, dict[int, float]] = defaultdict(dict)
        for run, step, reward in members:
            runs[run][step] = reward
        if not any(present):  # a row has the reward of its run, which comes with the last step
            runs |= {
                run: {**dict.fromkeys(steps, 0.0), max(steps): steps[max(steps)]}
                for run, steps in runs.items()
            }
        episodes[name] = {run: sum(steps.values()) for run, steps in runs.items()}
        ahead = {
            run: dict(zip(r, to_go(np.array([*r.values()]), args.gamma), strict=True))
            for run, r in runs.items()
        }
        for i in indices:
            returns[i] = float(ahead[rows[i].run][rows[i].step])
    return episodes, returns


def _normal(values: Sequence[float], args: GigpoArgs) -> np.ndarray:
    if equal(values):
        return np.zeros(len(values))
    scored: np.ndarray = (np.asarray(values) - np.mean(values)) / (
        (unbiased_std(values) if args.fnorm == "std" else 1.0) + args.epsilon
    )
    return scored


def _number(row: StepRow, key: str) -> float:
    value = row.info[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f'group {row.group}, run {row.run}, step {row.step}: info["{key}"] is {value!r}, not a '
            f"finite number"
        )
    return float(value)


def _state(row: StepRow, key: str) -> Hashable:
    info: Mapping[str, object] = row.info
    if (state := info.get(key)) is None:
        raise ValueError(
            f'group {row.group}, run {row.run}, step {row.step}: gigpo needs info["{key}"], a text '
            f"or number that names the state in "
            "which the step began; the workflow writes it.  With omega: 0 only whole episodes are "
            "compared"
        )
    return str(state)


define_algorithm(
    "gigpo",
    "Compares whole runs, and steps that begin in the same state (arXiv:2505.10978).",
    advantage_fn="gigpo",
    policy_loss_fn="ppo",
)
