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


class LogConfig(Section):
    """Log files in the run folder."""

    level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(lambda v: v.upper() if isinstance(v, str) else v)
    ] = key("INFO", "Least severe line that is kept.", on_resume="safe")
