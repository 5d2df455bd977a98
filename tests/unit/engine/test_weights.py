"""The reader of published weights."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from rft.collective import pinned
from rft.engine.weights import MappedWeights, PinnedPlaces, WeightIntake
from rft.testing.engine_contract import stage
from rft.types.ids import Version
from rft.types.ports import TensorSpec, WeightManifest

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.float32)}


@pytest.fixture
def manifest(tmp_path: Path) -> WeightManifest:
    return stage(tmp_path / "w", WEIGHTS, Version(1, 2))


def test_views_hold_what_was_written(manifest: WeightManifest) -> None:
    mapped = MappedWeights(manifest)
    assert mapped.bad() == ()
    for spec in manifest.tensors:
        assert np.array_equal(mapped.tensor(spec).numpy(), WEIGHTS[spec.name])


def test_writing_to_a_view_never_reaches_the_file(manifest: WeightManifest) -> None:
    before = Path(manifest.path).read_bytes()
    MappedWeights(manifest).tensor(manifest.tensors[0]).zero_()
    assert Path(manifest.path).read_bytes() == before and MappedWeights(manifest).bad() == ()


def test_one_changed_byte_is_named(manifest: WeightManifest) -> None:
    raw = bytearray(Path(manifest.path).read_bytes())
    raw[manifest.tensors[1].offset] ^= 1
    Path(manifest.path).write_bytes(raw)
    assert MappedWeights(manifest).bad() == ("b",)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shape": (7,)}, "20 bytes for shape"),
        ({"offset": 1 << 20}, "outside"),
        ({"dtype": "F8"}, "none of"),
    ],
)
def test_a_manifest_that_does_not_fit_is_bad(
    manifest: WeightManifest, change: dict[str, object], why: str
) -> None:
    spec: TensorSpec = msgspec.structs.replace(manifest.tensors[1], **change)
    mapped = MappedWeights(msgspec.structs.replace(manifest, tensors=(spec,)))
    assert mapped.bad() == ("b",)
    with pytest.raises(ValueError, match=why):
        mapped.tensor(spec)


def test_bfloat16(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.25], dtype=torch.bfloat16)
    (tmp_path / "w").write_bytes(values.view(torch.int16).numpy().tobytes())
    spec = TensorSpec("x", "BF16", (2,), 0, 4, "")
    manifest = WeightManifest(
        version=Version(1, 0), transport="checkpoint", path=str(tmp_path / "w"), tensors=(spec,)
    )
    assert torch.equal(MappedWeights(manifest).tensor(spec), values)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Calls of a process whose GPU pins memory: what is done, and its address."""
    calls: list[tuple[str, int]] = []
    for name in ("pin", "unpin"):
        monkeypatch.setattr(
            pinned,
            name,
            lambda memory, name=name: calls.append((name, memory.data_ptr())) or True,
        )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return calls


def test_a_gpu_reads_the_places_of_versions_which_are_pinned_once(
    gpu: list[tuple[str, int]], manifest: WeightManifest, tmp_path: Path
) -> None:
    intake = WeightIntake()
    in_memory = msgspec.structs.replace(manifest, transport="memory")
    for _ in range(3):
        taken = intake.take(in_memory)
        assert taken.report.intact and [what for what, _ in gpu] == ["pin"]
        view = taken.weights.tensor(manifest.tensors[0])
        assert view.data_ptr() == gpu[0][1] + manifest.tensors[0].offset
        assert np.array_equal(view.numpy(), WEIGHTS["a"])
    assert not intake.take(in_memory, damage=True).report.intact
    assert intake.take(in_memory).report.intact, "damage has not reached other engines"
    assert intake.take(manifest).report.intact and len(gpu) == 1, (
        "a checkpoint's file is not pinned"
    )


def test_a_gpu_keeps_as_many_places_as_a_trainer_has(
    gpu: list[tuple[str, int]], tmp_path: Path
) -> None:
    places = PinnedPlaces()
    files = [stage(tmp_path / str(i), WEIGHTS, Version(1, i)).path for i in range(5)]
    for file in (*files[:3], *files):
        assert bytes(places.bytes_of(file) or b"") == Path(file).read_bytes()
    at = [address for what, address in gpu if what == "pin"]
    assert [address for what, address in gpu if what == "unpin"] == at[:2] and len(at) == 5


def test_what_cannot_be_pinned_is_mapped_privately(
    manifest: WeightManifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *given: tried.append(given) or 801)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    intake = WeightIntake()
    in_memory = msgspec.structs.replace(manifest, transport="memory")
    for _ in range(2):
        assert isinstance(intake.take(in_memory).weights, MappedWeights)
    assert len(tried) == 1 and tried[0][1] == Path(manifest.path).stat().st_size
    assert "CUDA error 801" in caplog.text
