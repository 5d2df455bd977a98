"""tests.helpers.rows: one item stands for many rows, and none of them is passed over."""

from __future__ import annotations

import pytest

from tests.helpers.rows import for_each


def test_every_row_that_fails_is_named() -> None:
    seen = []

    @for_each("row", [1, 2, 3, 4])
    def look(row: int, tmp: str) -> None:
        seen.append(row)
        if row == 4:
            pytest.skip("not this one")
        if row == 3:
            pytest.fail("said so")
        assert row != 2, "two"

    with pytest.raises(
        AssertionError, match=r"(?s)2 of 4 rows:.*2: AssertionError: two.*3: Failed: said so"
    ):
        look(tmp="")
    assert seen == [1, 2, 3, 4]


def test_no_rows_are_no_test() -> None:
    with pytest.raises(AssertionError, match="0 of 0"):
        for_each("row", [])(lambda row: None)()


@for_each("row", "ab")
def test_fixtures_are_those_of_the_test(row: str, tmp_path: object) -> None:
    assert row in "ab" and tmp_path
