"""Sections `monitor` and `log`: where numbers and lines go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rft.config.schema.base import Args, IgnoreCase, Section, key

MonitorKind = Annotated[Literal["tensorboard", "wandb", "mlflow", "swanlab"], IgnoreCase]


def _listed(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return ()
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class MonitorConfig(Section):
    """Trackers beside metrics.jsonl, which is always written."""

    monitor_type: Annotated[
        tuple[MonitorKind, ...],
        BeforeValidator(_listed, json_schema_input_type=MonitorKind | list[MonitorKind] | None),
        Field(validate_default=True),
    ] = key((), "One tracker or a list of them; none = metrics.jsonl alone.", on_resume="safe")
    monitor_args: Args | None = key(
        None, "Arguments of the tracker; with several, one mapping per tracker: {wandb: {...}}.", on_resume="safe"
    )
    log_eval_samples: int = key(
        64,
        "Answers of each evaluation that are shown in the trackers and kept in samples/; 0 = none.",
        unit="runs",
        on_resume="safe",
        ge=0,
    )
    eval_dump_dir: str | None = key(
        None, "Folder that gets every answer of every evaluation, a jsonl file each.  Null: none.", on_resume="safe"
    )
    detailed_stats: bool = key(
        False,
        "Percentiles 10, 50 and 90 of rewards, response lengths, prompt lengths and run times of every explore step, beside mean, least "
        "and largest value.",
        on_resume="safe",
    )
    enable_ray_timeline: bool = key(
        False,
        "Write Ray's timeline of the run's processes (Chrome trace format) to ray_timeline.json in the run folder at the end.",
        on_resume="safe",
    )


class LogConfig(Section):
    """Log files in the run folder."""

    level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(lambda v: v.upper() if isinstance(v, str) else v)
    ] = key("INFO", "Least severe line that is kept.", on_resume="safe")
    group_by_node: bool = key(
        False,
        "A folder below logs for each machine, with the files of its processes.",
        on_resume="safe",
    )
