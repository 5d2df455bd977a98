"""mode: colocate in a whole run, on CPU: vLLM sleeps before the first step of every window and
wakes with its weights.

vLLM's sleep gives nothing back on a CPU, and no GPU has run this: what is proven is the order of
the calls.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rft.monitor.read import read, series
from tests.helpers import runs

STEPS = 4
WINDOW = 2
PHASES = ["sleeps at level 2", "has its weights again", "has its kv_cache again"]


@pytest.mark.vllm
def test_engines_sleep_while_the_trainer_works(tiny_model: Path, tmp_path: Path) -> None:
    more = (
        "mode=colocate",
        "explorer.rollout_model.engine_type=vllm",
        f"synchronizer.sync_interval={WINDOW}",
        f"trainer.total_steps={STEPS}",
    )
    run = runs.Run(*runs.arguments(tiny_model, tmp_path, *runs.SMALL, *more))
    assert run.end() == 0, run.output
    folder = runs.folder(tmp_path)
    records = read(folder / "metrics.jsonl")
    assert [v for _, v in series(records, "sync/version")] == [0, 2, 4]
    assert [v for _, v in series(records, "experience/staleness/max")] == [0, 1, 0, 1]
    assert all(error <= 1e-4 for _, error in series(records, "sync/canary_max_abs"))
    assert re.findall(
        "|".join(PHASES), (folder / "logs" / "engine-0.log").read_text()
    ) == PHASES * (STEPS // WINDOW)
