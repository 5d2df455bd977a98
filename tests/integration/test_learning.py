"""A random model learns the tiny task from scratch, in one process, whatever the seed of its
weights, its data and its sampling.
"""

import pytest

from rft.monitor.read import read, series
from rft.testing import tiny
from tests.helpers import runs


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_it_learns_in_eighty_steps(tmp_path, seed):
    model = tiny.make(tmp_path / "model", seed=seed)
    overrides = (f"seed={seed}", "explorer.eval_interval=1000", "explorer.eval_on_startup=true")
    run = runs.Run(*runs.arguments(model, tmp_path / "runs", *overrides), "--in-process")
    assert run.end() == 0, run.output
    accuracy = dict(
        series(read(runs.folder(tmp_path / "runs") / "metrics.jsonl"), "eval/copy_eval/mean@1")
    )
    # seeds and processors end between 0.57 and 1.0: the claim is that it learns, not how far
    assert accuracy[0] < 0.1 and accuracy[80] >= 0.4, accuracy
