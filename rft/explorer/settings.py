"""Settings of the explorer.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from rft.buffer.settings import PipelineSettings
from rft.taskset.settings import TasksetSettings
from rft.types.ids import SEED


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """An OpenAI-compatible loopback server for observers; its calls are not recorded."""

    model: str | None = None  # name of an auxiliary model; None = the policy
    port: int | None = None  # None = a free one
    key: str | None = field(default=None, repr=False)  # None = a random one


@dataclass(frozen=True, kw_only=True)
class ExplorerSettings:
    """The exploring loop."""

    tasksets: tuple[TasksetSettings, ...]
    eval_tasksets: tuple[TasksetSettings, ...] = ()
    batch_size: int  # groups per explore step
    total_batches: int | None = None  # None = total_epochs
    total_epochs: int | None = 1
    name: str = "explorer"  # distinguishes several explorers of a run
    index: int = 0  # part of ids; explorers that share one order of batches all have 0
    seed: int = SEED
    # explore batches in progress whose pass rates a choice of tasks does not wait for
    feedback_lag: int = 0
    max_timeout_s: float = 1800.0  # per run
    max_retry_times: int = 2
    max_group_timeout_s: float | None = None  # all runs of a task together
    whole_groups: bool = False  # do not train a group with a missing run
    # fail a run unless every token is drawn from the policy itself at its temperature
    reproducible: bool = False
    sampled: bool = False  # fail a greedy run, whose tokens have no log-probs
    stop_hopeless: bool = False  # end the runs of a group that can no longer be trained
    # limit of a run as a multiple of the mean; None = max_timeout_s only
    timeout_ratio: float | None = None
    timeout_warmup: int = 1  # explore steps measured before timeout_ratio applies
    over_rollout: float = 0.0  # share of a step's tasks that need not finish
    wait_after_s: float = 30.0  # extra time for the remaining tasks after that
    keep_partial: bool = False  # train the finished runs of a group that over_rollout ended
    teacher_top: int = 0  # most likely tokens of a teacher that are kept at each position
    baseline: bool = False  # play every task once more at temperature 0, as reward baseline
    max_refill: int | None = None  # groups replaced per step; None = 3 x batch_size
    on_short_batch: str = "stop"
    eval_interval: int = 0  # explore steps; 0 = never during training
    eval_on_startup: bool = True
    eval_at_end: bool = True
    # pace groups individually: groups of a batch may begin with different weights
    by_group: bool = False
    # maximum explore batches in progress; None = limited by weights and buffer
    max_inflight: int | None = None
    eval_in_background: bool = False  # continue exploring during an evaluation
    bench_latest: bool = False  # mode bench: evaluate only the newest checkpoint
    percentiles: bool = False  # add percentiles to rollout metrics
    # answers of each evaluation passed to the sink; None = all, 0 = none
    eval_samples: int | None = 64
    max_concurrent_runs: int = 256
    report_interval_s: float = 0.0  # interval of progress lines in the log; 0 = never
    # consecutive failed or unscored groups before the run stops
    breaker: int = 10
    deterministic: bool = False
    apis: tuple[ApiSettings, ...] = ()
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    plugin_dirs: tuple[str, ...] = field(default_factory=tuple)
    # of the explorer's process
    env_vars: dict[str, str] = field(default_factory=dict)
