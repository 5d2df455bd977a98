"""What algorithms have to reach on tiny models, over three seeds: see scripts/learning.py, which writes docs/learning.md."""

from __future__ import annotations

from pathlib import Path

import learning
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", learning.GOALS)
def test_goal(name: str, seed: int, tmp_path: Path) -> None:
    goal = learning.GOALS[name]
    learnt = goal.run(tmp_path, seed)
    assert goal.reached(learnt), f"{goal.number}: {learnt}, wanted {goal.wanted}"


def test_a_part_is_written_anew_and_the_rest_stays() -> None:
    tiny, real = learning.GOALS["ppo"], learning.REAL["judge"]

    def row(name: str, number: str, after: float, seed: int = 1) -> str:
        return str(learning.line(name, number, "+0.1", seed, learning.Learnt(0.1, after, 5), 60.0, True))

    page = learning.PAGE.read_text(encoding="utf-8").partition(f"\n{learning.REAL_TITLE}")[0]
    rows = [row("judge", number, 0.5) for number, _, _ in real.numbers]
    both = learning.written(page, learning.REAL_INTRODUCTION, "today", rows, real=True)
    assert both.startswith(page.rstrip()) and all(r in both for r in rows)
    lake = row("frozen_lake", "held-out success", 0.9)
    both = learning.written(both, learning.REAL_INTRODUCTION, "today", [lake], real=True)
    assert all(r in both for r in [lake, *rows]) and both.count(learning.REAL_TITLE) == 1
    other = row("frozen_lake", "held-out success", 0.8, 42)
    more = learning.written(both, learning.REAL_INTRODUCTION, "today", [other], real=True)
    assert f"{other}\n{lake}\n{rows[0]}" in more, "in the order of the seeds"
    again = learning.written(both, learning.INTRODUCTION, "today", [row("ppo", tiny.number, 0.9)], real=False)
    assert lake in again and "| grpo |" in again and again.count("| ppo |") == 3 and "| 1 | 0.100 | 0.900 |" in again


def test_a_real_engine_needs_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"fetch_model\.py, or set MODEL_PATH"):
        learning.pretrained()


def test_the_page_has_every_goal() -> None:
    text = learning.PAGE.read_text(encoding="utf-8")
    assert [text.count(f"| {name} | {goal.number} |") for name, goal in learning.GOALS.items()] == [3] * len(learning.GOALS)
    assert "| no |" not in text.partition(learning.REAL_TITLE)[0] and text.startswith(learning.INTRODUCTION)
