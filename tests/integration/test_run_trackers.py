"""Trackers and secrets, in whole runs on Ray: every tracker has the numbers, and no file or line
has a secret.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rft.monitor.read import read
from rft.secrets import REDACTED
from tests.helpers.command import rft
from tests.helpers.trackers import tensorboard, wandb_values

HERE = Path(__file__).parent


def test_both_trackers_have_what_metrics_jsonl_has(ray_run: Any) -> None:
    written = {
        (r.role, name, r.step): value
        for r in read(ray_run.folder / "metrics.jsonl")
        for name, value in r.values.items()
    }
    assert {role for role, _, _ in written} == {"explorer", "trainer", "synchronizer", "eval"}
    assert {step for role, _, step in written if role == "trainer"} == {1, 2}
    boards, text = tensorboard(ray_run.folder)
    runs, run = wandb_values(ray_run.folder)
    # In wandb two roles share a name: the one that came second has its role put first.
    runs = {
        (role, name if (role, name, step) in written else name.removeprefix(f"{role}/"), step): v
        for (role, name, step), v in runs.items()
    }
    for found in (boards, runs):
        assert found.keys() == written.keys()
        assert all(
            found[key] == pytest.approx(value, rel=1e-6, abs=1e-9) for key, value in written.items()
        )
    assert (run.project, run.run_group, run.display_name) == ("project", "group", "name")
    tables = list((ray_run.folder / "wandb").rglob("*.table.json"))
    assert "prompt" in text and "prompt" in tables[0].read_text()


def hits(folder: Path, canaries: tuple[str, ...]) -> list[str]:
    """`file: canary` for every secret in a file of the run; names count too."""
    found = []
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        found += [
            f"{path.relative_to(folder)}: {c}"
            for c in canaries
            if c in str(path) or c.encode() in data
        ]
    return found


def test_no_secret_in_anything_a_run_leaves(ray_run: Any, canaries: tuple[str, ...]) -> None:
    folder: Path = ray_run.folder
    assert hits(folder, canaries) == []
    assert not [c for c in canaries if c in ray_run.output]
    # The secrets were there to be found: the workflow has logged and printed them, the
    # configuration was copied.
    for name in ("logs/explorer.log", "logs/explorer.out"):
        assert (
            f"folder uses {REDACTED} at postgresql://me:{REDACTED}@db.example/prod"
            in (folder / name).read_text()
        ), name
    assert f"module uses {REDACTED} at" in (folder / "logs/explorer.log").read_text()
    for name in ("config.yaml", "config.resolved.yaml", "config.json"):
        assert REDACTED in (folder / name).read_text(), name
    kinds = {"state.json", "metrics.jsonl", "launcher.log", "manifest.json", "experience_buffer.db"}
    names = {p.name for p in folder.rglob("*")}
    assert (
        kinds <= names
        and any(n.startswith("events.out") for n in names)
        and any(n.endswith(".wandb") for n in names)
    )
    assert list((folder / "samples").glob("*.jsonl"))
    assert "is a secret in plain text" in ray_run.output


def test_no_secret_in_what_a_failed_run_leaves(
    failed_ray_run: Any, canaries: tuple[str, ...]
) -> None:
    assert failed_ray_run.code == 4, failed_ray_run.output
    assert hits(failed_ray_run.folder, canaries) == []
    assert not [c for c in canaries if c in failed_ray_run.output]
    assert REDACTED in (failed_ray_run.folder / "state.json").read_text()


def test_the_failed_run_shows_the_users_traceback_and_leaves_nothing(failed_ray_run: Any) -> None:
    assert "PermissionError" in failed_ray_run.output and "in run" in failed_ray_run.output
    assert "failed completely" in failed_ray_run.output
    assert failed_ray_run.left == ()


def test_busy_ports_do_not_matter(ray_run: Any) -> None:
    assert ray_run.code == 0, ray_run.output
    assert ray_run.left == ()


def test_wandb_keeps_no_command_line(tmp_path: Path) -> None:
    """Its own record of how the program was called would hold the secrets of overrides."""
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom rft.monitor.monitor import Monitor\n"
        "from rft.monitor.settings import MonitorConfig, TrackedRun\n"
        "made = Monitor(MonitorConfig(monitor_type=('wandb',), monitor_args={'mode': "
        "'offline'}), TrackedRun(folder=Path(sys.argv[1])))\n"
        "asyncio.run(made.close())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "c4a7cmdline=1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.wandb")) and hits(tmp_path, ("c4a7cmdline",)) == []


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (
            "buffer.explorer_input.taskset.workflow_args={api_token: c4a7dbtoken}",
            2,
            "unknown argument 'api_token'",
        ),
        ("seed=1", 3, "cannot be reached"),
    ],
)
def test_what_is_refused_does_not_repeat_its_secrets(
    tiny_model: Path, tmp_path: Path, more: str, code: int, says: str
) -> None:
    done = rft(
        "run",
        "--in-process",
        "-c",
        HERE / "tiny_config.yaml",
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "buffer.trainer_input.experience_buffer.path=postgresql://me:c4a7dburl@127.0.0.1:1/db",
        "buffer.trainer_input.experience_buffer.max_retry_times=0",
        more,
    )
    assert done.code == code and says in done.output
    assert "c4a7db" not in done.output
