"""The reader of published weights."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rft.engine.weights import MappedWeights
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
