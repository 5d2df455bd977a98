"""Every example of the repository passes `rft check`, with its model and data where they are on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.config.check import check
from rft.testing import tiny

EXAMPLES = Path(__file__).parents[3] / "examples"
NO_GOLD = ("judge", "frozen_lake")  # a judge is not asked, and an environment scores itself
FILES = sorted(EXAMPLES.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(EXAMPLES)))
def test_example(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    schema = check(path, schema_only=True)
    assert not schema.errors and not schema.not_active and schema.plan is not None
    report = check(path, (f"model.model_path={tiny.make(tmp_path / 'model')}",))
    assert not report.errors and report.plan is not None
    assert report.tasksets and all(t.rows for t in report.tasksets)
    unscored = report.plan.trainer.given is not None or path.parent.name in NO_GOLD
    gold = {None} if unscored else {1.0}  # what is imitated is not scored
    assert {row.gold_reward for t in report.tasksets for row in t.rows} == gold
