"""The mark of an attempt, and the table of docs/measured/attacks.md that is made from the marks.

Every test of this folder says with `@attack(FINDING, TRIES, HAPPENS)` what it tries and what
happens; each of its parameters is one attempt.
Invariant: the table lists every test of the folder, and nothing else.  `python -m
tests.attacks.table` writes it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DOC = HERE.parents[1] / "docs" / "measured" / "attacks.md"
BEGIN = "<!-- attempts: written by `python -m tests.attacks.table` -->"
END = "<!-- end of the attempts -->"


def attack(finding: str, tries: str, happens: str) -> pytest.MarkDecorator:
    """`finding`: the number of what was once found this way, "–" where nothing was."""
    return pytest.mark.attack(finding=finding, tries=tries, happens=happens)


@dataclass(frozen=True)
class Attempts:
    """One test."""

    area: str
    test: str
    count: int
    finding: str
    tries: str
    happens: str


def collected() -> list[Attempts]:
    """Every test of the folder, file by file."""
    return [
        one
        for file in sorted(HERE.glob("test_*.py"))
        if file.stem != "test_table"
        for one in _of(file)
    ]


def table() -> str:
    """The part of the document between BEGIN and END."""
    lines = []
    rows = collected()
    for area in dict.fromkeys(r.area for r in rows):
        its = [r for r in rows if r.area == area]
        lines += [
            f"### {area}: {sum(r.count for r in its)}",
            "",
            "| # | Attempt | Forms | What happens | Test |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {r.finding} | {r.tries} | {r.count} | {r.happens} | `{r.test}` |" for r in its
        ]
        lines.append("")
    return "\n".join([BEGIN, "", f"{sum(r.count for r in rows)} attempts.", "", *lines, END])


def written() -> str:
    """The document with this table."""
    text = DOC.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    return head + table() + rest.partition(END)[2]


def _of(file: Path) -> Iterator[Attempts]:
    module = importlib.import_module(f"tests.attacks.{file.stem}")
    area = file.stem.removeprefix("test_").replace("_", " ").capitalize()
    for name, test in vars(module).items():
        if (
            name.startswith("test_")
            and inspect.isfunction(test)
            and test.__module__ == module.__name__
        ):
            marks: list[Any] = getattr(test, "pytestmark", [])
            (said,) = [m.kwargs for m in marks if m.name == "attack"]
            forms = math.prod(len(m.args[1]) for m in marks if m.name == "parametrize")
            yield Attempts(area=area, test=f"{file.stem}.{name}", count=forms, **said)


if __name__ == "__main__":
    DOC.write_text(written(), encoding="utf-8")
    sys.exit()
