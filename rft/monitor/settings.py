"""Section `monitor`: metrics, trackers and alarms.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rft.schema import units
from rft.schema.base import Args, Section, safe_key, section

TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
Level = Literal["off", "warn", "stop"]
AlarmLevel = Annotated[
    Level,
    BeforeValidator(
        lambda v: "off" if v is False else v.strip().lower() if isinstance(v, str) else v
    ),
]
MonitorKind = Annotated[
    str, BeforeValidator(lambda v: v.lower() if isinstance(v, str) and ":" not in v else v)
]


def _listed(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


_alarm = partial(safe_key, "warn")


class AlarmsConfig(Section):
    """Level of each alarm: off, warn (log, terminal, trackers, `alarm/NAME`), or stop (also ends
    the run, which can be resumed).
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
        64,
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
        False,
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

    def tracker_args(self, tracker: str) -> dict[str, Any]:
        """Return the arguments of one of `monitor_type`."""
        args = self.monitor_args or {}
        if set(args) <= set(self.monitor_type):
            args = args.get(tracker) or {}
        return args


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The identity of a run for trackers."""

    folder: Path
    plugin_dirs: tuple[str, ...] = ()  # folders of tracker plugins
    project: str = "rft"
    group: str = ""
    name: str = "run"
    config: dict[str, Any] = field(default_factory=dict)  # redacted, for trackers that store it
