"""What the endurance run concludes from what it has seen: growth with its interval, faults of a
seed, hangs and their names.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import time
from pathlib import Path

import bench_harness
import pytest
import soak


def lives(per_hour: float, seed: int = 0) -> list[list[tuple[float, float]]]:
    """Two processes of 25 minutes each, of different sizes, whose memory swings slowly by some MiB."""
    dice = random.Random(seed)
    made = []
    for n in range(2):
        swing = 0.0
        life = []
        for second in range(0, 1500, 3):
            swing = 0.95 * swing + dice.gauss(0, 0.3)
            life.append((40 * n + second, 500 + 40 * n + swing + per_hour * second / 3600))
        made.append(life)
    return made


def test_growth_is_found_beside_processes_of_different_size() -> None:
    found = [bench_harness.growth(lives(60, seed), soak.WINDOW_S) for seed in range(40)]
    assert sum(g.low <= 60 <= g.high for g in found if g) >= 34
    assert all(g.low > soak.LIMITS["memory, MiB"] for g in found if g)
    steady = [bench_harness.growth(lives(0, seed), soak.WINDOW_S) for seed in range(40)]
    assert sum(g.low <= 0 <= g.high for g in steady if g) >= 34 and all(
        g.low < soak.LIMITS["memory, MiB"] for g in steady if g
    )


def test_nothing_is_said_of_too_little() -> None:
    assert bench_harness.growth([], 300.0) is None
    assert bench_harness.growth([[(0.0, 1.0), (3.0, 1.0)]], 300.0) is None


def test_a_seed_draws_every_fault_in_its_own_order() -> None:
    first, again, other = (list(itertools.islice(soak.plan(seed), 60)) for seed in (1, 1, 2))
    assert first == again != other
    assert {(f.kind, f.action) for f in first} == {
        *((kind, action) for kind in soak.KINDS for action in ("kill", "stop")),
        ("machine", "disk"),
        ("machine", "clock"),
    }


class Said:
    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)


@pytest.mark.parametrize(
    ("line", "named"),
    [("RunFailed: trainer-0 hangs: its process answers nothing", True), ("step 7", False)],
)
def test_a_hang_has_to_be_named(tmp_path: Path, line: str, named: bool) -> None:
    program = soak.Program("train", "launcher", [], {}, tmp_path, ledger=True)
    (tmp_path / "buffer").mkdir()
    with sqlite3.connect(tmp_path / "buffer" / "experience_buffer.db") as ledger:
        ledger.execute("CREATE TABLE experiences (id)")
        ledger.execute("CREATE TABLE uses (id)")
        ledger.execute("INSERT INTO experiences VALUES (1)")
    ledger.close()
    program.run = Said(line)  # type: ignore[assignment]
    program.progress = (1, -1)
    program.since = time.monotonic() - 100
    program.look(["stop trainer"])
    assert program.progress == (1, 0) and [s > soak.HANG_S for s, _ in program.hangs] == [True]
    assert (program.hangs[0][1] == line) == named and bool(program.problems) != named
    program.look([])
    assert len(program.hangs) == 1
