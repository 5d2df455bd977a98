"""metrics.jsonl survives crashes and keeps no secrets; trackers that fail are switched off, loudly."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rft import secrets as logs
from rft.errors import ConfigError, DiskFull, RunFailed, SetupError
from rft.monitor import monitor as mirror
from rft.monitor.base import OneRun, Row, Tracker, markdown, remembered_id
from rft.monitor.monitor import ALARM, Monitor, check_available
from rft.monitor.read import Records, read, series
from rft.monitor.settings import MonitorConfig, TrackedRun
from rft.plugins import REGISTRY, Plugin
from rft.types.metrics import MetricRecord


def record(step: int, role: str = "trainer", **values: float) -> MetricRecord:
    return MetricRecord(role=role, step=step, time=float(step), values=values)  # type: ignore[arg-type]


def monitor(folder: Path, *kinds: str, **args: Any) -> Monitor:
    return Monitor(MonitorConfig(monitor_type=kinds, monitor_args=args), TrackedRun(folder=folder))


class Recorder(Tracker):
    """Keeps what it is told; subclasses misbehave."""

    opened: ClassVar[list[Recorder]] = []

    def __init__(self, run: TrackedRun, args: Any) -> None:
        super().__init__(run, args)
        self.records: list[MetricRecord] = []
        self.closed = False
        self.opened.append(self)

    def log(self, record: MetricRecord) -> None:
        self.records.append(record)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None: ...

    def close(self) -> None:
        self.closed = True


class Failing(Recorder):
    def log(self, record: MetricRecord) -> None:
        raise ConnectionError("no route to host")


class NeverOpens(Recorder):
    def __init__(self, run: TrackedRun, args: Any) -> None:
        sys.exit("login needed")


class Stuck(Recorder):
    release: ClassVar[threading.Event] = threading.Event()

    def log(self, record: MetricRecord) -> None:
        self.release.wait(30)


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    REGISTRY.scan_package("rft.monitor")
    monkeypatch.setattr(Recorder, "opened", [])
    for cls in (Recorder, Failing, NeverOpens, Stuck):
        name = cls.__name__.lower()
        monkeypatch.setitem(
            REGISTRY._plugins, ("monitor", name), Plugin("monitor", name, cls, "test", cls.Args)
        )


# ---------------------------------------------------------------- metrics.jsonl


async def test_a_record_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    m = monitor(tmp_path)
    first = record(1, loss=0.5)
    await m.log(first)
    assert read(tmp_path / "metrics.jsonl") == [first]
    await m.log(record(2, "explorer", reward=1))
    assert [r.step for r in read(tmp_path / "metrics.jsonl")] == [1, 2]
    await m.close()


async def test_numbers_that_json_cannot_hold(tmp_path: Path) -> None:
    m = monitor(tmp_path)
    await m.log(record(1, grad_norm=math.inf, loss=math.nan))
    await m.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["values"] == {"grad_norm": None, "loss": None}
    (found,) = read(tmp_path / "metrics.jsonl")
    assert math.isnan(found.values["loss"])


def test_a_killed_writer_loses_nothing(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, signal, sys\nfrom pathlib import Path\n"
        "from rft.monitor.monitor import Monitor\nfrom rft.monitor.settings import "
        "MonitorConfig, TrackedRun\n"
        "from rft.types.metrics import MetricRecord\n"
        "async def main():\n"
        "    m = Monitor(MonitorConfig(), TrackedRun(folder=Path(sys.argv[1])))\n"
        "    for step in range(50):\n"
        "        await m.log(MetricRecord(role='trainer', step=step, time=0.0, values={'loss': "
        "1.0}))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    assert [r.step for r in read(tmp_path / "metrics.jsonl")] == list(range(50))


@pytest.mark.parametrize("garbage", [b'{"role":"trainer","st', b"x" * 200_000])
async def test_a_cut_line_is_reported_and_removed_on_resume(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    m = monitor(tmp_path)
    await m.log(record(1, loss=1.0))
    await m.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(garbage)
    found = Records(path)
    assert [r.step for r in found] == [1]
    assert f"cut after {len(garbage)} bytes" in found.note
    m = monitor(tmp_path)
    await m.log(record(2, loss=2.0))
    await m.close()
    assert "cut by a crash" in caplog.text
    assert [r.step for r in found] == [1, 2]
    assert found.note == ""


def test_what_is_no_plain_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(OSError):
            read(path)


def test_a_file_that_is_one_cut_line_becomes_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"ro')
    m = monitor(tmp_path)
    assert read(tmp_path / "metrics.jsonl") == []
    m._file.close()


def test_a_damaged_line_inside_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"role":"trainer","step":1,"time":0,"values":{}}\n{"role":"cook"}\n')
    with pytest.raises(RunFailed, match=r"metrics.jsonl:2 is not a metric record"):
        read(path)


async def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    m = monitor(tmp_path)
    m._file.close()
    m._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    with pytest.raises(
        DiskFull,
        match=r"metrics\.jsonl cannot be written: No space left.*the same command then goes on",
    ):
        await m.log(record(1, loss=1.0))
    with pytest.raises(OSError, match="No space left"):
        m._file.close()


def test_series_takes_the_later_value_of_a_repeated_step() -> None:
    records = [record(1, a=1.0), record(2, a=2.0), record(3, b=0.0), record(2, a=20.0)]
    assert series(records, "a") == [(1, 1.0), (2, 20.0)]


def test_series_leaves_out_what_lay_beyond_the_begin_of_a_later_process() -> None:
    def made(role: Any, step: int, **values: float) -> MetricRecord:
        return MetricRecord(role=role, step=step, time=0.0, values=values)

    attempt = [made("trainer", s, a=1.0) for s in (1, 2, 3)] + [
        made("explorer", s, b=1.0) for s in (1, 2, 3, 4)
    ]
    resumed = [*attempt, made("synchronizer", 2, version=2.0)]
    assert series(resumed, "a") == [(1, 1.0), (2, 1.0)]
    assert series(resumed, "b") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)], (
        "explored ahead of the checkpoint, and not again"
    )
    anew = [
        *attempt,
        made("synchronizer", 0, version=0.0),
        made("trainer", 1, a=5.0),
        made("explorer", 1, b=5.0),
    ]
    assert series(anew, "a") == [(1, 5.0)] == series(anew, "b"), (
        "nothing was saved, so all steps are done again, or never"
    )


# ---------------------------------------------------------------- samples and secrets


async def test_samples_are_whole_files_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_values", set())
    logs.learn_secrets(['hunter"2\\three'])
    m = monitor(tmp_path)
    await m.samples(
        "my/set",
        3,
        [
            {
                "prompt": 'say hunter"2\\three',
                "nested": {"k": ['hunter"2\\three']},
                "reward": math.nan,
            }
        ],
    )
    await m.log(record(1, **{'hunter"2\\three': 1.0}))
    await m.close()
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "my_set_3.jsonl"
    assert json.loads(path.read_text()) == {
        "prompt": "say ***",
        "nested": {"k": ["***"]},
        "reward": None,
    }
    assert "hunter" not in (tmp_path / "metrics.jsonl").read_text()


async def test_samples_hold_whatever_a_taskset_made(tmp_path: Path) -> None:
    """A taskset from Python whose truths are NumPy's ended the run at its first evaluation."""
    truth = [
        np.int64(3),
        np.float32(0.5),
        np.float64("inf"),
        np.bool_(True),
        np.arange(2),
        {1},
        date(2026, 1, 2),
        "\ud83d",
        2**70,
    ]
    m = monitor(tmp_path)
    await m.samples("sums", 0, [{"truth": truth}])
    await m.close()
    (path,) = (tmp_path / "samples").iterdir()
    assert json.loads(path.read_text()) == {
        "truth": [3, 0.5, None, True, [0, 1], "{1}", "2026-01-02", "\\ud83d", 2**70]
    }


async def test_first_samples_are_shown_and_all_are_dumped(tmp_path: Path) -> None:
    m = Monitor(
        MonitorConfig(log_eval_samples=2, eval_dump_dir=str(tmp_path / "dumps")),
        TrackedRun(folder=tmp_path / "run"),
    )
    await m.samples("eval/sums", 7, [{"task": i} for i in range(5)])
    await m.close()

    def tasks(path: Path) -> list[int]:
        return [json.loads(line)["task"] for line in path.read_text().splitlines()]

    assert tasks(tmp_path / "run" / "samples" / "eval_sums_7.jsonl") == [0, 1]
    assert tasks(tmp_path / "dumps" / "eval_sums_7.jsonl") == [0, 1, 2, 3, 4]
    none = Monitor(MonitorConfig(log_eval_samples=0), TrackedRun(folder=tmp_path / "none"))
    await none.samples("eval/sums", 7, [{"task": 0}])
    await none.close()
    assert not (tmp_path / "none" / "samples").exists()


# ---------------------------------------------------------------- failing trackers


@pytest.mark.parametrize(
    ("kind", "what"), [("failing", "no route to host"), ("neveropens", "login needed")]
)
async def test_a_failing_tracker_is_switched_off_once_and_loudly(
    tmp_path: Path, kind: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    m = monitor(tmp_path, kind, "recorder")
    for step in range(3):
        await m.log(
            MetricRecord(
                role="trainer",
                step=step,
                time=0.0,
                values={"loss": 1.0},
                notes=("a group was rejected",),
            )
        )
    await m.close()
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert what in errors[0].getMessage()
    found = read(tmp_path / "metrics.jsonl")
    assert [r.step for r in found if "loss" in r.values] == [0, 1, 2]
    (alarm,) = [r for r in found if ALARM in r.values]
    assert alarm.notes == (errors[0].getMessage().partition(";")[0],), (
        "what happened, not what the record before had to say"
    )
    (other,) = [t for t in Recorder.opened if type(t) is Recorder]
    assert other.closed
    assert [r.step for r in other.records if "loss" in r.values] == [0, 1, 2]
    assert len([r for r in other.records if ALARM in r.values]) == 1


async def test_a_tracker_that_hangs_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Stuck, "release", threading.Event())
    m = monitor(tmp_path, "stuck")
    await m.log(record(1, loss=1.0))
    await m.close(deadline_s=0.05)
    assert "did not finish within 0.05 s" in caplog.text
    assert ALARM in read(tmp_path / "metrics.jsonl")[-1].values
    Stuck.release.set()


async def test_a_tracker_that_cannot_keep_up_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Stuck, "release", threading.Event())
    monkeypatch.setattr(mirror, "CAPACITY", 2)
    m = monitor(tmp_path, "stuck")
    for step in range(6):
        await m.log(record(step, loss=1.0))
    assert "2 records behind" in caplog.text
    Stuck.release.set()
    await m.close()
    assert len([r for r in read(tmp_path / "metrics.jsonl") if ALARM in r.values]) == 1


# ---------------------------------------------------------------- before the run


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "requires", ("no_such_tracker",))
    with pytest.raises(SetupError, match="pip install no_such_tracker"):
        check_available(["recorder"])
    assert SetupError("").exit_code == 3


def test_an_unknown_tracker_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)unknown monitor 'tensorbord'.*Did you mean tensorboard"
    ):
        check_available(["tensorbord"])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"mod": "offline"}, "monitor.monitor_args.wandb.*'mod'.*Did you mean mode"),
        ({"mode": "sometimes"}, "mode: .*'sometimes'"),
    ],
)
def test_wrong_arguments_are_found_before_the_run(args: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_available(["wandb"], {"wandb": args})


def test_watching_loads_no_torch_and_no_tracker() -> None:
    code = (
        "import sys; from rft.monitor.monitor import Monitor, check_available; "
        "check_available(['tensorboard', 'wandb'])\n"
        "sys.exit(bool({'torch', 'wandb', 'tensorboard', 'matplotlib'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# ---------------------------------------------------------------- helpers


class Names(OneRun):
    def send(self, role: str, step: int, when: float, values: dict[str, Any]) -> None: ...
    def table(self, name: str, step: int, rows: Sequence[Row]) -> None: ...
    def close(self) -> None: ...


async def test_a_name_of_two_roles_is_the_first_ones_also_when_the_run_resumes(
    tmp_path: Path,
) -> None:
    """Where rows wait in the buffer the trainer is the first to report then; the two curves changed
    places in the tracker.
    """
    m = monitor(tmp_path)
    for role, value in (("explorer", 1.0), ("trainer", 0.5)):
        await m.log(record(1, role, spread=value))
    await m.close()
    assert Names(TrackedRun(folder=tmp_path), None).name("trainer", "spread") == "trainer/spread"
    assert series(read(tmp_path / "metrics.jsonl"), "spread") == [(1, 1.0)]


def test_one_run_keeps_names_of_different_roles_apart(tmp_path: Path) -> None:
    names = Names(TrackedRun(folder=tmp_path), None)
    assert [names.name(r, "time/step") for r in ("trainer", "explorer", "trainer")] == [
        "time/step",
        "explorer/time/step",
        "time/step",
    ]


def test_markdown_shows_every_column_and_says_what_is_left_out() -> None:
    text = markdown([{"a": "x|y\nz"}, {"b": [1]}, {"a": None}], limit=2)
    assert text.splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y<br>z |  |",
        "|  | [1] |",
        "",
        "1 more rows are in the run's samples folder.",
    ]


def test_a_remembered_id_stays(tmp_path: Path) -> None:
    path = tmp_path / "x" / "id"
    assert remembered_id(path) == remembered_id(path) != remembered_id(tmp_path / "other")


def test_a_full_disk_leaves_no_empty_id(tmp_path: Path) -> None:
    """The resumed run had an empty one, so that each start was another run of the tracker."""
    path = tmp_path / "id"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            remembered_id(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(remembered_id(path)) == 16


def test_the_copy_of_a_run_is_a_run_of_its_own_in_trackers(tmp_path: Path) -> None:
    """A folder that was moved goes on in the same one; two that are there would write into each
    other.
    """
    first = remembered_id(tmp_path / "first" / "wandb" / "rft_run_id")
    shutil.copytree(tmp_path / "first", tmp_path / "branch")
    branch = tmp_path / "branch" / "wandb" / "rft_run_id"
    assert remembered_id(branch) != first and remembered_id(branch) == branch.read_text()
    assert remembered_id(tmp_path / "first" / "wandb" / "rft_run_id") == first
    (tmp_path / "first").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert remembered_id(tmp_path / "moved" / "wandb" / "rft_run_id") == first
    assert remembered_id(tmp_path / "link" / "wandb" / "rft_run_id") == first
