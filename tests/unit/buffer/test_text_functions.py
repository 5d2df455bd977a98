"""SQLite's functions of texts in linear time: the same results, and bounded steps."""

from __future__ import annotations

import random
import sqlite3
from typing import Any

import pytest

from rft.buffer import text_functions

VALUES = (None, 1, 2.5, 1e300, "a", "%a%", b"ab", b"b", " x ", "é")
CASES = {
    "SELECT ? LIKE ?": ("abAB%_\n", "aB%_"),
    "SELECT ? LIKE ? ESCAPE 'x'": ("ab%_x", "ab%_x"),
    "SELECT ? GLOB ?": ("ab]-[*?^", "ab*?[]^-"),
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
            assert _said(ours, sql, values) == _said(theirs, sql, values), values
    theirs.close()
    ours.close()


def _said(connection: sqlite3.Connection, sql: str, values: tuple[Any, ...]) -> Any:
    try:
        return connection.execute(sql, values).fetchone()
    except sqlite3.Error:
        return "an error"
