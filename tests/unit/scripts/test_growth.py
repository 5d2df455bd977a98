"""The small form of `scripts/bench_growth.py`: the laws of docs/measured/benchmarks.md, in
operations counted and not in seconds.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_explorer
import bench_growth
import growth_scale
import msgspec
import numpy as np
import pytest
import sqlalchemy
import xxhash
from torch.utils.flop_counter import FlopCounterMode

from rft.buffer import derived_state
from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.mixing import Mix
from rft.buffer.settings import BufferSettings, MixSettings, ReplaySettings
from rft.testing import tiny
from rft.testing.storage_contract import fill, group, take
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import RankBatch
from rft.trainer.settings import LearnerSettings, LoraSettings
from rft.types.ids import Version
from tests.helpers.counted import Counted

PER_TICK = 50  # instructions of SQLite's machine


@pytest.mark.e2e
def test_a_run_costs_the_same_however_many_are_in_flight() -> None:
    """Lines of Python, for each of 512 runs."""

    def lines(in_flight: int) -> float:
        writer = bench_explorer.Writer()
        with Counted() as counted:
            bench_explorer.play(
                512, seed=0, writer=writer, loop=bench_explorer.NoTimeForWork, in_flight=in_flight
            )
        assert writer.runs == 512
        return counted.lines / writer.runs

    lines(64)  # imports and caches
    few = lines(32)
    many = lines(512)
    assert many < 1.25 * few, (few, many)


@contextmanager
def instructions() -> Iterator[Counter[str]]:
    """Counts what SQLite's machine does in connections that are opened meanwhile, in PER_TICK
    instructions.
    """
    found: Counter[str] = Counter()

    def tick() -> int:
        found["ticks"] += 1
        return 0

    def opened(connection: Any, record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.set_progress_handler(tick, PER_TICK)

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", opened)
    try:
        yield found
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "connect", opened)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_uses": 3, "replay": ReplaySettings(cooldown_s=1e-4)}],
    ids=["fifo", "priority"],
)
async def test_a_row_costs_the_same_however_many_are_stored(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Instructions of the database: for each row to append, lease, open again and audit."""

    async def costs(batches: int) -> dict[str, float]:
        folder = tmp_path / str(batches)
        per_row = {}
        with instructions() as found:

            def since() -> int:
                ticks, found["ticks"] = found["ticks"], 0
                return ticks

            async def opened() -> Buffer:
                made = Buffer(BufferSettings(folder=folder / "buffer", **settings))
                await made.open()
                return made

            ledger = await opened()
            await ledger.start_lineage(None, None)
            for batch in range(batches - 10):
                await fill(ledger, 1, batch)
            since()
            for batch in range(batches - 10, batches):
                await fill(ledger, 1, batch)
            per_row["append"] = since() / 80
            for step in range(1, 11):
                await take(ledger, 1, step)
                await ledger.reader(1).use(step)
            per_row["lease"] = since() / 80
            await ledger.close()
            since()
            again = await opened()
            per_row["open"] = since() / (8 * batches)
            await again.close()
            since()
            audit = audit_run(folder)
            per_row["audit"] = since() / (8 * batches)
        assert audit.balanced and audit.acked == 8 * batches and not audit.problems
        return per_row

    few, many = await costs(12), await costs(96)
    assert few["append"] > 0 and few["lease"] > 0 and few["audit"] > 0
    assert {name: many[name] <= 1.5 * few[name] + 0.1 for name in many} == dict.fromkeys(
        many, True
    ), (few, many)


@pytest.mark.e2e
async def test_a_row_costs_the_same_however_often_a_run_was_resumed(tmp_path: Path) -> None:
    """Instructions of the database."""
    with instructions() as found:
        ledger = Buffer(BufferSettings(folder=tmp_path / "buffer"))
        await ledger.open()
        await ledger.start_lineage(None, None)
        for batch in range(40):
            await fill(ledger, 1, batch)
        spent = []
        for lineage in range(1, 50):
            told = await ledger.reader(lineage).consumption(0)
            found.clear()
            await ledger.start_lineage(Version(lineage, 0), told)
            spent.append(found["ticks"])
        await ledger.close()
    assert spent[-1] < 1.5 * spent[0], spent


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["once", "with mixed rows", "with replay"])
async def test_a_checkpoint_costs_the_same_however_much_was_trained(
    tmp_path: Path, kind: str
) -> None:
    """Instructions of the database for each save, and for each row and manifest of an audit."""
    settings = (
        {"max_uses": 3, "replay": ReplaySettings(cooldown_s=1e4)} if kind == "with replay" else {}
    )
    mix = (
        Mix(MixSettings(name="old_run", rows=8), group(1, 0, 0, runs=8))
        if kind == "with mixed rows"
        else None
    )

    async def costs(steps: int) -> tuple[int, float]:
        folder = tmp_path / str(steps)
        with instructions() as found:
            ledger = Buffer(BufferSettings(folder=folder / "buffer", **settings), mix=mix)
            await ledger.open()
            await ledger.start_lineage(None, None)
            for step in range(1, steps + 1):
                await fill(ledger, 1, step - 1)
                await take(ledger, 1, step)
                await ledger.reader(1).use(step)
                found.clear()
                stated = await ledger.reader(1).consumption(step)
                saved = found["ticks"]
                manifest = {
                    "format": 5,
                    "version": (1, step),
                    "parent": None,
                    "consumption": stated,
                }
                path = folder / f"checkpoints/global_step_{step}/manifest.json"
                path.parent.mkdir(parents=True)
                path.write_bytes(msgspec.json.encode(manifest))
            await ledger.close()
            found.clear()
            audit = audit_run(folder)
        assert (
            audit.ok
            and audit.manifests == steps
            and audit.num_uses == 8 * steps
            and audit.digest == stated.digest
        )
        assert stated.cursor == steps and stated.mixed == ({"old_run": 8 * steps} if mix else {})
        return saved, found["ticks"] / steps

    few, many = await costs(16), await costs(128)
    assert many[0] <= 1.5 * few[0] and many[1] <= 1.5 * few[1], (few, many)


@pytest.mark.e2e
async def test_a_checkpoint_costs_the_same_however_much_waits(tmp_path: Path) -> None:
    """Instructions of the database."""

    async def cost(batches: int) -> int:
        with instructions() as found:
            ledger = Buffer(BufferSettings(folder=tmp_path / str(batches)))
            await ledger.open()
            await ledger.start_lineage(None, None)
            for batch in range(batches):
                await fill(ledger, 1, batch)
            for step in (1, 2):
                await take(ledger, 1, step)
                await ledger.reader(1).use(step)
                found.clear()
                assert (await ledger.reader(1).consumption(step)).cursor == step
            await ledger.close()
        return found["ticks"]

    few, many = await cost(8), await cost(128)
    assert many <= few + 3, (few, many)


@pytest.mark.parametrize("size", (1, 3, 10_000))
async def test_a_digest_is_that_of_its_uses_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(derived_state, "_PART", size)
    ledger = Buffer(BufferSettings(folder=tmp_path / "buffer", max_uses=4))
    await ledger.open()
    await ledger.start_lineage(None, None)
    for batch in range(3):
        await fill(ledger, 1, batch)
    for step in range(7, 13):
        await take(ledger, 1, step)
        await ledger.reader(1).use(step)
    database = sqlite3.connect(tmp_path / "buffer/experience_buffer.db")
    every = database.execute("SELECT experience, lineage, step FROM uses").fetchall()
    database.close()
    assert len(every) == 48
    for newest in (6, 8, 12, 10):  # in the order of a run, and then an earlier one
        lines = sorted(
            f"{experience}@{lineage}:{step}".encode()
            for experience, lineage, step in every
            if step <= newest
        )
        total = sum(map(xxhash.xxh3_128_intdigest, lines)) % 2**128
        stated = await ledger.reader(1).consumption(newest)
        assert (stated.num_uses, stated.digest) == (len(lines), f"sum:{total:032x}")
        assert stated.cursor == {6: 0, 8: 0, 12: 2, 10: 1}[newest], (
            "what is used again later is not wholly used"
        )
    await ledger.close()


@pytest.mark.e2e
def test_a_large_ledger_is_compared_with_the_small_one_that_took_turns_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_growth, "SMALL", 2176)
    monkeypatch.setattr(bench_growth, "LEASES", 34)
    found = bench_growth.buffer(4352)
    assert set(found) == {
        f"{x}_us_per_row{of}"
        for x in ("append", "lease", "reopen", "audit")
        for of in ("", "_of_small")
    }
    assert min(found.values()) > 0
    with pytest.raises(ValueError, match="a multiple of 2176 rows"):
        bench_growth.buffer(3000)


def test_a_slower_core_does_not_count_against_a_large_ledger() -> None:
    quiet = {"lease": 32.0, "lease_of_small": 32.0}
    busy = {"lease": 54.0, "lease_of_small": 54.0}
    assert bench_growth._check({10: quiet, 1000: busy}, "buffer", "lease", 1.5).ratio == 1.5
    assert (
        bench_growth._check({10: {"us": 32.0}, 1000: {"us": 54.0}}, "runs", "us", 1.5).ratio
        == 0.889
    ), "without a small one"


def test_a_sync_asks_each_engine_the_same_and_the_trainer_once() -> None:
    one, eight = (asyncio.run(bench_growth.synced(n, versions=3)) for n in (1, 8))
    assert one.asked_of_each == eight.asked_of_each > 0
    assert one.scorer_calls == eight.scorer_calls == 3
    assert one.positions == eight.positions > 0, "engines that draw the same are scored once"


@pytest.mark.e2e
def test_a_token_costs_a_constant_and_a_part_linear_in_its_context() -> None:
    """Floating point operations of a train step on 512 tokens."""
    with bench_growth.tiny_learner(512) as learner:

        def flops(length: int) -> int:
            rows = bench_growth.rows(512 // length, length, np.random.default_rng(0))
            counter = FlopCounterMode(display=False)
            with counter:
                learner.step(
                    RankBatch(step=1, micro_batches=(rows,), tokens=256, rows=len(rows)), None
                )
            return counter.get_total_flops()

        short, middle, long = (flops(length) for length in (64, 128, 256))
    assert (
        short < 1.3 * (2 * short - middle)
        and abs((long - middle) / 2 - (middle - short)) < 0.05 * short
    )


@pytest.mark.e2e
def test_a_weight_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    """Floating point operations of a train step with LoRA, for each weight of the layers."""

    def flops(layers: int) -> float:
        made = tiny.make(tmp_path / str(layers), num_hidden_layers=layers)
        counter = FlopCounterMode(display=False)
        learner = Learner(LearnerSettings(model_path=str(made), cpu_threads=1, lora=LoraSettings()))
        try:
            rows = bench_growth.rows(1, 64, np.random.default_rng(0))
            with counter:
                learner.step(RankBatch(step=1, micro_batches=(rows,), tokens=32, rows=1), None)
            return counter.get_total_flops() / sum(p.numel() for p in learner.policy.parameters())
        finally:
            learner.close()

    few = flops(2)
    many = flops(16)
    assert many < 1.5 * few, (few, many)


@pytest.mark.e2e
def test_a_broadcast_sends_each_byte_to_each_receiver_once(tmp_path: Path) -> None:
    sent = {n: growth_scale.broadcast(n, mb=1, versions=2).moved for n in (1, 3)}
    assert sent == {1: 1 << 20, 3: 1 << 20}
