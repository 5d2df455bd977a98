"""The whole written configuration, `RunConfig`, and its short sections: `cluster`, `monitor` and
`log`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PrivateAttr

from rft.config.schema.algorithm_section import AlgorithmConfig
from rft.config.schema.buffer_section import BufferConfig, DataProcessorConfig
from rft.config.schema.explorer_section import ExplorerConfig
from rft.config.schema.model_section import ModelConfig
from rft.config.schema.source import Source, plain
from rft.config.schema.trainer_section import TrainerConfig
from rft.monitor.settings import MonitorConfig
from rft.schema import units
from rft.schema.base import Diagnostics, IgnoreCase, Name, Section, key, safe_key, section
from rft.sync.settings import FixedSync, SynchronizerConfig
from rft.types.ids import SEED


class RayInitConfig(Section):
    """How a local Ray is started."""

    num_cpus: units.Cpus | None = safe_key(
        None,
        "CPUs that a local Ray is told of; a fixed number helps under SLURM.  Null: the machine's, "
        "at least 8.",
    )


class ClusterConfig(Section):
    """The machines.  Explorer engines take their GPUs first, the trainer gets the rest."""

    ray_address: str | None = safe_key(
        None,
        "Join this Ray cluster, HOST:PORT or auto.  Null: a local Ray is started and stopped by "
        "the run; with node_num above 1, and "
        "for processes of mode: train and mode: explore that are to meet: auto.",
    )
    node_num: int = safe_key(0, "Machines; 0 counts as one.", unit="nodes", ge=0)
    gpu_per_node: int = safe_key(
        0, "GPUs on each machine; 0 = found when the run starts.", unit="GPUs", ge=0
    )
    actor_start_timeout: units.Seconds = safe_key(
        900, "How long one process of the run may take to get ready."
    )
    stall_timeout: units.Patience | None = safe_key(
        15.0,
        "A process of the run that for this long neither answers nor uses its processors (trainer, "
        "explorer, buffer, coordinator; "
        "engines have a separate key) counts as hung and ends the run.  Null: never.",
    )
    ray_init: RayInitConfig = section(RayInitConfig, "Starting a local Ray.")

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if self.ray_address is not None:
            self.ray_init.warn_unused(
                f"{at}.ray_init",
                ("num_cpus",),
                f"{at}.ray_address joins a Ray that is there",
                diagnostics,
            )


class LogConfig(Section):
    """Log files in the run folder."""

    level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        BeforeValidator(lambda v: v.upper() if isinstance(v, str) else v),
    ] = safe_key("INFO", "Least severe line that is kept.")
    group_by_node: bool = safe_key(
        False, "A folder below logs for each machine, with the files of its processes."
    )


class RunConfig(Section):
    """What a person writes.  `source` tells which file, line or override each value came from."""

    mode: Annotated[
        Literal["both", "explore", "train", "bench", "serve", "colocate"], IgnoreCase
    ] = key(
        "both",
        "both: explore and train; train: on given data with sft, cpt or dpo, with another "
        "algorithm on what processes of mode: explore "
        "sample; explore: sample for the process of mode: train of the same project, group and "
        "name; bench: play eval_tasksets under the "
        "base model and the checkpoints of this folder or of resume_from_path; serve: answer "
        "requests and record them; colocate: both, "
        "strictly in turns, on the same GPUs or cores: engines sleep while the trainer works.  "
        "With one GPU, both becomes colocate.",
    )
    # these four say where a run is: one that was moved or renamed goes on
    project: Name = safe_key("rft", "First part of the run's folder; the trackers' project.")
    group: Name | Literal[""] = safe_key("", "Second part of the run's folder; empty: none.")
    name: Name = safe_key("run", "Last part of the run's folder.")
    checkpoint_root_dir: str = safe_key(
        "checkpoints", "Folder of all runs; the run lives in `root/project/group/name`."
    )
    continue_from_checkpoint: bool = safe_key(
        True,
        "Resume what is in the run's folder.  False: a folder that is not empty gets a sibling "
        "with a time stamp.",
    )
    resume_mode: Annotated[Literal["auto", "fresh"], IgnoreCase] = safe_key(
        "auto",
        "When every checkpoint that a run saved is gone: auto refuses to continue; fresh starts "
        "over from the model.  Existing "
        "checkpoints are always resumed from.",
    )
    resume_from_path: str | None = safe_key(
        None,
        "Checkpoint (`global_step_N`) or folder of another run: if this run's folder has no "
        "checkpoint, it starts with those weights, "
        "that optimizer state and that position in the data.",
    )
    ray_namespace: str = safe_key(
        "",
        "Namespace on the Ray cluster in which processes of mode: train and mode: explore find "
        "each other.  Empty: made from the run's "
        "folder.",
    )
    seed: units.Seed = key(SEED, "Seed of everything random.")
    deterministic: bool = key(
        False, "Same answers, same order and same weights every time; slower."
    )
    plugin_dirs: tuple[str, ...] = safe_key((), "Folders whose *.py files hold plugins.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "How rewards become gradients.")
    model: ModelConfig = section(ModelConfig, "The policy and its sampling.")
    cluster: ClusterConfig = section(ClusterConfig, "The machines.")
    buffer: BufferConfig = section(BufferConfig, "Tasks, experiences, size of a step.")
    data_processor: DataProcessorConfig = section(
        DataProcessorConfig, "Operators on tasks and experiences."
    )
    explorer: ExplorerConfig = section(ExplorerConfig, "Engines and the exploring loop.")
    trainer: TrainerConfig = section(TrainerConfig, "The training loop.")
    synchronizer: SynchronizerConfig = section(FixedSync, "When and how weights move.")
    monitor: MonitorConfig = section(MonitorConfig, "Trackers.")
    log: LogConfig = section(LogConfig, "Log files.")

    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        return self._source

    def shown(self, *, again: bool = False) -> dict[str, Any]:
        """All keys with plain values, secrets replaced by ***; `again`: to be read again."""
        return {
            name: plain(value, (name,))
            for name, value in self.model_dump(mode="json", context=again or None).items()
        }
