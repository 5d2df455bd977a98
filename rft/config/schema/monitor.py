"""Sections `monitor` and `log`: where numbers and lines go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rft.config.schema.base import Args, IgnoreCase, Later, Section, key

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
        "More percentiles of every metric.",
        on_resume="safe",
        later=Later("metrics are mean, least and largest value", harmless=True),
    )
    enable_ray_timeline: bool = key(
        False, "Write Ray's timeline at the end.", on_resume="safe", later=Later("no timeline is written", harmless=True)
    )


class LogConfig(Section):
    """Log files in the run folder."""

    level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(lambda v: v.upper() if isinstance(v, str) else v)
    ] = key("INFO", "Least severe line that is kept.", on_resume="safe")
    group_by_node: bool = key(
        False,
        "A folder of log files for each machine.",
        on_resume="safe",
        later=Later("all log files are in one folder", harmless=True),
    )
