"""Run folders of other people that are only looked at: `rft report`, `rft compare`, `rft view`,
`rft buffer query`, `rft replay`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from yarl import URL

from rft.api.stored_run import open_run
from rft.buffer.audit import audit_run
from rft.buffer.query import open_run as questions_of
from rft.buffer.schema import payloads
from rft.buffer.settings import BufferSettings
from rft.buffer.storage_choice import make_storage
from rft.errors import ConfigError, PayloadDamaged, RftError
from rft.extras.view import report_comparison as comparison
from rft.extras.view.report_facts import collect
from rft.extras.view.report_page import page
from rft.monitor.read import MOST_LINE
from tests.attacks.table import attack
from tests.extras.view.viewed import stored, viewing

STEP = {"role": "trainer", "step": 1, "time": 1.7e9, "values": {"actor/loss": 1.0}}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("foreign") / "run"
    asyncio.run(stored(folder))
    (folder / "config.json").write_text(
        json.dumps({"tree": {"seed": 1}, "versions": {}, "path": "a.yaml", "overrides": []})
    )
    yield folder


def _metrics(*lines: Any) -> Callable[[Path], Any]:
    def make(run: Path) -> None:
        told = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (run / "metrics.jsonl").write_text("\n".join(told) + "\n")

    return make


def _instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(run: Path) -> None:
        (run / name).unlink()
        make(run / name)

    return change


def _config(value: Any) -> Callable[[Path], Any]:
    return lambda run: (run / "config.json").write_text(
        value if isinstance(value, str) else json.dumps(value)
    )


def _ledger(*statements: str) -> Callable[[Path], Any]:
    def change(run: Path) -> None:
        (file,) = (run / "buffer").glob("*.db")
        with sqlite3.connect(file) as database:
            for statement in statements:
                database.execute(statement)
        database.close()

    return change


def _eval(values: dict[str, Any]) -> dict[str, Any]:
    return {"role": "eval", "step": 1, "time": 1.7e9, "values": {"eval/a/mean@1": 0.5, **values}}


def _ledger_file(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(run: Path) -> None:
        (file,) = (run / "buffer").glob("*.db")
        file.unlink()
        make(file)

    return change


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "metrics without end": _instead("metrics.jsonl", lambda f: f.symlink_to("/dev/zero")),
    "metrics in a pipe": _instead("metrics.jsonl", os.mkfifo),
    "metrics in a folder": _instead("metrics.jsonl", Path.mkdir),
    "metrics that are a link to itself": _instead("metrics.jsonl", lambda f: f.symlink_to(f)),
    "metrics of one long line": lambda run: (run / "metrics.jsonl").write_bytes(
        b"x" * (MOST_LINE + 9)
    ),
    "metrics of many damaged lines": lambda run: (run / "metrics.jsonl").write_bytes(
        b"{\n" * 20_000
    ),
    "a step beyond 64 bits": _metrics({**STEP, "step": 10**30}),
    "a step beyond 63 bits": _metrics({**STEP, "step": 2**63}),
    "a negative step": _metrics({**STEP, "step": -5}),
    "a time at the end of numbers": _metrics(
        {**STEP, "time": 1e308}, {**STEP, "step": 2, "time": -1e308}
    ),
    "counts that are no numbers": _metrics(
        _eval({"eval/a/tasks": None, "eval/a/runs": None, "eval/a/sem@1": None})
    ),
    "counts that are huge": _metrics(_eval({"eval/a/tasks": 1e308, "eval/a/failed": -1e308})),
    "values beyond numbers": _metrics(
        '{"role": "trainer", "step": 1, "time": 1, "values": {"a": 1e999}}'
    ),
    "notes of a wrong form": _metrics(
        '{"role": "trainer", "step": 1, "time": 1, "values": {}, "notes": [{}]}'
    ),
    "nested": _metrics('{"role":' + '{"a":' * 100_000),
    "ten thousand names": _metrics(
        {**STEP, "values": {f"<b>{i}": float(i) for i in range(10_000)}}
    ),
    "costs that fall and rise": _metrics(
        *(
            {**STEP, "step": n, "values": {"judge/cost_usd": cost}}
            for n, cost in ((1, 1e308), (2, 1.0), (3, 1e308))
        )
    ),
    "a configuration that is a list": _config([]),
    "a configuration whose tree is a list": _config({"tree": [1]}),
    "a configuration of texts for sections": _config(
        {"tree": {"buffer": "x", "trainer": "y", "explorer": 5, "algorithm": None}}
    ),
    "a configuration of wrong values": _config(
        {
            "tree": {
                "algorithm": {"optimizer": {"lr": "fast"}},
                "buffer": {"explorer_input": {"taskset": "x", "tasksets": 5}},
                "trainer": {"world_size": "two"},
                "explorer": {"rollout_model": {"engine_num": []}},
            }
        }
    ),
    "versions that are a list": _config(
        {"tree": {}, "versions": [1], "path": 5, "overrides": [1, {}]}
    ),
    "a configuration that is deep": _config('{"tree":' + '{"a":' * 100_000),
    "a configuration in a pipe": _instead("config.json", os.mkfifo),
    "a configuration without end": _instead("config.json", lambda f: f.symlink_to("/dev/zero")),
    "a state in a pipe": _instead("state.json", os.mkfifo),
    "a state of a wrong form": lambda run: (run / "state.json").write_text(
        '{"phase": {"a": 1}, "pid": "x", "time": 1e308, "reason": []}'
    ),
    "a ledger in a pipe": _ledger_file(os.mkfifo),
    "a ledger without end": _ledger_file(lambda f: f.symlink_to("/dev/zero")),
    "a ledger that is none": _ledger_file(lambda f: f.write_bytes(b"x" * 5000)),
    "a ledger without its views": _ledger("DROP VIEW v_experiences"),
    "a ledger with another view": _ledger(
        "DROP VIEW v_experiences", "CREATE VIEW v_experiences AS SELECT 'x' AS id, 'y' AS reward"
    ),
    "a ledger of wrong values": _ledger(
        "DROP TRIGGER reward_edit",
        "UPDATE experiences SET reward = 'much', taskset = 5, task_index = 'x', reward_parts = '{'",
    ),
    "a ledger of large numbers": _ledger(
        "UPDATE experiences SET run = 99999999999, step = -5, num_response_tokens = 99999999999"
    ),
    "a ledger of other blobs": _ledger(
        "UPDATE groups SET locator = '../../../etc/passwd', num_bytes = -1"
    ),
    "checkpoints that are a file": lambda run: (
        shutil.rmtree(run / "checkpoints"),
        (run / "checkpoints").write_text(""),
    ),
}


def _changed(honest: Path, folder: Path, name: str) -> Path:
    shutil.copytree(honest, folder)
    FOLDERS[name](folder)
    return folder


@attack(
    "–",
    "a run's files are links, pipes, huge, malformed, or a ledger of other tables",
    "a report without them, or one line",
)
@pytest.mark.parametrize("name", FOLDERS)
def test_reports(name: str, honest: Path, tmp_path: Path) -> None:
    run = _changed(honest, tmp_path / "run", name)
    try:
        facts = collect(open_run(run))
    except RftError as e:
        assert "\n" not in str(e) and len(str(e)) < 1000
        return
    text = page(facts)
    assert "<script" not in text and len(text.encode()) < 5 << 20
    comparison.compared([facts, facts], comparison.short_names([facts, facts]), ("actor/loss",))


@pytest.mark.e2e
@attack(
    "–",
    "the same runs in the viewer",
    "each page is shown, or says what is wrong; the server goes on",
)
@pytest.mark.parametrize("name", FOLDERS)
async def test_views(name: str, honest: Path, tmp_path: Path) -> None:
    shutil.copytree(honest, tmp_path / "runs" / "good")
    _changed(honest, tmp_path / "runs" / "bad", name)
    async with viewing(tmp_path / "runs") as (server, session):

        async def status(path: str) -> int:
            async with session.get(URL(server.address + path, encoded=True)) as answer:
                await answer.read()
                return answer.status

        for path in (
            "",
            "facts",
            "rollouts",
            "curves.json",
            "timeline.svg",
            "sql?q=SELECT+count(*)+FROM+v_experiences",
        ):
            assert await status(f"run/bad/{path}") in (200, 422), path
        for path in (
            "",
            "run/good/facts",
            "run/good/rollouts",
            "compare?run=good&run=bad",
            "compare.json?run=good&run=bad",
        ):
            assert await status(path) == 200, path


@attack(
    "–",
    "a ledger whose rows name payload outside of the buffer",
    "refused: neither read nor removed",
)
@pytest.mark.parametrize("kind", ["file", "queue", "sql"])
@pytest.mark.parametrize(
    "locator",
    ["../../other", "/tmp/other", "000000/../../../other", "a\0b", "1:2:3", "9" * 60, "-1"],
)
def test_payload_of_elsewhere(kind: str, locator: str, tmp_path: Path) -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        payloads.create(connection)
        storage = make_storage(BufferSettings(folder=tmp_path / "buffer", storage_type=kind))
        with pytest.raises(PayloadDamaged):
            storage.get([locator], connection)
    engine.dispose()


@attack(
    "–",
    "a ledger that names a file, a module or a command as its storage",
    "no code of it runs: refused with what to set",
)
@pytest.mark.parametrize("kind", ["{file}:Evil", "subprocess:Popen", "os:system", "evil:Evil"])
def test_a_ledger_names_no_code(
    kind: str, honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Evil: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(honest, tmp_path / "run")
    named = kind.format(file=tmp_path / "evil.py")
    _ledger(
        "DELETE FROM meta WHERE key IN ('storage', 'storage_type')",
        *(f"INSERT INTO meta VALUES ('{k}', '{named}')" for k in ("storage", "storage_type")),
    )(tmp_path / "run")
    with questions_of(tmp_path / "run") as questions:
        with questions.ask("SELECT id FROM v_experiences LIMIT 1") as answer:
            ((id,),) = answer.rows
        with pytest.raises(ConfigError, match="names code as its storage"):
            questions.payload([id])
    with pytest.raises(ConfigError, match="names code as its storage"):
        audit_run(tmp_path / "run")
    assert "names code" in " ".join(collect(open_run(tmp_path / "run")).missing)
    assert not (tmp_path / "ran").exists()


ENDLESS = {
    "LIKE with many wild cards": "SELECT sum(t LIKE '%a%a%a%a%a%a%a%a%a%b') FROM (SELECT "
    "replace(hex(zeroblob(50000)), '0', 'a') AS t)",
    "GLOB with many wild cards": "SELECT t GLOB '*a*a*a*a*a*a*a*a*a*b' FROM (SELECT "
    "replace(hex(zeroblob(50000)), '0', 'a') AS t)",
    "a long text in a longer one": "SELECT instr(t || t, t || 'b') FROM (SELECT "
    "replace(hex(zeroblob(1000000)), '0', 'a') AS t)",
    "a long text replaced": "SELECT length(replace(t || t, t || 'b', 'x')) FROM (SELECT "
    "replace(hex(zeroblob(1000000)), '0', 'a') AS t)",
    "characters that are many": "SELECT length(trim(t || t, t || 'b')) FROM (SELECT "
    "replace(hex(zeroblob(1000000)), '0', 'a') AS t)",
}
COUNT = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c)"
SLOW = {
    "a recursion": f"{COUNT} SELECT count(*) FROM c",
    "steps that are long each": f"{COUNT} SELECT sum(length(randomblob(20000000))) FROM c",
    "joins": "WITH t(x) AS (VALUES (1),(2),(3),(4),(5),(6),(7),(8),(9),(10)) SELECT count(*) FROM "
    "t a,t b,t c,t d,t e,t f,t g,t h,t i,t j",
}


@attack("L", "a question whose one step never ends", "answered: such steps are linear")
@pytest.mark.parametrize("name", ENDLESS)
def test_no_step_is_endless(name: str, honest: Path) -> None:
    began = time.process_time()
    with questions_of(honest) as questions, questions.ask(ENDLESS[name], timeout_s=600.0) as answer:
        list(answer.rows)
    # of the processor
    assert time.process_time() - began < 20


@attack("L", "a question of endless or of long steps", "ended at its deadline")
@pytest.mark.parametrize("name", SLOW)
def test_questions_have_a_deadline(name: str, honest: Path) -> None:
    began = time.process_time()
    with (
        questions_of(honest) as questions,
        pytest.raises(ConfigError, match="took longer than"),
        questions.ask(SLOW[name], timeout_s=0.3) as answer,
    ):
        list(answer.rows)
    assert time.process_time() - began < 10


@attack(
    "–",
    "questions that attach a file, write one, load code, or change how the database works",
    "refused with what is allowed",
)
@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH '{file}' AS x",
        "SELECT * FROM pragma_database_list",
        "PRAGMA query_only = OFF",
        "SELECT load_extension('{file}')",
        "SELECT readfile('{file}')",
        "SELECT * FROM fsdir('/')",
        "SELECT writefile('{file}', 'x')",
        "SELECT edit('x', 'sh')",
        "WITH x AS (SELECT 1) DELETE FROM experiences",
        "EXPLAIN ATTACH '{file}' AS x",
        "VALUES (1); ATTACH '{file}' AS x",
        "SELECT fts3_tokenizer('simple')",
        "SELECT * FROM dbstat",
    ],
)
def test_questions_reach_no_file(sql: str, honest: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    file.write_text("a key")
    with (
        questions_of(honest) as questions,
        pytest.raises(ConfigError),
        questions.ask(sql.format(file=file), timeout_s=10.0) as answer,
    ):
        list(answer.rows)
    assert file.read_text() == "a key"
