"""The ledger's connection breaks: before, in and after a commit, with a terminated backend, a
restarted and a killed server.

Judged by the audit and by what was trained: lost 0, twice 0, and the buffer goes on by itself.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from rft.buffer import database
from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.location import find
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, SetupError
from rft.testing.storage_contract import fill, group, ids, take
from rft.types.block import encode
from rft.types.ids import Version
from rft.worker.waiting import activities
from tests.helpers.breaking_wire import BreakingWire, Moment
from tests.helpers.postgres import PostgresServer

TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'rft %'"
)
PLACES = {  # statement, and which one of them, counted from the first explore batch on
    "append": (b"INSERT INTO experiences", 1),
    "lease": (b"INSERT INTO leases", 1),
    "use": (b"INSERT INTO uses", 1),
    "commit of an append": (b"COMMIT", 2),
    "commit of a batch": (b"COMMIT", 4),
    "commit of a lease": (b"COMMIT", 5),
    "commit of a use": (b"COMMIT", 6),
}


def settings(server: PostgresServer, folder: Path, **changes: Any) -> BufferSettings:
    base = BufferSettings(
        folder=folder / "buffer",
        run=folder.as_posix(),
        ledger_url=server.url,
        max_retry_interval_s=0.1,
    )
    return replace(base, **changes)


async def opened(given: BufferSettings) -> Buffer:
    buffer = Buffer(given)
    await buffer.open()
    return buffer


async def play(buffer: Buffer, line: int, steps: range, seen: list[tuple[int, int, int]]) -> None:
    for step in steps:
        await fill(buffer, line, step - 1)
        seen += ids(await take(buffer, line, step))
        await buffer.reader(line).use(step)


def expected(steps: int) -> list[tuple[int, int, int]]:
    return [(b, t, r) for b in range(steps) for t in range(2) for r in range(4)]


@pytest.fixture
def wire(postgres: PostgresServer) -> Iterator[tuple[BreakingWire, str]]:
    with tempfile.TemporaryDirectory(prefix="rft-wire-") as folder:
        server = Path(postgres.url.partition("host=")[2])
        made = BreakingWire(Path(folder), server)
        yield made, postgres.url.replace(str(server), folder)
        made.close()


@pytest.mark.parametrize(
    ("place", "moment"),
    [
        (p, m)
        for p in PLACES
        for m in ("before", "after", "abandon")
        if m != "after" or p.startswith("commit")
    ],
)
async def test_a_lost_connection_costs_nothing(
    postgres: PostgresServer,
    wire: tuple[BreakingWire, str],
    tmp_path: Path,
    place: str,
    moment: Moment,
) -> None:
    """ "after" a COMMIT is the ambiguous one: stored, but nobody was told.  "abandon" leaves our
    own lock behind on the server.
    """
    seen: list[tuple[int, int, int]] = []
    buffer = await opened(settings(postgres, tmp_path, ledger_url=wire[1]))
    await buffer.start_lineage(None, None)
    wire[0].arm(PLACES[place][0], moment, PLACES[place][1])
    await play(buffer, 1, range(1, 4), seen)
    audit = await buffer.audit()
    stored = postgres.run(
        f"SELECT count(*) FROM {schema(buffer)}.groups, {schema(buffer)}.meta WHERE key = 'format'"
    )
    assert wire[0].broken == 1
    assert (seen, audit.acked, audit.used, audit.num_uses, audit.ok) == (
        expected(3),
        24,
        24,
        24,
        True,
    ), audit
    assert stored == [(6,)]
    await buffer.close()


async def test_a_connection_that_its_driver_cannot_use_is_left(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psycopg stays in pipeline mode where the server dies in the middle of many rows; it takes no
    statement then, not even ROLLBACK.
    """
    real = psycopg.Cursor.executemany
    broken = []

    def executemany(cursor: Any, *args: Any, **kwargs: Any) -> None:
        if not broken:
            broken.append(cursor.connection)
            cursor.connection.pgconn.enter_pipeline_mode()
            raise psycopg.OperationalError("cannot exit pipeline mode while busy")
        real(cursor, *args, **kwargs)

    seen: list[tuple[int, int, int]] = []
    buffer = await opened(settings(postgres, tmp_path))
    await buffer.start_lineage(None, None)
    monkeypatch.setattr(psycopg.Cursor, "executemany", executemany)
    await play(buffer, 1, range(1, 3), seen)
    assert broken[0].closed and seen == expected(2) and (await buffer.audit()).ok
    await buffer.close()


def schema(buffer: Buffer) -> str:
    return f'"{buffer._ledger.location.schema}"'


@pytest.mark.parametrize("how", ["terminate", "restart", "crash"])
async def test_the_server_goes_and_comes(
    postgres: PostgresServer, tmp_path: Path, how: str
) -> None:
    seen: list[tuple[int, int, int]] = []
    # a crashed server recovers first, on a busy machine for a while
    given = settings(postgres, tmp_path, max_retry_times=20)
    buffer = await opened(given)
    await buffer.start_lineage(None, None)
    await play(buffer, 1, range(1, 3), seen)
    playing = asyncio.create_task(play(buffer, 1, range(3, 8), seen))
    if how == "terminate":
        postgres.run(TERMINATE)
    elif how == "restart":
        await asyncio.to_thread(postgres.restart)
    else:
        await asyncio.to_thread(postgres.crash)
        await asyncio.to_thread(postgres.start)
    await playing
    audit = await buffer.audit()
    assert (seen, audit.acked, audit.used, audit.ok) == (expected(7), 56, 56, True), audit
    consumption = await buffer.reader(1).consumption(7)
    await buffer.close()
    folder = tmp_path / "checkpoints/global_step_7"
    folder.mkdir(parents=True)
    manifest = {"format": 5, "version": Version(1, 7), "parent": None, "consumption": consumption}
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    from_outside = audit_run(tmp_path)
    assert (from_outside.acked, from_outside.used, from_outside.ok) == (56, 56, True), from_outside


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
async def test_anything_at_any_time(
    postgres: PostgresServer, wire: tuple[BreakingWire, str], tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    seen: list[tuple[int, int, int]] = []
    kind = dice.choice(["sql", "file", "queue"])
    buffer = await opened(
        settings(postgres, tmp_path, ledger_url=wire[1], storage_type=kind, max_retry_times=8)
    )
    await buffer.start_lineage(None, None)
    for step in range(1, 13):
        what = dice.choice(["wire", "wire", "terminate", "restart", "crash", "nothing"])
        if what == "wire":
            wire[0].arm(
                b"COMMIT", dice.choice(["before", "after", "abandon"]), dice.randrange(1, 7)
            )
        playing = asyncio.create_task(play(buffer, 1, range(step, step + 1), seen))
        if what == "terminate":
            postgres.run(TERMINATE)
        elif what == "restart":
            await asyncio.to_thread(postgres.restart, dice.choice([signal.SIGINT, signal.SIGQUIT]))
        elif what == "crash":
            await asyncio.to_thread(postgres.crash)
            await asyncio.to_thread(postgres.start)
        await playing
    audit = await buffer.audit()
    assert (seen, audit.acked, audit.used, audit.ok) == (expected(12), 96, 96, True), audit
    await buffer.close()


async def test_a_server_that_stays_away(postgres: PostgresServer, tmp_path: Path) -> None:
    buffer = await opened(
        settings(
            postgres,
            tmp_path,
            max_retry_times=1,
            max_retry_interval_s=0.01,
            full_disk_wait_s=0.0,
        )
    )
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    postgres.stop()
    try:
        with pytest.raises(
            BufferFailed,
            match=r"could not be written or read: .*Nothing of the last call is stored",
        ):
            await fill(buffer, 1, 1)
        with pytest.raises(
            SetupError,
            match=r"cannot be reached: .*Start the server, or correct buffer.trainer_input",
        ):
            await opened(settings(postgres, tmp_path / "other", max_retry_times=0))
    finally:
        postgres.start()
    await fill(buffer, 1, 1)  # the explorer's repetition
    audit = await buffer.audit()
    assert (audit.acked, audit.ok) == (16, True)
    await buffer.close()


async def test_a_server_that_is_away_for_long_is_waited_for(
    postgres: PostgresServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More attempts than `max_retry_times` fail; the terminal hears of it once."""
    monkeypatch.setattr(database, "AWAY_PAUSE_S", 0.01)
    buffer = await opened(
        settings(postgres, tmp_path, max_retry_times=1, max_retry_interval_s=0.01)
    )
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    postgres.stop()
    filling = asyncio.create_task(fill(buffer, 1, 1))
    try:
        while caplog.text.count("trying again in 0.01 s") < 8:  # noqa: ASYNC110  # lines of a log
            await asyncio.sleep(0.01)
        assert any("database is away" in a.text for a in activities())
    finally:
        postgres.start()
    await filling
    told = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(told) == 1
    assert "is away: " in told[0]
    assert "Retrying for 600 s, then the run stops" in told[0]
    audit = await buffer.audit()
    assert (audit.acked, audit.ok) == (16, True)
    await buffer.close()


async def test_one_owner_and_who_it_is(postgres: PostgresServer, tmp_path: Path) -> None:
    given = settings(postgres, tmp_path)
    buffer = await opened(given)
    await buffer.start_lineage(None, None)
    with pytest.raises(
        BufferFailed,
        match=r"is open in process \d+ \(rft .*, local, backend \d+\); a buffer has one owner",
    ):
        await opened(given)
    # other runs share the database
    other = await opened(replace(given, run="another", folder=tmp_path / "another"))
    await other.close()
    await fill(buffer, 1, 0)
    postgres.run(TERMINATE)
    thief = await opened(given)  # between the loss and the next call
    await thief.start_lineage(None, None)
    await thief.close()
    with pytest.raises(
        BufferFailed, match=r"another process took the buffer .* over while the connection was lost"
    ):
        await fill(buffer, 1, 1)
    await buffer.close()


async def test_runs_whose_names_come_out_alike(postgres: PostgresServer, tmp_path: Path) -> None:
    await (await opened(settings(postgres, tmp_path, run="alike/a-b/c"))).close()
    with pytest.raises(
        BufferFailed, match="was made with run 'alike/a-b/c', this run has 'alike/a/b-c'"
    ):
        await opened(settings(postgres, tmp_path, run="alike/a/b-c"))


async def test_no_password_is_told_or_kept(
    postgres: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "hunter2hunter2"
    away = f"postgresql://rft:{secret}@/nowhere?host={tmp_path}&sslpassword={secret}"
    with pytest.raises(SetupError) as told:
        await opened(
            settings(
                postgres,
                tmp_path / "a",
                ledger_url=away,
                max_retry_times=1,
                max_retry_interval_s=0.0,
            )
        )
    url = postgres.url.replace("rft@", f"rft:{secret}@")
    buffer = await opened(settings(postgres, tmp_path, ledger_url=url))
    await buffer.start_lineage(None, None)
    postgres.run(TERMINATE)
    await fill(buffer, 1, 0)
    assert "terminating connection" in caplog.text
    await buffer.close()
    kept = await asyncio.to_thread(lambda: "".join(p.read_text() for p in tmp_path.rglob("*.json")))
    assert "postgresql://rft@" in kept
    assert secret not in kept + caplog.text + str(told.value) + str(find(tmp_path)) + repr(
        find(tmp_path, url)
    )
    assert audit_run(tmp_path).acked == 8


async def test_an_edit_that_is_not_committed_yet_holds_the_lease_up(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    buffer = await opened(settings(postgres, tmp_path))
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=1)
    with psycopg.connect(postgres.url) as person:
        person.execute(
            f"UPDATE {schema(buffer)}.experiences SET reward = 0.25 WHERE run = 0".encode()
        )
        leasing = asyncio.create_task(take(buffer, 1, 1, 1))
        done, _ = await asyncio.wait({leasing}, timeout=0.3)
        assert not done
        person.commit()
        lease = await leasing
        assert lease.groups[0].rewards == (0.25, 1.0, 0.0, 1.0)
        with pytest.raises(psycopg.errors.RaiseException, match="is leased or was trained"):
            person.execute(
                f"UPDATE {schema(buffer)}.experiences SET reward = 9 WHERE run = 0".encode()
            )
    await buffer.close()


async def test_power_needs_a_server_that_flushes(postgres: PostgresServer, tmp_path: Path) -> None:
    postgres.run("ALTER SYSTEM SET full_page_writes = off")
    try:
        postgres.restart()
        with pytest.raises(SetupError, match="durability: power needs full_page_writes = on"):
            await opened(settings(postgres, tmp_path, durability="power"))
        await (await opened(settings(postgres, tmp_path))).close()
    finally:
        postgres.run("ALTER SYSTEM RESET full_page_writes")
        postgres.restart()


async def test_the_conflict_after_an_ambiguous_commit_is_still_one(
    postgres: PostgresServer, wire: tuple[BreakingWire, str], tmp_path: Path
) -> None:
    """A repetition by the explorer finds what the lost answer was about."""
    buffer = await opened(settings(postgres, tmp_path, ledger_url=wire[1]))
    await buffer.start_lineage(None, None)
    frame = encode(group(1, 0, 0))
    wire[0].arm(b"COMMIT", "after")
    first = await buffer.writer(1).append(frame, accepted=True)
    again = await buffer.writer(1).append(frame, accepted=True)
    assert (first.appended, first.duplicates, again.appended, again.duplicates) == (4, 0, 0, 4)
    assert (await buffer.audit()).acked == 4
    await buffer.close()
