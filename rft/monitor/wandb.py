"""Weights & Biases: one run for all roles, each role with a step axis of its own; offline where `mode` or WANDB_MODE says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, SecretStr

from rft.logs import learn_secrets
from rft.monitor.base import OneRun, Row, Tracker, TrackerArgs, cell, columns, monitor, remembered_id
from rft.monitor.settings import MonitorSettings
from rft.types.metrics import MetricRecord

log = logging.getLogger(__name__)


class WandbArgs(TrackerArgs):
    """Where the run goes; project, group and name come from the run's own."""

    mode: Literal["online", "offline", "disabled"] | None = Field(None, description="null: what WANDB_MODE says, else online")
    entity: str | None = Field(None, description="user or team; null: the account's default")
    tags: tuple[str, ...] = Field((), description="tags of the run")
    base_url: str | None = Field(None, description="server, where it is not wandb.ai")
    api_key: SecretStr | None = Field(None, description="better given as the environment variable WANDB_API_KEY")


@monitor("wandb")
class Wandb(Tracker):
    """Metrics have the x axis `<role>_step`; samples become tables `samples/<name>`."""

    Args = WandbArgs
    requires = ("wandb",)

    def __init__(self, settings: MonitorSettings, args: WandbArgs) -> None:
        super().__init__(settings, args)
        import wandb

        # "off": the console belongs to the progress display, and our logs are redacted while wandb's copy would not be.
        # Nor does wandb's own look at the process go along: the command line and the git remote may hold secrets.
        own: dict[str, Any] = {"console": "off", "silent": True, "x_disable_meta": True, "disable_git": True, "save_code": False}
        if args.base_url is not None:
            own["base_url"] = args.base_url
        if args.api_key is not None:
            own["api_key"] = args.api_key.get_secret_value()
            learn_secrets([own["api_key"]])
        self._run = wandb.init(
            project=settings.project,
            group=settings.group or None,
            name=settings.name,
            dir=str(settings.folder),
            id=remembered_id(settings.folder / "wandb" / "rft_run_id"),
            resume="allow",
            config=settings.config,
            entity=args.entity,
            tags=list(args.tags),
            mode=args.mode,
            settings=wandb.Settings(**own),
        )
        log.info("wandb run: %s", self._run.url or self._run.dir)
        self._table, self._teardown = wandb.Table, wandb.teardown
        self._names = OneRun()
        self._defined: set[str] = set()

    def log(self, record: MetricRecord) -> None:
        self._log(record.role, record.step, {self._names.name(record.role, k): v for k, v in record.values.items()})

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        names = columns(rows)
        table = self._table(columns=names, data=[[cell(row.get(n)) for n in names] for row in rows], allow_mixed_types=True)
        self._log("eval", step, {f"samples/{name}": table})

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # ends wandb's service process, which would otherwise outlive the run until this process ends

    def _log(self, role: str, step: int, values: dict[str, Any]) -> None:
        axis = f"{role}_step"
        if axis not in self._defined:
            self._run.define_metric(axis, hidden=True)
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
        self._defined |= {axis, *values}
        self._run.log({axis: step, **values})
