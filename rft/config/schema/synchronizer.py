"""Section `synchronizer`: when weights move to the engines, and how."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import AfterValidator

from rft.config.schema.base import IgnoreCase, Section, key, renamed

_METHODS = ("memory", "checkpoint", "nccl")
_OTHER_NAMES = {"offline": "checkpoint", "online": "nccl"}


def _method(value: str) -> str:
    if ":" in value:  # a transport of somebody's own
        return value
    known = value.strip().lower()
    known = _OTHER_NAMES.get(known, known)
    if known not in _METHODS:
        near = difflib.get_close_matches(known, _METHODS, n=1)
        hint = f".  Did you mean {near[0]}?" if near else ""
        raise ValueError(f"must be {', '.join(_METHODS)}, or a transport of your own: pkg.module:Name, path/file.py:Name{hint}")
    return known


SyncMethod = Annotated[Literal["memory", "checkpoint", "nccl"] | str, AfterValidator(_method)]
SyncStyle = Annotated[
    Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"],
    renamed(dynamic_by_explorer="explorer_driven", dynamic_by_trainer="trainer_driven"),
]


class SynchronizerConfig(Section):
    """Schedule and transport of weight versions."""

    sync_method: SyncMethod = key(
        "memory",
        "memory: through an anonymous memory file of the node; checkpoint: through a file in the run folder; nccl: broadcast from the "
        "trainer to all engines, over NCCL between GPUs and over gloo where the trainer or the engines have none; pkg.module:Name or "
        "path/file.py:Name: a transport of your own.",
        on_resume="safe",
    )
    sync_style: SyncStyle = key(
        "fixed",
        "fixed: both sides count steps; explorer_driven: when the explorer asks; trainer_driven: after every sync_interval steps, without "
        "anybody waiting; fully_async: the same, with a quota of tasks for each window.  max_staleness bounds every one of them.",
        on_resume="safe",
    )
    sync_interval: int = key(
        1, "Train steps between two versions; explorer_driven: explore steps after which the explorer asks for one.", unit="train steps",
        on_resume="safe", ge=1,
    )  # fmt: skip
    explorer_sync_interval: int | None = key(
        None, "Interval of explorer_driven.  Null: sync_interval; with fixed both sides have the same.", unit="explore steps",
        on_resume="safe", ge=1,
    )  # fmt: skip
    trainer_sync_interval: int | None = key(
        None, "Interval of trainer_driven and fully_async.  Null: sync_interval; with fixed both sides have the same.", unit="train steps",
        on_resume="safe", ge=1,
    )  # fmt: skip
    sync_offset: int = key(
        0, "fixed: how many steps the explorer may run ahead; explorer_driven: after how many it asks first.", unit="explore steps",
        on_resume="safe", ge=0,
    )  # fmt: skip
    sync_timeout: float = key(3600.0, "How long one side waits for the other.", unit="s", on_resume="safe", gt=0)
    max_staleness: int | None = key(
        None, "Oldest experience that is trained, as train steps since its weights; null = no bound of its own.", unit="train steps",
        on_resume="safe", ge=0,
    )  # fmt: skip
    require_batches: int = key(
        1, "fully_async: batches that are there before the trainer takes the first of them; a divisor of sync_interval.", unit="batches",
        on_resume="safe", ge=1,
    )  # fmt: skip
    staleness_threshold: float | None = key(
        None, "fully_async: tasks started beyond one sync window, as a share of it; 0 = none, null = no quota.  A quantity, not an age.",
        on_resume="safe", ge=0,
    )  # fmt: skip
    partial_rollout: bool = key(
        True, "Tasks that are under way at a sync are interrupted and go on under the new weights; false: the sync waits for them.",
        on_resume="safe",
    )  # fmt: skip
    kv_cache: Annotated[Literal["recompute", "keep"], IgnoreCase] = key(
        "recompute",
        "Keys and values of running requests at a sync: computed again under the new weights, or kept.",
        on_resume="safe",
    )
    bucketed_broadcast: bool = key(True, "nccl: send the weights in buckets instead of tensor by tensor.", on_resume="safe")
    overlap_broadcast_and_load: bool = key(
        False, "nccl: receive the next bucket while one is verified; the model is loaded when all are whole.", on_resume="safe"
    )
    bucket_size_mb: int = key(1024, "nccl: size of a bucket; a larger tensor goes alone.", unit="MB", on_resume="safe", ge=1)
    group_name: str | None = key(None, "Accepted, no effect: the group's name is chosen by itself.", on_resume="safe")
    wait_for_checkpoint: bool = key(False, "Accepted, no effect: a version is used when it is complete.", on_resume="safe")
