"""Broadcast of weights over gloo, for real: buckets, groups that are kept or formed anew, peers
that die or never come.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rft import fault_injection as faults
from rft.collective.broadcast import Bucket, TrainerEnd, buckets
from rft.engine.weights import TakenWeights, WeightIntake
from rft.errors import WeightSyncFailed
from rft.sync.settings import FixedSync, SyncConfig
from rft.sync.transport.nccl import BroadcastTransport
from rft.types import delta
from rft.types.ids import Version
from rft.types.ports import Broadcast, TensorSpec, WeightManifest
from tests.helpers.sync_config import SmallBuckets

CHILD = """
import sys, msgspec, torch.distributed
from rft.engine.weights import WeightIntake
from rft.types.ports import WeightManifest
intake = WeightIntake(int(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin.buffer:
    taken = intake.take(msgspec.json.decode(line, type=WeightManifest))
    sums = [] if taken.report.failed else [float(taken.weights.tensor(t).double().sum()) for t in taken.weights.manifest.tensors]
    sys.stdout.buffer.write(msgspec.json.encode([taken.report.failed, list(taken.report.bad_hash), sums]) + b"\\n")
    sys.stdout.buffer.flush()
"""


def weights(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(50 + 30 * i, 100, generator=g) for i in range(6)} | {
        "scale": torch.tensor(float(seed))
    }


def config(bucket_bytes: int | None = 64 << 10, overlap: bool = False) -> SyncConfig:
    nccl = SmallBuckets(size=bucket_bytes, overlap_broadcast_and_load=overlap)
    return FixedSync(sync_method="nccl", sync_timeout=20.0, nccl=nccl)


@pytest.fixture
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BroadcastTransport]:
    made = BroadcastTransport(config(**getattr(request, "param", {})), tmp_path)
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def invited(
    manifest: WeightManifest, round: int, workers: tuple[int, ...], place: int = 0
) -> WeightManifest:
    assert manifest.broadcast is not None
    engines = tuple(range(len(workers)))
    return replace(
        manifest,
        broadcast=replace(
            manifest.broadcast, round=round, engines=engines, workers=workers, place=place
        ),
    )


def stage(transport: BroadcastTransport, step: int) -> WeightManifest:
    return transport.stage(Version(1, step), iter(weights(step).items()), {})


class Group:
    """Engines of one worker each, in threads of this process."""

    def __init__(self, transport: BroadcastTransport, pool: ThreadPoolExecutor, count: int) -> None:
        self.transport = transport
        self.pool = pool
        self.intakes = [WeightIntake() for _ in range(count)]

    def round(self, number: int, manifest: WeightManifest, **damage: bool) -> list[TakenWeights]:
        workers = (1,) * len(self.intakes)
        sent = self.pool.submit(
            asyncio.run, self.transport.send(invited(manifest, number, workers))
        )
        asked = [
            self.pool.submit(
                intake.take,
                invited(manifest, number, workers, place),
                damage=damage.get(f"engine{place}", False),
            )
            for place, intake in enumerate(self.intakes)
        ]
        sent.result(60)
        return [a.result(60) for a in asked]

    @property
    def held(self) -> set[str]:
        return {i._member._group_name for i in self.intakes if i._member is not None}


def same(taken: TakenWeights, step: int) -> bool:
    want = weights(step)
    return all(
        torch.equal(taken.weights.tensor(t), want[t.name]) for t in taken.weights.manifest.tensors
    )


# ---------------------------------------------------------------- buckets


def spec(name: str, offset: int, nbytes: int) -> TensorSpec:
    return TensorSpec(name, "U8", (nbytes,), offset, nbytes, "")


def test_buckets_hold_whole_tensors_and_no_more_than_fits() -> None:
    tensors = [
        spec("a", 0, 60),
        spec("b", 64, 30),
        spec("none", 128, 0),
        spec("c", 128, 200),
        spec("d", 384, 10),
    ]
    assert [(b.start, b.end, [t.name for t in b.tensors]) for b in buckets(tensors, 100)] == [
        (0, 94, ["a", "b"]),
        (128, 328, ["c"]),  # larger than a bucket: alone
        (384, 394, ["d"]),
    ]
    assert [b.tensors[0].name for b in buckets(tensors, None)] == ["a", "b", "c", "d"]
    assert buckets(tensors, 1000) == [
        Bucket(0, 394, (tensors[0], tensors[1], tensors[3], tensors[4]))
    ]


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize(
    "transport", [{}, {"overlap": True}, {"bucket_bytes": None}], indirect=True
)
def test_every_worker_gets_every_byte(
    request: pytest.FixtureRequest, transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    group = Group(transport, threads, 3)
    for step in (1, 2):
        taken = group.round(step, stage(transport, step))
        assert all(t.report.intact and same(t, step) for t in taken)
    assert len(group.held) == 1


def test_a_group_is_kept_until_its_members_change(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    group = Group(transport, threads, 2)
    manifest = stage(transport, 1)
    group.round(1, manifest)
    (first,) = group.held
    group.round(2, manifest)
    assert group.held == {first}
    group.intakes[1] = WeightIntake()  # an engine that was restarted
    group.round(3, manifest)
    (second,) = group.held
    assert second != first


def test_damage_on_the_way_to_one_engine_is_found_there(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    taken = Group(transport, threads, 2).round(1, stage(transport, 1), engine1=True)
    assert [t.report.bad_hash for t in taken] == [(), ("layer.0",)]


def test_who_does_not_come_is_named_and_the_others_are_told(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    manifest = invited(stage(transport, 1), 1, (1, 2))
    assert manifest.broadcast is not None
    manifest = replace(manifest, broadcast=replace(manifest.broadcast, timeout_s=0.5))
    here = threads.submit(WeightIntake().take, manifest)
    with pytest.raises(
        WeightSyncFailed,
        match=r"worker 0 of engine 1, worker 1 of engine 1 did not come within 0\.5 s",
    ):
        asyncio.run(transport.send(manifest))
    assert (
        "worker 0 of engine 1, worker 1 of engine 1 did not come" in here.result(30).report.failed
    )
    again = Group(transport, threads, 2)
    assert all(same(t, 1) for t in again.round(2, manifest))


def test_a_round_that_is_given_up_ends_at_once(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    manifest = invited(stage(transport, 1), 4, (1, 1))
    here = threads.submit(WeightIntake().take, manifest)
    sent = threads.submit(asyncio.run, transport.send(manifest))
    asyncio.run(transport.abort_round(4, "engine 1 died"))
    with pytest.raises(WeightSyncFailed, match="given up: engine 1 died"):
        sent.result(10)
    assert "given up: engine 1 died" in here.result(10).report.failed
    assert all(same(t, 1) for t in Group(transport, threads, 2).round(5, manifest))


def test_only_what_is_held_is_sent(transport: BroadcastTransport, tmp_path: Path) -> None:
    manifest = invited(stage(transport, 1), 1, (1,))
    transport.release(Version(1, 1))
    with pytest.raises(WeightSyncFailed, match=r"1:1 is not held here any more"):
        asyncio.run(transport.send(manifest))
    other = BroadcastTransport(config(), tmp_path)
    try:
        with pytest.raises(WeightSyncFailed, match="not staged by this start of the trainer"):
            asyncio.run(other.send(manifest))
    finally:
        other.close()


# ---------------------------------------------------------------- changes


@given(data=st.data(), before=st.binary(max_size=80))
def test_changes_make_the_new_bytes_of_the_old_ones_or_are_longer(
    data: st.DataObject, before: bytes
) -> None:
    now = bytearray(before)
    for at in data.draw(st.lists(st.integers(0, len(before) - 1), max_size=6)) if before else []:
        now[at] = data.draw(st.integers(0, 255))
    room = np.frombuffer(bytearray(before), np.uint8)
    wanted = np.frombuffer(bytes(now), np.uint8)
    packed = delta.pack(np.frombuffer(before, np.uint8), wanted)
    if packed is None:
        assert len(before) // 16 + 2 * np.count_nonzero(room != wanted) + 2 >= len(before)
        return
    delta.apply(room, packed)
    assert np.array_equal(room, wanted) and (len(packed) < len(now) or not now)


def narrow(step: int) -> dict[str, torch.Tensor]:
    """bfloat16 weights, of which one in ten changes with a step; beside them a table that never
    does, and a counter of 5 bytes.
    """
    made = {name: w.to(torch.bfloat16) for name, w in weights(0).items() if w.dim() == 2}
    for w in made.values():
        for past in range(step + 1):
            w.view(-1)[past::10] += 1
    return made | {
        "frozen": torch.ones(300, 100, dtype=torch.bfloat16),
        "steps": torch.full((5,), step, dtype=torch.int8),
    }


def moved(group: Group, number: int, step: int, **damage: bool) -> list[TakenWeights]:
    """A round with version `step`, whose predecessor is released as a trainer does it."""
    manifest = group.transport.stage(Version(1, step), narrow(step).items(), {})
    taken = group.round(number, manifest, **damage)
    if step > 1:
        group.transport.release(Version(1, step - 1))
    for t in taken:
        if t.report.intact:
            assert all(
                torch.equal(t.weights.tensor(s), narrow(step)[s.name]) for s in manifest.tensors
            )
    return taken


@pytest.mark.parametrize(
    "transport", [{}, {"overlap": True}, {"bucket_bytes": None}], indirect=True
)
def test_of_16_bit_weights_only_what_changed_is_sent(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    group = Group(transport, threads, 2)
    whole, *later = ([t.report.moved_bytes for t in moved(group, step, step)] for step in (1, 2, 3))
    nbytes = sum(w.nbytes for w in narrow(1).values())
    assert min(whole) >= nbytes
    for bytes in later:  # a tenth of the values and a bitmap
        assert bytes[0] == bytes[1] < nbytes // 5


def test_who_does_not_hold_the_version_before_gets_all_of_the_new_one(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    group = Group(transport, threads, 2)
    nbytes = sum(w.nbytes for w in narrow(1).values())
    moved(group, 1, 1)
    assert [bool(t.report.bad_hash) for t in moved(group, 2, 2, engine1=True)] == [False, True]
    assert all(t.report.intact and t.report.moved_bytes >= nbytes for t in moved(group, 3, 3)), (
        "engine 1 has damaged bytes"
    )
    assert all(t.report.intact and t.report.moved_bytes < nbytes for t in moved(group, 4, 4))
    group.intakes[1] = WeightIntake()
    assert all(t.report.intact and t.report.moved_bytes >= nbytes for t in moved(group, 5, 5)), (
        "engine 1 was restarted"
    )
    assert all(t.report.intact and t.report.moved_bytes < nbytes for t in moved(group, 6, 6))
    transport.release(Version(1, 6))
    assert all(t.report.intact and t.report.moved_bytes >= nbytes for t in moved(group, 7, 7)), (
        "the trainer has it no more"
    )


def test_changes_of_other_bytes_than_a_worker_holds_are_found(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    group = Group(transport, threads, 1)
    moved(group, 1, 1)
    kept = group.intakes[0]._buffer
    assert kept is not None
    kept[12] ^= 1
    assert [t.report.bad_hash for t in moved(group, 2, 2)] == [("layer.0",)]
    assert all(t.report.intact for t in moved(group, 3, 3))


def test_of_wider_weights_nothing_is_kept(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    group = Group(transport, threads, 1)
    for step in (1, 2):
        (taken,) = group.round(step, stage(transport, step))
        assert taken.report.moved_bytes == sum(
            b.end - b.start for b in buckets(taken.weights.manifest.tensors, 64 << 10)
        )
    assert group.intakes[0]._buffer is None


# ---------------------------------------------------------------- processes


class Child:
    def __init__(self, worker: int, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
        )

    def ready(self) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline() == b"ready\n"

    def ask(self, manifest: WeightManifest) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(manifest) + b"\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[str, list[str], list[float]]:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        return msgspec.json.decode(said, type=tuple[str, list[str], list[float]])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.e2e
def test_a_worker_killed_between_two_buckets_costs_one_round(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    """Engine 0 is here, engine 1 has two processes, of which one is killed (-9) when it has its
    second bucket.
    """
    manifest = stage(transport, 1)
    workers = (1, 2)
    here = WeightIntake()
    children = [Child(0), Child(1, **{faults.VARIABLE: "sync.received:2=kill"}), Child(1)]

    def round(number: int, asked: list[Child]) -> tuple[Future[None], TakenWeights]:
        sending = threads.submit(asyncio.run, transport.send(invited(manifest, number, workers)))
        for child in asked:
            child.ask(invited(manifest, number, workers, place=1))
        return sending, here.take(invited(manifest, number, workers, place=0))

    try:
        for child in children:
            child.ready()
        sending, taken = round(1, children[:2])
        with pytest.raises(
            WeightSyncFailed, match=r"sending 1:1 to engines 0, 1 broke off: .*[Cc]onnection"
        ):
            sending.result(19)
        assert "receiving 1:1 as engine 0 broke off" in taken.report.failed
        assert "receiving 1:1 as worker 0 of engine 1 broke off" in children[0].answer()[0]
        assert children[1].process.wait(10) == -9
        sending, taken = round(2, [children[0], children[2]])
        sending.result(60)
        assert taken.report.intact and same(taken, 1)
        sums = [float(t.double().sum()) for t in weights(1).values()]
        assert [children[i].answer() for i in (0, 2)] == [("", [], sums)] * 2
    finally:
        for child in children:
            child.end()


def test_nothing_listens_beyond_this_machine(
    transport: BroadcastTransport, threads: ThreadPoolExecutor
) -> None:
    import psutil

    Group(transport, threads, 2).round(1, stage(transport, 1))
    listening = [
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}


async def test_threads_of_torch_end_with_the_transport(tmp_path: Path) -> None:
    before = threading.active_count()
    made = BroadcastTransport(config(), tmp_path)
    await asyncio.to_thread(made.close)
    made.close()
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize("before", [None, "0"])
def test_errors_of_nccl_are_raised_where_they_are_waited_for(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch reads when it makes a group; a group of NCCL itself needs GPUs."""
    found: list[str | None] = []

    class Group:
        class Options:
            _timeout = None

        def __init__(self, *given: object) -> None:
            found.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    monkeypatch.setattr("torch.distributed.distributed_c10d.ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before or "")
    if before is None:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    end = TrainerEnd()
    b = Broadcast(
        host=end.host,
        port=end.port,
        token=end.token,
        backend="nccl",
        bucket_bytes=None,
        overlap=False,
        timeout_s=5.0,
        engines=(0,),
        workers=(1,),
    )
    end._form(b, "g", 0)
    assert found == ["1"] and os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    end.close()
