"""Run folders that were changed from outside: what cannot be gone on from is refused with the file
and the remedy.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.errors import ConfigError
from rft.launch.rundir import RunDir
from rft.trainer.checkpoint import manifest as manifests
from rft.types.ids import Version
from rft.types.ports import Consumption
from tests.attacks.refused import CONFIG
from tests.attacks.table import attack
from tests.helpers.command import Done, rft

OURS = "CREATE TABLE meta (key TEXT, value TEXT)"


def start(model: Path, root: Path, *changes: str) -> Done:
    return rft(
        "run",
        "--in-process",
        "-c",
        CONFIG,
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        *changes,
    )


STATES: dict[str, str | bytes | None] = {
    "cut": '{"phase": "runn',
    "empty": "",
    "a list": "[]",
    "a number of 5,000 digits": '{"pid": ' + "9" * 5000 + "}",
    "nested": '{"a":' * 100_000,
    "a key twice": '{"phase": "done", "phase": "running"}',
    "no text": b"\xff\xfe",
    "a text for the time": '{"phase": "done", "time": "now"}',
    "a list for the parts": '{"phase": "done", "parts": [1]}',
    "a text for a process": '{"phase": "done", "parts": {"engine-0": "1; kill -9 -1"}}',
    "a pipe": None,
}


def _damage(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    file = folder / "state.json"
    text = STATES[name]
    if text is None:
        os.mkfifo(file)
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())


@attack("L", "a damaged state.json", "`rft status` and `rft run` name it and what to do")
@pytest.mark.parametrize("name", STATES)
def test_state(name: str, tmp_path: Path) -> None:
    _damage(tmp_path / "run", name)
    with pytest.raises(ConfigError, match=r"state.json is damaged: .*; remove it"):
        RunDir(tmp_path / "run").read_state()
    done = rft("status", tmp_path / "run")
    assert done.code == 2 and "Traceback" not in done.output


@attack(
    "L",
    "a run goes on in a folder whose state.json is cut",
    "refused before anything starts; the folder can be claimed again",
)
def test_a_run_with_a_cut_state(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project" / "group" / "name"
    _damage(folder, "cut")
    done = start(tiny_model, tmp_path)
    assert (
        done.code == 2 and "state.json is damaged" in done.output and "Traceback" not in done.output
    )
    RunDir.claim(folder).release()


@pytest.mark.e2e
@attack(
    "L",
    "all checkpoints of a run are removed",
    "refused until resume_mode: fresh says to begin again; never a silent step 0",
)
def test_vanished_checkpoints(tiny_model: Path, tmp_path: Path) -> None:
    assert start(tiny_model, tmp_path).code == 0
    run = tmp_path / "project" / "group" / "name"
    shutil.rmtree(run / "checkpoints")
    again = start(tiny_model, tmp_path)
    assert again.code == 2 and again.output.count("\n") == 1, again.output
    for text in (
        "resume_mode: the run has saved checkpoints, global_step_2 last",
        "holds none",
        "bring them back, or write fresh",
    ):
        assert text in again.output
    assert not (run / "checkpoints").exists()
    fresh = start(tiny_model, tmp_path, "resume_mode=fresh")
    assert fresh.code == 0 and "done  step 2" in fresh.output, fresh.output
    # what is there is gone on from
    assert "nothing to do" in start(tiny_model, tmp_path, "resume_mode=fresh").output


def _saved(checkpoints: Path, step: int) -> None:
    folder = checkpoints / manifests.folder_name(step)
    folder.mkdir(parents=True)
    (folder / "weights").write_text("x")
    made = manifests.commit(
        folder,
        version=Version(1, step),
        parent=None,
        consumption=Consumption(num_uses=0, digest="", cursor=0),
    )
    manifests.remember(made)


@attack(
    "L",
    "the newest checkpoint is removed, an older one is there",
    "told on the terminal; the run goes on from the older one",
)
def test_the_newest_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        _saved(tmp_path / "checkpoints", step)
    shutil.rmtree(tmp_path / "checkpoints" / "global_step_2")
    manifests.refuse_lost(tmp_path / "checkpoints")
    (record,) = caplog.records
    assert (
        record.levelname == "ERROR"
        and "global_step_2, is gone; the run goes on from global_step_1" in record.getMessage()
    )


@attack("L", "the note of the newest checkpoint is damaged", "refused with its name")
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"folder"', "\x00"])
def test_the_note_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / manifests.NEWEST).write_text(text)
    with pytest.raises(ConfigError, match=r"newest_checkpoint.json is damaged.*remove it"):
        manifests.refuse_lost(tmp_path / "checkpoints")


def _database(*statements: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with sqlite3.connect(path) as database:
            for statement in statements:
                database.execute(statement)
        database.close()

    return make


FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bookmarks": (
        _database("CREATE TABLE bookmarks (url TEXT)", "INSERT INTO bookmarks VALUES ('x')"),
        "with the tables bookmarks",
    ),
    "a table meta of others": (_database(OURS), "with the tables meta"),
    "tables of half our names": (
        _database(OURS, "CREATE TABLE groups (a TEXT)"),
        "with the tables groups, meta",
    ),
    "no database": (
        lambda path: path.write_bytes(b"PK" + bytes(5000)),
        "is no database that can be read",
    ),
    "half a database": (
        lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(10)),
        "is no database that can be read",
    ),
}


@pytest.mark.e2e
@attack(
    "L",
    "the experience buffer is put into another program's database",
    "refused; not one byte of the file changes",
)
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_databases(name: str, tiny_model: Path, tmp_path: Path) -> None:
    make, says = FOREIGN[name]
    make(tmp_path / "own.db")
    before = (tmp_path / "own.db").read_bytes()
    done = start(
        tiny_model,
        tmp_path / "runs",
        f"buffer.trainer_input.experience_buffer.path=sqlite:///{tmp_path / 'own.db'}",
    )
    assert done.code == 2 and says in done.output and "Traceback" not in done.output, done.output
    assert (tmp_path / "own.db").read_bytes() == before
    assert not (tmp_path / "own.db-wal").exists()


@attack("–", "the saved configuration of a run is damaged", "refused with its name")
@pytest.mark.parametrize("text", ["{", "[]", '{"tree"', "\x00"])
def test_saved_configuration(text: str, tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "project" / "group" / "name"
    _saved(run / "checkpoints", 1)
    (run / "config.json").write_text(text)
    done = start(tiny_model, tmp_path)
    assert (
        done.code == 2
        and "config.json is damaged" in done.output
        and "Traceback" not in done.output
    ), done.output


MANIFESTS: dict[str, Callable[[Path], Any]] = {
    "cut": lambda file: file.write_text(file.read_text()[:-9]),
    "another version": lambda file: file.write_text(file.read_text().replace('"time"', '"thyme"')),
    "a file outside": lambda file: file.write_text(
        file.read_text().replace('"weights"', '"../../../../etc/passwd"')
    ),
    "nothing": lambda file: file.write_text(""),
    "a list": lambda file: file.write_text("[]"),
    "other weights": lambda file: (file.parent / "weights").write_text("y"),
    "no weights": lambda file: (file.parent / "weights").unlink(),
    "other uses": lambda file: file.write_text(
        json.dumps(json.loads(file.read_text()) | {"consumption": 5})
    ),
}


@pytest.mark.e2e
@attack(
    "–",
    "a checkpoint whose manifest or files were changed",
    "not gone on from; where it is the only one the run ends and names it",
)
@pytest.mark.parametrize("name", MANIFESTS)
def test_changed_checkpoints(name: str, tiny_model: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "project" / "group" / "name" / "checkpoints"
    _saved(checkpoints, 1)
    MANIFESTS[name](checkpoints / "global_step_1" / manifests.NAME)
    done = start(tiny_model, tmp_path)
    assert (
        done.code == 4
        and "CheckpointInvalid: no checkpoint in" in done.output
        and "Traceback" not in done.output
    ), done.output


@attack("L", "a question to the ledger that never ends", "cancelled at its deadline, in one line")
async def test_a_question_without_end(tmp_path: Path) -> None:
    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await buffer.open()
    endless = (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    )
    with (
        open_run(tmp_path) as questions,
        pytest.raises(ConfigError, match=r"took longer than 0\.3 s"),
        questions.ask(endless, timeout_s=0.3) as answer,
    ):
        list(answer.rows)
    await buffer.close()
