"""What the ledger answers, in leases, audits and SQL, and keeps of rewards, texts and log-probs,
whatever the storage behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from rft.buffer.location import connect, ledger_location
from rft.buffer.settings import BufferSettings
from rft.errors import DeadlineExceeded, Fenced, IdConflict, ShortBatch
from rft.testing.storage_contract import StorageContract, fill, group, ids, row, take
from rft.types import token_logprobs
from rft.types.block import decode, encode
from rft.types.experience import failed
from rft.types.ids import GroupId, Version
from rft.types.ports import EndOfData
from tests.helpers.postgres import PostgresServer


def ask(settings: BufferSettings, sql: str) -> list[tuple[object, ...]]:
    """One statement through a separate client, committed; its rows."""
    engine = connect(ledger_location(settings))
    try:
        with engine.begin() as connection:
            done = connection.execute(text(sql))
            return [tuple(r) for r in done] if done.returns_rows else []
    finally:
        engine.dispose()


class OnPostgres:
    """Put it before a contract class: its ledger is then in PostgreSQL."""

    server: PostgresServer

    @pytest.fixture(autouse=True)
    def _server(self, postgres: PostgresServer) -> None:
        self.server = postgres

    def settings(self, folder: Path) -> BufferSettings:
        below: BufferSettings = super().settings(folder)  # type: ignore[misc]
        return dataclasses.replace(below, ledger_url=self.server.url, run=folder.as_posix())


class LedgerContract(StorageContract):
    """The shipped suite, and the ledger's part."""

    async def test_the_trainers_log_probs_are_kept_once(self, tmp_path: Path) -> None:
        buffer, settings = (
            await self.started(tmp_path, max_uses=2),
            self.settings(tmp_path / "buffer"),
        )
        await fill(buffer, 1, 0)
        await fill(buffer, 1, 1)
        by_step = (
            "SELECT batch, train_lineage, train_step, trainer_logprob, sum(num_tokens) FROM "
            "v_tokens GROUP BY 1, 2, 3, 4 ORDER BY 1"
        )

        async def train(lineage: int, step: int, told: float) -> None:
            lease = await take(buffer, lineage, step)
            frame = token_logprobs.encode(
                [
                    token_logprobs.of_row(x, np.full(6, told, np.float32))
                    for x in decode(lease.frame)
                ]
            )
            for _ in range(2):  # repeated after a lost answer: a no-op
                await buffer.reader(lineage).use(step, frame)

        assert ask(settings, by_step) == [(batch, None, None, None, 48) for batch in (0, 1)]
        for step, told in ((1, -0.25), (2, -1.0), (3, -2.0)):  # batch 0, once more, batch 1
            await train(1, step, told)
            if step == 1:
                consumption = await buffer.reader(1).consumption(1)
        assert ask(settings, by_step) == [(0, 1, 1, -0.25, 48), (1, 1, 3, -2.0, 48)]
        tokens = (
            "SELECT token_start, token_end, logprob, trainer_logprob FROM v_tokens WHERE id = "
            "'{}' ORDER BY 1"
        )
        wanted = [(i, i + 1, -0.5, -0.25) for i in range(6, 12)]
        assert ask(settings, tokens.format(GroupId(1, 0, 0, 1).run(3))) == wanted

        if self.durable:
            await buffer.start_lineage(Version(1, 1), consumption)  # steps 2 and 3 count no longer
            await fill(buffer, 2, 1)
            await train(2, 2, -4.0)  # batch 0, whose first use still counts
            await train(2, 3, -8.0)
            assert ask(settings, by_step) == [(0, 1, 1, -0.25, 48), (1, 2, 3, -8.0, 48)]
        assert (await buffer.audit()).ok
        ask(settings, "DELETE FROM uses WHERE step = 1")
        assert any(
            "trainer's log-probs of 0001.00.00000000.000000.0000.00.0000 belong to no use (8" in p
            for p in (await buffer.audit()).problems
        )

    async def test_people_ask_with_sql(self, tmp_path: Path) -> None:
        run = f"{tmp_path.name}/maths/one"
        buffer = await self.started(tmp_path, run=run)
        settings = dataclasses.replace(self.settings(tmp_path / "buffer"), run=run)
        for batch in range(3):
            await fill(buffer, 1, batch, version=Version(1, 0))
        for step in (1, 2):
            await take(buffer, 1, step)
            if step == 1:
                await buffer.reader(1).use(1)
                await buffer.reader(1).consumption(1)
        states = (
            "SELECT state, count(*), count(leased), count(used) FROM v_experiences GROUP BY "
            "state ORDER BY state"
        )
        assert ask(settings, states) == [
            ("available", 8, 0, 0),
            ("leased", 8, 8, 0),
            ("used", 8, 8, 8),
        ]
        filtered = (
            "SELECT DISTINCT run_name, workflow, status FROM v_experiences WHERE taskset = 'toy' "
            "AND reward = 1 AND explorer = 0 "
            "AND num_response_tokens = 6 AND finish_reason = 'stop' AND oldest_step = 0 AND "
            "has_logprobs"
        )
        assert ask(settings, filtered) == [(run, "toy", "complete")]
        groups = (
            "SELECT batch, task, reward_mean, reward_variance, num_used, num_leased FROM "
            "v_groups ORDER BY id"
        )
        first, *_, last = ask(settings, groups)
        assert first == (0, 0, 0.5, pytest.approx(1 / 3), 4, 0) and last == (
            2,
            1,
            0.5,
            pytest.approx(1 / 3),
            0,
            0,
        )
        spans = (
            "SELECT version_lineage, version_step, token_start, token_end, sum(num_tokens) "
            "FROM v_tokens GROUP BY 1, 2, 3, 4"
        )
        assert ask(settings, spans) == [(1, 0, 6, 12, 24 * 6)]
        path = (
            "SELECT oldest_step, train_step, staleness, counts, checkpoint_step, count(*) FROM "
            "v_lineage GROUP BY 1, 2, 3, 4, 5"
        )
        assert sorted(ask(settings, path), key=str) == [
            (0, 1, 0, 1, 1, 8),
            (0, None, None, None, None, 16),
        ]

    async def test_a_reward_may_be_edited_until_it_is_leased(self, tmp_path: Path) -> None:
        buffer, settings = await self.started(tmp_path), self.settings(tmp_path / "buffer")
        await fill(buffer, 1, 0)
        ask(settings, "UPDATE experiences SET reward = 0.25 WHERE task = 0 AND run = 0")
        lease = await take(buffer, 1, 1, groups=1)
        assert lease.groups[0].rewards == (0.25, 1.0, 0.0, 1.0)
        assert [x.reward for x in decode(lease.frame)] == [0.25, 1.0, 0.0, 1.0]
        for _ in ("leased", "used"):
            with pytest.raises(DBAPIError, match="is leased or was trained"):
                ask(settings, "UPDATE experiences SET reward = 3 WHERE task = 0 AND run = 1")
            await buffer.reader(1).use(1)
        for value in ("9e999", "NULL", "1e30", "'NaN'"):
            value = (
                f"CAST({value} AS DOUBLE PRECISION)"
                if settings.ledger_url and value == "9e999"
                else value
            )
            with pytest.raises(DBAPIError, match=r"must be a finite number|out of range"):
                ask(settings, f"UPDATE experiences SET reward = {value} WHERE task = 1 AND run = 1")
        edits = ask(
            settings,
            "SELECT experience, old_reward, new_reward, edited > 1700000000 FROM reward_edits",
        )
        assert edits == [(str(GroupId(1, 0, 0, 0).run(0)), 0.0, 0.25, True)]
        # nothing of lineage 1 counts: all may be edited again
        assert (await buffer.start_lineage(None, None)).lineage == 2
        ask(settings, "UPDATE experiences SET reward = 3 WHERE task = 0 AND run = 1")
        assert (await buffer.audit()).ok

    async def test_texts_that_databases_dislike(self, tmp_path: Path) -> None:
        buffer, settings = await self.started(tmp_path), self.settings(tmp_path / "buffer")
        words = (
            "nul \0 right-to-left \u202e\u05d0 emoji \U0001f468\u200d\U0001f469 '; DROP TABLE "
            "experiences; -- %s :x ?"
        )
        rows = [
            msgspec.structs.replace(x, prompt_text=words, response_text=words, taskset=words)
            for x in group(1, 0, 0)
        ]
        await buffer.writer(1).append(encode(rows), accepted=True)
        await buffer.writer(1).append(encode(group(1, 0, 1)), accepted=False, reason=words)
        await buffer.writer(1).close_batch(0, accepted=1, expected=1, reasons={words: 1})
        ((shown, length),) = ask(
            settings,
            "SELECT DISTINCT prompt_text, length(taskset) FROM v_experiences WHERE task = 0",
        )
        assert (shown, length) == (words.replace("\0", "\ufffd"), len(words))
        lease = await buffer.reader(1).lease(
            1, groups=None, rows=4, deadline_s=5, max_staleness=None
        )
        assert {x.response_text for x in decode(lease.frame)} == {words}
        await buffer.reader(1).discard(1, words)
        audit = await buffer.audit()
        assert (sum(audit.discarded.values()), audit.ok) == (8, True)

    async def test_append_is_idempotent_and_conflicts_are_told(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path)
        writer = buffer.writer(1)
        frame = encode(group(1, 0, 0))
        await writer.append(frame, accepted=True)
        again = await asyncio.gather(*(writer.append(frame, accepted=True) for _ in range(5)))
        assert [(r.appended, r.duplicates) for r in again] == [(0, 4)] * 5
        with pytest.raises(IdConflict):
            await writer.append(encode(group(1, 0, 0, tokens=14)), accepted=True)
        audit = await buffer.audit()
        assert (audit.acked, audit.available, audit.ok) == (4, 4, True)

    async def test_rows_that_cannot_be_trained_are_explained(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path)
        writer = buffer.writer(1)
        name = GroupId(1, 0, 0, 0)
        await writer.append(
            encode(
                [
                    row(name.run(0)),
                    row(name.run(1), reward=None),
                    row(name.run(2), trained=False),
                    failed(
                        name.run(3), taskset="toy", task_index=0, workflow="toy", reason="timeout"
                    ),
                ]
            ),
            accepted=True,
        )
        await writer.append(encode(group(1, 0, 1)), accepted=False, reason="zero_std")
        await writer.close_batch(0, accepted=1, expected=1, reasons={"zero_std": 1})
        lease = await take(buffer, 1, 1, groups=1)
        audit = await buffer.audit()
        assert ids(lease) == [(0, 0, 0)]
        # untrainable but scored: counts in the statistics
        assert lease.groups[0].rewards == (1.0, 1.0)
        assert audit.discarded == {"failed": 1, "unscored": 1, "untrainable": 1, "zero_std": 4}
        assert audit.ok

    async def test_a_lease_never_passes_an_open_batch(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path)
        await fill(buffer, 1, 1)
        await fill(buffer, 1, 0, groups=1, close=False)
        with pytest.raises(
            DeadlineExceeded, match="batch 0 of explorer 0 is still open with 1 groups stored"
        ):
            await take(buffer, 1, 1, deadline_s=0.02)
        waiting = asyncio.create_task(take(buffer, 1, 1))
        await fill(buffer, 1, 0)
        assert {b for b, _, _ in ids(await waiting)} == {0}

    async def test_rows_are_counted_out_exactly(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path)
        await fill(buffer, 1, 0)
        reader = buffer.reader(1)
        seen = []
        for step in (1, 2):
            lease = await reader.lease(step, groups=None, rows=3, deadline_s=5, max_staleness=None)
            seen += ids(lease)
            await reader.use(step)
        # of the whole group, though it was split
        assert lease.groups[0].rewards == (0.0, 1.0, 0.0, 1.0)
        assert seen == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 1)]
        await buffer.writer(1).finish("all epochs done")
        with pytest.raises(ShortBatch, match="all epochs done"):
            await reader.lease(3, groups=None, rows=3, deadline_s=5, max_staleness=None)
        await reader.lease(3, groups=None, rows=2, deadline_s=5, max_staleness=None)
        await reader.use(3)
        with pytest.raises(EndOfData):
            await reader.lease(4, groups=None, rows=2, deadline_s=5, max_staleness=None)

    async def test_a_second_trainer_fences_the_first(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path)
        await fill(buffer, 1, 0)
        await take(buffer, 1, 1)
        waiting = asyncio.create_task(take(buffer, 1, 2))
        blocked = asyncio.create_task(
            buffer.writer(1).append(encode(group(1, 1, 0)), accepted=True)
        )
        await blocked
        assert (await buffer.start_lineage(None, None)).lineage == 2
        with pytest.raises(Fenced):
            await waiting
        for call in (
            buffer.reader(1).use(1),
            take(buffer, 1, 2),
            buffer.reader(1).consumption(1),
            buffer.writer(1).append(encode(group(1, 1, 1)), accepted=True),
            buffer.writer(2).append(encode(group(1, 1, 1)), accepted=True),
            buffer.writer(1).room(1),
            buffer.writer(1).stored_groups(0),
        ):
            with pytest.raises(Fenced):
                await call
        audit = await buffer.audit()
        assert (audit.num_uses, audit.ok) == (0, True)

    async def test_too_old_rows_are_left_out(self, tmp_path: Path) -> None:
        buffer = await self.started(tmp_path)
        await fill(buffer, 1, 0, version=Version(1, 0))
        for step in (1, 2):
            await fill(buffer, 1, step, groups=1, version=Version(1, 0))
        lease = await buffer.reader(1).lease(1, groups=3, rows=None, deadline_s=5, max_staleness=1)
        await buffer.reader(1).use(1)
        await fill(buffer, 1, 3, groups=1, version=Version(1, 1))
        lease = await buffer.reader(1).lease(3, groups=1, rows=None, deadline_s=5, max_staleness=1)
        audit = await buffer.audit()
        assert {b for b, _, _ in ids(lease)} == {3}
        assert (audit.used, audit.leased, audit.discarded, audit.ok) == (12, 4, {"stale": 4}, True)

    async def test_four_explorers_resume(self, tmp_path: Path) -> None:
        """One of four dies before its batch is closed; each goes on where it was, and only what is
        missing is explored again.
        """
        buffer = await self.started(tmp_path, num_explorers=4)
        for number in range(4):
            await fill(buffer, 1, 0, explorer=number)
            await fill(
                buffer, 1, 1, explorer=number, groups=2 if number != 2 else 1, close=number != 2
            )
        await take(buffer, 1, 1, groups=8)
        await buffer.reader(1).use(1)
        consumption = await buffer.reader(1).consumption(1)
        await buffer.close()

        buffer = await self.opened(tmp_path, num_explorers=4)
        start = await buffer.start_lineage(Version(1, 1), consumption)
        held = [
            len(await buffer.writer(2, number).stored_groups(start.cursor)) for number in range(4)
        ]
        assert (start.cursor, held) == (1, [2, 2, 1, 2] if self.durable else [0, 0, 0, 0])
        for number in range(4):
            await fill(buffer, 2, 1, explorer=number)
        lease = await take(buffer, 2, 2, groups=8)
        assert [(x.id.explorer, x.id.task) for x in decode(lease.frame)][::4] == [
            (e, t) for e in range(4) for t in range(2)
        ]
        await buffer.reader(2).use(2)
        audit = await buffer.audit()
        assert (audit.used, audit.num_uses, audit.ok) == (64, 64, True)
