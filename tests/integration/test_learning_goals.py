"""What algorithms have to reach on tiny models, over three seeds: see scripts/learning.py, which writes docs/learning.md."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "learning.py"
spec = importlib.util.spec_from_file_location("learning", SCRIPT)
assert spec is not None and spec.loader is not None
learning: Any = importlib.util.module_from_spec(spec)
sys.modules["learning"] = learning  # its dataclasses look themselves up there
spec.loader.exec_module(learning)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", learning.GOALS)
def test_goal(name: str, seed: int, tmp_path: Path) -> None:
    goal = learning.GOALS[name]
    learnt = goal.run(tmp_path, seed)
    assert goal.reached(learnt), f"{goal.number}: {learnt}, wanted {goal.wanted}"


def test_the_page_has_every_goal() -> None:
    text = learning.PAGE.read_text(encoding="utf-8")
    assert [text.count(f"| {name} | {goal.number} |") for name, goal in learning.GOALS.items()] == [3] * len(learning.GOALS)
    assert "| no |" not in text and text.startswith(learning.INTRODUCTION)
