"""Which cells `scripts/kill_table.py` plays, and what it goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import kill_table
import pytest
from kill_table import Cell


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """The places that were played; each is good and takes two minutes of the script's clock."""
    now = 0.0
    places = []

    def play(cell: Cell, *_: object) -> None:
        nonlocal now
        now += 120.0
        cell.outcome, cell.named, cell.again, cell.balanced = "exit 4", True, 0, True
        places.append(cell.place)

    monkeypatch.setattr(kill_table, "play", play)
    monkeypatch.setattr(kill_table.time, "monotonic", lambda: now)
    monkeypatch.setattr(kill_table.tiny, "make", lambda folder: folder)
    return places


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["kill_table.py", *map(str, arguments)])
    return kill_table.main()


def test_a_table_has_each_process_and_signal_in_each_phase(struck, monkeypatch) -> None:
    assert command(monkeypatch) == 0
    assert len(struck) == len(set(struck)) == 120
    assert {phase for _, _, phase in struck} == {
        "start",
        "explore",
        "train",
        "sync",
        "evaluate",
        "end",
    }
    processes = {"command", "coordinator", "buffer", "explorer", "engine", "trainer"}
    ray = {"raylet", "gcs_server", "Ray's dashboard agent", "Ray's runtime-env agent"}
    assert {process for process, _, _ in struck} == processes | ray


def test_parts_of_nine_minutes_make_a_whole_table(struck, monkeypatch, tmp_path) -> None:
    file = tmp_path / "cells.jsonl"
    parts = []
    while command(monkeypatch, "--cells", file, "--minutes", 9, "--only", "engine,raylet"):
        parts.append(len(struck))
    assert parts == [4, 8, 12, 16, 20]
    assert len(struck) == len(set(struck)) == len(file.read_text().splitlines()) == 24


def test_a_page_goes_on_from_its_cells(struck, monkeypatch, tmp_path, capsys) -> None:
    page = tmp_path / "page.md"
    cells = [Cell("engine", "STOP", "explore", "goes on", 45.0, False, 0, True)]
    cells.append(Cell("buffer", "KILL", "start", "exit 4", 5.0, True, 0, True))
    cells.append(Cell("buffer", "KILL", "end", "hangs", 60.0, False, None, False, left=["x"]))
    page.write_text(f"{kill_table.BEGIN}\n{kill_table.summary(cells)}\n{kill_table.END}\n")
    again = kill_table.from_page(page.read_text())
    assert [cell.text() for cell in again] == [cell.text() for cell in cells]
    monkeypatch.setattr(kill_table, "PAGE", page)
    file = tmp_path / "cells.jsonl"
    file.write_text(json.dumps(asdict(Cell("raylet", "KILL", "end", "exit 4", 4, True, 0, True))))
    assert command(monkeypatch, "--keep", "--write", "--cells", file, "--phases", "end") == 1
    assert len(struck) == 18
    assert len(kill_table.from_page(page.read_text())) == 22


def test_the_published_page_is_read() -> None:
    page = Path(kill_table.__file__).parents[1] / "docs" / "measured" / "kill-table.md"
    rows = [
        line for line in page.read_text().splitlines() if " KILL |" in line or " STOP |" in line
    ]
    assert rows
    assert [cell.text() for cell in kill_table.from_page(page.read_text())] == rows
