"""Operators that leave rows out: by reward, by group, by length, by likeness.

They know only the group they are given.  Rows left out are stored as `explained: filtered` and still count in the group's statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rft.buffer.operators.base import GroupView, Operator, OperatorArgs, Result, names_of, number_of, operator, untrained
from rft.types.experience import Experience
from rft.types.metrics import Metric

ACCURACY = "accuracy"


class RewardFilterArgs(OperatorArgs):
    threshold: float = 0.0


@operator("reward_filter", args=RewardFilterArgs)
class RewardFilter(Operator):
    """Keeps rows with a reward of at least `threshold`.  Rows that are not scored are left to be explained as unscored."""

    stage = "drop"

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        return Result([r for r in rows if r.reward is None or r.reward >= self.threshold])


class StdArgs(OperatorArgs):
    threshold: float = Field(0.0, ge=0)


@operator("reward_std_filter", args=StdArgs)
class RewardStdFilter(Operator):
    """Drops groups whose rewards have an unbiased standard deviation of at most `threshold`, and groups of one."""

    stage = "drop"

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        kept = list(rows) if group.std > self.threshold else []
        metrics = [Metric("operator_filtered_count", len(rows) - len(kept), "sum")]
        if len(group.rewards) > 1:
            for name, value in (("reward_mean", group.mean), ("reward_std", group.std)):
                at = f"origin_group_advantages/{name}"
                metrics += [Metric(f"{at}/mean", value), Metric(f"{at}/max", value, "max"), Metric(f"{at}/min", value, "min")]
        return Result(kept, metrics)


class DapoArgs(OperatorArgs):
    metric_key: str = Field(ACCURACY, min_length=1)
    correct_threshold: float = 0.0


@operator("dapo_dynamic_sampling", args=DapoArgs)
class DapoDynamicSampling(Operator):
    """Keeps groups in which some scored runs, not all, are correct: `metric_key` above `correct_threshold`.

    arXiv:2503.14476, section 3.2.  The key is looked for in the rows' info, metrics and parts of the reward.  Where no row has
    `accuracy`, the reward stands for it; another key that is missing is an error.  The explorer replaces dropped groups, up to
    buffer.max_refill of them in a step.
    """

    stage = "drop"

    def __init__(self, metric_key: str = ACCURACY, correct_threshold: float = 0.0) -> None:
        self.metric_key, self.correct_threshold = metric_key, correct_threshold

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        scored = [m for m in group.members if m.reward is not None]
        correct = sum(score > self.correct_threshold for score in self._scores(scored))
        if 0 < correct < len(scored):
            return Result(rows, [Metric("dropped_all_correct", 0, "sum"), Metric("dropped_all_wrong", 0, "sum")])
        wrong, right = (len(rows), 0) if correct == 0 else (0, len(rows))
        return Result([], [Metric("dropped_all_correct", right, "sum"), Metric("dropped_all_wrong", wrong, "sum")])

    def _scores(self, rows: Sequence[Experience]) -> list[float]:
        found = [number_of(r, self.metric_key) for r in rows]
        if self.metric_key == ACCURACY and all(f is None for f in found):
            return [r.reward for r in rows if r.reward is not None]
        for row, value in zip(rows, found, strict=True):
            if value is None:
                raise ValueError(
                    f"{row.id} has no {self.metric_key!r}; it has {names_of(row)}.  Let the reward or the workflow report it, "
                    "or name another metric_key"
                )
        return [value for value in found if value is not None]


class NoArgs(OperatorArgs):
    pass


@operator("invalid_reward_filter", args=NoArgs)
class InvalidRewardFilter(Operator):
    """Drops rows without a reward.  (A reward that is not a finite number never gets this far: its run has failed.)"""

    stage = "drop"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        return Result([r for r in rows if r.reward is not None])


@operator("mask_response_truncated", args=NoArgs)
class MaskResponseTruncated(Operator):
    """Trains no token of an answer that ended at a length limit.  arXiv:2503.14476, section 3.4

    The finish reason of the last model call decides, and the whole row is masked.
    """

    stage = "drop"

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        cut = [r.finish_reason == "length" for r in rows]
        kept = [untrained(r) if c else r for r, c in zip(rows, cut, strict=True)]
        return Result(kept, [Metric("masked_truncated_count", sum(cut), "sum")])


class DeduplicateArgs(OperatorArgs):
    by: Literal["tokens", "text"] = "tokens"
    ignore_case: bool = False
    ignore_space: bool = False
    max_copies: int = Field(1, ge=1)


@operator("deduplicate", args=DeduplicateArgs)
class Deduplicate(Operator):
    """Keeps the first `max_copies` runs of a group that gave the same answer.

    `by: tokens` compares the trained tokens; `by: text` the text of the last answer, with `ignore_case` and `ignore_space` without
    regard to case and to where white space stands and how much of it.
    """

    stage = "drop"

    def __init__(self, by: str = "tokens", ignore_case: bool = False, ignore_space: bool = False, max_copies: int = 1) -> None:
        self.by, self.ignore_case, self.ignore_space, self.max_copies = by, ignore_case, ignore_space, max_copies

    async def process(self, rows: Sequence[Experience], group: GroupView) -> Result:
        seen: Counter[str | bytes] = Counter()
        kept = []
        for row in rows:
            answer = self._answer(row)
            seen[answer] += 1
            if seen[answer] <= self.max_copies:
                kept.append(row)
        return Result(kept, [Metric("duplicate_count", len(rows) - len(kept), "sum")])

    def _answer(self, row: Experience) -> str | bytes:
        if self.by == "tokens":
            return bytes(row.tokens[row.loss_mask].tobytes())
        text = row.response_text.casefold() if self.ignore_case else row.response_text
        return " ".join(text.split()) if self.ignore_space else text
