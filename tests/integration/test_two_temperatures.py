"""Two tasksets with temperatures and group sizes of their own train in one run, and the trainer
sees every token as it was drawn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.preflight.check import load_plan
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows import batch_builder
from rft.types.block import decode
from rft.types.experience import Experience
from rft.types.ports import Lease, ScoreRow

CONFIG = Path(__file__).parent / "tiny_config.yaml"
TEMPERATURES = {"cool": 0.6, "warm": 1.2}
RUNS = {"cool": 2, "warm": 4}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    root = tmp_path_factory.mktemp("two_temperatures")
    values: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    values["checkpoint_root_dir"] = str(root)
    values["model"] |= {"model_path": str(tiny_model), "max_response_tokens": 4}
    # a random model is never right; this reward differs between the runs of a group, so that every
    # row is trained
    (root / "reward.py").write_text(
        "def spread(task, transcript): return sum(transcript.answer.encode()) % 17 / 17\n"
    )
    given = values["buffer"]["explorer_input"]
    given["default_reward_fn_type"] = f"{root}/reward.py:spread"
    del given["taskset"]
    given["tasksets"] = [
        {
            "name": name,
            "path": "rft.testing.tiny:copy_tasks",
            "weight": 1,
            "rollout_args": {"temperature": TEMPERATURES[name]},
            "repeat_times": RUNS[name],
        }
        for name in TEMPERATURES
    ]
    values["trainer"]["total_steps"] = 3
    file = root / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="module")
def leases(config: Path) -> list[Lease]:
    """What each train step of the run was given."""
    seen: list[Lease] = []
    read = batch_builder.decode_lease

    def keep(lease: Lease, **needs: Any) -> batch_builder.DecodedLease:
        seen.append(lease)
        return read(lease, **needs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_builder, "decode_lease", keep)
        execute(config, [], in_process=True)
    return seen


@pytest.fixture(scope="module")
def first(leases: list[Lease]) -> list[Experience]:
    """The rows of the first step: drawn, and here scored again, by the model as it was loaded."""
    return decode(leases[0].frame)


def test_both_train_with_groups_of_their_own(config: Path, leases: list[Lease]) -> None:
    assert [lease.step for lease in leases] == [1, 2, 3]
    for lease in leases:
        rows = decode(lease.frame)
        assert {row.temperature for row in rows if row.taskset == "cool"} == {0.6}
        assert {row.temperature for row in rows if row.taskset == "warm"} == {1.2}
        groups = Counter((row.taskset, str(row.group)) for row in rows)
        assert Counter(name for name, _ in groups) == {"cool": 2, "warm": 2}
        assert all(count == RUNS[name] for (name, _), count in groups.items())
    apart = dict(
        series(read(load_plan(config)[1].run_dir / "metrics.jsonl"), "mismatch/abs_diff_max")
    )
    assert set(apart) == {1, 2, 3} and max(apart.values()) <= 1e-4


@pytest.mark.parametrize("taskset", list(TEMPERATURES))
def test_engine_and_trainer_agree(config: Path, first: list[Experience], taskset: str) -> None:
    assert apart(config, first, taskset, None) <= 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.2])
def test_one_temperature_for_all_would_be_seen(
    config: Path, first: list[Experience], temperature: float
) -> None:
    wrong = [name for name, own in TEMPERATURES.items() if own != temperature]
    assert max(apart(config, first, name, temperature) for name in wrong) >= 0.1


def apart(config: Path, rows: list[Experience], taskset: str, temperature: float | None) -> float:
    """Largest difference between the engine's log-probs and the learner's; `temperature` is taken
    for all tokens if given.
    """
    given = [row for row in rows if row.taskset == taskset]
    starts = [int(row.loss_mask.argmax()) for row in given]
    asked = [
        ScoreRow(
            tokens=row.tokens,
            prompt_length=start,
            temperature=row.temperature if temperature is None else temperature,
        )
        for row, start in zip(given, starts, strict=True)
    ]
    scored = asyncio.run(Ranks(Learner(load_plan(config)[1].learner)).score(asked))
    return max(
        float(np.abs(found - row.logprobs[start:]).max())
        for row, start, found in zip(given, starts, scored, strict=True)
    )
