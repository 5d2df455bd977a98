"""PPO with a critic, four updates for each batch: a random model learns the tiny task, whatever the
seed.
"""

from __future__ import annotations

import pytest

from rft.monitor.read import read, series
from rft.testing import tiny
from tests.helpers import runs


@pytest.mark.parametrize(
    ("seed", "steps", "gain"),
    [(0, 22, 0.25), *(pytest.param(seed, 36, 0.3, marks=pytest.mark.slow) for seed in range(3))],
)
def test_it_learns_with_a_critic(tmp_path, seed, steps, gain):
    model = tiny.make(tmp_path / "model", seed=seed)
    overrides = (
        *(
            f"seed={seed}",
            "algorithm.algorithm_type=ppo",
            "trainer.ppo_epochs=4",
            "trainer.critic.optimizer.lr=1e-3",
        ),
        *(
            f"trainer.total_steps={steps}",
            "explorer.eval_interval=1000",
            "explorer.eval_on_startup=true",
            "trainer.cpu_threads=1",
        ),
    )
    run = runs.Run(*runs.arguments(model, tmp_path / "runs", *overrides), "--in-process")
    assert run.end() == 0, run.output
    records = read(runs.folder(tmp_path / "runs") / "metrics.jsonl")
    accuracy = dict(series(records, "eval/copy_eval/mean@1"))
    assert accuracy[steps] >= accuracy[0] + gain, accuracy
    explained = dict(series(records, "critic/vf_explained_var"))
    assert explained[1] < 0.1 and explained[steps] > 0.2, explained
