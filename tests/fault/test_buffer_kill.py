"""kill -9 in the middle of append, lease, use and close, again and again on the same run; judged by its files alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rft.buffer.audit import audit_run
from rft.testing.postgres import PostgresServer

CHILD = Path(__file__).with_name("buffer_child.py")
ROOT = CHILD.parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def live(run: Path, kind: str, nth: int, *url: str) -> list[list[str]]:
    command = [sys.executable, str(CHILD), str(run), kind, str(nth), *url]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("kind", "lives", "seed"), [("sql", 5, 1), ("queue", 4, 2), ("file", 4, 3)])
def test_nothing_is_lost_and_nothing_trained_twice(tmp_path: Path, kind: str, lives: int, seed: int) -> None:
    many_lives(tmp_path, kind, lives, seed)


@pytest.mark.parametrize(("kind", "lives", "seed"), [("sql", 4, 4)])
def test_nor_with_the_ledger_in_postgres(tmp_path: Path, postgres: PostgresServer, kind: str, lives: int, seed: int) -> None:
    many_lives(tmp_path, kind, lives, seed, postgres.url)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ledger", ["sqlite", "postgres"])
@pytest.mark.parametrize("kind", ["sql", "queue", "file"])
def test_nor_in_many_lives(tmp_path: Path, kind: str, ledger: str, seed: int, request: pytest.FixtureRequest) -> None:
    many_lives(tmp_path, kind, 10, seed, *([request.getfixturevalue("postgres").url] if ledger == "postgres" else []))


def many_lives(tmp_path: Path, kind: str, lives: int, seed: int, *url: str) -> None:
    dice = random.Random(seed)
    manifest: list[int] | None = None
    acked = 0
    for n in range(lives):
        said = live(tmp_path, kind, dice.randrange(1, 250) if n else 250, *url)
        assert not [x for x in said if x[0] == "WRONG"]
        acked += sum(int(x[3]) for x in said if x[0] == "acked")
        manifest = next(([int(x[1]), int(x[2])] for x in reversed(said) if x[0] == "manifest"), manifest)
        audit = audit_run(tmp_path)
        assert audit.ok, (n, audit)
        assert audit.acked >= acked, (n, audit)
        assert audit.used == audit.num_uses  # whole steps only: what the newest manifest says
        if manifest is not None:
            assert audit.used >= 12 * manifest[1]
        assert audit.explained.keys() <= {"orphaned"}
    assert manifest is not None, "no life was long enough to write a manifest"


def test_the_script_tells_by_its_exit_code(tmp_path: Path) -> None:
    live(tmp_path, "sql", 150)
    command = [sys.executable, "scripts/audit.py", str(tmp_path), "--json"]
    good = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV, timeout=60)
    assert (good.returncode, json.loads(good.stdout)["ok"]) == (0, True), good.stderr
    path = max(tmp_path.glob("checkpoints/*/manifest.json"))
    manifest = json.loads(path.read_bytes())
    manifest["consumption"]["num_uses"] += 1
    path.write_text(json.dumps(manifest))
    bad = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENV, timeout=60)
    assert bad.returncode == 4
    assert "uses (digest" in json.loads(bad.stdout)["problems"][0]
    none = subprocess.run(
        [*command[:2], str(tmp_path / "nowhere")], capture_output=True, text=True, cwd=ROOT, env=ENV, timeout=60
    )
    assert (none.returncode, "must hold one buffer" in none.stderr) == (4, True)
