"""What algorithms have to reach on tiny models, over three seeds: see scripts/learning.py, which
writes docs/measured/learning.md.
"""

from __future__ import annotations

from pathlib import Path

import learning
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*learning.GOALS, "colour"])
def test_goal(name: str, seed: int, tmp_path: Path) -> None:
    goal = {**learning.GOALS, **learning.FAMILIES}[name]
    learnt = goal.run(tmp_path, seed)
    assert goal.reached(learnt), f"{goal.number}: {learnt}, wanted {goal.wanted}"


def test_a_part_is_written_anew_and_the_rest_stays() -> None:
    tiny = learning.GOALS["ppo"]
    real = learning.REAL["judge"]

    def row(name: str, number: str, after: float, seed: int = 1) -> str:
        return str(
            learning.line(name, number, "+0.1", seed, learning.Learnt(0.1, after, 5), 60.0, True)
        )

    algorithms, families, engines = map(learning.part_of, ("ppo", "hybrid", "judge"))
    page = learning.PAGE.read_text(encoding="utf-8").partition(f"\n{engines.title}")[0]
    rows = [row("judge", number, 0.5) for number, _, _ in real.numbers]
    both = learning.written(page, engines, "today", rows)
    assert both.startswith(page.rstrip()) and all(r in both for r in rows)
    lake = row("frozen_lake", "held-out success", 0.9)
    both = learning.written(both, engines, "today", [lake])
    assert all(r in both for r in [lake, *rows]) and both.count(engines.title) == 1
    other = row("frozen_lake", "held-out success", 0.8, 42)
    more = learning.written(both, engines, "today", [other])
    assert f"{other}\n{lake}\n{rows[0]}" in more, "in the order of the seeds"
    again = learning.written(both, algorithms, "today", [row("ppo", tiny.number, 0.9)])
    hybrid = row("hybrid", "held-out accuracy", 0.97)
    third = learning.written(again, families, "tomorrow", [hybrid])
    assert (
        hybrid in third
        and third.index("| ppo |") < third.index(hybrid) < third.index(lake)
        and third.count("tomorrow") == 1
    )
    assert (
        lake in again
        and "| grpo |" in again
        and again.count("| ppo |") == 3
        and "| 1 | 0.100 | 0.900 |" in again
    )


def test_a_real_engine_needs_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"fetch_model\.py, or set MODEL_PATH"):
        learning.pretrained()


def test_the_page_has_every_goal() -> None:
    text = learning.PAGE.read_text(encoding="utf-8")
    assert {
        name: text.count(f"| {name} | {goal.number} |") for name, goal in learning.GOALS.items()
    } == dict.fromkeys(learning.GOALS, 3)
    # other tables say where a goal is missed
    assert "| no |" not in text.partition(learning.part_of("maxrl").title)[0]
    assert all(part.introduction in text for part in learning.PARTS if part.title in text)
