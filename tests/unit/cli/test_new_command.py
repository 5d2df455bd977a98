"""`rft new` writes files whose tests pass as they are, and never writes over any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rft.cli.new_command import KINDS
from tests.helpers.command import forget_plugins, rft


@pytest.mark.e2e
def test_what_it_writes_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        done = rft("new", kind, f"my_{kind}", "--dir", "mine")
        assert (
            done.code == 0
            and f"mine/tests/test_my_{kind}.py" in done.output
            and "rft run" in done.output
        ), done.output
        assert "rft new config" in done.output
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "mine"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    tested = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert tested.returncode == 0 and f"{2 * len(KINDS) - 1} passed" in tested.stdout, (
        tested.stdout + tested.stderr
    )
    style = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--line-length",
            "130",
            "--select",
            "E,F,W,I,UP,B",
            "mine",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert style.returncode == 0, style.stdout


def test_a_configuration_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        for kind in KINDS:
            assert rft("new", kind, f"found_{kind}").code == 0
        listed = rft("plugins", "--plugin-dir", "plugins")
        assert listed.code == 0 and all(f"found_{kind}" in listed.output for kind in KINDS), (
            listed.output
        )
    finally:
        forget_plugins(tmp_path)


def test_a_configuration_that_can_be_checked_at_once(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rft("new", "config", "sums", "--model", str(tiny_model))
    assert done.code == 0 and "rft check --config sums.yaml" in done.output
    checked = rft(
        "check", "--config", "sums.yaml", "explorer.rollout_model.engine_type=transformers"
    )
    assert (
        checked.code == 0
        and "sums.yaml is fine" in checked.output
        and "warning  " not in checked.output.replace("disk", "")
    ), checked.output
    questions = {*(tmp_path / "sums.jsonl").read_text().splitlines()}
    assert (
        not questions & {*(tmp_path / "sums_eval.jsonl").read_text().splitlines()}
        and len(questions) == 64
    )
    again = rft("new", "config", "sums")
    assert again.code == 2 and "already exists" in again.output
    other = rft("new", "config", "more")
    assert "python -m rft.testing.tiny runs/tiny-model" in other.output


@pytest.mark.parametrize("there", ["plugins/mine.py", "plugins/tests/test_mine.py"])
def test_nothing_is_written_over(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / there
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    done = rft("new", "workflow", "mine")
    assert done.code == 2 and "already exists" in done.output and path.read_text() == "precious"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("workflow", "Mine", "lower-case letters"),
        ("workflow", "my-own", "lower-case letters"),
        ("workflow", "../mine", "lower-case letters"),
        ("workflow", "class", "not be a Python keyword"),
        ("workflow", "m", "2 to 50"),
        ("agent", "simple_workflow", "comes with rft has this name"),
        ("judge", "exact_answer", "comes with rft has this name"),
        ("wrokflow", "mine", "write one of: workflow (what happens"),
    ],
)
def test_names_are_checked(
    kind: str, name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rft("new", kind, name)
    assert done.code == 2 and why in done.output, done.output
    assert not any(tmp_path.rglob("*.py"))


def test_a_file_where_the_folder_would_be_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugins").write_text("precious")
    done = rft("new", "workflow", "mine")
    assert (
        done.code == 3
        and "SetupError: 'plugins': File exists" in done.output
        and "Traceback" not in done.output
    )
