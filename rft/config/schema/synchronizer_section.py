"""Section `synchronizer`: when weights move to the engines, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from rft.config.schema import units
from rft.config.schema.base import IgnoreCase, Section, Told, renamed, safe_key
from rft.errors import nearest
from rft.sync.settings import SyncSettings
from rft.trainer.settings import TrainerSettings

_METHODS = ("memory", "checkpoint", "nccl")
_OTHER_NAMES = {"offline": "checkpoint", "online": "nccl"}


def _method(value: str) -> str:
    if ":" in value:  # a transport of somebody's own
        return value
    known = value.strip().lower()
    known = _OTHER_NAMES.get(known, known)
    if known not in _METHODS:
        own = (
            f"or your own transport: pkg.module:Name, path/file.py:Name.{nearest(known, _METHODS)}"
        )
        raise ValueError(f"must be {', '.join(_METHODS)}, {own}")
    return known


SyncMethod = Annotated[Literal["memory", "checkpoint", "nccl"] | str, AfterValidator(_method)]
SyncStyle = Annotated[
    Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"],
    renamed(dynamic_by_explorer="explorer_driven", dynamic_by_trainer="trainer_driven"),
]


class SynchronizerConfig(Section):
    """Schedule and transport of weight versions."""

    sync_method: SyncMethod = safe_key(
        SyncSettings.method,
        "memory: through an anonymous memory file of the node; checkpoint: through a file in the "
        "run folder; nccl: broadcast from the "
        "trainer to all engines, over NCCL between GPUs and over gloo where the trainer or the "
        "engines have none; pkg.module:Name or "
        "path/file.py:Name: your own transport.",
    )
    sync_style: SyncStyle = safe_key(
        SyncSettings.style,
        "fixed: both sides count steps; explorer_driven: when the explorer asks; trainer_driven: "
        "after every sync_interval steps, and "
        "neither side waits; fully_async: the same, with a quota of tasks for each window.  "
        "max_staleness limits all of them.",
    )
    sync_interval: units.TrainSteps = safe_key(
        SyncSettings.interval,
        "Train steps between two versions; explorer_driven: explore steps after which the explorer "
        "asks for one.",
    )
    explorer_sync_interval: units.ExploreSteps | None = safe_key(
        None,
        "Interval of explorer_driven.  Null: sync_interval; with fixed both sides have the same.",
    )
    trainer_sync_interval: units.TrainSteps | None = safe_key(
        None,
        "Interval of trainer_driven and fully_async.  Null: sync_interval; with fixed both sides "
        "have the same.",
    )
    sync_offset: units.ExploreStepsOr0 = safe_key(
        SyncSettings.offset,
        "fixed: how many steps the explorer may run ahead; explorer_driven: how many it runs "
        "before it first asks.",
    )
    sync_timeout: units.Seconds = safe_key(
        SyncSettings.timeout_s, "How long one side waits for the other."
    )
    max_staleness: units.TrainStepsOr0 | None = safe_key(
        None,
        "Oldest experience that is trained, in train steps since its weights were published; null "
        "= no separate bound.",
    )
    require_batches: units.Batches = safe_key(
        TrainerSettings.require_batches,
        "fully_async: batches that must have arrived before the trainer takes the first of them; a "
        "divisor of sync_interval.",
    )
    staleness_threshold: float | None = safe_key(
        None,
        "fully_async: tasks started beyond one sync window, as a fraction of it; 0 = none, null = "
        "no quota.  A quantity, not an age.",
        ge=0,
    )
    partial_rollout: bool = safe_key(
        SyncSettings.partial_rollout,
        "Tasks in progress at a sync are interrupted and continue under the new weights; false: "
        "the sync waits for them.",
    )
    kv_cache: Annotated[Literal["recompute", "keep"], IgnoreCase] = safe_key(
        SyncSettings.kv_cache,
        "Keys and values of running requests at a sync: computed again under the new weights, or "
        "kept.",
    )
    bucketed_broadcast: bool = safe_key(
        True, "nccl: send the weights in buckets instead of tensor by tensor."
    )
    overlap_broadcast_and_load: bool = safe_key(
        False,
        "nccl: receive the next bucket while one is verified; the model is loaded when all are "
        "whole.",
    )
    bucket_size_mb: int = safe_key(
        1024, "nccl: size of a bucket; a larger tensor is sent alone.", unit="MB", ge=1
    )
    group_name: str | None = safe_key(None, "Name of the broadcast's process group.")
    canary_tolerance: float = safe_key(
        SyncSettings.canary_tolerance,
        "bfloat16 and float16: how many times the model's own rounding noise the log-probs of "
        "engines may be off the trainer's, on "
        "average over the canary's tokens; the largest may be off by twice that multiple of the "
        "largest noise, or by 1 nat.",
        ge=1,
    )
    wait_for_checkpoint: bool = safe_key(
        False, "Wait for the checkpoint to be saved before a version is used."
    )

    def rules(self, at: str, told: Told) -> None:
        style = f"sync_style is {self.sync_style}"
        method = f"sync_method is {self.sync_method}"
        if self.sync_method != "nccl":
            self.idle(
                at,
                ("bucketed_broadcast", "overlap_broadcast_and_load", "bucket_size_mb"),
                method,
                told,
            )
        elif not self.bucketed_broadcast:
            self.idle(at, ("bucket_size_mb",), "bucketed_broadcast is false", told)
        if self.sync_style != "fully_async":
            self.idle(at, ("require_batches", "staleness_threshold"), style, told)
        if self.sync_style in ("trainer_driven", "fully_async"):
            self.idle(at, ("sync_offset",), style, told)
