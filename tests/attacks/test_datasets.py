"""Data sets that crash a reader, hang it, or run code: each is refused in one line with file and
line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.taskset.open_source import open_taskset
from rft.taskset.settings import FormatSettings, TasksetSettings
from tests.attacks.refused import CONFIG, TASKSET, assert_refused, check
from tests.attacks.table import attack

GOOD = '{"question": "a", "answer": "1"}\n'
ROWS: dict[str, tuple[str, str, str]] = {
    "200,000 open brackets": ("d.jsonl", GOOD + "[" * 200_000, "d.jsonl:2: nested too deeply"),
    "5,000 open braces": (
        "d.jsonl",
        GOOD + '{"a":' * 5000 + "1" + "}" * 5000,
        "d.jsonl:2: nested too deeply",
    ),
    "500 levels": (
        "d.jsonl",
        GOOD + '{"a":' * 500 + "1" + "}" * 500,
        "d.jsonl:2: nested too deeply; at most 100",
    ),
    "a JSON file of brackets": ("d.json", "[" * 200_000, "d.json: nested too deeply"),
    "a number of 5,000 digits": (
        "d.jsonl",
        GOOD + '{"question": "a", "answer": ' + "9" * 5000 + "}",
        "a number has too many digits",
    ),
    "the same in a JSON file": (
        "d.json",
        '[{"question": "a", "answer": ' + "9" * 5000 + "}]",
        "d.json: a number has too many digits",
    ),
    "half a character": (
        "d.jsonl",
        GOOD + '{"question": "\\ud800", "answer": "1"}',
        "d.jsonl:2: holds half of a character (\\ud800)",
    ),
    "half a character in an answer": (
        "d.jsonl",
        '{"question": "a", "answer": "\\udfff"}',
        "d.jsonl:1: holds half of a character",
    ),
    "half a character in a key": (
        "d.jsonl",
        '{"question": "a", "answer": "1", "\\ud800": 1}',
        "d.jsonl:1: holds half of a character",
    ),
    "a key twice": (
        "d.jsonl",
        GOOD + '{"question": "a", "question": "b", "answer": "1"}',
        "d.jsonl:2: the key 'question' is",
    ),
    "a key twice in a JSON file": (
        "d.json",
        '[{"question": "a", "question": "b", "answer": "1"}]',
        "the key 'question' is written twice",
    ),
    "a list for a row": ("d.jsonl", GOOD + "[1]", "d.jsonl:2: a line must be a JSON object"),
    "a page": ("d.jsonl", "<html>", "d.jsonl:1: not JSON"),
    "bytes that are no text": (
        "d.jsonl",
        GOOD.encode("utf-16").decode("latin-1"),
        "d.jsonl:1: not UTF-8",
    ),
    "a field of 200,000 characters": (
        "d.csv",
        "question,answer\n" + "x" * 200_000 + ",1\n",
        "d.csv",
    ),
    "a Parquet file of zeros": (
        "d.parquet",
        "PAR1" + "\0" * 100 + "PAR1",
        "not a readable Parquet file",
    ),
    "nothing": ("d.jsonl", "", "has no rows"),
}


@attack("L", "rows that break readers", "refused with file and line")
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, tmp_path: Path, tiny_model: Path) -> None:
    file, text, says = ROWS[name]
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    assert_refused(check(CONFIG, tiny_model, f"{TASKSET}.path={tmp_path / file}"), says)


@attack(
    "L", "a bad row, where bad rows are to be left out", "left out and said, with file and line"
)
@pytest.mark.parametrize(
    "name", ["500 levels", "a number of 5,000 digits", "half a character", "a key twice"]
)
def test_bad_rows_may_be_left_out(name: str, tmp_path: Path) -> None:
    file, text, says = ROWS[name]
    (tmp_path / file).write_text(text + "\n" + GOOD)
    columns = FormatSettings(prompt_key="question", response_key="answer")
    settings = TasksetSettings(
        name="t", workflow="w", path=str(tmp_path / file), format=columns, skip_bad_rows=True
    )
    found = open_taskset(settings)
    assert len(found) == 2 and found.skipped is not None and says in str(found.skipped)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "is no plain file"),
    "a link to itself": (lambda path: path.symlink_to(path), "is no plain file"),
    "/dev/zero": (lambda path: path.symlink_to("/dev/zero"), "is no plain file"),
}


@attack("L", "what is no file is given as the data", "refused; nothing waits for it")
@pytest.mark.parametrize("kind", FILES)
def test_no_plain_file(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    make, says = FILES[kind]
    make(tmp_path / "d.jsonl")
    assert_refused(check(CONFIG, tiny_model, f"{TASKSET}.path={tmp_path / 'd.jsonl'}"), says)


@attack("L", "a folder of data that holds a program", "refused, and the program does not run")
@pytest.mark.parametrize("program", ["data.py", "evil.py", "__init__.py", "setup.py"])
def test_a_program_among_the_data(program: str, tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / program).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert_refused(check(CONFIG, tiny_model, f"{TASKSET}.path={folder}"), "cannot be loaded")
    assert not (tmp_path / "ran").exists()


SAVED = {
    "a cut state.json": ("state.json", '{"_data_fi'),
    "a list for state.json": ("state.json", "[]"),
    "a cut dataset_dict.json": ("dataset_dict.json", '{"splits": ['),
    "splits that are not there": ("dataset_dict.json", '{"splits": ["train"]}'),
    "splits elsewhere": ("dataset_dict.json", '{"splits": ["../../etc"]}'),
}


@attack("L", "a saved data set that is damaged", "refused with its folder")
@pytest.mark.parametrize("name", SAVED)
def test_saved_data(name: str, tmp_path: Path, tiny_model: Path) -> None:
    file, text = SAVED[name]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / file).write_text(text)
    assert_refused(check(CONFIG, tiny_model, f"{TASKSET}.path={folder}"), str(folder))


PLACES = {
    "a file that is no database": ("sqlite:////etc/hostname", "not a database"),
    "a database that is not there": ("sqlite:////nowhere/x.db", "does not exist"),
    "a table that is a statement": ("sqlite:////etc/hostname", "is no name of a table"),
}


@attack(
    "–",
    "tasks from a database that is none, or by a name that is a statement",
    "refused; names are names",
)
@pytest.mark.parametrize("name", PLACES)
def test_databases(name: str, tiny_model: Path) -> None:
    url, says = PLACES[name]
    table = "x; DROP TABLE y" if "statement" in name else "x"
    done = check(
        CONFIG,
        tiny_model,
        f"{TASKSET}.path={url}",
        f"{TASKSET}.storage_type=sql",
        f'{TASKSET}.args={{table: "{table}"}}',
    )
    assert_refused(done, says)
