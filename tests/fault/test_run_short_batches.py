"""Whole runs whose batches come out short: they go on, or end at once with the reason; nobody waits
for anybody in vain.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft.monitor.read import read, series
from tests.helpers.command import Done, rft

CONFIG = Path(__file__).parents[1] / "integration" / "tiny_config.yaml"
REWARD = """
def sometimes(task, transcript):
    if sum(transcript.turns[0].completion.tokens) % 5 == 0:
        raise RuntimeError("bad luck")
    return 1.0
"""
REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"


def start(root: Path, model: Path, *changes: str) -> Done:
    (root / "rewards.py").write_text(REWARD)
    reward = f"buffer.explorer_input.default_reward_fn_type={root / 'rewards.py'}:sometimes"
    places = (f"model.model_path={model}", f"checkpoint_root_dir={root}", reward)
    return rft("run", "--in-process", "-c", CONFIG, *places, *changes)


def audit(root: Path) -> dict[str, int]:
    done = rft("buffer", "audit", root / "project" / "group" / "name", "--json")
    assert done.code == 0, done.output
    return dict(json.loads(done.output))


@pytest.mark.parametrize("policy", ["carry", "train"])
def test_c4_rows_are_missing_and_the_run_goes_on(
    tiny_model: Path, tmp_path: Path, policy: str
) -> None:
    """A failed run leaves a step of rows short; under the strictest schedule the explorer would
    wait for that very step.
    """
    # two steps of each explore batch
    sizes = ("buffer.train_batch_size=4", "trainer.total_steps=4")
    done = start(tmp_path, tiny_model, *sizes, f"buffer.on_short_batch={policy}")
    assert done.code == 0, done.output
    metrics = read(tmp_path / "project" / "group" / "name" / "metrics.jsonl")
    rows = series(metrics, "experience/rows")
    missing = series(metrics, "experience/missing")
    assert sum(v for _, v in series(metrics, "rollout/failed")) > 0
    assert all(
        v + (m if policy == "train" else 0) == 4
        for (_, v), (_, m) in zip(rows, missing, strict=True)
    )
    assert audit(tmp_path)["used"] == sum(v for _, v in rows)


def test_replay_in_a_whole_run(tiny_model: Path, tmp_path: Path) -> None:
    replay = (f"{REPLAY}.enable=true", f"{REPLAY}.reuse_cooldown_time=0.01", f"{REPLAY}.max_uses=2")
    done = start(tmp_path, tiny_model, *replay, "buffer.on_short_batch=carry")
    assert done.code == 0, done.output
    account = audit(tmp_path)
    assert account["used_twice"] == 0
    assert account["num_uses"] >= account["used"] * 2
