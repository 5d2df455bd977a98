"""The buffer against the one of trinity-rft: durable writes, reads up to the tensors, waking up a
reader, priority reads at scale.

Depends on `bench_race`'s two sides.  Invariant: what both sides wrote and read is compared before a
ratio is told.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import bench_harness as harness
import msgspec
import torch
from bench_race import (
    BATCH,
    GROUP,
    GROUPS,
    Ours,
    Trinity,
    Work,
    agree,
    append,
    close_batch,
    facts,
    spread,
    within,
)

from rft.algorithm.composition import Algorithm, build
from rft.algorithm.settings import AlgorithmSettings
from rft.buffer.settings import ReplaySettings
from rft.trainer.model import batch as batches_of
from rft.trainer.model.batch import MicroBatch
from rft.trainer.rows import batch_builder
from rft.trainer.rows.pack import Budget, plan
from rft.types.block import decode, encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience
from rft.types.ids import Version
from rft.types.ports import Lease

# ---------------------------------------------------------------- B1


def buffer_append_durable(quick: bool) -> harness.Result:
    """Seconds of trinity-rft's `SQLExperienceStorage` / seconds of ours for the same experiences,
    from objects to acknowledged.

    `process` survives kill -9 of every process and must be 10 times as fast, `power` is synced to
    disk before it is acknowledged and must be 5 times as fast; `_4`: four writers at once.  `jsonl`
    is its text form, which leaves all arrays out.  `share_of_raw_disk`: of the speed at which the
    bare payload can be written and synced.
    """
    count, rounds = (4096, 3) if quick else (20_480, 5)
    work = Work(count)
    rows = {n: work.experiences(explorers=n) for n in (1, 4)}
    frames = [encode(rows[1][at : at + GROUP]) for at in range(0, count, GROUP)]
    measured = harness.probes()
    with (
        tempfile.TemporaryDirectory(prefix="rft-bench-") as name,
        Trinity(work, Path(name)) as peer,
    ):
        folder = Path(name)
        agreed: set[int] = set()

        async def write(durability: str, writers: int) -> float:
            async with Ours(folder, durability=durability, num_explorers=writers) as ours:
                began = time.perf_counter()
                mine = [
                    [x for x in rows[writers] if x.id.group.explorer == n] for n in range(writers)
                ]
                await asyncio.gather(*(ours.write(part, n) for n, part in enumerate(mine)))
                seconds = time.perf_counter() - began
                if writers not in agreed:
                    agreed.add(writers)
                    agree("write", facts(await ours.drain(count // BATCH)), theirs(writers)[1])
                return seconds

        def theirs(writers: int) -> tuple[float, dict[str, Any]]:
            path = peer.database()
            answer = peer.ask("write", path=path, rows=count, writers=writers)
            Path(path).unlink()
            return answer.pop("seconds"), answer

        def jsonl() -> float:
            path = Path(peer.database()).with_suffix(".jsonl")
            seconds: float = peer.ask("write_jsonl", path=str(path), rows=count)["seconds"]
            path.unlink()
            return seconds

        seconds = harness.all_in_turn(
            {
                "process_1": lambda: asyncio.run(write("process", 1)),
                "trinity_1": lambda: theirs(1)[0],
                "power_1": lambda: asyncio.run(write("power", 1)),
                "raw": lambda: raw_write(folder / "raw", frames),
                "process_4": lambda: asyncio.run(write("process", 4)),
                "trinity_4": lambda: theirs(4)[0],
                "power_4": lambda: asyncio.run(write("power", 4)),
                "jsonl": jsonl,
            },
            rounds,
        )
        versions = peer.versions
    goals = {"process_1": 10.0, "process_4": 10.0, "power_1": 5.0, "power_4": 5.0}
    checks = [
        harness.speed_ratio(name, seconds[name], seconds[f"trinity_{name[-1]}"], goal)
        for name, goal in goals.items()
    ]
    checks.append(
        harness.speed_ratio("jsonl_without_arrays", seconds["process_1"], seconds["jsonl"], None)
    )
    checks.append(
        harness.speed_ratio("share_of_raw_disk", seconds["power_1"], seconds["raw"], None)
    )
    rate = {name: round(count / statistics.median(s)) for name, s in seconds.items()}
    size = sum(map(len, frames))
    about = {
        "experiences": count,
        "mean_tokens": round(float(work.lengths.mean())),
        "bytes_each": round(size / count),
    }
    return harness.Result(
        "buffer_append_durable",
        checks,
        {**about, "experiences_per_s": {n: r for n, r in rate.items() if n in goals}},
        {"experiences_per_s": {n: r for n, r in rate.items() if n not in goals and n != "raw"}},
        {
            **measured,
            "raw_write_sync_mb_s": round(size / statistics.median(seconds["raw"]) / 1e6, 1),
        },
        versions=versions,
    )


def raw_write(path: Path, frames: Sequence[bytes]) -> float:
    """The bare payload, synced batch by batch."""
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(frames), GROUPS):
            file.write(b"".join(frames[at : at + GROUPS]))
            os.fdatasync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


# ---------------------------------------------------------------- B2


def buffer_read_collate(quick: bool) -> harness.Result:
    """Seconds of trinity-rft / seconds of ours from the SQL storage to the padded tensors of
    batches of 64; goal 3.

    Ours leases (which is written down), compares the payload with its hashes, decodes, checks that
    the rows can be trained on, packs and makes the tensors; the peer reads (which counts the rows
    as used), deserialises and gathers.  What ours records once the step has been taken, and the
    peer has nothing for, is left out; `store_to_tensors_and_use` has it.  `bytes_to_tensors` leaves
    the database out on both sides.  Nobody takes advantages; `with_advantages_ms` is ours from
    bytes to planned micro-batches, advantages and metrics included and tensors not.
    """
    batches, rounds = (8, 3) if quick else (32, 5)
    work = Work(batches * BATCH)
    rows = work.experiences()
    measured = harness.probes()
    leases: list[Lease] = []  # of the warm-up
    steps = itertools.count(1)
    and_use: list[float] = []  # of all rounds
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    with (
        tempfile.TemporaryDirectory(prefix="rft-bench-") as name,
        Trinity(work, Path(name)) as peer,
        asyncio.Runner() as runner,
    ):
        ours = runner.run(Ours(Path(name)).__aenter__())
        path = peer.database()
        peer.ask("fill", path=path, rows=batches * BATCH * (rounds + 1))
        for again in range(rounds + 1):
            runner.run(ours.write([_moved(x, again * batches) for x in rows]))

        async def read() -> float:
            seconds = 0.0
            whole = 0.0
            told = Counter[str]()
            for _ in range(batches):
                step = next(steps)
                began = time.perf_counter()
                lease = await ours.lease(step)
                made = tensors(lease)
                seconds += time.perf_counter() - began
                await ours.reader.use(step)
                whole += time.perf_counter() - began
                told.update(_tensor_facts(made))
                if step <= batches:
                    leases.append(lease)
            found["ours"].append(dict(told))
            and_use.append(whole)
            return seconds

        def peer_read() -> float:
            answer = peer.ask("read", path=path, batches=batches)
            found["peer"].append(answer["tensors"])
            seconds: float = answer["seconds"]
            return seconds

        def unpack() -> float:
            began = time.perf_counter()
            for lease in leases:
                tensors(lease)
            return time.perf_counter() - began

        def peer_unpack() -> float:
            seconds: float = peer.ask("unpack", batches=batches)["seconds"]
            return seconds

        store = harness.all_in_turn({"ours": lambda: runner.run(read()), "peer": peer_read}, rounds)

        def whole() -> float:
            began = time.perf_counter()
            for lease in leases:
                batch_builder.build_step(
                    batch_builder.decode_lease(lease), _grpo(), _BUDGET, world_size=1
                )
            return time.perf_counter() - began

        bare = harness.all_in_turn({"ours": unpack, "peer": peer_unpack, "whole": whole}, rounds)
        for both in zip(found["ours"], found["peer"], strict=True):
            agree("tensors", *({name: round(n, 1) for name, n in told.items()} for told in both))
        runner.run(ours.__aexit__())
        versions = peer.versions
    size = sum(len(lease.frame) for lease in leases)

    def numbers(side: str) -> dict[str, float]:
        seconds = statistics.median(store[side])
        alone = statistics.median(bare[side])
        return {
            "ms_per_batch": round(seconds / batches * 1e3, 2),
            "mb_s": round(size / seconds / 1e6, 1),
            "bytes_to_tensors_mb_s": round(size / alone / 1e6, 1),
        }

    share = size / statistics.median(bare["ours"]) / 1e9 / measured["memcpy_gb_s"]
    return harness.Result(
        "buffer_read_collate",
        [
            harness.speed_ratio("store_to_tensors", store["ours"], store["peer"], 3.0),
            harness.speed_ratio("store_to_tensors_and_use", and_use[1:], store["peer"], None),
            harness.speed_ratio("bytes_to_tensors", bare["ours"], bare["peer"], None),
        ],
        {
            **numbers("ours"),
            "share_of_memcpy": round(share, 4),
            "with_advantages_ms": round(statistics.median(bare["whole"]) / batches * 1e3, 2),
        },
        numbers("peer"),
        measured,
        versions=versions,
    )


_BUDGET = Budget(1 << 20, layout="padded")


def tensors(lease: Lease) -> MicroBatch:
    """The trainer's own way from a lease to one padded micro-batch, but for the advantages."""
    rows = batch_builder.decode_lease(lease).rows
    ((cut,),) = plan(rows, 1, _BUDGET)
    rows = [rows[i] for i in cut]
    return batches_of.make(rows, layout="padded", device=torch.device("cpu"))


@cache
def _grpo() -> Algorithm:
    return build(AlgorithmSettings())


def _tensor_facts(made: MicroBatch) -> dict[str, float]:
    targets = made.targets.numpy()  # torch would wake its threads, which then spin
    logprobs = made.rollout_logprobs.numpy()
    return {
        "trained": len(targets),
        "targets": int(targets.sum()),
        "logprobs": float(logprobs.sum(dtype=float)),
    }


def _moved(x: Experience, batches: int) -> Experience:
    """The same, some explore batches later."""
    return msgspec.structs.replace(x, id=msgspec.structs.replace(x.id, batch=x.id.batch + batches))


# ---------------------------------------------------------------- B3


def buffer_wakeup(quick: bool) -> harness.Result:
    """The last group of a train batch is written at a random time while the reader waits: from its
    acknowledgement to the reader holding the batch of 64, at most 5 ms for 99 of 100.

    In between the explore batch is closed.  The ratios are medians of trinity-rft / medians of
    ours, by round, until the batch is also decoded: its SQL reader asks once a second, its queue
    lives in an actor.
    """
    samples, waits, rounds = (60, 6, 3) if quick else (200, 20, 5)
    work = Work(16 * BATCH)
    rows = work.experiences()
    measured = harness.probes()
    rng = random.Random(0)
    held: list[float] = []
    decoded: list[float] = []
    theirs: dict[str, list[float]] = {"sql": [], "queue": []}
    with (
        tempfile.TemporaryDirectory(prefix="rft-bench-") as name,
        Trinity(work, Path(name)) as peer,
    ):

        def ours() -> float:
            found = asyncio.run(
                _wake_ours(Path(name), rows, [rng.uniform(0.005, 0.05) for _ in range(samples)])
            )
            held.extend(h for h, _ in found)
            decoded.extend(d for _, d in found)
            return statistics.median(d for _, d in found)

        def trinity(kind: str) -> float:
            path = peer.database() if kind == "sql" else peer.database() + ".jsonl"
            found = peer.ask(
                f"wake_{kind}", path=path, delays=[rng.uniform(0.05, 1.05) for _ in range(waits)]
            )["waits"]
            theirs[kind].extend(found)
            return float(statistics.median(found))

        medians = harness.all_in_turn(
            {"ours": ours, "sql": lambda: trinity("sql"), "queue": lambda: trinity("queue")},
            rounds,
            discard=1,
        )
        versions = peer.versions
    return harness.Result(
        "buffer_wakeup",
        [
            within("p99_at_most_5_ms", held[samples:], 0.005, 0.99),
            harness.speed_ratio("vs_sql", medians["ours"], medians["sql"], None),
            harness.speed_ratio("vs_queue", medians["ours"], medians["queue"], None),
        ],
        {"held": spread(held[samples:]), "decoded": spread(decoded[samples:])},
        {kind: spread(found[waits:]) for kind, found in theirs.items()},
        measured,
        versions=versions,
    )


async def _wake_ours(
    folder: Path, rows: Sequence[Experience], delays: Sequence[float]
) -> list[tuple[float, float]]:
    """Seconds until the reader holds each batch, and until it is decoded."""
    async with Ours(folder) as ours:
        writer = ours.writer()
        found = []

        async def hold(step: int) -> tuple[float, float]:
            lease = await ours.lease(step)
            held = time.perf_counter()
            if (count := len(decode(lease.frame))) != BATCH:
                raise RuntimeError(f"the reader came back with {count} of {BATCH} experiences")
            return held, time.perf_counter()

        for i, delay in enumerate(delays):
            start = BATCH * i % len(rows)
            batch = [_moved(x, i - x.id.batch) for x in rows[start : start + BATCH]]
            await append(writer, batch[:-GROUP])
            reading = asyncio.create_task(hold(i + 1))
            await asyncio.sleep(delay)
            await append(writer, batch[-GROUP:])
            written = time.perf_counter()
            await close_batch(writer, batch)
            held, decoded = await reading
            found.append((held - written, decoded - written))
            await ours.reader.use(i + 1)
        return found


# ---------------------------------------------------------------- at scale


def priority_read_at_scale(quick: bool) -> harness.Result:
    """100,000 experiences wait; a read takes the 64 of highest priority, payload included: at most
    10 ms for 99 of 100.

    Ours: `replay_buffer` with linear_decay over 200 weight versions, from the call to the decoded
    rows.  The ratio is against trinity-rft's priority read of its SQL storage, medians by round.
    """
    count, reads, rounds = (100_000, 100, 3) if quick else (100_000, 300, 5)
    work = Work(1024)
    measured = harness.probes()
    mine: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="rft-bench-") as name,
        Trinity(work, Path(name)) as peer,
        asyncio.Runner() as runner,
    ):
        path = peer.database()
        peer.ask("fill", path=path, rows=count)
        ours = runner.run(
            Ours(Path(name), replay=ReplaySettings()).after(Version(1, 200)).__aenter__()
        )
        runner.run(_fill(ours, work.experiences(), count))
        step = 0

        async def read() -> float:
            nonlocal step
            found = []
            for _ in range(reads):
                step += 1
                began = time.perf_counter()
                rows = decode((await ours.lease(step, groups=None, rows=BATCH)).frame)
                found.append(time.perf_counter() - began)
                if len(rows) != BATCH:
                    raise RuntimeError(f"the read gave {len(rows)} of {BATCH} experiences")
                await ours.reader.use(step)
            mine.extend(found)
            return statistics.median(found)

        theirs: list[float] = []

        def peer_read() -> float:
            each = peer.ask("read", path=path, batches=20)["each"]
            theirs.extend(each)
            return float(statistics.median(each))

        medians = harness.all_in_turn(
            {"ours": lambda: runner.run(read()), "peer": peer_read}, rounds
        )
        runner.run(ours.__aexit__())
        versions = peer.versions
    return harness.Result(
        "priority_read_at_scale",
        [
            within("p99_at_most_10_ms", mine[reads:], 0.010, 0.99),
            harness.speed_ratio("vs_sql", medians["ours"], medians["peer"], None),
        ],
        {"experiences": count, **spread(mine[reads:])},
        spread(theirs[20:]),
        measured,
        versions=versions,
    )


async def _fill(ours: Ours, rows: Sequence[Experience], count: int) -> None:
    """Batches whose versions are spread over the 200 steps before."""
    for number in range(-(-count // BATCH)):
        start = BATCH * number % len(rows)
        version = Version(1, number * 37 % 200)
        await ours.write(
            [_aged(x, number, ours.lineage, version) for x in rows[start : start + BATCH]]
        )


def _aged(x: Experience, batch: int, lineage: int, version: Version) -> Experience:
    (span,) = x.version_spans
    name = msgspec.structs.replace(x.id, batch=batch, lineage=lineage)
    return msgspec.structs.replace(
        x, id=name, version_spans=(VersionSpan(version, span.start, span.end),)
    )
