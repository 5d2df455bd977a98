"""The table of attempts in the documents is that of these tests."""

from __future__ import annotations

import pytest

from tests.attacks import table


@pytest.mark.extra
def test_the_document_lists_every_attempt() -> None:
    """It does: each test of this folder, with its finding and the number of its forms."""
    assert table.DOC.read_text(encoding="utf-8") == table.written(), (
        "run python -m tests.attacks.table"
    )


@pytest.mark.extra
def test_there_are_many() -> None:
    """At least 120, over sandbox, judge, endpoint, plugins, configurations, data sets, models and
    run folders; and one for each finding.
    """
    rows = table.collected()
    assert sum(r.count for r in rows) >= 120
    numbers = {n.strip() for r in rows for n in r.finding.split(",") if n.strip()}
    assert {*(f"H{n}" for n in range(1, 5)), *(f"M{n}" for n in range(1, 10)), "L"} <= numbers
