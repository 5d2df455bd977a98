"""Section synchronizer: when and how weights move to the engines.  Torch-free.

`sync_style` selects the class of the section.  The launch adds a `SyncRuntime`, derived from
engines, trainer and machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from rft.errors import nearest
from rft.schema import units
from rft.schema.base import (
    ChosenBy,
    Diagnostics,
    IgnoreCase,
    Section,
    renamed,
    safe_key,
    section,
)
from rft.sync.schedule import Schedule, Style
from rft.types import noise

Backend = Literal["gloo", "nccl"]
_METHODS = ("memory", "checkpoint", "nccl")
_TRINITY_NAMES = {"offline": "checkpoint", "online": "nccl"}


def _method(value: str) -> str:
    if ":" in value:  # a transport plugin
        return value
    name = value.strip().lower()
    name = _TRINITY_NAMES.get(name, name)
    if name not in _METHODS:
        plugin = (
            f"or your own transport: pkg.module:Name, path/file.py:Name.{nearest(name, _METHODS)}"
        )
        raise ValueError(f"must be {', '.join(_METHODS)}, {plugin}")
    return name


SyncMethod = Annotated[Literal["memory", "checkpoint", "nccl"] | str, AfterValidator(_method)]
SyncStyle = Annotated[
    Style,
    renamed(dynamic_by_explorer="explorer_driven", dynamic_by_trainer="trainer_driven"),
]


class NcclConfig(Section):
    """The broadcast of sync_method nccl.  A `safe_key` may change when a run is resumed."""

    bucketed_broadcast: bool = safe_key(
        True, "Send the weights in buckets instead of tensor by tensor."
    )
    overlap_broadcast_and_load: bool = safe_key(
        False,
        "Receive the next bucket while one is verified; the load begins when all are there.",
    )
    bucket_size_mb: int = safe_key(
        1024, "Size of a bucket; a larger tensor is sent alone.", unit="MiB", ge=1
    )

    @property
    def bucket_bytes(self) -> int | None:
        """Return the bytes per broadcast; None = tensor by tensor."""
        return self.bucket_size_mb << 20 if self.bucketed_broadcast else None

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if not self.bucketed_broadcast:
            self.warn_unused(at, ("bucket_size_mb",), "bucketed_broadcast is false", diagnostics)


def _style(style: Style) -> Any:
    return safe_key(
        style,
        "fixed: after every sync_interval train steps, and both sides wait; explorer_driven: when "
        "the explorer asks; trainer_driven: after every sync_interval train steps, and neither side "
        "waits; fully_async: as trainer_driven, with a quota of tasks for each window.  "
        "max_staleness limits all of them.",
    )


class SyncConfig(Section):
    """Schedule and transport of weight versions: the keys of every style."""

    sync_style: SyncStyle = _style("fixed")
    sync_method: SyncMethod = safe_key(
        "memory",
        "memory: through an anonymous memory file of the node; checkpoint: through a file in the "
        "run folder; nccl: broadcast from the trainer's host memory to that of all engine workers, "
        "over NCCL between GPUs and over gloo where the trainer or the engines have none: slower "
        "than memory on one node; pkg.module:Name or "
        "path/file.py:Name: your own transport.",
    )
    sync_interval: units.TrainSteps = safe_key(
        1,
        "Train steps between two versions; explorer_driven: explore steps between two requests of "
        "the explorer.",
    )
    sync_timeout: units.Seconds = safe_key(3600.0, "How long one side waits for the other.")
    max_staleness: units.TrainStepsOr0 | None = safe_key(
        None,
        "Oldest experience that is trained, in train steps since its weights were published; null "
        "= no separate bound.",
    )
    partial_rollout: bool = safe_key(
        True,
        "Tasks in progress at a sync are interrupted and continue under the new weights; false: "
        "the sync waits for them.",
    )
    kv_cache: Annotated[Literal["recompute", "keep"], IgnoreCase] = safe_key(
        "recompute",
        "Keys and values of running requests at a sync: computed again under the new weights, or "
        "kept.",
    )
    canary_tolerance: float = safe_key(
        noise.MULTIPLE,
        "bfloat16 and float16: allowed mean difference between the log-probs of engines and trainer "
        "over the canary's tokens, as a multiple of the model's own rounding noise; a single token "
        "may differ by twice this multiple of the largest noise, and at least by 1 nat.",
        ge=1,
    )
    nccl: NcclConfig = section(NcclConfig, "The broadcast of sync_method nccl.")

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if self.sync_method != "nccl":
            self.refuse_options(at, ("nccl",), "sync_method nccl", "sync_method", diagnostics)


_OFFSET: int = safe_key(
    0,
    "fixed: steps that the explorer may run ahead; explorer_driven: explore steps before the first "
    "interval.",
)


class FixedSync(SyncConfig):
    """The trainer publishes after every sync_interval steps; both sides wait."""

    sync_offset: units.ExploreStepsOr0 = _OFFSET


class ExplorerDrivenSync(SyncConfig):
    """The explorer requests new weights."""

    sync_style: SyncStyle = _style("explorer_driven")
    sync_offset: units.ExploreStepsOr0 = _OFFSET


class TrainerDrivenSync(SyncConfig):
    """The trainer publishes after every sync_interval steps; neither side waits."""

    sync_style: SyncStyle = _style("trainer_driven")


class FullyAsyncSync(SyncConfig):
    """As trainer_driven, with a quota of tasks for each window."""

    sync_style: SyncStyle = _style("fully_async")
    require_batches: units.Batches = safe_key(
        1,
        "Batches to wait for before the first of them is trained; must divide sync_interval.",
    )
    staleness_threshold: float | None = safe_key(
        None,
        "Tasks that may start early, beyond one sync window, as a fraction of it; 0 = none, null = "
        "no quota.  It limits their number, not their age.",
        ge=0,
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        super().rules(at, diagnostics)
        if self.sync_interval % self.require_batches:
            diagnostics.error(
                f"{at}.require_batches",
                f"{self.require_batches} must divide sync_interval {self.sync_interval}: weights "
                f"are published only when all batches that were waited for are trained",
            )


SynchronizerConfig = Annotated[
    FixedSync | ExplorerDrivenSync | TrainerDrivenSync | FullyAsyncSync, ChosenBy("sync_style")
]


def offset(config: SyncConfig) -> int:
    """Return `sync_offset`; 0 for a style without it."""
    return config.sync_offset if isinstance(config, FixedSync | ExplorerDrivenSync) else 0


def schedule(
    config: SyncConfig, *, batch_units: int = 1, step_units: int = 1, group_units: int = 1
) -> Schedule:
    """Return the schedule of a section.  Raises ConfigError for a max_staleness it cannot keep."""
    return Schedule(
        style=config.sync_style,
        interval=config.sync_interval,
        offset=offset(config),
        max_staleness=config.max_staleness,
        threshold=config.staleness_threshold if isinstance(config, FullyAsyncSync) else None,
        batch_units=batch_units,
        step_units=step_units,
        group_units=group_units,
    )


@dataclass(frozen=True, kw_only=True)
class SyncRuntime:
    """Settings of the synchronizer that follow from engines, trainer and machine."""

    # nccl: backend of the broadcast; gloo if the trainer or an engine has no GPU
    backend: Backend = "gloo"
    workers: tuple[int, ...] = ()  # nccl: workers of each rollout engine; empty = one each
    # engines sleep from the first train step of a window until its weights are published
    in_turns: bool = False
    # number of engines that load a version together while the others serve; None: all
    at_a_time: int | None = None
    # with `at_a_time`: seconds for requests in progress before their engine is paused
    drain_s: float = 10.0
    # engines pause while the trainer scores the canary: both compute on the same CPUs
    shares_cores: bool = False
    canary_prompts: int = 8
    canary_tokens: int = 8
    canary_temperature: float = 1.0  # of every other probe prompt: the training tasks' temperature
    canary_limit: float = 1e-3  # nats; for the first version if both sides compute in float32
    retries: int = 1
    engine_dtype: str = "float32"  # of the rollout engines, "float32" | "bfloat16" | "float16"
    trainer_dtype: str = "float32"

    @property
    def canary_dtype(self) -> str:
        """Return the shorter type of engines and trainer, whose rounding the canary must allow."""
        return self.trainer_dtype if self.engine_dtype == "float32" else self.engine_dtype
