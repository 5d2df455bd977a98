"""The shipped trackers: TensorBoard, Weights & Biases, MLflow and SwanLab.

Each imports its library when opened.  All except TensorBoard keep every role in one run, with each
role's own steps.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, SecretStr

from rft.monitor.base import (
    OneRun,
    Row,
    Tracker,
    TrackerArgs,
    cell,
    columns,
    copied,
    markdown,
    monitor,
    remember,
    remembered_id,
)
from rft.monitor.settings import TrackedRun
from rft.secrets import learn_secrets
from rft.types.metrics import MetricRecord

log = logging.getLogger(__name__)
_BATCH = 1000  # metrics and parameters per request: limits of MLflow's server
_PARAMS = 100


def _secret(secret: SecretStr | None) -> str | None:
    """Return the secret's value, and register it for redaction in logs."""
    if secret is None:
        return None
    learn_secrets([secret.get_secret_value()])
    return secret.get_secret_value()


@monitor("tensorboard")
class TensorBoard(Tracker):
    """Event files in run/tensorboard/{explorer,trainer,synchronizer,eval}, one folder per role.

    View with `tensorboard --logdir run/tensorboard`.  Writes protocol buffers directly, so torch is
    not loaded.
    """

    requires = ("tensorboard",)

    def __init__(self, run: TrackedRun, args: Any) -> None:
        super().__init__(run, args)
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2

        self._event = event_pb2.Event
        self._summary = summary_pb2
        self._tensor = tensor_pb2.TensorProto
        self._types = types_pb2
        self._writers: dict[str, Any] = {}

    def log(self, record: MetricRecord) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in record.values.items()
        ]
        self._write(record.role, record.step, record.time, values)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text")
        )
        text = self._tensor(dtype=self._types.DT_STRING, string_val=[markdown(rows).encode()])
        value = self._summary.Summary.Value(
            tag=f"samples/{name}/text_summary", metadata=metadata, tensor=text
        )
        self._write("eval", step, time.time(), [value])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _write(self, role: str, step: int, when: float, values: list[Any]) -> None:
        if role not in self._writers:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writers[role] = EventFileWriter(str(self.run.folder / "tensorboard" / role))
        self._writers[role].add_event(
            self._event(step=step, wall_time=when, summary=self._summary.Summary(value=values))
        )
        self._writers[role].flush()


class WandbArgs(TrackerArgs):
    """Destination of the run; project, group and name are those of the run."""

    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="null: what WANDB_MODE says, else online"
    )
    entity: str | None = Field(None, description="user or team; null: the account's default")
    tags: tuple[str, ...] = Field((), description="tags of the run")
    base_url: str | None = Field(None, description="server, if not wandb.ai")
    api_key: SecretStr | None = Field(
        None, description="better set as the environment variable WANDB_API_KEY"
    )


@monitor("wandb")
class Wandb(OneRun):
    """Metrics have the x axis `<role>_step`; samples become tables `samples/<name>`.

    Offline if `mode` or WANDB_MODE says so.
    """

    Args = WandbArgs
    requires = ("wandb",)

    def __init__(self, run: TrackedRun, args: WandbArgs) -> None:
        super().__init__(run, args)
        import wandb

        # "off": the console belongs to the progress display, and wandb's copy of the logs would not
        # be redacted.  Process metadata is disabled too: command line and git remote may hold
        # secrets.
        options: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "x_disable_meta": True,
            "disable_git": True,
            "save_code": False,
        }
        options |= {
            k: v
            for k, v in (("base_url", args.base_url), ("api_key", _secret(args.api_key)))
            if v is not None
        }
        self._run = wandb.init(
            project=run.project,
            group=run.group or None,
            name=run.name,
            dir=str(run.folder),
            id=remembered_id(run.folder / "wandb" / "rft_run_id"),
            resume="allow",
            config=run.config,
            entity=args.entity,
            tags=list(args.tags),
            mode=args.mode,
            settings=wandb.Settings(**options),
        )
        log.info("wandb run: %s", self._run.url or self._run.dir)
        self._table = wandb.Table
        self._teardown = wandb.teardown
        self._defined: set[str] = set()

    def send(self, role: str, step: int, when: float, values: dict[str, Any]) -> None:
        axis = f"{role}_step"
        if axis not in self._defined:
            self._run.define_metric(axis, hidden=True)
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
        self._defined |= {axis, *values}
        self._run.log({axis: step, **values})

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        names = columns(rows)
        table = self._table(
            columns=names,
            data=[[cell(row.get(n)) for n in names] for row in rows],
            allow_mixed_types=True,
        )
        self.send("eval", step, time.time(), {f"samples/{name}": table})

    def close(self) -> None:
        self._run.finish()
        # ends wandb's service process, which would otherwise outlive the run until this process
        # ends
        self._teardown()


class MlflowArgs(TrackerArgs):
    """The tracking server."""

    uri: str | None = Field(
        None,
        description="tracking URI; null: MLFLOW_TRACKING_URI, else a database in the run folder",
    )
    username: str | None = Field(
        None, description="better set as the environment variable MLFLOW_TRACKING_USERNAME"
    )
    password: SecretStr | None = Field(
        None, description="better set as the environment variable MLFLOW_TRACKING_PASSWORD"
    )


@monitor("mlflow")
class Mlflow(OneRun):
    """A run in experiment `<project>`.

    Names keep only characters that MLflow allows; `mean@4` becomes `mean_at_4`.
    """

    Args = MlflowArgs
    requires = ("mlflow",)

    def __init__(self, run: TrackedRun, args: MlflowArgs) -> None:
        super().__init__(run, args)
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        for name, value in (("USERNAME", args.username), ("PASSWORD", _secret(args.password))):
            if value is not None:
                os.environ[f"MLFLOW_TRACKING_{name}"] = value  # the only source
        folder = run.folder / "mlflow"
        folder.mkdir(exist_ok=True)
        uri = (
            args.uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        )
        self._client = MlflowClient(tracking_uri=uri)
        self._metric = Metric
        id_file = folder / "run_id"
        server = uri.startswith(("http", "databricks"))
        if id_file.exists() and not (server and copied(id_file)):
            self._run = id_file.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        artifacts = None if server else (folder.resolve() / "artifacts").as_uri()
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(run.project, artifact_location=artifacts)
        )
        tags = {"group": run.group} if run.group else {}
        self._run = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        remember(id_file, self._run)
        params = [Param(_allowed(k), str(v)[:6000]) for k, v in _flat(run.config).items()]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run, params=params[start : start + _PARAMS])

    def send(self, role: str, step: int, when: float, values: dict[str, Any]) -> None:
        metrics = [
            self._metric(_allowed(name), value, int(when * 1000), step)
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + _BATCH])

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        names = columns(rows)
        # the format of MLflow's own log_table, without requiring pandas
        shown = {"columns": names, "data": [[cell(row.get(n)) for n in names] for row in rows]}
        self._client.log_dict(
            self._run, shown, f"samples/{_allowed(name).replace('/', '_')}_{step}.json"
        )

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


class SwanlabArgs(TrackerArgs):
    """Destination of the run; project, group and name are those of the run."""

    mode: Literal["online", "local", "offline", "disabled"] | None = Field(
        None, description="null: what SWANLAB_MODE says, else online"
    )
    workspace: str | None = Field(
        None, description="user or organisation; null: the account's default"
    )
    tags: tuple[str, ...] = Field((), description="tags of the run")
    api_key: SecretStr | None = Field(
        None, description="better set as the environment variable SWANLAB_API_KEY"
    )


@monitor("swanlab")
class Swanlab(OneRun):
    """Samples become texts `samples/<name>`."""

    Args = SwanlabArgs
    requires = ("swanlab",)

    def __init__(self, run: TrackedRun, args: SwanlabArgs) -> None:
        super().__init__(run, args)
        import swanlab

        if (key := _secret(args.api_key)) is not None:
            swanlab.login(api_key=key)
        options: dict[str, Any] = {
            "mode": args.mode,
            "workspace": args.workspace,
            "group": run.group,
            "tags": list(args.tags),
        }
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=str(run.folder / "swanlab"),
            config=run.config,
            **{key: value for key, value in options.items() if value},
        )
        self._text = swanlab.Text

    def send(self, role: str, step: int, when: float, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        self._run.log({f"samples/{name}": self._text(markdown(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()
