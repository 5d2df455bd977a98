"""A run with a selector that learns is killed; what it chooses afterwards is what it would have
chosen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("selector_child.py")
ROOT = CHILD.parents[2]


def run(folder: Path, lag: int, kill_after: int = 0) -> dict | None:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder), str(lag), str(kill_after)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if kill_after:
        assert done.returncode == -9, done.stderr[-2000:]
        return None
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    return {lag: run(tmp_path_factory.mktemp(f"lag{lag}"), lag) for lag in (0, 1)}


def resumed(tmp_path: Path, whole: dict[int, dict], lag: int, kills: tuple[int, ...]) -> None:
    for n in kills:
        run(tmp_path / "run", lag, n)
    result = run(tmp_path / "run", lag)
    assert result["lineage"] == len(kills) + 1
    assert result["ok"] and not result["twice"], result
    assert result["chosen"] == whole[lag]["chosen"]


@pytest.mark.parametrize(("lag", "kills"), [(0, (18,)), (1, (23, 7))])
def test_resume_equality(
    tmp_path: Path, whole: dict[int, dict], lag: int, kills: tuple[int, ...]
) -> None:
    assert len({*whole[lag]["chosen"].values()}) < 36, (
        "it comes back to rows of the wanted pass rate"
    )
    resumed(tmp_path, whole, lag, kills)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_resume_equality_at_many_points(tmp_path: Path, whole: dict[int, dict], seed: int) -> None:
    resumed(tmp_path, whole, seed % 2, (1 + seed * 7 % 17, 1 + seed * 5 % 13))
