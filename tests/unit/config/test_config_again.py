"""`config.resolved.yaml`: read again, e.g. by `rft replay` and `rft debug step`, it means the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.config.save import save
from rft.config.schema.root import RunConfig

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"
BUFFER = "buffer.trainer_input.experience_buffer"
SFT = (
    "mode=train",
    "algorithm.algorithm_type=sft",
    f"{BUFFER}.path=rows",
    "buffer.explorer_input.taskset=null",
)
REPLAYED = (
    f"{BUFFER}.replay_buffer={{enable: true, priority_fn: decay_limit_randomization, "
    f"reuse_cooldown_time: 1.0}}"
)
CASES = {
    "plain": (),
    "old log-probs of a window": ("algorithm.compute_prox_logprobs=true",),
    "a correction": ("algorithm.rollout_correction={rollout_is: token}",),
    "a data set": SFT,
    "another priority": (REPLAYED,),
    "an adapter with a rank of its own": ("model.lora_configs=[{path: adapter}]",),
    "one that is written": ("model.lora_configs=[{path: adapter, lora_rank: 32}]",),
    "a shared GPU": ("mode=colocate",),
    "a service": ("mode=serve", "trainer.device=cpu", "buffer.explorer_input.taskset=null"),
}


def planned(config: RunConfig) -> Plan:
    """Without the tree for trackers, and what is said of written values."""
    plan = resolve(config, Facts(cpus=4, gpus=1, exists=lambda path: False))
    return replace(
        plan, tracked_run=replace(plan.tracked_run, config={}), derived=(), warnings=(), notes=()
    )


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_same(name: str, tmp_path: Path) -> None:
    config = load(FILE, CASES[name])
    save(config, tmp_path)
    assert planned(load(tmp_path / "config.resolved.yaml")) == planned(config)


def test_files_beside_the_original_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    away = tmp_path / "away"
    home.mkdir()
    away.mkdir()
    (home / "mine.yaml").write_text(FILE.read_text())
    (home / "mine.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    save(
        load("home/mine.yaml", ["buffer.explorer_input.taskset.path=mine.jsonl"]), tmp_path / "run"
    )
    monkeypatch.chdir(away)
    (taskset,) = resolve(
        load(tmp_path / "run" / "config.resolved.yaml"), Facts(cpus=4, gpus=0)
    ).explorer.tasksets
    assert taskset.path == str(home / "mine.jsonl")
