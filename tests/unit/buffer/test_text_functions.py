"""SQLite's functions of texts in linear time: the same results, and bounded steps."""

from __future__ import annotations

import random
import sqlite3
from typing import Any

import pytest

from rft.buffer import text_functions

VALUES = (None, 1, 2.5, 1e300, "a", "%a%", b"ab", b"b", " x ", "é")
CASES = {
    "SELECT instr(?, ?)": ("ab", "ab"),
    "SELECT replace(?, ?, 'xb')": ("ab", "ab"),
    "SELECT trim(?, ?)": ("ab c", "ab "),
    "SELECT ltrim(?, ?)": ("ab c", "ab "),
    "SELECT rtrim(?) || coalesce(?, '')": ("ab ", "a"),
}


@pytest.mark.parametrize("sql", CASES)
def test_results_are_those_of_sqlite(sql: str) -> None:
    draw, (first, second) = random.Random(5), CASES[sql]
    theirs = sqlite3.connect(":memory:")
    ours = sqlite3.connect(":memory:")
    text_functions.install(ours)
    with theirs, ours:
        for i in range(3000):
            if i % 10 == 0:
                values: tuple[Any, ...] = (draw.choice(VALUES), draw.choice(VALUES))
            else:
                values = (
                    "".join(draw.choices(first, k=draw.randint(0, 8))),
                    "".join(draw.choices(second, k=draw.randint(0, 6))),
                )
            assert _outcome(ours, sql, values) == _outcome(theirs, sql, values), values
    theirs.close()
    ours.close()


def test_replace_refuses_a_text_before_making_it() -> None:
    connection = sqlite3.connect(":memory:")
    text_functions.install(connection)
    sql = "SELECT length(replace(hex(zeroblob(1000000)), '0', hex(zeroblob(?))))"
    assert connection.execute(sql, (16,)).fetchone() == (2_000_000 * 32,)
    with pytest.raises(sqlite3.DataError, match="too big"):
        connection.execute(sql, (1_000_000,))  # 4 TB
    connection.close()


def _outcome(connection: sqlite3.Connection, sql: str, values: tuple[Any, ...]) -> Any:
    try:
        return connection.execute(sql, values).fetchone()
    except sqlite3.Error:
        return "an error"
