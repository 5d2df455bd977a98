"""A whole run in one process with operators: rejected groups are replaced, metrics are written, the
audit by files balances.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rft.buffer.audit import audit_run
from rft.launch.execute import execute

CONFIG = Path(__file__).parent / "tiny_config.yaml"
REWARD = """
from rft.types.completion import Score

def luck(task, transcript):
    odd = float(transcript.turns[0].completion.tokens[0] % 2)
    return Score(value=odd, parts={"accuracy": odd})
"""


@pytest.mark.parametrize("storage", ["sql", "queue"])
def test_dynamic_sampling_rejects_refills_and_trains(
    tmp_path: Path, tiny_model: Path, storage: str
) -> None:
    (tmp_path / "luck.py").write_text(REWARD)
    pipeline = "data_processor.experience_pipeline"
    outcome = execute(
        CONFIG,
        [
            f"model.model_path={tiny_model}",
            f"checkpoint_root_dir={tmp_path}",
            f"buffer.explorer_input.default_reward_fn_type={tmp_path}/luck.py:luck",
            "buffer.explorer_input.taskset.repeat_times=3",
            f"buffer.trainer_input.experience_buffer.storage_type={storage}",
            "buffer.max_refill=40",
            f"{pipeline}.operators=[{{name: pass_rate_calculator}}, {{name: deduplicate}}, {{name: "
            f"dapo_dynamic_sampling}}]",
            f"{pipeline}.save_input=true",
        ],
        in_process=True,
    )
    records = [
        json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    explored = [r["values"] for r in records if r["role"] == "explorer"]
    total: Counter[str] = Counter()
    for values in explored:
        total.update(values)
    assert total["rollout/groups/accepted"] == 8 and total["rollout/groups/rejected"] > 0
    started = int(total["rollout/runs"])
    dropped = int(total["experience_pipeline/filtered_count"])
    assert started == 3 * (8 + total["rollout/groups/rejected"]) and total["rollout/failed"] == 0
    # and what deduplicate left out of the accepted ones
    assert dropped >= 3 * total["rollout/groups/rejected"]
    assert total["experience_pipeline/experience_count"] == started - dropped
    trained = [r["values"] for r in records if r["role"] == "trainer"]
    assert [v["experience/groups"] for v in trained] == [4, 4]
    assert sum(v["experience/rows"] for v in trained) == started - dropped
    audit = audit_run(outcome.run_dir)
    assert (
        audit.ok
        and audit.acked == started
        and audit.used == started - dropped
        and audit.discarded == {"filtered": dropped}
    )
    copy = [
        json.loads(line)
        for line in (outcome.run_dir / "buffer" / "explorer_output.jsonl").read_text().splitlines()
    ]
    assert len({line["id"] for line in copy}) == started and all(
        not line["reason"] for line in copy
    )
