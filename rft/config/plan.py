"""What a run will do: each package's complete, frozen settings, and why each derived value is what it
is.

Torch-free.  Invariant: nothing is filled in later; code downstream reads a Plan and never a
RunConfig.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rft.buffer.settings import BufferSettings, MixSettings
from rft.config.gpus import count_gpus, smallest_gpu
from rft.engine.settings import AuxiliarySettings, EngineSettings
from rft.explorer.service_settings import ServeRuntime
from rft.explorer.settings import ExplorerSettings
from rft.files.disk import read_regular
from rft.monitor.settings import MonitorConfig, TrackedRun
from rft.sync.schedule import Schedule
from rft.sync.settings import SyncConfig, SyncRuntime
from rft.taskset.settings import OfflineDataSettings, TaskPipelineSettings, TasksetSettings
from rft.trainer.settings import LearnerSettings, TrainerSettings

Tasksets = tuple[TasksetSettings, ...]


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Machines and how their GPUs are split."""

    ray_address: str | None  # None = a local Ray, started and stopped by the run
    namespace: str  # of that Ray: where the processes of a run meet
    node_num: int
    gpu_per_node: int
    gpus_per_engine: int  # 0 = engines on CPU
    auxiliary: tuple[int, ...]  # GPUs of each engine of the auxiliary models that needs any
    trainer_gpus: int  # 0 = trainer on CPU
    shared: bool  # engines are on the trainer's GPUs, in turns
    num_cpus: int | None  # what a local Ray is told; None = the machine's, at least 8
    actor_start_timeout_s: float  # for each process of the run
    stall_timeout_s: float | None  # of processes that are not engines; None = never
    timeline: bool  # Ray's own is written at the end

    @property
    def gpus(self) -> int:
        return self.node_num * self.gpu_per_node

    @property
    def auxiliary_gpus(self) -> int:
        return sum(self.auxiliary)

    def used(self, engines: int) -> int:
        """GPUs that have something to do, with so many engines."""
        return (
            self.auxiliary_gpus
            + self.trainer_gpus
            + (0 if self.shared else engines * self.gpus_per_engine)
        )


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A derived value of a key, and the reason for it."""

    key: str
    value: object
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run, resolved.  `total_steps` is None only where epochs were asked for and the tasksets
    were not opened.
    """

    mode: str
    joins: bool = False  # a run whose trainer is another process
    run_dir: Path
    explorer: ExplorerSettings
    serve: ServeRuntime | None = None  # instead of exploring
    engines: tuple[EngineSettings, ...]
    auxiliary: tuple[AuxiliarySettings, ...] = ()  # judges, teachers, reward models
    buffer: BufferSettings
    mix: MixSettings | None = None  # an expert's rows in each train batch,
    expert: OfflineDataSettings | None = None  # and where they come from
    learner: LearnerSettings
    trainer: TrainerSettings
    sync: SyncConfig
    sync_runtime: SyncRuntime
    schedule: Schedule
    monitor: MonitorConfig
    tracked_run: TrackedRun
    task_pipeline: TaskPipelineSettings | None = None
    cluster: ClusterSettings
    total_steps: int | None
    # of a task: the size of the largest group, also of tasks that clients or another process bring
    num_runs: int = 0
    log_level: str = "INFO"
    log_by_node: bool = False  # a folder of log files for each machine
    plugin_dirs: tuple[str, ...] = ()
    seed: int = 42
    deterministic: bool = False
    continue_from_checkpoint: bool = True
    resume_mode: str = "auto"
    resume_from_path: Path | None = None  # of another run, for one that has no checkpoint yet
    derived: tuple[Derived, ...] = ()
    notes: tuple[str, ...] = ()  # worth knowing
    warnings: tuple[str, ...] = ()  # probably not what was meant

    @property
    def trains(self) -> bool:
        """Whether trainer ranks are here."""
        return self.mode not in ("explore", "bench") and not self.joins

    @property
    def averaged(self) -> int | None:
        """Place of the auxiliary model that serves a moving average of the policy."""
        return next((i for i, m in enumerate(self.auxiliary) if m.decay is not None), None)

    @property
    def staleness_bound(self) -> int | None:
        """Train steps by which an experience can at most be behind; None = no bound (replay without
        max_staleness, for example).
        """
        most = self.sync.max_staleness
        sizes = {t.num_runs for t in self.explorer.tasksets}
        if self.buffer.replay is not None or (
            self.trainer.batch_rows is not None and len(sizes) > 1
        ):
            # batches of larger groups than the schedule counts on give rows that wait ever longer
            return most
        # a batch that is asked for because a step lacks rows begins before its turn; what that step
        # leaves of it feeds the next one
        bound = self.schedule.staleness_bound
        if bound is None:
            return None
        bound += self.buffer.on_short_batch == "carry"
        return bound if most is None else min(bound, most)

    @property
    def runs_per_step(self) -> int:
        """Experiences of one explore step, where every taskset has the same group size; else the
        largest it can be.
        """
        return self.explorer.batch_size * self.num_runs


def _read(path: str) -> str:
    """A small text file.  Raises OSError, also for bytes that are no text."""
    try:
        return read_regular(Path(path), 1 << 20).decode("utf-8")
    except UnicodeDecodeError as e:
        raise OSError(errno.EINVAL, f"is not UTF-8 text (byte {e.start})", path) from None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int | None:
    """Bytes that this process may use: the machine's, or its control group's limit if that is
    lower.
    """
    if not (info := Path("/proc/meminfo")).is_file():
        return None
    limits = [
        int(line.split()[1]) * 1024
        for line in info.read_text().splitlines()
        if line.startswith("MemTotal:")
    ]
    files = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    limits += [
        int(text) for f in files if f.is_file() and (text := f.read_text().strip()).isdecimal()
    ]
    return min(limits, default=None)


def _free(folder: Path) -> int | None:
    """Bytes that `folder`, which may not be there yet, may still take of its disk."""
    existing = next((p for p in (folder, *folder.parents) if p.is_dir()), None)
    return None if existing is None else shutil.disk_usage(existing).free


@dataclass(frozen=True)
class Facts:
    """What `resolve` may know of the world.  Give your own for another machine."""

    cpus: int = field(default_factory=_cores)
    gpus: int = field(default_factory=count_gpus)
    memory: int | None = field(default_factory=_memory)  # bytes of this machine; None = not judged
    # bytes of the smallest GPU of this machine; None = not known
    gpu_memory: int | None = field(default_factory=smallest_gpu)
    gpu_memory_declared: bool = False  # it is that of the run's GPUs, wherever they are
    # bytes that a folder may still take; None = not judged
    disk: Callable[[Path], int | None] = _free
    exists: Callable[[str], bool] = os.path.exists
    read_text: Callable[[str], str] = _read
    plugins_loaded: bool = False  # whether names of plugins can be looked up
    plugin_dirs: tuple[str, ...] = ()  # folders given on the command line
