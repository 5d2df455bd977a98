"""When weights go straight into vLLM's layers, and out of which memory a merged layer is packed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rft.engine import vllm_direct, vllm_worker
from rft.engine.vllm_direct import DirectLoad
from rft.engine.vllm_worker import Placed, WorkerLoader
from rft.types.ids import Version


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> WorkerLoader:
    """Of a model whose only parameter a probed layer has; what happens is in `loader.seen`."""
    seen: list[str] = []
    worker: Any = SimpleNamespace(
        rank=0,
        model_config=SimpleNamespace(dtype=torch.float32),
        vllm_config=SimpleNamespace(
            lora_config=None, parallel_config=SimpleNamespace(pipeline_parallel_size=1)
        ),
        get_model=Model,
        reload_weights=lambda weights_iterator: seen.append("reload"),
    )
    monkeypatch.setattr(vllm_worker, "expert_layers", lambda model: {})
    monkeypatch.setattr(vllm_worker, "repack_tied_heads", lambda model: seen.append("head"))
    monkeypatch.setattr(vllm_direct, "probed_modules", lambda model: [("", model)])
    monkeypatch.setattr(DirectLoad, "copy", lambda self, published: seen.append("direct"))
    monkeypatch.setattr(DirectLoad, "possible", lambda self: True)
    made = WorkerLoader(worker)
    made.seen = seen  # type: ignore[attr-defined]
    return made


def load(
    loader: WorkerLoader, error: float, monkeypatch: pytest.MonkeyPatch, *, stale: bool = False
) -> list[str]:
    seen: list[str] = loader.seen  # type: ignore[attr-defined]
    seen.clear()
    monkeypatch.setattr(vllm_worker, "probe", lambda *args, **named: (1, error, ""))
    placed = Placed({}, {})
    loader.copy({}, placed, stale=stale)
    manifest: Any = SimpleNamespace(version=Version(1, 1))
    loader.probe(placed, manifest)
    return list(seen)


def test_only_what_a_probe_has_proven_goes_straight_into_the_layers(
    loader: WorkerLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(loader, 1e-7, monkeypatch) == ["reload", "head"]
    assert load(loader, 1e-7, monkeypatch) == ["direct", "head"]
    assert load(loader, 0.7, monkeypatch, stale=True) == ["direct"]
    assert load(loader, float("nan"), monkeypatch) == ["reload", "head"], (
        "what was off is done vLLM's way"
    )
    assert load(loader, 1e-7, monkeypatch) == ["reload", "head"]
    assert load(loader, 1e-7, monkeypatch) == ["direct", "head"]


def test_other_models_go_through_vllms_reload(
    loader: WorkerLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectLoad, "possible", lambda self: False)
    assert load(loader, 1e-7, monkeypatch) == load(loader, 1e-7, monkeypatch) == ["reload", "head"]


def test_parts_that_lie_below_each_other_are_packed_from_where_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_direct, "probed_modules", lambda model: [])
    direct = DirectLoad(Model(), torch.float32)
    whole = torch.arange(40.0).view(10, 4)
    q = whole[:4]
    k = whole[4:6]
    v = whole[6:8]
    assert direct._merged([q, k, v]).data_ptr() == whole.data_ptr() and torch.equal(
        direct._merged([q, k, v]), whole[:8]
    )
    swapped = direct._merged([k, q])
    assert torch.equal(swapped, torch.cat([k, q]))
    assert torch.equal(direct._merged([q, v]), torch.cat([q, v]))
    assert direct._merged([q, v]).data_ptr() == swapped.data_ptr() != whole.data_ptr(), (
        "one buffer for all"
    )
    assert torch.equal(direct._merged([q[:, :2]]), q[:, :2]), "a column of a row-parallel layer"
    half = whole.bfloat16()
    assert direct._merged([half[:2], half[2:4]]).dtype == torch.float32
    assert torch.equal(direct._merged([q.clone(), k.clone()]), whole[:6]), "from two storages"
