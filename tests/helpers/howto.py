"""Runs the code blocks of a page, in order, in one empty folder.

    ```LANG title="name"    is written to a file
    ```console              `$ command` is run; the lines below it must be printed, in this order, with … standing for anything
    ```sql                  is run on the ledger of the page's first run
    ```python               is executed
    ```yaml                 is part of a configuration and must be accepted

Commands are `rft` (in this process), `python`, `mkdir` and `ls`; `# exit N` says the expected exit
code.  Other languages are shown only.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r'^```(?P<lang>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$', re.MULTILINE | re.DOTALL
)
_EXIT = re.compile(r"\s+# exit (\d+)$")


@dataclass(frozen=True)
class Block:
    lang: str
    title: str | None
    body: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["lang"], m["title"], m["body"], text[: m.start()].count("\n") + 1)
        for m in _FENCE.finditer(text)
    ]


def play(page: Path, folder: Path, tiny_model: Path) -> None:
    """Everything on the page, in `folder`; raises AssertionError naming page and line."""
    (folder / "runs").mkdir(exist_ok=True)
    shutil.copytree(tiny_model, folder / "runs" / "tiny-model", dirs_exist_ok=True)
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.title is not None:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        elif block.lang == "console":
            for command, expected in _commands(block.body):
                _run(command, expected, folder, where)
        elif block.lang == "sql":
            _sql(block.body, folder, where)
        elif block.lang == "python":
            path = folder / f"{page.stem}_{block.line}.py"
            path.write_text(block.body, encoding="utf-8")
            runpy.run_path(str(path), run_name="__main__")
        elif block.lang == "yaml":
            _part(block.body, where)


def _commands(body: str) -> Iterator[tuple[str, list[str]]]:
    command = ""
    expected: list[str] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, expected
            command = line[2:]
            expected = []
        elif line.strip():
            expected.append(line)
    if command:
        yield command, expected


def _run(line: str, expected: list[str], folder: Path, where: str) -> None:
    code = int(m[1]) if (m := _EXIT.search(line)) else 0
    words = shlex.split(_EXIT.sub("", line))
    output, found = _call(words, folder)
    assert found == code, f"{where}: `{line}` ended with {found}, expected {code}\n{output}"
    printed = iter(output.splitlines())
    for text in expected:
        parts = [
            "".join(r"\s+" if w.isspace() else re.escape(w) for w in re.split(r"(\s+)", p))
            for p in text.strip().split("…")
        ]
        form = re.compile(r"\s*" + ".*".join(parts) + r"\s*")
        assert any(form.fullmatch(p) for p in printed), (
            f"{where}: `{line}` did not print {text!r} (in this order):\n{output}"
        )


def _call(words: list[str], folder: Path) -> tuple[str, int]:
    match words:
        case ["rft", *arguments]:
            return _rft(arguments)
        case ["python", *arguments]:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            return done.stdout + done.stderr, done.returncode
        case ["mkdir", name]:
            (folder / name).mkdir()
            return "", 0
        case ["ls", name]:
            return "\n".join(sorted(p.name for p in (folder / name).iterdir())), 0
    raise AssertionError(f"the documents may use rft, python, mkdir and ls, not {words[0]!r}")


def _rft(arguments: list[str]) -> tuple[str, int]:
    from rft.cli.main import main

    out = io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(arguments)
        except SystemExit as e:
            code = e.code or 0
    return out.getvalue(), int(code)


def _sql(statement: str, folder: Path, where: str) -> None:
    (path,) = folder.glob("runs/**/*.db")
    db = sqlite3.connect(path)
    try:
        rows = db.execute(statement).fetchall()
        db.rollback()
    except sqlite3.Error as e:
        raise AssertionError(f"{where}: {e}") from e
    finally:
        db.close()
    assert rows or not statement.lstrip().startswith("SELECT") or "'failed'" in statement, (
        f"{where}: the query finds nothing"
    )


def _part(text: str, where: str) -> None:
    """The keys and values of a part of a configuration are accepted by the schema."""
    from rft.config.load import from_dict

    base = yaml.safe_load((ROOT / "examples" / "tiny" / "config.yaml").read_text(encoding="utf-8"))
    from_dict(_merged(base, yaml.safe_load(text)))


def _merged(base: Any, more: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(more, dict)):
        return more
    return {**base, **{k: _merged(base.get(k), v) for k, v in more.items()}}
