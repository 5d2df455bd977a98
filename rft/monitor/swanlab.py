"""SwanLab: one run for all roles; steps are each role's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, SecretStr

from rft.logs import learn_secrets
from rft.monitor.base import OneRun, Row, Tracker, TrackerArgs, markdown, monitor
from rft.monitor.settings import MonitorSettings
from rft.types.metrics import MetricRecord


class SwanlabArgs(TrackerArgs):
    """Where the run goes; project, group and name come from the run's own."""

    mode: Literal["online", "local", "offline", "disabled"] | None = Field(
        None, description="null: what SWANLAB_MODE says, else online"
    )
    workspace: str | None = Field(None, description="user or organisation; null: the account's default")
    tags: tuple[str, ...] = Field((), description="tags of the run")
    api_key: SecretStr | None = Field(None, description="better given as the environment variable SWANLAB_API_KEY")


@monitor("swanlab")
class Swanlab(Tracker):
    """Samples become texts `samples/<name>`."""

    Args = SwanlabArgs
    requires = ("swanlab",)

    def __init__(self, settings: MonitorSettings, args: SwanlabArgs) -> None:
        super().__init__(settings, args)
        import swanlab

        if args.api_key is not None:
            learn_secrets([args.api_key.get_secret_value()])
            swanlab.login(api_key=args.api_key.get_secret_value())
        given: dict[str, Any] = {"mode": args.mode, "workspace": args.workspace, "group": settings.group, "tags": list(args.tags)}
        self._run = swanlab.init(
            project=settings.project,
            name=settings.name,
            log_dir=str(settings.folder / "swanlab"),
            config=settings.config,
            **{key: value for key, value in given.items() if value},
        )
        self._text = swanlab.Text
        self._names = OneRun()

    def log(self, record: MetricRecord) -> None:
        values = {self._names.name(record.role, name): value for name, value in record.values.items()}
        self._run.log(values, step=record.step)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        self._run.log({f"samples/{name}": self._text(markdown(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()
