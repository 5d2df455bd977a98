"""An adapter learns on Ray with vLLM, from a model that is half-way: only the adapter travels, and every version is proven."""

import importlib.util
from pathlib import Path

import pytest

from rft.monitor.read import read, series
from rft.testing import tiny

spec = importlib.util.spec_from_file_location("runs", Path(__file__).parent / "runs.py")
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)
ADAPTER = "model.lora_configs=[{lora_rank: 8, lora_alpha: 16}]"


@pytest.mark.slow
@pytest.mark.vllm
def test_an_adapter_learns_on_ray_with_vllm(tmp_path: Path) -> None:
    never = ("explorer.eval_interval=1000", "explorer.eval_on_startup=true")
    model = tiny.make(tmp_path / "model")
    whole = runs.Run(*runs.arguments(model, tmp_path / "whole", "trainer.total_steps=45", *never), "--in-process")
    assert whole.end(900) == 0, whole.output
    (half_way,) = (runs.folder(tmp_path / "whole") / "checkpoints").glob("global_step_45/huggingface")
    more = (ADAPTER, "explorer.rollout_model.engine_type=vllm", "trainer.total_steps=40", "algorithm.optimizer.lr=3e-3", *never)
    run = runs.Run(*runs.arguments(half_way, tmp_path / "lora", *more))
    assert run.end(900) == 0, run.output
    metrics = read(runs.folder(tmp_path / "lora") / "metrics.jsonl")
    accuracy = dict(series(metrics, "eval/copy_eval/mean@1"))
    assert accuracy[40] >= min(0.9, accuracy[0] + 0.2), accuracy
    canary, sent = dict(series(metrics, "sync/canary_max_abs")), {value for _, value in series(metrics, "sync/bytes")}
    assert set(canary) == set(range(41)) and max(canary.values()) < 1e-4
    assert len(sent) == 1 and sent.pop() < 0.12 * (half_way / "model.safetensors").stat().st_size
