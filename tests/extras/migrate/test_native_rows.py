"""Every native row of veRL's table names a test in which changing the value changes what happens:
data/native_rows.tsv.

A line is a target of such rows, the test, and the word by which the test knows the key.  That
another value also makes another Plan is tested for all keys in test_config_every_key.py.
"""

from __future__ import annotations

import ast
import csv
import re
from functools import cache
from pathlib import Path

from rft.extras.migrate.compat.keys.verl_keys import rows
from tests.helpers.rows import for_each

ROOT = Path(__file__).parents[3]
with (Path(__file__).parent / "native_rows.tsv").open(newline="", encoding="utf-8") as table:
    LINES = {
        line["target"]: line
        for line in csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)
    }
NATIVE = [row for row in rows() if row.kind == "native"]


@cache
def source(file: str) -> tuple[str, frozenset[str]]:
    """The text of a test file, and the names of its tests."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = {
        n.name
        for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return text, frozenset(n for n in found if n.startswith("test_"))


@for_each("row", NATIVE, ids=lambda r: r.name)
def test_a_row_names_a_test(row) -> None:
    for target in row.targets:
        assert target in LINES, f"{row.name} became {target}, which has no line"


@for_each("target", LINES)
def test_the_test_is_there_and_knows_the_key(target: str) -> None:
    file, _, name = LINES[target]["test"].partition("::")
    text, names = source(file)
    function, _, case = name.rstrip("]").partition("[")
    assert function in names, f"{file} has no test {function}"
    word = LINES[target]["word"]
    assert re.search(rf"(?<![a-z0-9]){re.escape(word)}", text), f"{file} does not mention {word}"
    if case:
        assert case.rpartition(".")[2] in text, f"{file} has no case {case}"


def test_no_line_is_left_over() -> None:
    assert set(LINES) == {target for row in NATIVE for target in row.targets}
