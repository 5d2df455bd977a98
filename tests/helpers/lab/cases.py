"""The fault matrix: what is done to a run, by the numbers of the fault table, and what must hold
afterwards.

Each case plays one run of `Plan` with faults drawn from its seed and raises AssertionError unless
the judge finds nothing.
"""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import func, select

from rft import fault_injection as faults
from rft.buffer.audit import audit_run
from rft.buffer.location import connect, find
from rft.buffer.schema import experiences
from rft.trainer.checkpoint import manifest as manifests
from tests.helpers.lab.judge import told
from tests.helpers.lab.lab import Fault, Lab, Nursery, Result, lose_power
from tests.helpers.lab.plan import Plan
from tests.helpers.lab.roles import FAILED, FENCED
from tests.helpers.postgres import PostgresServer

EXPLORER = (
    "lab.explorer.group",  # before the first append of a batch
    "lab.explorer.append.before",
    "lab.explorer.append.sent",  # between append and acknowledgement
    "lab.explorer.append.after",
    "lab.explorer.mid_batch",
    "lab.explorer.batch",  # all groups stored, the batch is not closed
    "lab.explorer.close_batch.sent",
)
TRAINER = (
    "lab.trainer.lease.sent",  # during the read
    "lab.trainer.forward",
    "lab.trainer.optimizer",
    "lab.trainer.use.sent",
    "lab.trainer.explain.sent",
    "lab.trainer.used",
    "lab.trainer.consumption.sent",
    "lab.trainer.checkpoint.files",
    "lab.trainer.checkpoint.saved",
    "lab.trainer.publish.sent",  # the weight sync
    "lab.trainer.start_lineage.sent",
)
ONLY = {
    "storage.put.torn": ("file", "queue"),
    "storage.put.aside": ("file",),
    "buffer.drop": ("memory",),
}
_VISITS = {
    "append": 24,
    "mid_batch": 8,
    "group": 8,
    "batch": 8,
    "put": 12,
    "torn": 12,
    "aside": 12,
    "stored": 12,
    "explain": 1,
    "lineage": 1,
    "start_lineage": 1,
    "files": 4,
    "saved": 4,
    "consumption": 4,
}
POINTS_OF_SQL = 150  # database events of a run
WRITES_OF_OPENING = 90  # a buffer that cannot even be created has nothing to go on with


@dataclass(frozen=True)
class Case:
    """One cell of the matrix: `play` runs it with a seed."""

    number: str  # of the fault table
    name: str
    play: Callable[[Nursery, Plan, random.Random], Result]
    needs_shim: bool = False

    def run(self, nursery: Nursery, seed: int, **plan: Any) -> Result:
        """Plays the case in a folder of its own, kept only when it fails."""
        root = tempfile.mkdtemp(prefix="rft-lab-")
        try:
            result = self.play(
                nursery, Plan(root=root, **plan), random.Random(f"{self.name} {seed} {plan}")
            )
        except BaseException as e:
            nursery.clear()
            e.add_note(
                f"case {self.number} {self.name}, seed {seed}, {plan}; its files are in {root}"
            )
            raise
        shutil.rmtree(root)
        return result


def good(lab: Lab, **judged: Any) -> Result:
    result = lab.result(**judged)
    assert not result.verdict.problems, (result.verdict.problems, lab.deaths)
    return result


def nth(point: str, dice: random.Random) -> int:
    words = point.split(".")
    return dice.randint(1, next((_VISITS[w] for w in reversed(words) if w in _VISITS), 7))


# ---------------------------------------------------------------- F1, F2, F5, F6: kill -9


def kill_at(role: str, point: str) -> Callable[[Nursery, Plan, random.Random], Result]:
    """The process dies at a random visit of the point; half of the time its next life, or another
    process, dies somewhere too.
    """

    def play(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
        target = f"explorer{dice.randrange(plan.explorers)}" if role == "explorer" else role
        planned = [Fault(role=target, fault=f"{point}:{nth(point, dice)}=kill")]
        if dice.random() < 0.5:
            other, points = dice.choice(
                (("explorer0", EXPLORER), ("trainer", TRAINER), ("buffer", faults.BUFFER_POINTS))
            )
            again = dice.choice(points)
            planned.append(Fault(role=other, life=1, fault=f"{again}:{nth(again, dice)}=kill"))
        lab = Lab(nursery, plan, tuple(planned))
        lab.play()
        return good(lab)

    return play


def kill_anywhere(role: str) -> Callable[[Nursery, Plan, random.Random], Result]:
    """The buffer dies at any statement or commit, three lives in a row."""

    def play(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
        planned = tuple(
            Fault(role=role, life=n, sql=dice.randint(1, POINTS_OF_SQL)) for n in range(3)
        )
        lab = Lab(nursery, plan, planned)
        lab.play()
        return good(lab)

    return play


def kill_in_a_write(role: str) -> Callable[[Nursery, Plan, random.Random], Result]:
    """The process writes half of what it wanted to, and dies, two lives in a row."""

    def play(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
        most = 60 if role == "buffer" else 6
        planned = tuple(
            Fault(role=role, life=n, first_write=(k := dice.randint(1, most)), last_write=k)
            for n in range(2)
        )
        lab = Lab(nursery, plan, planned)
        lab.play()
        return good(lab)

    return play


def kill_everyone(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """The launcher or the machine goes: all processes die at once, three times."""
    planned = []
    for life in range(3):
        role, points = dice.choice(
            (
                ("explorer0", EXPLORER[:4]),
                ("trainer", TRAINER[:7]),
                ("buffer", faults.BUFFER_POINTS[:8]),
            )
        )
        point = dice.choice(points)
        planned.append(
            Fault(role=role, life=life, fault=f"{point}:{nth(point, dice)}=kill", everyone=True)
        )
    lab = Lab(nursery, plan, tuple(planned))
    lab.play()
    return good(lab)


# ---------------------------------------------------------------- F7: power


def lose_the_power(durability: Any) -> Callable[[Nursery, Plan, random.Random], Result]:
    """All die, and of the disk only what was synced is left."""

    def play(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
        # headers may be on disk before their payload
        apart = durability == "process" and plan.storage != "sql"
        plan = msgspec.structs.replace(
            plan,
            power_loss=True,
            durability=durability,
            on_damaged_payload="explain" if apart else "stop",
        )
        planned = []
        for life in range(3):
            role, points = dice.choice(
                (
                    ("explorer0", EXPLORER),
                    ("trainer", TRAINER[:10]),
                    ("buffer", faults.BUFFER_POINTS[:8]),
                )
            )
            point = dice.choice(points)
            planned.append(
                Fault(role=role, life=life, fault=f"{point}:{nth(point, dice)}=kill", everyone=True)
            )
        lab = Lab(nursery, plan, tuple(planned))
        lab.play(between=lambda: lose_power(plan))
        good(lab, may_lose=durability == "process")
        lose_power(plan)
        return good(lab, may_lose=durability == "process")

    return play


# ---------------------------------------------------------------- F8: disks


def disk_fails(
    role: str, error: int, *, in_place: bool
) -> Callable[[Nursery, Plan, random.Random], Result]:
    """Some writes fail with the error.  In place: the clients repeat their calls until there is
    room again; else all start anew.
    """

    def play(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
        plan = msgspec.structs.replace(
            plan, patience=60 if in_place else 0, full_disk_wait_s=30.0 if in_place else 0.0
        )
        first = dice.randint(WRITES_OF_OPENING if in_place else 1, 150 if role == "buffer" else 4)
        lab = Lab(
            nursery,
            plan,
            (
                Fault(
                    role=role, first_write=first, last_write=first + dice.randint(0, 8), error=error
                ),
            ),
        )
        lab.play()
        result = good(lab)
        if in_place and role == "buffer":
            failed = [d for d in result.deaths if not d.endswith(" 0")]
            assert not failed, f"the run goes on without a restart, but {failed}"
        return result

    return play


# ---------------------------------------------------------------- F9: checkpoints


def damage_the_checkpoint(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """The newest checkpoint is damaged: the run goes on from the one before, on rows of its own."""
    lab = Lab(
        nursery,
        plan,
        (
            Fault(
                role="trainer",
                fault=f"lab.trainer.checkpoint.saved:{dice.randint(2, 3)}=kill",
                everyone=True,
            ),
        ),
    )
    said: list[str] = []

    def damage() -> None:
        newest = manifests.latest(plan.checkpoints)
        assert newest is not None
        how = dice.choice(("flip", "cut", "delete", "empty manifest", "torn manifest", "swap"))
        said.append(how)
        file = newest.folder / "trainer" / "weights"
        manifest = newest.folder / manifests.NAME
        data = bytearray(file.read_bytes())
        if how == "flip":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            file.write_bytes(data)
        elif how == "cut":
            file.write_bytes(data[: dice.randrange(len(data))])
        elif how == "delete":
            file.unlink()
        elif how == "swap":
            older = min(manifests.committed(plan.checkpoints))
            shutil.copy(older / "trainer" / "weights", file)
        else:
            manifest.write_bytes(manifest.read_bytes()[: 40 if how == "torn manifest" else 0])

    lab.play(between=damage)
    assert len(said) == 1, said
    result = good(lab)
    began = [e["parent"] for e in told(plan) if e["event"] == "began"]
    assert began[1] is not None and began[1][1] < 6, began
    return result


def resume_older(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """A person puts the newer checkpoints away and goes on from an older one; then takes them back,
    and goes on from there.
    """
    lab = Lab(
        nursery,
        plan,
        (
            Fault(role="trainer", fault="lab.trainer.checkpoint.saved:3=kill", everyone=True),
            Fault(role="trainer", life=1, fault="lab.trainer.used:3=kill", everyone=True),
        ),
    )
    away = Path(plan.root) / "away"
    folders = [plan.checkpoints / manifests.folder_name(step) for step in (4, 6)]

    def move() -> None:
        if not away.exists():
            away.mkdir()
            for folder in folders:
                folder.rename(away / folder.name)
        else:
            for path in plan.checkpoints.iterdir():
                shutil.rmtree(path)
            for folder in folders:
                (away / folder.name).rename(folder)

    lab.play(between=move)
    began = [e["parent"] for e in told(plan) if e["event"] == "began"]
    assert began == [None, [1, 2, 0], [1, 6, 0]], began
    return good(lab)


# ---------------------------------------------------------------- F15, F16, F19, F20


def back_pressure(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """The trainer stands still, the explorer is free to run ahead: it is held at `capacity`, and
    nothing is lost.
    """
    plan = msgspec.structs.replace(plan, capacity=5, offset=1000, steps=12)
    lab = Lab(
        nursery,
        plan,
        (Fault(role="trainer", fault=f"lab.trainer.forward:{dice.randint(1, 4)}=stop"),),
    )
    lab.begin("buffer", "trainer", "explorer0")
    lab.wait_until("trainer", "stopped")
    lab.nothing_happens()
    trained = {e["step"] for e in told(plan) if e["event"] in ("used", "skipped")}
    stored = {
        g
        for e in told(plan)
        if e["event"] == "acked" and not e["group"].endswith("100")
        for g in [e["group"]]
    }
    waiting = len(stored) - plan.groups * len(trained)
    assert waiting < plan.capacity + plan.groups, f"{waiting} groups wait, capacity {plan.capacity}"
    lab.go_on("trainer")
    lab.play_on()
    return good(lab)


def starvation(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """The explorer dies and nobody starts it again: the trainer ends by its deadline, says who is
    missing, and can go on later.
    """
    plan = msgspec.structs.replace(plan, deadline_s=0.5)
    point = dice.choice(EXPLORER)
    lab = Lab(nursery, plan, (Fault(role="explorer0", fault=f"{point}:{dice.randint(2, 6)}=kill"),))
    lab.begin("buffer", "trainer", "explorer0")
    lab.wait_for_end("trainer")
    assert f"trainer {FAILED}" in lab.deaths, lab.deaths
    (why,) = [e["why"] for e in told(plan) if e["event"] == "failed"]
    assert "waited 0.5 s for the explorer" in why and "of explorer 0 is still open" in why, why
    good(lab, finished=False)
    lab.end(list(lab.living))
    lab = Lab(nursery, msgspec.structs.replace(plan, deadline_s=20.0), first_life=1)
    lab.play()
    return good(lab)


def two_trainers(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """A second trainer takes over while the first one stands still; when that one wakes up, its
    next call is refused.
    """
    point = dice.choice(("forward", "optimizer", "checkpoint.files", "used"))
    lab = Lab(
        nursery,
        plan,
        (Fault(role="trainer", fault=f"lab.trainer.{point}:{dice.randint(1, 3)}=stop"),),
    )
    lab.begin("buffer", "trainer", "explorer0")
    lab.wait_until("trainer", "stopped")
    lab.start("rival0")
    lab.wait_until("rival0", "began")
    lab.go_on("trainer")
    lab.play_on()
    assert f"trainer {FENCED}" in lab.deaths and "rival0 0" in lab.deaths, lab.deaths
    return good(lab)


def same_identity(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """Two explorers with one number: each group is stored once, and who comes second is told."""
    lab = Lab(nursery, plan)
    lab.begin("buffer", "trainer", "explorer0")
    lab.start("twin0")
    lab.play_on()
    return good(lab)


def duplicates(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """Every message comes twice, and processes die in between."""
    return kill_at(
        *dice.choice(
            (("explorer", EXPLORER[2]), ("trainer", TRAINER[3]), ("buffer", "buffer.append.after"))
        )
    )(nursery, msgspec.structs.replace(plan, duplicate=True), dice)


def clock_jumps(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """Time of day jumps by an hour back and forth, or stands still, in every process."""
    return kill_at(
        *dice.choice(
            (("explorer", EXPLORER[3]), ("trainer", TRAINER[5]), ("buffer", "buffer.use.after"))
        )
    )(nursery, msgspec.structs.replace(plan, clock=dice.randint(1, 3)), dice)


def server_goes(
    point: str, go: Callable[[], None]
) -> Callable[[Nursery, Plan, random.Random], Result]:
    """`go` is done to the database server while the buffer is at the point; the run goes on without
    a restart.
    """

    def play(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
        lab = Lab(
            nursery,
            plan,
            (Fault(role="buffer", fault=f"{point}:{nth(point, dice)}=stop"),),
            on_stop=go,
        )
        lab.play()
        result = good(lab)
        assert result.deaths == ["trainer 0"], result.deaths
        return result

    return play


def damage_payload(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """A byte of waiting payload changes: found by the audit, not trained on; with `explain` its
    task is explored again.
    """
    plan = msgspec.structs.replace(plan, steps=4, offset=1000, save_interval=1)
    lab = Lab(nursery, plan, (Fault(role="trainer", fault="lab.trainer.forward:2=stop"),))
    lab.begin("buffer", "trainer", "explorer0")
    lab.wait_until("explorer0", "finished")
    lab.wait_until("trainer", "stopped")
    lab.end(list(lab.living))
    _change_a_byte(plan, dice)
    found = lab.result(finished=False).verdict.problems
    assert (len(found) == 1 and "payload" in found[0]) or "segment" in found[0], found
    lab = Lab(nursery, plan, first_life=1)
    lab.begin("buffer", "trainer", "explorer0")
    lab.wait_for_end("trainer")
    lab.end(list(lab.living))
    (failed,) = [e for e in told(plan) if e["event"] == "failed"]
    assert failed["kind"] == "PayloadDamaged" and "on_damaged_payload: explain" in failed["why"], (
        failed
    )
    lab = Lab(nursery, msgspec.structs.replace(plan, on_damaged_payload="explain"), first_life=2)
    lab.play()
    result = good(lab)
    assert result.verdict.audit.discarded.get("payload_damaged"), result.verdict.audit
    return result


def _change_a_byte(plan: Plan, dice: random.Random) -> None:
    """Near the end of the newest block."""
    if plan.storage == "sql":
        with contextlib.closing(sqlite3.connect(find(plan.run).path or "")) as raw, raw:
            number, block = raw.execute(
                "SELECT id, block FROM payloads ORDER BY id DESC LIMIT 1"
            ).fetchone()
            data = bytearray(block)
            data[-dice.randint(1, 40)] ^= 0x10
            raw.execute("UPDATE payloads SET block = ? WHERE id = ?", (bytes(data), number))
        return
    file = max(p for p in (plan.run / "buffer").rglob("*") if p.suffix in (".seg", ".blk"))
    data = bytearray(file.read_bytes())
    data[-dice.randint(1, 200)] ^= 0x10
    file.write_bytes(data)


def readers(nursery: Nursery, plan: Plan, dice: random.Random) -> Result:
    """People look while it trains: queries, audits, and one transaction that stays open from
    beginning to end.
    """
    plan = msgspec.structs.replace(plan, steps=30)
    lab = Lab(nursery, plan)
    lab.begin("buffer", "trainer", "explorer0")
    stop = threading.Event()
    asked = [0]
    failed: list[str] = []

    def ask() -> None:
        engine = connect(find(plan.run), read_only=True)
        try:
            while not stop.is_set():
                with engine.connect() as tx, tx.begin():
                    tx.execute(select(func.count(), func.sum(experiences.c.num_tokens))).one()
                audit = audit_run(plan.run, payload=False)
                failed.extend(audit.problems)
                asked[0] += 1
        finally:
            engine.dispose()

    engine = connect(find(plan.run), read_only=True)
    asker = threading.Thread(target=ask)
    with engine.connect() as long, long.begin():
        first = long.execute(select(func.count()).select_from(experiences)).scalar()
        asker.start()
        lab.play_on()
        assert long.execute(select(func.count()).select_from(experiences)).scalar() == first, (
            "a reader sees one moment"
        )
    stop.set()
    asker.join()
    engine.dispose()
    assert not failed and asked[0], (asked, failed)
    assert len(lab.lives) == 3 and set(lab.lives.values()) == {1}, lab.deaths
    return good(lab)


# ---------------------------------------------------------------- the table


def matrix(storage: str) -> Iterator[Case]:
    """Every case that makes sense for the storage."""
    for point in EXPLORER:
        yield Case(
            "F1",
            f"kill -9 explorer at {point.removeprefix('lab.explorer.')}",
            kill_at("explorer", point),
        )
    for point in TRAINER:
        yield Case(
            "F2",
            f"kill -9 trainer at {point.removeprefix('lab.trainer.')}",
            kill_at("trainer", point),
        )
    yield Case(
        "F2",
        "kill -9 trainer in a write of a checkpoint",
        kill_in_a_write("trainer"),
        needs_shim=True,
    )
    for point in faults.BUFFER_POINTS:
        if storage in ONLY.get(point, (storage,)):
            yield Case("F5", f"kill -9 buffer at {point}", kill_at("buffer", point))
    yield Case("F5", "kill -9 buffer at any statement or commit", kill_anywhere("buffer"))
    yield Case("F5", "kill -9 buffer in a write", kill_in_a_write("buffer"), needs_shim=True)
    yield Case("F6", "kill -9 of all processes at once", kill_everyone)
    for durability in ("power", "process"):
        yield Case(
            "F7",
            f"power loss, durability {durability}",
            lose_the_power(durability),
            needs_shim=True,
        )
    for name, error in (
        ("disk full", errno.ENOSPC),
        ("quota used up", errno.EDQUOT),
        ("disk error", errno.EIO),
    ):
        yield Case(
            "F8",
            f"{name} for the buffer, all start again",
            disk_fails("buffer", error, in_place=False),
            needs_shim=True,
        )
        yield Case(
            "F8",
            f"{name} for the buffer, goes on in place",
            disk_fails("buffer", error, in_place=True),
            needs_shim=True,
        )
        yield Case(
            "F8",
            f"{name} for a checkpoint",
            disk_fails("trainer", error, in_place=False),
            needs_shim=True,
        )
    yield Case("F9", "newest checkpoint damaged", damage_the_checkpoint)
    yield Case("F9", "older checkpoint, then the newer one again", resume_older)
    yield Case("F9", "a byte of waiting payload changed", damage_payload)
    yield Case("F15", "trainer stands still, explorer free", back_pressure)
    yield Case("F16", "explorer dead, trainer waiting", starvation)
    yield Case("F19", "two trainers on one buffer", two_trainers)
    yield Case("F19", "two explorers of the same identity", same_identity)
    yield Case("F19", "every message twice", duplicates)
    yield Case("F27", "queries and audits while it trains", readers)
    yield Case("F20", "clock jumps by an hour, or stands still", clock_jumps, needs_shim=True)


def postgres_matrix(server: PostgresServer) -> Iterator[Case]:
    """The cases that concern a ledger in PostgreSQL; `ledger_url` of the plan is the server's."""

    def terminate() -> None:
        server.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE "
            "'rft %'"
        )

    def crash() -> None:
        server.crash()
        server.start()

    for point in (
        p
        for p in faults.BUFFER_POINTS
        if p.startswith("buffer.") and p not in ("buffer.drop", "buffer.lineage")
    ):
        yield Case("F5", f"pg_terminate_backend at {point}", server_goes(point, terminate))
        yield Case("F5", f"kill -9 of the server at {point}", server_goes(point, crash))
        yield Case("F5", f"kill -9 buffer at {point}", kill_at("buffer", point))
    yield Case("F5", "kill -9 buffer at any statement or commit", kill_anywhere("buffer"))
    for point in (EXPLORER[2], EXPLORER[5]):
        yield Case(
            "F1",
            f"kill -9 explorer at {point.removeprefix('lab.explorer.')}",
            kill_at("explorer", point),
        )
    for point in (TRAINER[3], TRAINER[8], TRAINER[10]):
        yield Case(
            "F2",
            f"kill -9 trainer at {point.removeprefix('lab.trainer.')}",
            kill_at("trainer", point),
        )
    yield Case("F6", "kill -9 of all processes at once", kill_everyone)
    yield Case("F9", "older checkpoint, then the newer one again", resume_older)
    yield Case("F19", "two trainers on one buffer", two_trainers)
    yield Case("F19", "every message twice", duplicates)
