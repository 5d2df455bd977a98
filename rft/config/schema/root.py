"""The whole written configuration: `RunConfig`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PrivateAttr

from rft.config.schema.algorithm import AlgorithmConfig
from rft.config.schema.base import IgnoreCase, Later, Name, Section, key, section
from rft.config.schema.buffer import BufferConfig
from rft.config.schema.cluster import ClusterConfig
from rft.config.schema.data_processor import DataProcessorConfig
from rft.config.schema.explorer import ExplorerConfig
from rft.config.schema.model import ModelConfig
from rft.config.schema.monitor import LogConfig, MonitorConfig
from rft.config.schema.synchronizer import SynchronizerConfig
from rft.config.schema.trainer import TrainerConfig
from rft.config.source import Source


class RunConfig(Section):
    """What a person writes.  `source` tells which file, line or override each value came from."""

    mode: Annotated[Literal["both", "explore", "train", "bench", "serve", "colocate"], IgnoreCase] = key(
        "both",
        "both: explore and train; train: on given data with sft, cpt or dpo, with another algorithm on what processes of mode: explore "
        "sample; explore: sample for the process of mode: train of the same project, group and name; bench: play eval_tasksets under the "
        "base model and the checkpoints of this folder or of resume_from_path; serve: answer requests and record them; colocate: both, "
        "strictly in turns, on the same cores.",
        later=Later(
            "use both",
            values=("serve",),
        ),
    )
    project: Name = key("rft", "First part of the run's folder; project of the trackers.", on_resume="safe")
    group: Name | Literal[""] = key("", "Second part of the run's folder; empty: none.", on_resume="safe")
    name: Name = key("run", "Last part of the run's folder.", on_resume="safe")
    checkpoint_root_dir: str = key(
        "checkpoints", "Folder of all runs; the run lives in `root/project/group/name`.", on_resume="safe"
    )  # these four say where a run is, so a run that was moved or renamed goes on
    continue_from_checkpoint: bool = key(
        True,
        "Resume what is in the run's folder.  False: a folder that is not empty gets a sibling with a time stamp.",
        on_resume="safe",
    )
    resume_from_path: str | None = key(
        None,
        "Checkpoint (`global_step_N`) or folder of another run: where this run's folder has no checkpoint, it begins with those "
        "weights, that optimizer and that place in the data.",
        on_resume="safe",
    )
    ray_namespace: str = key(
        "",
        "Namespace on the Ray cluster in which processes of mode: train and mode: explore find each other.  Empty: made from the run's "
        "folder.",
        on_resume="safe",
    )
    ignore_validator_suggestions: bool = key(
        False, "Accepted, no effect: what is only a suggestion never stops a run.", on_resume="safe"
    )
    seed: int = key(42, "Seed of everything that draws.", ge=0, lt=2**32)
    deterministic: bool = key(False, "Same answers, same order, same weights on every repetition; slower.")
    plugin_dirs: tuple[str, ...] = key((), "Folders whose *.py files hold plugins.", on_resume="safe")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "How rewards become gradients.")
    model: ModelConfig = section(ModelConfig, "The policy and its sampling.")
    cluster: ClusterConfig = section(ClusterConfig, "The machines.")
    buffer: BufferConfig = section(BufferConfig, "Tasks, experiences, size of a step.")
    data_processor: DataProcessorConfig = section(DataProcessorConfig, "Operators on tasks and experiences.")
    explorer: ExplorerConfig = section(ExplorerConfig, "Engines and the exploring loop.")
    trainer: TrainerConfig = section(TrainerConfig, "The training loop.")
    synchronizer: SynchronizerConfig = section(SynchronizerConfig, "When and how weights move.")
    monitor: MonitorConfig = section(MonitorConfig, "Trackers.")
    log: LogConfig = section(LogConfig, "Log files.")

    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        return self._source
