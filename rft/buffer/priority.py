"""Priority functions: choose which group is trained next, with `replay_buffer.enable`.

    @priority("mine", args=MyArgs)                      in a plugin folder: priority_fn: mine; else path/file.py:Mine
    class Mine(PriorityFn):
        def __init__(self, args: MyArgs, seed: int) -> None: ...
        def __call__(self, x: Candidate) -> float: ...  highest first; ties in order of their ids

Depends on no buffers, and stays light, because the config check uses it.  Invariant: a priority
follows from its arguments alone, so a resumed run reads in the same order; it is computed when a
group becomes readable and after each of its uses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rft.plugins import kind

priority = kind("priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The input of a priority function: a group, or those of its rows that are read together."""

    group: str
    batch: int
    task: int
    # train step of the oldest weights that wrote any of its tokens; 0 without a version
    model_version: int
    use_count: int  # train steps that used it, in the current ancestry
    rewards: tuple[float | None, ...]  # values from when the group was stored


class PriorityFn:
    """Base of priority functions.  `args`: checked by the plugin's model, None without a model."""

    def __init__(self, args: Any, seed: int) -> None: ...

    def __call__(self, x: Candidate) -> float:
        raise NotImplementedError


class PriorityArgs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LinearDecayArgs(PriorityArgs):
    decay: float = Field(2.0, description="how many train steps older each use makes a group")


class DecayLimitRandomizationArgs(LinearDecayArgs):
    use_count_limit: int = Field(
        3, description="uses after which a group is not read again; 0 or less: no limit"
    )
    sigma: float = Field(
        0.0, ge=0, description="standard deviation of normal noise, drawn for each use"
    )


@priority("linear_decay", args=LinearDecayArgs)
class LinearDecay(PriorityFn):
    """model_version - decay * use_count (Trinity-RFT's default)."""

    def __init__(self, args: LinearDecayArgs, seed: int) -> None:
        del seed
        self._decay = args.decay

    def __call__(self, x: Candidate) -> float:
        return x.model_version - self._decay * x.use_count


@priority("decay_limit_randomization", args=DecayLimitRandomizationArgs)
class DecayLimitRandomization(PriorityFn):
    """linear_decay with noise and a limit of uses.

    The limit becomes the buffer's max_uses; the noise follows from seed, group and use.
    """

    def __init__(self, args: DecayLimitRandomizationArgs, seed: int) -> None:
        self._args = args
        self._seed = seed

    def __call__(self, x: Candidate) -> float:
        a = self._args
        noise = (
            random.Random(f"{self._seed}:{x.group}:{x.use_count}").gauss(0.0, a.sigma)
            if a.sigma
            else 0.0
        )
        return x.model_version - a.decay * x.use_count + noise
