"""What the explorer needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from rft.buffer.settings import PipelineSettings
from rft.taskset.settings import TasksetSettings
from rft.types.ids import SEED


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """An OpenAI-compatible server on loopback for observers; its calls are not recorded."""

    model: str | None = None  # name of an auxiliary model; None = the policy
    port: int | None = None  # None = a free one
    key: str | None = field(default=None, repr=False)  # None = a random one


@dataclass(frozen=True, kw_only=True)
class ExplorerSettings:
    """The exploring loop."""

    tasksets: tuple[TasksetSettings, ...]
    eval_tasksets: tuple[TasksetSettings, ...] = ()
    batch_size: int  # groups per explore step
    total_batches: int | None = None  # None = until the tasksets' epochs are over
    total_epochs: int | None = 1
    name: str = "explorer"  # of several explorers of a run
    index: int = 0  # in ids; explorers that share one order of batches all have 0
    seed: int = SEED
    # explore batches under way whose pass rates a choice of tasks does not wait for
    feedback_lag: int = 0
    max_timeout_s: float = 1800.0  # per run
    max_retry_times: int = 2
    max_group_timeout_s: float | None = None  # all runs of a task together
    whole_groups: bool = False  # a group that misses a run is not trained
    # every token is drawn from the policy itself, at its temperature; else its run fails
    reproducible: bool = False
    drawn: bool = False  # at least from a part of it: a greedy token has no log-prob
    stop_hopeless: bool = False  # end the runs of a group that cannot be trained any more
    # limit of a run as a multiple of the mean; None = max_timeout_s alone
    timeout_ratio: float | None = None
    timeout_warmup: int = 1  # explore steps measured before that holds
    over_rollout: float = 0.0  # share of a step's tasks that need not finish
    wait_after_s: float = 30.0  # how long the others may go on then
    keep_partial: bool = False  # train what is left of a group that over_rollout ended
    baseline: bool = False  # play every task once more, at temperature 0, for its reward
    max_refill: int | None = None  # groups replaced per step; None = 3 x batch_size
    on_short_batch: str = "stop"
    eval_interval: int = 0  # explore steps; 0 = never during training
    eval_on_startup: bool = True
    eval_at_end: bool = True
    # the groups of a batch may begin at different weights, and each is asked for
    by_group: bool = False
    # explore batches under way at the same time; None = what the weights and the buffer allow
    max_inflight: int | None = None
    eval_in_background: bool = False  # explore on meanwhile
    bench_latest: bool = False  # mode bench: the newest checkpoint alone
    percentiles: bool = False  # metrics of rollouts also say percentiles
    # answers of each evaluation that are handed on; None = all, 0 = none
    eval_samples: int | None = 64
    max_concurrent_runs: int = 256
    report_interval_s: float = 0.0  # how often the log says what every batch does; 0 = never
    # consecutive groups that fail completely, or get no reward, before the run stops
    breaker: int = 10
    deterministic: bool = False
    apis: tuple[ApiSettings, ...] = ()
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    plugin_dirs: tuple[str, ...] = field(default_factory=tuple)
    # of the process that the explorer runs in
    env_vars: dict[str, str] = field(default_factory=dict)
