"""The base class of operators, which filter or change the rows of one group.

    @operator("short_answers")
    class ShortAnswers(Operator):
        stage = "drop"

        async def process(self, rows, group):
            return Result([r for r in rows if r.num_response_tokens <= 100])

An operator depends on neither explorer nor ledger.  Invariant: an operator's stage alone decides
which fields it may change, and the pipeline checks it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from numbers import Real
from typing import Annotated, ClassVar, Literal, get_args

import msgspec
import numpy as np
from msgspec import Struct
from pydantic import BaseModel, ConfigDict

from rft.plugins import Provider, kind
from rft.types.credit import compared, group_statistics, run_rewards
from rft.types.experience import Experience, scored_members
from rft.types.metrics import Metric
from rft.types.ports import ChatModel
from rft.types.task import Task

operator = kind("operator")

Stage = Literal["reward", "statistics", "drop"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""The order in which operators run.

    reward       sets rewards (also of rows without one); returns every row
    statistics   reads, and may change `info` and `metrics`; returns every row
    drop         drops rows, or excludes tokens from training
"""


class GroupView(Struct, frozen=True, kw_only=True):
    """The context of a group for an operator.

    `members` are all rows with a sequence, including those that an earlier operator dropped, in run
    order.  `rewards`, `mean` and `std` cover the rewards that the group compares: those of its
    scored runs, or of rows with their own rewards (`rft.types.credit`); the buffer computes the
    same again when the rows are leased.
    """

    task: Task
    members: tuple[Experience, ...]

    @property
    def run_rewards(self) -> dict[int, float]:
        """Return the reward of every scored run."""
        return run_rewards(scored_members(self.members))

    @property
    def rewards(self) -> list[float]:
        scored = scored_members(self.members)
        return list(compared(group_statistics("", scored)).rewards) if scored else []

    @property
    def mean(self) -> float:
        """Return the mean reward; 0 without scored rows."""
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else 0.0

    @property
    def std(self) -> float:
        """Return the unbiased standard deviation of the rewards; exactly 0 for equal rewards and
        for fewer than two.
        """
        rewards = self.rewards
        mean = self.mean
        if len(set(rewards)) < 2:
            return 0.0
        return float((sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5)


class Result(Struct, frozen=True):
    """The result of `process`: the remaining rows, and metrics.

    Names of metrics get the prefix `experience_pipeline/`; each metric says how its values over the
    groups of a step are combined.
    """

    rows: Sequence[Experience]
    metrics: Sequence[Metric] = ()


class Operator(Provider):
    """Base class of operators.  `__init__` takes the checked `args` as keyword arguments; one
    object serves the whole run.

    `needs` maps libraries to the extra that installs them.

    An `async` `process` may run for several groups at once.  An ordinary function runs in a thread,
    one group after the other.
    """

    stage: ClassVar[Stage] = ""  # type: ignore[assignment]  # every operator sets it
    needs: ClassVar[Mapping[str, str]] = {}

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Prepare before the first group.

        `models`: chat models by name: "rollout_model", the policy, and the auxiliary models.
        """

    def process(self, rows: Sequence[Experience], group: GroupView) -> Result | Awaitable[Result]:
        """Return the remaining rows and metrics of one group.

        `rows`: the group's members that have a sequence and were not dropped before, in run order.
        An exception makes the group fail, with the traceback; rows are read-only, so use
        `msgspec.structs.replace`.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Clean up after the last group."""


class OperatorArgs(BaseModel):
    """Arguments of an operator; unknown arguments are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Engine:
    """Marks arguments that name an engine."""


EngineName = Annotated[str, _Engine()]
"""An argument that names an engine, "rollout_model" or an auxiliary model; the config check refuses
unknown engines.
"""


def engines_named(args: type[BaseModel], values: Mapping[str, object]) -> dict[str, str]:
    """Return the arguments of `args` that name an engine, with their values."""
    marked = [
        name
        for name, field in args.model_fields.items()
        if any(isinstance(m, _Engine) for m in field.metadata)
    ]
    return {name: str(values[name]) for name in marked}


def untrained(row: Experience) -> Experience:
    """Return the row without trained tokens."""
    none = np.zeros(row.num_tokens, np.bool_)
    return msgspec.structs.replace(
        row, loss_mask=none, logprobs=np.zeros(row.num_tokens, np.float32)
    )


def number_of(row: Experience, name: str) -> float | None:
    """Return number `name` of the row's `info`, `metrics` or `reward_parts`, in this order.

    None = absent.  Raises ValueError if it is not a finite number.
    """
    for place in (row.info, row.metrics, row.reward_parts):
        if name in place:
            value = place[name]
            if isinstance(value, Real) and math.isfinite(value):
                return float(value)
            raise ValueError(f"{row.id}: {name!r} is {value!r}; it must be a finite number")
    return None


def names_of(row: Experience) -> str:
    """Return the names that `number_of` can find, for messages."""
    return ", ".join(sorted({*row.info, *row.metrics, *row.reward_parts})) or "none"
