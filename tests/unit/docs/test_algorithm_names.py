"""docs/algorithms/names.md: every entry means something here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.algorithm.catalog import algorithm_defaults
from rft.config.load import from_dict
from rft.config.plan import Facts
from rft.config.resolve import resolve

PAGE = Path(__file__).parents[3] / "docs" / "algorithms" / "names.md"
ENTRIES = re.findall(r"^\| .* \| `(\{.*\})` \|", PAGE.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_stands_for_a_name_elsewhere_is_accepted(entry: str, tiny_model: Path) -> None:
    written: dict[str, Any] = yaml.safe_load(entry)
    data = algorithm_defaults(written.get("algorithm_type", "grpo")).data
    path = {"path": "rft.testing.tiny:copy_tasks"}
    inputs: dict[str, Any] = (
        {"trainer_input": {"experience_buffer": {**path, "storage_type": "file"}}}
        if data
        else {
            "explorer_input": {
                "taskset": path,
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "exact_answer",
            }
        }
    )
    plan = resolve(
        from_dict(
            {
                "mode": "train" if data else "both",
                "model": {
                    "model_path": str(tiny_model),
                    "max_prompt_tokens": 8,
                    "max_response_tokens": 8,
                },
                "algorithm": written,
                "buffer": {"batch_size": 4, "total_steps": 2, **inputs},
            }
        ),
        Facts(cpus=1, gpus=0),
    )
    assert not [w for w in plan.warnings if "algorithm." in w], plan.warnings
    settings = plan.learner.algorithm
    for key, value in written.items():
        found = getattr(settings, key)
        if isinstance(value, dict) and key != "rollout_correction":
            assert found.items() >= value.items()
        elif not isinstance(value, dict):
            assert found == value


def test_the_page_has_its_table() -> None:
    assert len(ENTRIES) >= 30
