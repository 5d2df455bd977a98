"""Every plugin door through whole runs: in one process, and inside Ray's workers."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rft.monitor.read import read, series
from tests.helpers.command import rft


def played(folder: Path) -> dict[str, set[tuple[str, float]]]:
    """Workflow and reward of the trained rows of each taskset, from the run's own buffer."""
    found: dict[str, set[tuple[str, float]]] = {}
    with sqlite3.connect(folder / "buffer" / "experience_buffer.db") as db:
        for taskset, workflow, reward in db.execute(
            "SELECT taskset, workflow, reward FROM experiences WHERE state = 'used'"
        ):
            found.setdefault(taskset, set()).add((workflow, reward))
    db.close()
    return found


def expected(doors: Any) -> dict[str, set[tuple[str, float]]]:
    return {
        t["name"]: {(t["default_workflow_type"], doors.rewards[t["name"]])} for t in doors.tasksets
    }


@pytest.fixture(scope="module")
def local_run(
    doors: Any,
    door_config: Path,
    tiny_model: Path,
    python_path: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The same doors in one process; the plugin folder is named in the configuration."""
    root = tmp_path_factory.mktemp("local_run")
    done = rft(
        "run",
        "--in-process",
        "-c",
        door_config,
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={root}",
        f"plugin_dirs=[{doors.plugins}]",
        "monitor.monitor_type=[]",
        "monitor.monitor_args=null",
    )
    assert done.code == 0, done.output
    return root / "project" / "group" / "name"


def test_every_door_in_one_process(local_run: Path, doors: Any) -> None:
    assert played(local_run) == expected(doors)


def test_every_door_inside_ray_workers(ray_run: Any, doors: Any) -> None:
    assert ray_run.code == 0, ray_run.output
    assert played(ray_run.folder) == expected(doors)
    log = (ray_run.folder / "logs" / "explorer.log").read_text()
    for door in ("folder", "module", "file", "entry"):
        assert f"W {door}: {door} uses " in log, "the workflow ran in the explorer's process"


def test_an_advantage_of_ones_own_trains(local_run: Path, ray_run: Any) -> None:
    for folder in (local_run, ray_run.folder):
        assert series(read(folder / "metrics.jsonl"), "experience/advantage/abs_mean") == [
            (1, 0.25),
            (2, 0.25),
        ]


@pytest.mark.parametrize("in_process", [True, False])
def test_a_plugin_that_does_not_import_stops_the_run_before_it_starts(
    tiny_model: Path, tmp_path: Path, in_process: bool
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "broken.py").write_text(
        "def helper():\n    raise RuntimeError('broken on import')\n\nhelper()\n"
    )
    done = rft(
        "run",
        *(["--in-process"] if in_process else []),
        "-c",
        Path(__file__).parent / "tiny_config.yaml",
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "--plugin-dir",
        tmp_path / "plugins",
    )
    assert done.code == 2
    for text in (
        "broken.py failed to import",
        "line 2, in helper",
        "RuntimeError: broken on import",
    ):
        assert text in done.output
    assert not (tmp_path / "project").exists() and done.cpu_s < 20
