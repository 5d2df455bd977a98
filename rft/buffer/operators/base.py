"""What an operator is: the rows of one group in, the rows that go on out.

    @operator("short_answers")
    class ShortAnswers(Operator):
        stage = "drop"

        async def process(self, rows, group):
            return Result([r for r in rows if r.num_response_tokens <= 100])

An operator knows neither explorer nor ledger.  Invariant: what it may change depends on its stage
alone, and the pipeline checks it.
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
    """What an operator may know of a group besides the rows it is given.

    `members` are all rows that have a sequence, those that an earlier operator dropped included, in
    run order.  `rewards`, `mean` and `std` are of what the group compares: its scored runs, or rows
    with rewards of their own (`rft.types.credit`); the buffer takes the same again when the rows
    are leased.
    """

    task: Task
    members: tuple[Experience, ...]

    @property
    def run_rewards(self) -> dict[int, float]:
        """The reward of every scored run."""
        return run_rewards(scored_members(self.members))

    @property
    def rewards(self) -> list[float]:
        scored = scored_members(self.members)
        return list(compared(group_statistics("", scored)).rewards) if scored else []

    @property
    def mean(self) -> float:
        """Mean reward; 0 where nothing is scored."""
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation of the rewards; exactly 0 where they are all equal, and for
        fewer than two.
        """
        rewards = self.rewards
        mean = self.mean
        if len(set(rewards)) < 2:
            return 0.0
        return float((sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5)


class Result(Struct, frozen=True):
    """What `process` returns: the rows that go on, and numbers for people.

    Names of metrics are put behind `experience_pipeline/`; each says how its values of all groups
    of a step become one.
    """

    rows: Sequence[Experience]
    metrics: Sequence[Metric] = ()


class Operator(Provider):
    """Subclass it.  `__init__` takes the checked `args` as keyword arguments; one object serves the
    whole run.

    `needs` maps libraries to the extra that installs them.

    `process` may be `async`: then groups may overlap.  An ordinary function runs in a thread, one
    group after the other.
    """

    stage: ClassVar[Stage] = ""  # type: ignore[assignment]  # every operator sets it
    needs: ClassVar[Mapping[str, str]] = {}

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Once, before the first group.  `models` may be asked, by name: "rollout_model", the
        policy, and the auxiliary models.
        """

    def process(self, rows: Sequence[Experience], group: GroupView) -> Result | Awaitable[Result]:
        """`rows`: the members of one group that have a sequence and that no operator before has
        dropped, in run order.

        What it raises makes the group fail, with the traceback; rows are read-only, so use
        `msgspec.structs.replace`.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Once, after the last group."""


class OperatorArgs(BaseModel):
    """Arguments of an operator; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Engine:
    """Marks arguments that name an engine."""


EngineName = Annotated[str, _Engine()]
"""An argument that names an engine, "rollout_model" or an auxiliary model; the check of the
configuration refuses one that is not there.
"""


def engines_named(args: type[BaseModel], given: Mapping[str, object]) -> dict[str, str]:
    """The arguments of `args` that name an engine, and which."""
    marked = [
        name
        for name, field in args.model_fields.items()
        if any(isinstance(m, _Engine) for m in field.metadata)
    ]
    return {name: str(given[name]) for name in marked}


def untrained(row: Experience) -> Experience:
    """The row with no token left to train."""
    none = np.zeros(row.num_tokens, np.bool_)
    return msgspec.structs.replace(
        row, loss_mask=none, logprobs=np.zeros(row.num_tokens, np.float32)
    )


def number_of(row: Experience, name: str) -> float | None:
    """The number called `name` in the row's `info`, `metrics` or `reward_parts`, in this order.
    None = it has none.

    Raises ValueError where it is something else than a finite number.
    """
    for place in (row.info, row.metrics, row.reward_parts):
        if name in place:
            value = place[name]
            if isinstance(value, Real) and math.isfinite(value):
                return float(value)
            raise ValueError(f"{row.id}: {name!r} is {value!r}; it must be a finite number")
    return None


def names_of(row: Experience) -> str:
    """The names that `number_of` can find, for messages."""
    return ", ".join(sorted({*row.info, *row.metrics, *row.reward_parts})) or "none"
