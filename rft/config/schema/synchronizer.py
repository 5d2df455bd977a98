"""Section `synchronizer`: when weights move to the engines, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.config.schema.base import IgnoreCase, Section, key, renamed


class SynchronizerConfig(Section):
    """Schedule and transport of weight versions."""

    sync_method: Annotated[Literal["memory", "checkpoint"], renamed(offline="checkpoint", online="nccl")] = key(
        "memory",
        "memory: through an anonymous memory file of the node; checkpoint: through a file in the run folder.",
        on_resume="safe",
    )
    sync_style: Annotated[Literal["fixed"], IgnoreCase] = key("fixed", "fixed: after every sync_interval steps.")
    sync_interval: int = key(1, "Train steps between two versions.", unit="train steps", on_resume="safe", ge=1)
    sync_offset: int = key(0, "How many steps the explorer may run ahead.", unit="explore steps", on_resume="safe", ge=0)
    sync_timeout: float = key(3600.0, "How long one side waits for the other.", unit="s", on_resume="safe", gt=0)
    max_staleness: int | None = key(
        None, "Oldest experience that is trained, as train steps since its weights; null = no bound of its own.", unit="train steps",
        on_resume="safe", ge=0,
    )  # fmt: skip
    kv_cache: Annotated[Literal["recompute", "keep"], IgnoreCase] = key(
        "recompute",
        "Keys and values of running requests at a sync: computed again under the new weights, or kept.",
        on_resume="safe",
    )
