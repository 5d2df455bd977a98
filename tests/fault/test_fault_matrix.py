"""The fault matrix of the buffer: every case on every storage.  A few of them always, all with 20
seeds in the slow set.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.helpers.lab.cases import Case, matrix, postgres_matrix
from tests.helpers.lab.judge import judge
from tests.helpers.lab.lab import Lab, Nursery
from tests.helpers.lab.nursery import Order
from tests.helpers.lab.plan import Plan
from tests.helpers.postgres import PostgresServer

STORAGES = ("sql", "file", "queue")
SEEDS = range(20)
SMOKE = (  # (name, storage): each fault once, each storage in turn
    pytest.param("kill -9 explorer at append.sent", "sql", marks=pytest.mark.smoke),
    ("kill -9 trainer at checkpoint.files", "sql"),
    ("kill -9 trainer in a write of a checkpoint", "file"),
    ("kill -9 buffer at buffer.append.stored", "file"),
    ("kill -9 buffer at storage.put.torn", "queue"),
    ("kill -9 buffer at any statement or commit", "sql"),
    ("kill -9 of all processes at once", "file"),
    ("power loss, durability power", "file"),
    ("power loss, durability process", "queue"),
    ("disk full for the buffer, goes on in place", "sql"),
    ("disk full for a checkpoint", "queue"),
    ("older checkpoint, then the newer one again", "file"),
    ("a byte of waiting payload changed", "queue"),
    ("two trainers on one buffer", "sql"),
    ("every message twice", "queue"),
    ("clock jumps by an hour, or stands still", "sql"),
)


def named(cases: list[Case], name: str) -> Case:
    (case,) = [c for c in cases if c.name == name]
    return case


def play(case: Case, nursery: Nursery, seed: int, **plan: object) -> None:
    if case.needs_shim and not nursery.has_shim:
        pytest.skip("no C compiler: writes and clocks cannot be made to fail")
    case.run(nursery, seed, **plan)


@pytest.mark.parametrize(("name", "storage"), SMOKE)
def test_smoke(lab_nursery: Nursery, name: str, storage: str) -> None:
    play(named(list(matrix(storage)), name), lab_nursery, 100, storage=storage)


@pytest.mark.parametrize("storage", STORAGES)
def test_images_are_neither_lost_nor_stored_twice(lab_nursery: Nursery, storage: str) -> None:
    for name in (
        "kill -9 explorer at append.sent",
        "kill -9 buffer at storage.put",
        "kill -9 buffer at buffer.append.stored",
        "kill -9 of all processes at once",
    ):
        case = named(list(matrix(storage)), name)
        play(case, lab_nursery, 100, storage=storage, images=True, explorers=2)


def test_two_explorers(lab_nursery: Nursery) -> None:
    play(
        named(list(matrix("sql")), "kill -9 explorer at append.sent"),
        lab_nursery,
        1,
        storage="sql",
        explorers=2,
    )


def test_smoke_of_postgresql(lab_nursery: Nursery, postgres: PostgresServer) -> None:
    cases = list(postgres_matrix(postgres))
    for name in (
        "kill -9 of the server at buffer.append.stored",
        "pg_terminate_backend at buffer.use.after",
    ):
        play(named(cases, name), lab_nursery, 0, storage="sql", ledger_url=postgres.url)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("number", sorted({c.number for c in matrix("file")}))
def test_matrix(lab_nursery: Nursery, number: str, storage: str) -> None:
    for case in matrix(storage):
        if case.number == number:
            for seed in SEEDS:
                play(case, lab_nursery, seed, storage=storage, explorers=_explorers(case, seed))


def _explorers(case: Case, seed: int) -> int:
    """Kills are tried with two explorers, too."""
    return 1 + (seed % 4 == 3 and case.name.startswith("kill -9"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_matrix_of_postgresql(lab_nursery: Nursery, postgres: PostgresServer) -> None:
    for case in postgres_matrix(postgres):
        for seed in range(3):
            play(
                case,
                lab_nursery,
                seed,
                storage=("sql", "file", "queue")[seed % 3],
                ledger_url=postgres.url,
            )


def test_a_buffer_is_ready_before_the_nursery_says_that_it_was_born(tmp_path: Path) -> None:
    """A nursery that was held up after its fork on a busy machine: the run stood still, waiting for
    what it had been told.
    """

    class HeldUp(Nursery):
        def __init__(self) -> None:
            self.news: list[dict[str, object]] = []

        def start(self, order: Order) -> None:
            self.news = [{"told": order.tag, "event": "ready"}, {"born": order.tag, "pid": 0}]

        def next(self, timeout_s: float = 0.0) -> dict[str, object]:
            return self.news.pop(0)

    assert Lab(HeldUp(), Plan(root=str(tmp_path))).start_buffer()


def test_the_judge_is_not_blind(lab_nursery: Nursery, tmp_path: Path) -> None:
    """Each rule fails when its files are changed by hand."""
    plan = Plan(root=str(tmp_path), steps=4)
    lab = Lab(lab_nursery, plan)
    lab.play()
    assert judge(plan).problems == []
    ledger = plan.run / "buffer" / "experience_buffer.db"
    kept = tmp_path / "kept.db"
    with (
        contextlib.closing(sqlite3.connect(ledger)) as raw,
        contextlib.closing(sqlite3.connect(kept)) as copy,
    ):
        raw.backup(copy)
    changes = {
        "acknowledged rows are not stored": "DELETE FROM experiences WHERE batch = 3 AND task = 1",
        "was trained twice on": "INSERT INTO uses SELECT experience, lineage, 2, created FROM uses "
        "WHERE step = 1",
        "uses, its trainer was told": "DELETE FROM uses WHERE step = 4",
        "rows not trained": "DELETE FROM uses WHERE step = 1",
        "have no log-probs of the trainer": "DELETE FROM token_logprobs WHERE step = 1",
        "has the log-probs {-1.0}": "UPDATE token_logprobs SET pairs = replace(pairs, ',-2,', "
        "',-1,') WHERE step = 2",
        "by the groups' headers": "UPDATE groups SET num_rows = num_rows + 1 WHERE batch = 3 AND "
        "task = 0",
    }
    for said, change in changes.items():
        for path in ledger.parent.glob(f"{ledger.name}-*"):
            path.unlink()
        shutil.copy(kept, ledger)
        with contextlib.closing(sqlite3.connect(ledger)) as raw, raw:
            raw.execute(change)
        assert any(said in problem for problem in judge(plan).problems), (
            said,
            judge(plan).problems,
        )
