"""What the explorer needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from rft.buffer.operators.settings import PipelineSettings
from rft.taskset.settings import TasksetSettings


@dataclass(frozen=True, kw_only=True)
class ExplorerSettings:
    """The exploring loop."""

    tasksets: tuple[TasksetSettings, ...]
    eval_tasksets: tuple[TasksetSettings, ...] = ()
    batch_size: int  # groups per explore step
    total_batches: int | None = None  # None = until the tasksets' epochs are over
    total_epochs: int | None = 1
    index: int = 0  # number of this explorer
    seed: int = 42
    feedback_lag: int = 0  # explore batches under way whose pass rates a choice of tasks does not wait for
    max_timeout_s: float = 1800.0  # per run
    max_retry_times: int = 2
    max_refill: int | None = None  # groups replaced per step; None = 3 x batch_size
    on_short_batch: str = "stop"
    eval_interval: int = 0  # explore steps; 0 = never during training
    eval_on_startup: bool = True
    eval_at_end: bool = True
    eval_samples: int | None = 64  # answers of each evaluation that are handed on; None = all, 0 = none
    max_concurrent_runs: int = 256
    breaker: int = 10  # consecutive groups that fail wholly before the run stops
    deterministic: bool = False
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    plugin_dirs: tuple[str, ...] = field(default_factory=tuple)
    env_vars: dict[str, str] = field(default_factory=dict)  # of the process that the explorer runs in
