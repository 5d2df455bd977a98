"""A run that trains an adapter, end to end in one process: engines sample with it, and a resumed
run goes on with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rft.cli.export_command import copy_model
from rft.errors import WeightSyncFailed
from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.trainer.model import adapterfiles
from rft.types.adapter import key

TINY = Path(__file__).parent / "tiny_config.yaml"


def numbers(run_dir: Path, name: str) -> dict[int, float]:
    return dict(series(read(run_dir / "metrics.jsonl"), name))


def test_alone_or_merged_is_the_same_run(tiny_model: Path, tmp_path: Path) -> None:
    """The same versions, proven the same way; only what travels differs."""
    common = [
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "algorithm.optimizer.lr=0.01",
    ]
    runs = {
        merge: execute(
            TINY,
            [
                *common,
                f"name=run-{merge}",
                f"model.lora_configs=[{{lora_rank: 4, merge: {merge}}}]",
            ],
            in_process=True,
        )
        for merge in ("false", "true")
    }
    alone, merged = (numbers(r.run_dir, "sync/bytes") for r in runs.values())
    assert set(alone) == set(merged) and all(alone[s] < 0.2 * merged[s] for s in alone)
    for r in runs.values():
        assert max(numbers(r.run_dir, "sync/canary_max_abs").values()) < 1e-5
        moved = numbers(r.run_dir, "sync/canary_moved")
        assert moved[max(moved)] > 3 * numbers(r.run_dir, "sync/canary_limit")[max(moved)], (
            "the canary can tell the versions apart"
        )


def test_a_rejected_adapter_leaves_the_one_before(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third load and both tries of the fourth do nothing: the canary sees it, the way back is
    proven, the run ends resumable.
    """
    given = [
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "algorithm.optimizer.lr=0.01",
    ]
    given += ["model.lora_configs=[{lora_rank: 4}]"]
    monkeypatch.setenv("RFT_FAULT", "sync.stale_head:3-")
    with pytest.raises(
        WeightSyncFailed,
        match=r"computes with other weights than published.* serve 1:1 again, verified",
    ):
        execute(TINY, given, in_process=True)
    monkeypatch.delenv("RFT_FAULT")
    assert execute(TINY, given, in_process=True).version.step == 2


def test_an_adapter_is_learnt_published_saved_and_resumed(tiny_model: Path, tmp_path: Path) -> None:
    given = [
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "model.lora_configs=[{name: small, lora_rank: 4, target_modules: [q_proj, o_proj, "
        "down_proj]}]",
        "algorithm.kl_loss_fn=k2",
        "algorithm.optimizer.lr=0.01",
        "trainer.checkpoint.save_contents=[model, optimizer, extra]",
    ]
    first = execute(TINY, given, in_process=True)
    again = execute(TINY, [*given, "trainer.total_steps=3"], in_process=True)
    assert (
        again.resumed_from is not None and again.resumed_from.step == 2 and again.version.step == 3
    )
    metrics = read(first.run_dir / "metrics.jsonl")
    canary = dict(series(metrics, "sync/canary_max_abs"))
    assert set(canary) == {0, 1, 2, 3} and max(canary.values()) < 1e-5, (
        "engines add the adapter to their own base, as the trainer does"
    )
    sent = {value for _, value in series(metrics, "sync/bytes")}
    assert sent == {4.0 * 4 * sum(a + b for a, b in ((128, 128), (128, 128), (256, 128))) * 2}, (
        "A and B of two layers, nothing else"
    )
    assert dict(series(metrics, "actor/kl"))[1] == 0.0, "a new adapter is the base"
    assert dict(series(metrics, "actor/kl"))[3] > 0.0
    adapter = copy_model(first.run_dir, tmp_path / "adapter", None, adapter=True)
    form, _, _ = adapterfiles.read(adapter)
    assert len(form.modules) == 6 and form.base_name == str(tiny_model)
    parts = load_file(adapter / adapterfiles.WEIGHTS)
    base = load_file(tiny_model / "model.safetensors")
    merged = load_file(copy_model(first.run_dir, tmp_path / "model", None) / "model.safetensors")
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module in form.modules:
            a, b = (parts[key(module, side)] for side in "AB")
            assert not torch.equal(merged[name], weight)
            weight = weight + form.scale * b @ a
        assert torch.allclose(merged[name], weight, atol=1e-6), name
