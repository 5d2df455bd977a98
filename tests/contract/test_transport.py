"""Every transport keeps the same promises: whole bytes, readable by another process, never
overwritten while they may be read.
"""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from rft.collective import pinned
from rft.errors import WeightSyncFailed
from rft.sync.base import Transport
from rft.sync.settings import FixedSync
from rft.sync.transport import blob, memory
from rft.sync.transport.choose import make
from rft.types.ids import Version
from rft.types.ports import WeightManifest

KINDS = {name: dtype for dtype, name in blob._NAMES.items()}
TIED = {"lm_head.weight": "embed.weight"}


def weights(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(33, 7, generator=g),
        "layer.weight": torch.randn(5, 3, generator=g).to(torch.bfloat16),
        "layer.bias": torch.randn(3, generator=g).t(),
        "transposed": torch.randn(4, 6, generator=g).t(),
        "scalar": torch.tensor(float(seed)),
        "steps": torch.tensor([seed, 2], dtype=torch.int64),
    }


def read(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """What an engine worker does: open the path, verify, take the tensors."""
    found = {}
    with Path(manifest.path).open("rb") as f:
        for spec in manifest.tensors:
            f.seek(spec.offset)
            data = f.read(spec.nbytes)
            assert xxhash.xxh3_128_hexdigest(data) == spec.xxh3_128, spec.name
            found[spec.name] = torch.frombuffer(bytearray(data), dtype=KINDS[spec.dtype]).reshape(
                spec.shape
            )
    return found


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a
    )


def stage(transport: Transport, step: int, seed: int | None = None) -> WeightManifest:
    return transport.stage(
        Version(1, step), iter(weights(step if seed is None else seed).items()), TIED
    )


PINNED: list[int] = []  # addresses of memory that a GPU would use


def pretend_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transports write as for a GPU: to the place itself, which is hashed there."""
    PINNED.clear()
    monkeypatch.setattr(pinned, "pin", lambda memory: PINNED.append(memory.data_ptr()) or True)
    monkeypatch.setattr(pinned, "unpin", lambda memory: PINNED.remove(memory.data_ptr()))


@pytest.fixture(params=["memory", "checkpoint", "nccl", "memory-through-files", "memory-pinned"])
def transport(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Transport]:
    if request.param == "memory-through-files":
        monkeypatch.setattr(memory, "memory_is_readable", lambda: False)
        monkeypatch.setattr(memory, "_SHM", tmp_path / "shm-that-is-not-there")
    if request.param == "memory-pinned":
        pretend_to_pin(monkeypatch)
    made = make(FixedSync(sync_method=request.param.partition("-")[0]), tmp_path / "sync")
    yield made
    made.close()
    made.close()
    assert not list((tmp_path / "sync").glob("*")), "close() left files"


def test_what_is_staged_is_read_back_bit_by_bit(transport: Transport) -> None:
    manifest = stage(transport, 3)
    assert manifest.version == Version(1, 3)
    assert manifest.tied == TIED
    assert same(read(manifest), weights(3))
    assert all(t.offset % 64 == 0 for t in manifest.tensors)
    assert manifest.nbytes == sum(t.nbytes for t in weights(3).values())


def test_another_process_can_open_the_path(transport: Transport) -> None:
    manifest = stage(transport, 1)
    spec = manifest.tensors[0]
    code = "import sys,hashlib; f=open(sys.argv[1],'rb'); f.seek(int(sys.argv[2]))\n"
    code += "print(hashlib.sha256(f.read(int(sys.argv[3]))).hexdigest())"
    said = subprocess.run(
        [sys.executable, "-I", "-c", code, manifest.path, str(spec.offset), str(spec.nbytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        said.stdout.strip()
        == hashlib.sha256(weights(1)["embed.weight"].numpy().tobytes()).hexdigest()
    )


def test_without_releases_the_two_versions_before_stay_readable(transport: Transport) -> None:
    manifests = [stage(transport, 0), stage(transport, 1)]
    for step in range(2, 9):
        manifests.append(stage(transport, step))
        for old in manifests[-3:]:
            assert same(read(old), weights(old.version.step))


def test_a_failed_version_that_is_released_never_costs_the_served_one_its_bytes(
    transport: Transport,
) -> None:
    served = stage(transport, 0)
    for step in range(1, 6):  # each publish fails and is released
        failed = stage(transport, step)
        assert same(read(served), weights(0))
        transport.release(failed.version)
    assert same(read(served), weights(0))


def test_with_releases_two_places_are_enough(transport: Transport) -> None:
    paths = set()
    for step in range(6):
        paths.add(stage(transport, step).path)
        if step:
            transport.release(Version(1, step - 1))
    if "weights-1" not in next(iter(paths)):
        assert len(paths) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["embed.weight", "layer.weight"])
def test_non_finite_weights_are_never_published(
    transport: Transport, bad: float, name: str
) -> None:
    served = stage(transport, 0)
    broken = weights(1)
    broken[name].reshape(-1)[4] = bad
    with pytest.raises(WeightSyncFailed, match=f"1:1.*{name}.*NaN or infinity"):
        transport.stage(Version(1, 1), broken.items(), TIED)
    assert same(read(served), weights(0))
    assert same(read(stage(transport, 1)), weights(1))


FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_every_type_is_searched_for_non_finite_values(
    transport: Transport, dtype: torch.dtype, bad: float
) -> None:
    """U3: wherever they stand; a sum that overflows without any is no reason to refuse."""
    largest = torch.finfo(dtype).max
    count = blob.PIECE // dtype.itemsize + 9  # of more than one piece
    fine = {"w": torch.full((count,), largest, dtype=torch.float64).to(dtype)}
    assert same(read(transport.stage(Version(1, 0), fine.items(), {})), fine)
    for at in (0, count // 2, count - 1):
        broken = {"w": torch.zeros(count).to(dtype)}
        broken["w"][at] = bad
        if broken["w"][at].float().isfinite():  # the type has no infinity
            continue
        with pytest.raises(WeightSyncFailed, match="tensor w holds NaN or infinity"):
            transport.stage(Version(1, 1), broken.items(), {})


@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_ordinary_weights_need_one_pass(
    transport: Transport, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U3: `isfinite` of every value is 15 times as slow as a sum."""
    looked_at: list[int] = []
    exact = torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda x: (looked_at.append(x.numel()), exact(x))[1])
    draw = torch.Generator().manual_seed(0)
    transport.stage(
        Version(1, 0), {"w": torch.randn(3 * blob.PIECE, generator=draw).to(dtype)}.items(), {}
    )
    assert looked_at == []


def test_infinities_of_both_signs_do_not_cancel(transport: Transport) -> None:
    both = {"w": torch.tensor([float("inf"), float("-inf")], dtype=torch.bfloat16)}
    with pytest.raises(WeightSyncFailed, match="NaN or infinity"):
        transport.stage(Version(1, 0), both.items(), {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("layer.bias"), "layer.bias: was .*F32.*, is absent"),
        (lambda w: w.update(extra=torch.zeros(1)), "extra: was absent"),
        (lambda w: w.update({"layer.bias": torch.zeros(4)}), "layer.bias"),
        (lambda w: w.update({"layer.bias": torch.zeros(3, dtype=torch.bfloat16)}), "layer.bias"),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_another_set_of_tensors_than_before_is_refused(
    transport: Transport, change: object, said: str
) -> None:
    served = stage(transport, 0)
    other = weights(1)
    change(other)  # type: ignore[operator]
    with pytest.raises(WeightSyncFailed, match=said):
        transport.stage(Version(1, 1), other.items(), TIED)
    assert same(read(served), weights(0))


def test_nonsense_is_refused(transport: Transport) -> None:
    w = torch.zeros(2)
    with pytest.raises(WeightSyncFailed, match="given twice"):
        transport.stage(Version(1, 0), [("a", w), ("a", w)], {})
    with pytest.raises(WeightSyncFailed, match="no tensors"):
        transport.stage(Version(1, 0), [], {})
    with pytest.raises(WeightSyncFailed, match="tied to b, which was not given"):
        transport.stage(Version(1, 0), [("a", w)], {"h": "b"})
    with pytest.raises(WeightSyncFailed, match="as a tensor and as tied"):
        transport.stage(Version(1, 0), [("a", w), ("h", w)], {"h": "a"})
    with pytest.raises(WeightSyncFailed, match="complex64"):
        transport.stage(Version(1, 0), [("a", torch.zeros(2, dtype=torch.complex64))], {})


def test_a_generator_that_breaks_half_way_leaves_the_served_version_whole(
    transport: Transport,
) -> None:
    served = stage(transport, 0)

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", torch.zeros(33, 7)
        raise RuntimeError("gather failed")

    for step in (1, 2, 3):
        with pytest.raises(RuntimeError, match="gather failed"):
            transport.stage(Version(1, step), half(), TIED)
        assert same(read(served), weights(0))


def test_memory_leaves_no_name_and_few_descriptors(tmp_path: Path) -> None:
    before = num_descriptors()
    made = make(FixedSync(sync_method="memory"), tmp_path / "sync")
    for step in range(10):
        manifest = stage(made, step)
    assert manifest.path.startswith("/proc/")
    assert not (tmp_path / "sync").exists()
    assert num_descriptors() <= before + 3
    made.close()
    assert num_descriptors() == before
    with pytest.raises(WeightSyncFailed, match="closed"):
        stage(made, 11)


def test_memory_is_asked_for_once(tmp_path: Path) -> None:
    """A slot has its memory before it is written, but for the first version."""
    made = make(FixedSync(sync_method="memory"), tmp_path / "sync")
    given = {"a": torch.ones(3, 5), "b": torch.ones(8 << 20)}
    faults = []
    for step in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        made.stage(Version(1, step), given.items(), {})
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        if step:
            made.release(Version(1, step - 1))
    made.close()
    pages = (32 << 20) // resource.getpagesize()
    assert faults[0] + faults[1] > pages > 4 * max(faults[2:]), faults


def test_places_are_pinned_once_and_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U7: from the second version on a GPU writes to the place that engines read."""
    pretend_to_pin(monkeypatch)
    written: list[int] = []
    in_place = blob._arrived
    monkeypatch.setattr(
        blob, "_arrived", lambda *given: written.append(given[2].data_ptr()) or in_place(*given)
    )
    made = make(FixedSync(sync_method="memory"), tmp_path / "sync")
    for step in range(6):
        manifest = stage(made, step)
        assert same(read(manifest), weights(step))
        if step:
            made.release(Version(1, step - 1))
    assert len(PINNED) == len(set(PINNED)) == 2 and len(written) == 5 * len(weights(0))
    size = blob.aligned(manifest.nbytes) + 4096
    assert all(any(at <= w < at + size for at in PINNED) for w in written)
    made.close()
    assert PINNED == []


def test_checkpoint_removes_what_an_earlier_start_left(tmp_path: Path) -> None:
    folder = tmp_path / "sync"
    first = make(FixedSync(sync_method="checkpoint"), folder)
    stage(first, 7)
    (folder / "weights-1-8.tmp").write_bytes(b"half")
    second = make(FixedSync(sync_method="checkpoint"), folder)
    stage(second, 0)
    assert [f.name for f in folder.iterdir()] == ["weights-1-0.bin"]
    with pytest.raises(WeightSyncFailed, match="already staged"):
        stage(second, 0)


def test_disk_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(FixedSync(sync_method="checkpoint"), tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WeightSyncFailed, match=r"1:0.*weights-1-0\.bin.*No space left"):
        stage(made, 0)
    assert not list(tmp_path.iterdir())


def test_numpy_reads_what_torch_wrote(transport: Transport) -> None:
    spec = stage(transport, 5)
    first = spec.tensors[0]
    array = np.memmap(spec.path, np.float32, "r", first.offset, first.shape)
    assert np.array_equal(array, weights(5)["embed.weight"].numpy())
