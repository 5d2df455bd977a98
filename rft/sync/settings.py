"""What the synchronizer needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rft.sync.schedule import Style
from rft.types import noise


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """When weights move and how."""

    method: str = "memory"  # memory | checkpoint | nccl
    # nccl: of the broadcast; gloo where trainer or an engine has no GPU
    backend: Literal["gloo", "nccl"] = "gloo"
    bucket_bytes: int | None = 1 << 30  # nccl: sent at once; None = tensor by tensor
    overlap: bool = False  # nccl: the next bucket is received while one is verified
    workers: tuple[int, ...] = ()  # nccl: of each rollout engine; empty = one each
    style: Style = "fixed"
    interval: int = 1  # train steps; explorer_driven: explore batches
    offset: int = 0
    max_staleness: int | None = None
    # fully_async: groups that may begin beyond one window, as a share of it; None = no quota
    threshold: float | None = None
    # engines sleep from the first train step of a window until its weights are published
    in_turns: bool = False
    # engines that load a version together while the others serve; None: all
    at_a_time: int | None = None
    # with `at_a_time`: how long requests under way may take to end before their engine is paused
    drain_s: float = 10.0
    # groups under way when weights move go on under the new ones; else they are waited for
    partial_rollout: bool = True
    # engines stand still while the trainer scores the canary: both compute on the same CPUs
    shares_cores: bool = False
    timeout_s: float = 3600.0
    kv_cache: Literal["recompute", "keep"] = "recompute"
    canary_prompts: int = 8
    canary_tokens: int = 8
    canary_temperature: float = 1.0  # of every other probe prompt: the one that is trained with
    canary_limit: float = 1e-3  # nats; of the first version where both sides compute in float32
    canary_tolerance: float = noise.MULTIPLE  # in shorter types: times the model's own noise
    retries: int = 1
    engine_dtype: str = "float32"  # of the rollout engines, "float32" | "bfloat16" | "float16"
    trainer_dtype: str = "float32"
    # of one explore batch: groups, or rows where a train step takes a number of them; see
    # sync/schedule.py
    batch_units: int = 1
    step_units: int = 1  # of one train step
    group_units: int = 1  # of one group of a batch

    @property
    def canary_dtype(self) -> str:
        """The shorter type of engines and trainer, whose rounding the canary has to allow."""
        return self.trainer_dtype if self.engine_dtype == "float32" else self.engine_dtype
