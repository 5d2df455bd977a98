"""What docs/concepts/determinism.md promises: the same run twice, and once in two parts, ends with
the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rft.launch.execute import execute

ROOT = Path(__file__).parents[3]


def outcome(folder: Path, model: Path, name: str, steps: int, *more: str) -> dict[str, str]:
    """Hashes of what the checkpoint after `steps` holds."""
    changes = [
        *(
            f"model.model_path={model}",
            f"checkpoint_root_dir={folder}",
            f"name={name}",
            f"trainer.total_steps={steps}",
        ),
        *(
            "deterministic=true",
            "buffer.batch_size=4",
            "algorithm.repeat_times=4",
            "explorer.eval_interval=2",
            *more,
        ),
        "buffer.explorer_input.eval_tasksets.0.max_rows=4",
    ]
    done = execute(ROOT / "examples" / "tiny" / "config.yaml", changes, in_process=True)
    trainer = done.run_dir / "checkpoints" / f"global_step_{steps}" / "trainer"
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(trainer.iterdir())
        if p.is_file()
    }


def answers(folder: Path, name: str) -> list[str]:
    samples = sorted((folder / "rft" / "examples" / name / "samples").glob("*.jsonl"))
    return [
        json.loads(line)["answer"] for path in samples for line in path.read_text().splitlines()
    ]


@pytest.mark.e2e
def test_repeated_and_resumed_runs_end_with_the_same_bytes(
    tmp_path: Path, tiny_model: Path
) -> None:
    once = outcome(tmp_path, tiny_model, "once", 4)
    again = outcome(tmp_path, tiny_model, "again", 4)
    outcome(tmp_path, tiny_model, "parts", 2)
    parts = outcome(tmp_path, tiny_model, "parts", 4)
    assert once == again == parts
    assert answers(tmp_path, "once") == answers(tmp_path, "again") == answers(tmp_path, "parts")
    assert outcome(tmp_path, tiny_model, "other", 4, "seed=43") != once
