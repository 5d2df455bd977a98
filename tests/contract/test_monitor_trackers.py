"""One contract for all trackers: what a run logs can be read back from each of them, with their own
formats.
"""

from __future__ import annotations

import importlib.util
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.monitor.monitor import ALARM, Monitor, check_available
from rft.monitor.read import read
from rft.monitor.settings import MonitorConfig, TrackedRun
from rft.types.metrics import MetricRecord
from tests.helpers.trackers import Values, tensorboard, wandb_values

ARGS: dict[str, dict[str, Any]] = {"wandb": {"mode": "offline"}, "swanlab": {"mode": "offline"}}
ROWS = [
    {"prompt": "1+1?", "answer": "2 | two", "truth": "2", "reward": 1.0},
    {
        "prompt": "3+4?",
        "answer": "eight\nor so",
        "truth": "7",
        "reward": 0.0,
        "parts": {"format": 1},
    },
]
EXPECTED: Values = {
    ("explorer", "rollout/reward/mean", 1): 0.25,
    ("explorer", "rollout/reward/mean", 2): 0.5,
    ("trainer", "actor/loss", 1): -0.125,
    ("trainer", "time/step", 1): 4.0,
    ("explorer", "time/step", 2): 8.0,  # the same name as the trainer's
    ("eval", "eval/sums/mean@4", 0): 0.75,
}


def jsonl(folder: Path) -> tuple[Values, str]:
    values = {
        (r.role, n, r.step): v for r in read(folder / "metrics.jsonl") for n, v in r.values.items()
    }
    return values, (folder / "samples" / "sums_0.jsonl").read_text()


def wandb(folder: Path) -> tuple[Values, str]:
    values, run = wandb_values(folder)
    (table,) = (folder / "wandb").glob("offline-run-*/files/media/table/samples/*.table.json")
    assert (run.project, run.run_group, run.display_name) == ("project", "group", "name")
    return unprefixed(values), table.read_text()


def mlflow(folder: Path) -> tuple[Values, str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    run = client.get_run((folder / "mlflow" / "run_id").read_text())
    assert run.info.run_name == "name"
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.type"] == "grpo"
    values: Values = {}
    for name in run.data.metrics:
        for m in client.get_metric_history(run.info.run_id, name):
            values[("", name.replace("_at_", "@"), m.step)] = m.value
    (table,) = (folder / "mlflow").rglob("sums_0.json")
    return with_roles(values), table.read_text()


def swanlab(folder: Path) -> tuple[Values, str]:
    (run,) = [p for p in (folder / "swanlab").iterdir() if p.is_dir()]
    data = b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
    values = {
        k: v for k, v in EXPECTED.items() if k[1].encode() in data and struct.pack("<d", v) in data
    }
    return values, data.decode(errors="replace")


def unprefixed(values: Values) -> Values:
    """Without the role that keeps equal names apart."""
    known = {(role, name) for role, name, _ in EXPECTED}
    return {
        (r, n if (r, n) in known else n.removeprefix(f"{r}/"), s): v
        for (r, n, s), v in values.items()
    }


def with_roles(values: Values) -> Values:
    """For trackers whose metrics know no role: the names themselves must be free of collisions."""
    # the explorer was first
    names = {
        ("trainer/" if k == ("trainer", "time/step", 1) else "") + k[1]: k[0] for k in EXPECTED
    }
    return unprefixed({(names[name], name, step): v for (_, name, step), v in values.items()})


READERS: dict[str, Callable[[Path], tuple[Values, str]]] = {
    "jsonl": jsonl,
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "swanlab": swanlab,
}


async def run_with(folder: Path, kinds: tuple[str, ...]) -> None:
    check_available(kinds, ARGS)
    monitor = Monitor(
        MonitorConfig(monitor_type=kinds, monitor_args={k: ARGS[k] for k in kinds if k in ARGS}),
        TrackedRun(
            folder=folder,
            project="project",
            group="group",
            name="name",
            config={"algorithm": {"type": "grpo"}},
        ),
    )
    await monitor.samples("sums", 0, ROWS)
    grouped: dict[tuple[str, int], dict[str, float]] = {}
    for (role, name, step), value in EXPECTED.items():
        grouped.setdefault((role, step), {})[name] = value
    for (role, step), values in grouped.items():
        await monitor.log(MetricRecord(role=role, step=step, time=time.time(), values=values))  # type: ignore[arg-type]
    await monitor.close()


def installed(kind: str) -> bool:
    return kind == "jsonl" or importlib.util.find_spec(kind) is not None


@pytest.mark.e2e
@pytest.mark.parametrize("kind", READERS)
# of the trackers
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
async def test_everything_logged_can_be_read_back(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not installed(kind):
        pytest.skip(f"{kind} is an extra that is not installed here")
    await run_with(tmp_path, () if kind == "jsonl" else (kind,))
    assert not [r for r in read(tmp_path / "metrics.jsonl") if ALARM in r.values], caplog.text
    values, text = READERS[kind](tmp_path)
    assert values == EXPECTED
    for row in ROWS:
        for value in (row["prompt"], row["truth"]):
            assert str(value) in text


@pytest.mark.e2e
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
async def test_several_at_once(tmp_path: Path) -> None:
    kinds = tuple(k for k in READERS if k != "jsonl" and installed(k))
    assert len(kinds) >= 2
    await run_with(tmp_path, kinds)
    for kind in ("jsonl", *kinds):
        assert READERS[kind](tmp_path)[0] == EXPECTED, kind


@pytest.mark.e2e
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
async def test_a_resumed_run_goes_on_in_every_tracker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = tuple(k for k in READERS if k != "jsonl" and installed(k))
    for _ in range(2):
        await run_with(tmp_path, kinds)
    records = read(tmp_path / "metrics.jsonl")
    assert not [r for r in records if ALARM in r.values], caplog.text
    assert len(records) == 8
    if "wandb" in kinds:
        runs = [p.name for p in (tmp_path / "wandb").glob("offline-run-*")]
        assert len(runs) == 2
        assert all((tmp_path / "wandb" / "rft_run_id").read_text() in name for name in runs)
    if "mlflow" in kinds:
        values, _ = mlflow(tmp_path)
        assert values == EXPECTED
