"""What the synchronizer needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """When weights move and how."""

    method: Literal["memory", "checkpoint"] = "memory"
    style: Literal["fixed"] = "fixed"
    interval: int = 1
    offset: int = 0
    max_staleness: int | None = None
    timeout_s: float = 3600.0
    kv_cache: Literal["recompute", "keep"] = "recompute"
    canary_prompts: int = 8
    canary_tokens: int = 8
    canary_limit: float = 1e-3  # nats; the float32 limit for the first version, see rulings on later ones
    canary_limit_bf16: float = 0.25
    retries: int = 1
    engine_dtype: str = "float32"  # of the rollout engines, "float32" | "bfloat16" | "float16": picks the canary's limits
    batch_units: int = 1  # rows of one explore batch, where a train step takes another number of rows than that
    step_units: int = 1  # rows of one train step; see sync/schedule.py
