"""Built-in operators: filter rows by reward, group, length or similarity, change rewards, or report
them.

Each depends only on its group.  Dropped rows are stored as `explained: filtered` and still count in the
group's statistics.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

import msgspec
from pydantic import Field, field_validator

from rft.buffer.operators.base import (
    GroupView,
    Operator,
    OperatorArgs,
    Result,
    names_of,
    number_of,
    operator,
    untrained,
)
from rft.plugins import WithArgs
from rft.types.experience import Experience
from rft.types.metrics import Metric

ACCURACY = "accuracy"


class RewardFilterArgs(OperatorArgs):
    threshold: float = 0.0


@operator("reward_filter", args=RewardFilterArgs)
class RewardFilter(WithArgs, Operator):
    """Keeps rows with a reward of at least `threshold`.

    Unscored rows pass and are explained as unscored later.
    """

    stage = "drop"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        return Result([r for r in rows if r.reward is None or r.reward >= self.args.threshold])


class StdArgs(OperatorArgs):
    threshold: float = Field(0.0, ge=0)
    # True: each run counts once, with its last row's reward, even if rows have their own rewards
    of_runs: bool = False


@operator("reward_std_filter", args=StdArgs)
class RewardStdFilter(WithArgs, Operator):
    """Drops groups whose rewards have a standard deviation of at most `threshold`.

    The deviation is unbiased; groups with a single reward are dropped, too.
    """

    stage = "drop"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        if self.args.of_runs:
            last = {m.id.run: m for m in group.members if m.reward is not None}
            group = msgspec.structs.replace(group, members=tuple(last.values()))
        passed = list(rows) if group.std > self.args.threshold else []
        metrics = [Metric("operator_filtered_count", len(rows) - len(passed), "sum")]
        if len(group.rewards) > 1:
            for name, value in (("reward_mean", group.mean), ("reward_std", group.std)):
                at = f"origin_group_advantages/{name}"
                metrics += [
                    Metric(f"{at}/mean", value),
                    Metric(f"{at}/max", value, "max"),
                    Metric(f"{at}/min", value, "min"),
                ]
        return Result(passed, metrics)


class DapoArgs(OperatorArgs):
    metric_key: str = Field(ACCURACY, min_length=1)
    correct_threshold: float = 0.0


@operator("dapo_dynamic_sampling", args=DapoArgs)
class DapoDynamicSampling(WithArgs, Operator):
    """Keeps groups with correct and incorrect scored runs: `metric_key` above `correct_threshold`.

    arXiv:2503.14476, section 3.2.  The key is searched in the rows' info, metrics and reward parts.
    If no row has `accuracy`, the reward replaces it; any other missing key is an error.  The
    explorer replaces dropped groups, up to buffer.max_refill of them in a step.
    """

    stage = "drop"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        scores = self._scores(group)
        correct = sum(score > self.args.correct_threshold for score in scores)
        if 0 < correct < len(scores):
            return Result(
                rows,
                [Metric("dropped_all_correct", 0, "sum"), Metric("dropped_all_wrong", 0, "sum")],
            )
        wrong, right = (len(rows), 0) if correct == 0 else (0, len(rows))
        return Result(
            [],
            [
                Metric("dropped_all_correct", right, "sum"),
                Metric("dropped_all_wrong", wrong, "sum"),
            ],
        )

    def _scores(self, group: GroupView) -> list[float]:
        """Return the score of every scored run: its reward, or the mean of the key over its rows."""
        rows = [m for m in group.members if m.reward is not None]
        numbers = [number_of(r, self.args.metric_key) for r in rows]
        if self.args.metric_key == ACCURACY and all(f is None for f in numbers):
            return list(group.run_rewards.values())
        by_run: dict[int, list[float]] = defaultdict(list)
        for row, value in zip(rows, numbers, strict=True):
            if value is None:
                raise ValueError(
                    f"{row.id} has no {self.args.metric_key!r}; it has {names_of(row)}.  Let the "
                    f"reward or the workflow report it, "
                    "or name another metric_key"
                )
            by_run[row.id.run].append(value)
        return [fmean(values) for values in by_run.values()]


class NoOperatorArgs(OperatorArgs):
    pass


@operator("invalid_reward_filter", args=NoOperatorArgs)
class InvalidRewardFilter(Operator):
    """Drops rows without a reward.

    A run with a non-finite reward has already failed.
    """

    stage = "drop"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        return Result([r for r in rows if r.reward is not None])


@operator("mask_response_truncated", args=NoOperatorArgs)
class MaskResponseTruncated(Operator):
    """Excludes an answer that ended at a length limit from training.  arXiv:2503.14476, section 3.4

    The finish reason of the last model call decides, and all tokens of the row are masked.
    """

    stage = "drop"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        cut = [r.finish_reason == "length" for r in rows]
        masked = [untrained(r) if c else r for r, c in zip(rows, cut, strict=True)]
        return Result(masked, [Metric("masked_truncated_count", sum(cut), "sum")])


class DeduplicateRunsArgs(OperatorArgs):
    by: Literal["tokens", "text"] = "tokens"
    ignore_case: bool = False
    ignore_space: bool = False
    max_copies: int = Field(1, ge=1)


@operator("deduplicate", args=DeduplicateRunsArgs)
class DeduplicateRuns(WithArgs, Operator):
    """Keeps the first `max_copies` runs of a group with equal answers, compared row by row.

    `by: tokens` compares the trained tokens; `by: text` the text of the last answer.  `ignore_case`
    and `ignore_space` ignore case and the position and amount of white space.
    """

    stage = "drop"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        runs: dict[int, list[Experience]] = defaultdict(list)
        for row in rows:
            runs[row.id.run].append(row)
        copies: Counter[tuple[str | bytes, ...]] = Counter()
        unique = []
        for run_rows in runs.values():
            answers = tuple(map(self._answer, run_rows))
            copies[answers] += 1
            if copies[answers] <= self.args.max_copies:
                unique += run_rows
        return Result(unique, [Metric("duplicate_count", len(rows) - len(unique), "sum")])

    def _answer(self, row: Experience) -> str | bytes:
        if self.args.by == "tokens":
            return bytes(row.tokens[row.loss_mask].tobytes())
        text = row.response_text.casefold() if self.args.ignore_case else row.response_text
        return " ".join(text.split()) if self.args.ignore_space else text


class Shaping(OperatorArgs):
    """One change: reward `op_type` (`weight` x the row's `stats_key`)."""

    stats_key: str = Field(min_length=1)
    op_type: Literal["ADD", "SUB", "MUL", "DIV"] = "ADD"
    weight: float = 1.0

    @field_validator("op_type", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value


class ShapingArgs(OperatorArgs):
    reward_shaping_configs: list[Shaping] = Field(min_length=1)


@operator("reward_shaping_mapper", args=ShapingArgs)
class RewardShapingMapper(WithArgs, Operator):
    """Changes each scored row's reward by numbers of the row.

    Configurations apply in order.  A `stats_key` is searched in the row's info, metrics and reward
    parts.  A missing or non-numeric value, a division by zero and a non-finite result are errors:
    the group fails with the reason.  Unscored rows stay unscored.
    """

    stage = "reward"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        shaped = [
            r if r.reward is None else msgspec.structs.replace(r, reward=self._shaped(r, r.reward))
            for r in rows
        ]
        moved = [
            new.reward - old.reward
            for old, new in zip(rows, shaped, strict=True)
            if old.reward is not None and new.reward is not None
        ]
        metrics = [m for d in moved for m in _spread("reward_diff", d)]
        return Result(shaped, metrics)

    def _shaped(self, row: Experience, reward: float) -> float:
        for step in self.args.reward_shaping_configs:
            stat = number_of(row, step.stats_key)
            if stat is None:
                raise ValueError(
                    f"{row.id} has no {step.stats_key!r} to shape its reward by; it has "
                    f"{names_of(row)}"
                )
            by = step.weight * stat
            if step.op_type == "DIV" and by == 0:
                raise ValueError(
                    f"{row.id}: its reward {reward} cannot be divided by weight {step.weight} x "
                    f"{step.stats_key} {stat}"
                )
            reward = {
                "ADD": reward + by,
                "SUB": reward - by,
                "MUL": reward * by,
                "DIV": reward / (by or 1.0),
            }[step.op_type]
            if not math.isfinite(reward):
                raise ValueError(
                    f"{row.id}: {step.op_type} {step.weight} x {step.stats_key} {stat} makes its "
                    f"reward {reward}"
                )
        return reward


def _spread(name: str, value: float) -> list[Metric]:
    return [
        Metric(f"{name}/mean", value),
        Metric(f"{name}/min", value, "min"),
        Metric(f"{name}/max", value, "max"),
    ]


@operator("pass_rate_calculator", args=NoOperatorArgs)
class PassRateCalculator(Operator):
    """Reports the share of groups whose pass rate is worth training on.

    The pass rate is the mean reward of the scored runs.  The ledger stores the pass rates; task
    selectors learn from the ledger, even without this operator.
    """

    stage = "statistics"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        if not group.run_rewards:
            return Result(rows)
        rate = fmean(group.run_rewards.values())
        low = 1 / 16 + 1e-3
        high = 15 / 16 - 1e-3
        shares = {
            "valid_ratio": 0 < rate < 1,
            "strict_valid_ratio": low < rate < high,
            "<1_ratio": rate < 1,
            ">0_ratio": rate > 0,
            "<15_16_ratio": rate < high,
            ">1_16_ratio": rate > low,
        }
        return Result(
            rows, [Metric(f"selection/{name}", float(yes)) for name, yes in shares.items()]
        )
