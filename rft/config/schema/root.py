"""The whole written configuration, `RunConfig`, and its short sections: `cluster`, `monitor` and
`log`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from rft.config.schema import units
from rft.config.schema.algorithm_section import AlgorithmConfig
from rft.config.schema.base import Args, IgnoreCase, Name, Section, Told, key, safe_key, section
from rft.config.schema.buffer_section import BufferConfig, DataProcessorConfig
from rft.config.schema.explorer_section import ExplorerConfig
from rft.config.schema.model_section import ModelConfig
from rft.config.schema.source import Source, plain
from rft.config.schema.synchronizer_section import SynchronizerConfig
from rft.config.schema.trainer_section import TrainerConfig
from rft.monitor.settings import ALARM, Level, MonitorSettings
from rft.trainer.settings import LearnerSettings
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

    def rules(self, at: str, told: Told) -> None:
        if self.ray_address is not None:
            self.ray_init.idle(
                f"{at}.ray_init", ("num_cpus",), f"{at}.ray_address joins a Ray that is there", told
            )


TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
MonitorKind = Annotated[
    str, BeforeValidator(lambda v: v.lower() if isinstance(v, str) and ":" not in v else v)
]


def _listed(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return ()
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


AlarmLevel = Annotated[
    Level,
    BeforeValidator(
        lambda v: "off" if v is False else v.strip().lower() if isinstance(v, str) else v
    ),
]


_alarm = partial(safe_key, ALARM)


class AlarmsConfig(Section):
    """What the run says by itself: off, warn (log, terminal, trackers, `alarm/NAME`), or stop (also
    ends the run; it can be resumed).
    """

    reward_divergence: AlarmLevel = _alarm(
        "The training reward rose while an evaluation, or a part of the reward, fell."
    )
    length_drift: AlarmLevel = _alarm(
        "Answers got much longer or shorter than at the start: 1.5 times where length is paid, 3 "
        "times where not."
    )
    entropy_collapse: AlarmLevel = _alarm(
        "The entropy of sampled tokens lost nine tenths and the tasks are not solved."
    )
    no_spread: AlarmLevel = _alarm(
        "Ten steps in which all rewards inside groups were equal, and the tasks are not solved."
    )
    identical_answers: AlarmLevel = _alarm(
        "Half of the tasks get an answer that another task got too."
    )
    judge: AlarmLevel = _alarm(
        "A judge cannot be read, gives no verdicts, or gives everything the same score."
    )
    kl_jump: AlarmLevel = _alarm(
        "A KL of the policy jumped to 5 times what it was, and above 0.1 nats."
    )
    mismatch_jump: AlarmLevel = _alarm(
        "Engine and trainer disagree 5 times as much as before, or half of the effective samples "
        "are lost."
    )
    starving: AlarmLevel = _alarm("Trainer or explorer waited 95 % of the time for ten steps.")


class MonitorConfig(Section):
    """Trackers besides metrics.jsonl, which is always written."""

    monitor_type: Annotated[
        tuple[MonitorKind, ...],
        BeforeValidator(_listed, json_schema_input_type=MonitorKind | list[MonitorKind] | None),
        Field(validate_default=True),
    ] = safe_key(
        (),
        "One tracker or a list of them: tensorboard, wandb, mlflow, swanlab, or your own: its "
        "name, pkg.module:Name, "
        "path/file.py:Name; none = metrics.jsonl alone.",
    )
    monitor_args: Args | None = safe_key(
        None, "Arguments of the tracker; with several, one mapping per tracker: {wandb: {...}}."
    )
    log_eval_samples: units.RunsOr0 = safe_key(
        MonitorSettings.num_samples,
        "Answers of each evaluation that are shown in the trackers and kept in samples/; 0 = none.",
    )
    eval_dump_dir: str | None = safe_key(
        None,
        "Folder for every answer of every evaluation, one jsonl file per evaluation.  Null: none.",
    )
    detailed_stats: bool = safe_key(
        False,
        "Percentiles 10, 50 and 90 of rewards, response lengths, prompt lengths and run times of "
        "every explore step, besides mean, "
        "minimum and maximum.",
    )
    keep_trainer_logprobs: bool = safe_key(
        LearnerSettings.keep_trainer_logprobs,
        "Keep the trainer's log-prob and advantage of every trained token at its first use, beside "
        "the engine's log-prob, in the ledger "
        "(`v_tokens`).  Rows that a step does not compute, because their advantage is 0, get a "
        "forward pass.",
    )
    alarms: AlarmsConfig = section(AlarmsConfig, "What the run warns of by itself, or stops for.")
    enable_ray_timeline: bool = safe_key(
        False,
        "Write Ray's timeline of the run's processes (Chrome trace format) to ray_timeline.json in "
        "the run folder at the end.",
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
    project: Name = safe_key(
        MonitorSettings.project, "First part of the run's folder; the trackers' project."
    )
    group: Name | Literal[""] = safe_key("", "Second part of the run's folder; empty: none.")
    name: Name = safe_key(MonitorSettings.name, "Last part of the run's folder.")
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
    ignore_validator_suggestions: bool = safe_key(
        False, "Start even if a suggestion is not followed."
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
    synchronizer: SynchronizerConfig = section(SynchronizerConfig, "When and how weights move.")
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
