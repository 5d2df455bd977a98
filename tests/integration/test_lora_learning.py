"""An adapter learns on Ray with vLLM: only the adapter travels, and every version is proven.

The random model's embedding is frozen and is its output layer too: its rows are so short (0.02 each
entry) that no adapter can make a digit likelier than about 0.05.  From 0.005 that is what there is
to learn.
"""

from pathlib import Path
from statistics import mean

import pytest

from rft.monitor.read import read, series
from tests.helpers import runs

STEPS = 60


@pytest.mark.slow
@pytest.mark.vllm
def test_an_adapter_learns_on_ray_with_vllm(tiny_model: Path, tmp_path: Path) -> None:
    given = (
        "model.lora_configs=[{lora_rank: 32, lora_alpha: 64}]",
        "explorer.rollout_model.engine_type=vllm",
    )
    run = runs.Run(
        *runs.arguments(
            tiny_model,
            tmp_path,
            *given,
            f"trainer.total_steps={STEPS}",
            "explorer.eval_interval=1000",
        )
    )
    assert run.end(900) == 0, run.output
    metrics = read(runs.folder(tmp_path) / "metrics.jsonl")
    reward = [value for _, value in series(metrics, "experience/reward/mean")]
    assert mean(reward[-15:]) > 3 * mean(reward[:15]), reward
    canary = dict(series(metrics, "sync/canary_max_abs"))
    sent = {value for _, value in series(metrics, "sync/bytes")}
    assert set(canary) == set(range(STEPS + 1)) and max(canary.values()) < 1e-4
    assert len(sent) == 1 and sent.pop() < 0.5 * (tiny_model / "model.safetensors").stat().st_size
