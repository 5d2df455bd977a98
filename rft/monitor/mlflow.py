"""MLflow: one run for all roles in experiment `<project>`; steps are each role's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field, SecretStr

from rft.logs import learn_secrets
from rft.monitor.base import OneRun, Row, Tracker, TrackerArgs, cell, columns, monitor
from rft.monitor.settings import MonitorSettings
from rft.types.metrics import MetricRecord

_BATCH = 1000  # metrics in one request; the server's limit


class MlflowArgs(TrackerArgs):
    """Which tracking server."""

    uri: str | None = Field(None, description="tracking URI; null: MLFLOW_TRACKING_URI, else a database in the run folder")
    username: str | None = Field(None, description="better given as the environment variable MLFLOW_TRACKING_USERNAME")
    password: SecretStr | None = Field(None, description="better given as the environment variable MLFLOW_TRACKING_PASSWORD")


@monitor("mlflow")
class Mlflow(Tracker):
    """Names keep the characters that MLflow allows; `mean@4` becomes `mean_at_4`."""

    Args = MlflowArgs
    requires = ("mlflow",)

    def __init__(self, settings: MonitorSettings, args: MlflowArgs) -> None:
        super().__init__(settings, args)
        import os

        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        if args.username is not None:
            os.environ["MLFLOW_TRACKING_USERNAME"] = args.username  # the client reads nothing else
        if args.password is not None:
            os.environ["MLFLOW_TRACKING_PASSWORD"] = args.password.get_secret_value()
            learn_secrets([args.password.get_secret_value()])
        folder = settings.folder / "mlflow"
        folder.mkdir(exist_ok=True)
        uri = args.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._metric = Metric
        self._names = OneRun()
        kept = folder / "run_id"
        if kept.exists():
            self._run = kept.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(settings.project)
        own = None if uri.startswith(("http", "databricks")) else (folder.resolve() / "artifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(settings.project, artifact_location=own)
        tags = {"group": settings.group} if settings.group else {}
        self._run = self._client.create_run(experiment, run_name=settings.name, tags=tags).info.run_id
        kept.write_text(self._run)
        params = [Param(_allowed(k), str(v)[:6000]) for k, v in _flat(settings.config).items()]
        for start in range(0, len(params), 100):  # the server's limit for one request
            self._client.log_batch(self._run, params=params[start : start + 100])

    def log(self, record: MetricRecord) -> None:
        when = int(record.time * 1000)
        names = {_allowed(self._names.name(record.role, name)): value for name, value in record.values.items()}
        metrics = [self._metric(name, value, when, record.step) for name, value in names.items()]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + _BATCH])

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        data = {n: [cell(row.get(n)) for row in rows] for n in columns(rows)}
        # The form that MLflow's own log_table writes and its page shows, without asking for pandas.
        shown = {"columns": list(data), "data": [list(values) for values in zip(*data.values(), strict=True)]}
        file = f"samples/{_allowed(name).replace('/', '_')}_{step}.json"
        self._client.log_dict(self._run, shown, file)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
