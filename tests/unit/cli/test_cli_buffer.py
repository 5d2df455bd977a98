"""`rft buffer stats|query|export|sample|audit`: every storage, during a run and after it, and every
wrong use.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.cli import show
from rft.errors import ConfigError
from rft.secrets import safe
from rft.testing.storage_contract import fill, group
from rft.types.block import encode
from tests.helpers.asked_ledger import EVIL, play, said


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked") / "run"
    asyncio.run(play(folder))
    return folder


# ------------------------------------------------------------ stats


def test_stats_counts_everything(run_dir: Path) -> None:
    out, _, code = said("buffer", "stats", str(run_dir), "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["states"] == {"available": 5, "explained": 1, "leased": 8, "used": 8}
    assert facts["experiences"] == sum(facts["states"].values()) == 22 and facts["groups"] == 6
    assert facts["reasons"] == {"failed": 1}
    assert {t["taskset"]: t["experiences"] for t in facts["tasksets"]} == {"toy": 18, "other": 4}
    assert [(v["version"], v["experiences"]) for v in facts["versions"]] == [(None, 1), ("1:0", 21)]
    assert facts["waiting"] == {
        "groups": 2,
        "experiences": 5,
        "tokens": 60,
        "first_batch": 2,
        "last_batch": 2,
    }
    assert facts["uses"] == {"uses": 8, "experiences": 8, "last": "1:1"}
    assert facts["bytes"]["payload"] > 0 and facts["bytes"]["database"] > 0 and facts["edits"] == 0


def test_the_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b?c#d%20e"
    asyncio.run(play(folder))
    assert json.loads(said("buffer", "stats", str(folder), "--json")[0])["experiences"] == 22
    assert said("buffer", "audit", str(folder))[2] == 0


def test_stats_for_people(run_dir: Path) -> None:
    out, _, code = said("buffer", "stats", str(run_dir))
    assert code == 0
    assert "experiences  22 in 6 groups: 5 available, 1 explained, 8 leased, 8 used" in out
    assert "waiting      5 in 2 groups, 60 tokens, batches 2 to 2" in out
    assert "explained    1 failed" in out and "1:0" in out


def test_the_commands_need_neither_torch_nor_ray(run_dir: Path) -> None:
    program = (
        "import sys\nfrom rft.cli.main import main\n"
        "for words in (['stats', sys.argv[1]], ['query', sys.argv[1], 'SELECT 1'], ['sample', "
        "sys.argv[1]], ['audit', sys.argv[1]]):\n"
        "    try:\n        main(['buffer', *words])\n"
        "    except SystemExit as e:\n        assert not e.code, e.code\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'vllm', 'datasets') if m in "
        "sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_dir)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[]"


# ------------------------------------------------------------ query


def test_query_tables_csv_and_json(run_dir: Path) -> None:
    sql = (
        "SELECT state, count(*) AS n, avg(reward) AS mean FROM v_experiences GROUP BY state "
        "ORDER BY state"
    )
    assert said("buffer", "query", str(run_dir), sql)[0].splitlines() == [
        "state      n  mean",
        "available  5   0.6",
        "explained  1     -",
        "leased     8   0.5",
        "used       8   0.5",
    ]
    assert said("buffer", "query", str(run_dir), sql, "-f", "csv")[0].splitlines()[:2] == [
        "state,n,mean",
        "available,5,0.6",
    ]
    assert json.loads(said("buffer", "query", str(run_dir), sql, "-f", "json")[0])[1] == {
        "state": "explained",
        "n": 1,
        "mean": None,
    }
    assert said("buffer", "query", str(run_dir), "SELECT 1 AS a WHERE false")[0].splitlines() == [
        "a",
        "(no rows)",
    ]
    assert (
        json.loads(
            said("buffer", "query", str(run_dir), "SELECT 1 AS a WHERE false", "-f", "json")[0]
        )
        == []
    )
    twice = (
        "SELECT e.id, u.experience AS id FROM v_experiences e JOIN uses u ON u.experience = "
        "e.id LIMIT 1"
    )
    assert set(json.loads(said("buffer", "query", str(run_dir), twice, "-f", "json")[0])[0]) == {
        "id",
        "id_2",
    }


def test_query_without_sql_lists_the_views(run_dir: Path) -> None:
    out, _, code = said("buffer", "query", str(run_dir))
    assert code == 0
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        "v_experiences",
        "v_runs",
        "v_groups",
        "v_tokens",
        "v_lineage",
    ]
    assert " finish_reason" in out and " checkpoint_step" in out


@pytest.mark.parametrize("output", ["table", "csv", "json"])
def test_query_stops_at_the_limit_and_says_so(run_dir: Path, output: str) -> None:
    sql = "SELECT id FROM v_experiences ORDER BY id"
    out, err, code = said("buffer", "query", str(run_dir), sql, "--limit", "5", "-f", output)
    assert code == 0 and out.count("0001.00.00000") == 5
    assert "the first 5 rows; --limit 0 prints all" in err
    out, err, _ = said("buffer", "query", str(run_dir), sql, "--limit", "22", "-f", output)
    assert out.count("0001.00.00000") == 22 and not err
    assert (
        said("buffer", "query", str(run_dir), sql, "--limit", "0", "-f", output)[0].count(
            "0001.00.00000"
        )
        == 22
    )


@pytest.mark.parametrize(
    "words",
    [
        ("query", "SELECT response_text FROM v_experiences WHERE taskset = 'other'"),
        ("query", "SELECT response_text FROM v_experiences WHERE taskset = 'other'", "-f", "json"),
        ("sample", "--where", "taskset = 'other' AND run = 0"),
        ("sample", "--where", "taskset = 'other' AND run = 0", "--json"),
    ],
)
def test_what_a_model_wrote_cannot_drive_the_terminal(
    run_dir: Path, words: tuple[str, ...]
) -> None:
    out, _, code = said("buffer", words[0], str(run_dir), *words[1:])
    assert code == 0 and "gnp.exe" in out
    assert not set(out) & {"\x1b", "\x07", "\x9b", "\u202e"}
    if "json" in words or "--json" in words:
        assert json.loads(out)[0]["response_text"] == EVIL  # escaped, and yet the same


def test_csv_is_faithful_in_a_file_and_safe_on_a_terminal(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "buffer",
        "query",
        str(run_dir),
        "SELECT response_text FROM v_experiences WHERE run = 0 AND taskset = 'other'",
        "-f",
        "csv",
    )
    assert EVIL in said(*words)[0]
    monkeypatch.setattr(show, "on_terminal", lambda: True)
    assert "\x1b" not in said(*words)[0]


def test_escapes_and_widths() -> None:
    assert safe("a\tb\n", lines=True) == "a\tb\n" and safe("a\tb\n\x00") == "a\\tb\\n\\x00"
    assert safe("日本 é\u200e") == "日本 é\\u200e"
    assert show.cut("日本日本", 5) == "日本…" and show.cut("abcde", 5) == "abcde"
    assert list(show.table(["a", "n"], [["日本", "1"], ["x", "22"]], [False, True])) == [
        "a      n",
        "日本   1",
        "x     22",
    ]
    assert (
        show.human(0) == "0 B"
        and show.human(1500) == "1.5 kB"
        and show.human(2_340_000_000) == "2.3 GB"
    )


WRONG = [
    ("SELEC 1", "begins with 'SELEC'"),
    ("", "is empty"),
    (" ;; ", "is empty"),
    ("SELECT", "incomplete input"),
    ("SELECT * FROM v_experiences WHERE", "incomplete input"),
    ("SELECT * FROM v_experiences WERE reward > 0 ORDER", "syntax error"),
    ("SELECT rewrd FROM v_experiences", "no such column: rewrd. Did you mean reward?"),
    ("SELECT e.xyzzy FROM v_experiences e", "v_experiences has id, "),
    (
        "SELECT * FROM experience_buffer",
        "The views are v_experiences, v_runs, v_groups, v_tokens, v_lineage",
    ),
    ("SELECT unknown(1)", "no such function"),
    ("SELECT 1; SELECT 2", "more than one statement"),
    ("SELECT 1; DELETE FROM experiences", "more than one statement"),
    ("UPDATE experiences SET reward = 1", "begins with 'UPDATE': a query may only read"),
    ("/* x */ -- y\n delete from experiences", "begins with 'DELETE'"),
    ("WITH x AS (SELECT 1) DELETE FROM experiences", "a query may only read"),
    ("EXPLAIN DELETE FROM experiences", "a query may only read"),
    ("ATTACH 'x.db' AS x", "begins with 'ATTACH'"),
    ("PRAGMA query_only = OFF", "begins with 'PRAGMA'"),
    ("BEGIN", "begins with 'BEGIN'"),
    ("SELECT load_extension('x')", "a query may only read"),
    ("VACUUM", "begins with 'VACUUM'"),
]


@pytest.mark.parametrize(("sql", "why"), WRONG)
def test_wrong_questions_have_an_answer(run_dir: Path, sql: str, why: str) -> None:
    out, err, code = said("buffer", "query", str(run_dir), sql)
    assert code == 2 and not out
    assert why in err and len(err.splitlines()) == 1, err


def test_a_question_ends_by_its_deadline(run_dir: Path) -> None:
    endless = (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    )
    out, err, code = said("buffer", "query", str(run_dir), endless, "--timeout", "0.3")
    assert code == 2 and "took longer than 0.3 s" in err and "rft buffer query" in err and not out


def test_other_wrong_words(run_dir: Path, tmp_path: Path) -> None:
    run = str(run_dir)
    for words, why in [
        (("stats", str(tmp_path / "no")), "is no folder"),
        (("stats", str(tmp_path)), "must hold one buffer"),
        (("audit", str(tmp_path)), "must hold one buffer"),
        (("stats", str(run_dir.parent)), f"It holds the runs {run}"),
        (("stats",), "give the folder of a run"),
        (("query", run, "SELECT 1", "-f", "xml"), "write one of table, csv, json"),
        (("sample", run, "--id", "0001.00"), "is not in"),
        (("sample", run, "--where", "rewrd > 1"), "Did you mean reward?"),
        (("sample", run, "--where", "reward > 1) --"), "syntax error"),
        (("sample", run, "--id", "x", "--where", "reward > 1"), "cannot be combined with --id"),
        (("export", run, "--to", str(tmp_path / "x.csv")), "must end in .parquet or .jsonl"),
        (("export", run, "--to", str(tmp_path / "no" / "x.parquet")), "cannot be written"),
        (("export", run, "--to", str(tmp_path / "no" / "x.jsonl")), "cannot be written"),
        (("export", run, "--to", str(run_dir / "a.jsonl"), "--where", "reward >"), "syntax error"),
        (
            ("export", run, "--to", str(run_dir / "a.jsonl"), "--where", "1; DELETE FROM uses"),
            "syntax error",
        ),
        (("stats", "--config", str(tmp_path / "no.yaml")), "no.yaml"),
    ]:
        _, err, code = said("buffer", *words)
        assert code == 2 and why in err, (words, err)
    assert not list(run_dir.glob("*a.jsonl*"))


def test_a_ledger_that_cannot_be_read(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rft.buffer import query

    monkeypatch.setattr(query, "LOCK_WAIT_S", 0.05)
    for folder in ("newer", "older", "damaged", "torn", "locked", "empty"):
        shutil.copytree(run_dir, tmp_path / folder)
    path = {p.parent.parent.name: p for p in tmp_path.glob("*/buffer/experience_buffer.db")}
    for name, number in (("newer", "99"), ("older", "1")):
        with closing(sqlite3.connect(path[name])) as db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'format'", (number,))
            db.commit()
    for p in path["damaged"].parent.glob("*.db*"):
        p.write_bytes(b"not a database at all" * 1000)
    for p in path["empty"].parent.glob("*.db*"):
        p.write_bytes(b"")
    path["torn"].write_bytes(path["torn"].read_bytes()[: 3 * 8192])
    with closing(sqlite3.connect(path["locked"])) as lock:
        lock.execute("PRAGMA locking_mode = EXCLUSIVE")
        lock.execute("BEGIN EXCLUSIVE")
        for name, why in [
            ("newer", "has format 99, this rft reads format"),
            ("older", "has format 1, this rft reads format"),
            ("damaged", "is damaged or not a ledger"),
            ("torn", "is damaged or not a ledger"),
            ("empty", "is damaged or not a ledger"),
            ("locked", "is locked by another program"),
        ]:
            _, err, code = said("buffer", "stats", str(tmp_path / name))
            assert code == 2 and why in err and len(err.splitlines()) == 1, (name, err)
    for name in ("newer", "damaged", "torn", "empty"):
        _, err, code = said("buffer", "audit", str(tmp_path / name))
        assert code == 2 and "experience_buffer.db" in err, (name, err)


async def test_a_run_that_was_killed_is_read_with_its_log(tmp_path: Path) -> None:
    buffer = Buffer(BufferSettings(folder=tmp_path / "run" / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    killed = tmp_path / "killed" / "buffer"
    killed.mkdir(parents=True)
    for suffix in ("", "-wal"):  # what a kill leaves; the shared memory of the log is made anew
        name = f"experience_buffer.db{suffix}"
        shutil.copy(tmp_path / "run" / "buffer" / name, killed / name)
    await buffer.close()
    out, err, code = said("buffer", "stats", str(tmp_path / "killed"), "--json")
    assert code == 0 and json.loads(out)["states"] == {"available": 8}, err


# ------------------------------------------------------------ export


@pytest.mark.parametrize(
    ("storage", "suffix"),
    [("sql", "parquet"), ("file", "parquet"), ("queue", "parquet"), ("queue", "jsonl")],
)
def test_export_of_every_storage_holds_what_was_appended(
    tmp_path: Path, storage: str, suffix: str
) -> None:
    asyncio.run(play(tmp_path / "run", storage_type=storage))
    to = tmp_path / f"out.{suffix}"
    out, _, code = said("buffer", "export", str(tmp_path / "run"), "--to", str(to), "--tokens")
    assert code == 0 and "22 experiences" in out
    rows = (
        pq.read_table(to).to_pylist()
        if suffix == "parquet"
        else [json.loads(line) for line in to.read_text().splitlines()]
    )
    assert [r["id"] for r in rows] == sorted(r["id"] for r in rows) and len(rows) == 22
    by_id = {r["id"]: r for r in rows}
    for x in [m for batch in (0, 1) for task in (0, 1) for m in group(1, batch, task)]:
        found = by_id[str(x.id)]
        assert found["tokens"] == x.tokens.tolist() and found["loss_mask"] == x.loss_mask.tolist()
        assert np.array_equal(np.float32(found["logprobs"]), x.logprobs)
        assert found["version_spans"] == [{"version": "1:0", "start": 6, "end": 12}]
        assert found["reward"] == x.reward and json.loads(found["reward_parts"]) == {
            "exact": x.reward
        }
        assert found["is_expert"] is False and found["state"] == (
            "leased" if x.id.batch else "used"
        )
    assert by_id["0001.00.00000002.000001.0000.00.0000"]["tokens"] == []
    assert list((tmp_path).glob(".*")) == []  # nothing is left aside


def test_export_has_types_a_condition_and_is_read_by_datasets(
    run_dir: Path, tmp_path: Path
) -> None:
    import datasets

    to = tmp_path / "out.parquet"
    out, _, code = said(
        "buffer",
        "export",
        str(run_dir),
        "--to",
        str(to),
        "--where",
        "state = 'used' AND reward > 0 -- half",
    )
    assert code == 0 and "4 experiences" in out
    types = {f.name: str(f.type) for f in pq.read_schema(to)}
    assert (types["reward"], types["num_tokens"], types["is_expert"], types["response_text"]) == (
        "double",
        "int64",
        "bool",
        "string",
    )
    assert (types["used"], types["used_step"], types["seed"]) == ("double", "int64", "int64")
    found = datasets.load_dataset(
        "parquet", data_files=str(to), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert set(found["used_step"]) == {1} and set(found["reward"]) == {1.0}
    lines = tmp_path / "out.jsonl"
    assert said("buffer", "export", str(run_dir), "--to", str(lines), "--tokens")[2] == 0
    found = datasets.load_dataset(
        "json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(found) == 22 and sum(map(len, found["tokens"])) == 12 * 21
    none = tmp_path / "none.parquet"
    assert (
        "0 experiences"
        in said("buffer", "export", str(run_dir), "--to", str(none), "--where", "reward > 9")[0]
    )
    assert pq.read_table(none).num_rows == 0


def test_export_overwrites_nothing(run_dir: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.parquet"
    to.write_text("mine")
    _, err, code = said("buffer", "export", str(run_dir), "--to", str(to))
    assert code == 2 and "is not overwritten" in err and to.read_text() == "mine"


async def test_export_is_written_in_row_groups_from_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rft.buffer import experience_export, query

    buffer = Buffer(BufferSettings(folder=tmp_path / "run" / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0, groups=25)
    monkeypatch.setattr(experience_export, "PAGE", 16)
    monkeypatch.setattr(experience_export, "GROUP_ROWS", 32)
    told: list[int] = []
    with query.open_run(tmp_path / "run") as questions:  # while the buffer is open
        count = experience_export.export(
            questions, tmp_path / "x.parquet", tokens=True, on_progress=told.append
        )
        with pytest.raises(ConfigError, match="appeared meanwhile"):
            experience_export.export(
                questions,
                tmp_path / "y.parquet",
                on_progress=lambda n: (tmp_path / "y.parquet").touch(),
            )
    await buffer.close()
    assert count == 100 and told == [16, 32, 48, 64, 80, 96, 100]
    file = pq.ParquetFile(tmp_path / "x.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [
        32,
        32,
        32,
        4,
    ]
    assert len(set(file.read(["id"])["id"].to_pylist())) == 100


def test_export_knows_the_type_of_every_column(run_dir: Path) -> None:
    from rft.buffer import experience_export, query

    with query.open_run(run_dir) as questions:
        known = experience_export.schema(questions)
        (page,) = experience_export.pages(questions, "")
    for field in known:
        values = experience_export._typed([r[field.name] for r in page], field.type)
        kinds = {type(v) for v in values} - {type(None)}
        assert len(kinds) <= 1 and pa.array(values, field.type).null_count == values.count(None), (
            field
        )


# ------------------------------------------------------------ sample


def test_sample_answers_who_wrote_and_who_trained_it(run_dir: Path) -> None:
    out, _, code = said(
        "buffer", "sample", str(run_dir), "--id", "0001.00.00000000.000000.0001.00.0000"
    )
    assert code == 0
    assert "written by   weights 1:0 tokens 6 to 12" in out
    assert "trained in   step 1:1, first in checkpoint global_step_1\n" in out
    assert (
        "reward       1 = exact 1" in out and "response     b" in out and "tokens       " not in out
    )
    out, _, _ = said(
        "buffer", "sample", str(run_dir), "--id", "0001.00.00000001.000000.0001.00.0000", "--json"
    )
    (x,) = json.loads(out)
    assert x["uses"] == [] and x["state"] == "leased" and x["leased_step"] == 2
    sql = (
        "SELECT train_step, checkpoint_step, oldest_step, counts FROM v_lineage WHERE id = "
        "'0001.00.00000000.000000.0001.00.0000'"
    )
    assert json.loads(said("buffer", "query", str(run_dir), sql, "-f", "json")[0]) == [
        {"train_step": 1, "checkpoint_step": 1, "oldest_step": 0, "counts": 1}
    ]


def test_sample_says_what_an_answer_is_compared_with(tmp_path: Path) -> None:
    said_to_it = {"gold_answer": "7", "reward_reason": "it is not 7", "note": "x"}
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
    ]
    turns = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "c"},
    )

    async def played() -> None:
        buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
        await buffer.open()
        await buffer.start_lineage(None, None)
        members = [
            msgspec.structs.replace(x, info=said_to_it, messages=turns, reward=float(i == 0))
            for i, x in enumerate(group(1, 0, 0))
        ]
        await buffer.writer(1).append(encode(members), accepted=True)
        await buffer.close()

    asyncio.run(played())
    out, _, code = said("buffer", "sample", str(tmp_path), "--best", "1")
    assert (
        code == 0
        and "group        0001.00.00000000.000000, mean reward 0.25 of 4, this one +0.75\n" in out
    )
    assert (
        "gold_answer  7\n" in out
        and "reason       it is not 7\n" in out
        and 'assistant    look({"at": 3})\n' in out
    )


QUESTION = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "word " * 100}]
EQUATIONS = {  # parts, weights, reward: its line
    " = 0.2 × brief 0.185896 + 1 × rule 0 (rule/among 0)": (
        {"brief": 0.185896, "rule": 0.0, "rule/among": 0.0},
        {"brief": 0.2, "rule": 1.0},
        0.0371792,
    ),
    " = right 1 + short -0.5": ({"right": 1.0, "short": -0.5}, {}, 0.5),
    "; its parts: right 1, short -0.5": ({"right": 1.0, "short": -0.5}, {}, 0.7),
    "; its parts: low 2, right 1": ({"right": 1.0, "low": 2.0}, {"right": 0.5}, 2.5),
    "": ({}, {}, 0.5),
}


@pytest.mark.parametrize("line", EQUATIONS)
def test_a_reward_is_equal_to_what_stands_behind_the_sign(tmp_path: Path, line: str) -> None:
    parts, weights, reward = EQUATIONS[line]
    judged = [{"judge": "helpful", "question": QUESTION, "reply": '{"score": 3}'}]
    info = {"gold_answer": "7", "reward_weights": weights, "judge": judged}

    async def played() -> None:
        buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
        await buffer.open()
        await buffer.start_lineage(None, None)
        members = [
            msgspec.structs.replace(x, info=info, reward=reward, reward_parts=parts)
            for x in group(1, 0, 0)
        ]
        await buffer.writer(1).append(encode(members), accepted=True)
        await buffer.close()

    asyncio.run(played())
    out, _, code = said("buffer", "sample", str(tmp_path), "-n", "1")
    assert code == 0
    assert f"\nreward       {reward:.6g}{line}\n" in out
    places = [
        out.index(text) for text in ("\nresponse ", "\ngold_answer  7", "\nreward ", "\njudge ")
    ]
    assert places == sorted(places)
    assert 'judge        helpful: {"score": 3}\n  system     Judge.\n  user       word word' in out
    assert "… (499 characters)\n" in out
    assert "reward_weights" not in out


def test_times_are_dates_in_a_table_and_numbers_elsewhere(run_dir: Path) -> None:
    for view, column in (
        ("v_experiences", "used"),
        ("v_lineage", "trained"),
        ("v_groups", "created"),
    ):
        asked = (
            "buffer",
            "query",
            str(run_dir),
            f"SELECT {column} FROM {view} WHERE {column} IS NOT NULL LIMIT 1",
        )
        when = json.loads(said(*asked, "-f", "json")[0])[0][column]
        assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) in said(*asked)[0]
    assert said("buffer", "query", str(run_dir), "SELECT 3 AS used, 2.5 AS created")[0].split() == [
        "used",
        "created",
        "3",
        "2.5",
    ]


def test_sample_draws_as_many_as_asked_and_no_other(run_dir: Path) -> None:
    out, _, code = said(
        "buffer", "sample", str(run_dir), "-n", "4", "--where", "state = 'used'", "--json"
    )
    assert (
        code == 0
        and len(json.loads(out)) == 4
        and {x["state"] for x in json.loads(out)} == {"used"}
    )
    out, err, code = said("buffer", "sample", str(run_dir), "--where", "reward > 9")
    assert code == 0 and not out and "no experience matches the condition" in err


def test_sample_by_step_and_reward(run_dir: Path) -> None:
    out, _, _ = said(
        "buffer", "sample", str(run_dir), "--step", "1", "--best", "2", "--worst", "1", "--json"
    )
    rows = json.loads(out)
    of_step = json.loads(
        said(
            "buffer",
            "query",
            str(run_dir),
            "SELECT reward FROM v_experiences WHERE used_step = 1",
            "-f",
            "json",
        )[0]
    )
    rewards = sorted((r["reward"] for r in of_step), reverse=True)
    assert [r["reward"] for r in rows] == [*rewards[:2], rewards[-1]] and {
        r["used_step"] for r in rows
    } == {1}
    assert not said("buffer", "sample", str(run_dir), "--step", "9")[0]


async def test_a_row_without_log_probs_shows_none(tmp_path: Path) -> None:
    """They were shown as 0.00: as if the model had been sure of every token."""
    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    rows = [
        msgspec.structs.replace(x, has_logprobs=False, logprobs=0 * x.logprobs)
        for x in group(1, 0, 0)
    ]
    await buffer.writer(1).append(encode(rows), accepted=True)
    await buffer.close()
    out, _, code = said("buffer", "sample", str(tmp_path), "--id", str(rows[0].id), "--tokens")
    assert code == 0 and f"⟦{rows[0].tokens[6]} -⟧" in out


def test_sample_shows_tokens_with_their_log_probs(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models

    words = (
        "buffer",
        "sample",
        str(run_dir),
        "--id",
        "0001.00.00000000.000000.0001.00.0000",
        "--tokens",
    )
    x = group(1, 0, 0)[1]
    out, _, code = said(*words)
    assert (
        code == 0
        and f"⟦{x.tokens[6]} -0.50⟧·⟦{x.tokens[7]} -0.50⟧" in out
        and f"{x.tokens[0]}·{x.tokens[1]}·" in out
    )
    known = {f"w{n}\x1b": n for n in range(1000)}
    Tokenizer(models.WordLevel(known, unk_token="w0\x1b")).save(str(tmp_path / "tokenizer.json"))
    (run_dir / "config.json").write_text(
        json.dumps({"tree": {"model": {"model_path": str(tmp_path)}}})
    )
    out, _, _ = said(*words)
    assert (
        f"w{x.tokens[0]}\\x1b·" in out
        and f"⟦w{x.tokens[6]}\\x1b -0.50⟧" in out
        and "\x1b" not in out
    )
    monkeypatch.setattr(show, "in_colour", lambda: True)
    assert said(*words)[0].count("\x1b[33m") == 6  # the trained ones
    (run_dir / "config.json").unlink()


def test_sample_of_payload_that_is_gone(tmp_path: Path) -> None:
    asyncio.run(play(tmp_path / "run", storage_type="queue", storage_path="none"))
    run = str(tmp_path / "run")
    out, _, code = said(
        "buffer", "sample", run, "-n", "1", "--where", "taskset = 'other'", "--tokens"
    )
    assert code == 0 and "tokens       kept in memory only" in out and "weights 1:0\n" in out
    _, err, code = said("buffer", "export", run, "--to", str(tmp_path / "x.parquet"), "--tokens")
    assert code == 2 and "in memory only" in err
    assert said("buffer", "export", run, "--to", str(tmp_path / "x.parquet"))[2] == 0


def test_damaged_payload_is_named(tmp_path: Path) -> None:
    asyncio.run(play(tmp_path / "run", storage_type="file"))
    run = str(tmp_path / "run")
    for path in (tmp_path / "run" / "buffer").rglob("*.blk"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    out, _, code = said("buffer", "sample", run, "-n", "1", "--tokens")
    assert code == 0 and "damaged" in out
    _, err, code = said("buffer", "export", run, "--to", str(tmp_path / "x.parquet"), "--tokens")
    assert code == 4 and "damaged" in err and not list(tmp_path.glob("*x.parquet*"))


# ------------------------------------------------------------ audit


def test_audit_ends_with_0_and_with_4(run_dir: Path, tmp_path: Path) -> None:
    out, _, code = said("buffer", "audit", str(run_dir))
    assert (
        code == 0
        and "acknowledged 22 = used 8 + leased 8 + available 5" in out
        and "balanced     yes" in out
    )
    shutil.copytree(run_dir, tmp_path / "bad")
    with closing(sqlite3.connect(tmp_path / "bad" / "buffer" / "experience_buffer.db")) as db:
        db.execute("DELETE FROM experiences WHERE id LIKE '%.0001.00.0000'")
        db.commit()
    out, _, code = said("buffer", "audit", str(tmp_path / "bad"), "--json")
    assert code == 4 and not json.loads(out)["ok"]


def test_audit_counts_as_stats_does_while_a_run_has_no_checkpoint(
    run_dir: Path, tmp_path: Path
) -> None:
    """N6, R15: the audit called rows orphaned that `buffer query` called available, leased and
    used.
    """
    folder = str(
        shutil.copytree(run_dir, tmp_path / "live", ignore=shutil.ignore_patterns("checkpoints"))
    )
    audit = json.loads(said("buffer", "audit", folder, "--json")[0])
    states = json.loads(said("buffer", "stats", folder, "--json")[0])["states"]
    assert {s: audit[s] for s in ("used", "leased", "available")} == {
        s: states[s] for s in ("used", "leased", "available")
    }
    assert audit["explained"] == {"failed": 1} and audit["ok"]
    assert audit["checkpoint"] == "" and audit["after_restart"] == {
        "used": 0,
        "available": 0,
        "orphaned": 21,
    }
    assert (
        "a restart now would go back to step 0: 0 used, 0 available, 21 set aside"
        in said("buffer", "audit", folder)[0]
    )
    assert "restart now" not in said("buffer", "audit", str(run_dir))[0], (
        "its newest checkpoint has all uses"
    )


def test_audit_finds_a_state_that_does_not_follow_from_the_facts(
    run_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(run_dir, tmp_path / "bad")
    with closing(sqlite3.connect(tmp_path / "bad" / "buffer" / "experience_buffer.db")) as db:
        db.execute("UPDATE experiences SET state = 'available' WHERE state = 'used'")
        db.commit()
    out, _, code = said("buffer", "audit", str(tmp_path / "bad"), "--json")
    (problem,) = json.loads(out)["problems"]
    assert (
        code == 4
        and "is stored as ('available', None), but is ('used', None) (8 such rows)" in problem
    )


# ------------------------------------------------------------ while the run goes on (F27)


async def test_a_long_question_holds_up_no_writer(tmp_path: Path) -> None:
    """A writer that waits for no lock at all never meets one, and appends stay quick."""
    from rft.buffer.query import open_run

    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    asked = threading.Event()
    answered = threading.Event()
    stop: list[Callable[[], None]] = []

    endless = """WITH RECURSIVE c(n) AS (SELECT count(*) FROM experiences UNION ALL SELECT n + 1 FROM c)
        SELECT n FROM c WHERE n < 20 OR n = -1"""

    def ask() -> None:
        ends = pytest.raises(ConfigError, match="took longer")
        with open_run(tmp_path) as questions, ends, questions.ask(endless, timeout_s=120) as answer:
            stop.append(questions.connection.connection.driver_connection.interrupt)  # type: ignore[union-attr]
            # the read transaction is open, and the question goes on
            assert next(answer.rows) == (8,)
            asked.set()
            assert len(list(answer.rows)) < 0, "it has no end"
        answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert await asyncio.to_thread(asked.wait, 60)
    for batch in range(1, 26):
        await fill(buffer, 1, batch, groups=1)
    with closing(
        sqlite3.connect(
            tmp_path / "buffer" / "experience_buffer.db", timeout=0, isolation_level=None
        )
    ) as db:
        for _ in range(100):
            db.execute("BEGIN IMMEDIATE")
            db.execute("UPDATE meta SET value = value WHERE key = 'format'")
            db.execute("COMMIT")
        assert db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[0] == 0
    assert not answered.is_set(), "the writer had to wait for the end of the question"
    stop[0]()
    await asyncio.to_thread(thread.join, 60)
    assert answered.is_set()
    assert (await buffer.audit()).ok
    await buffer.close()


@pytest.mark.parametrize("as_json", [False, True])
def test_audit_exit_code_follows_the_audit(
    as_json: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rft.buffer.audit
    from rft.buffer.base import Audit

    good = Audit(
        acked=10,
        used=4,
        leased=2,
        available=3,
        discarded={"failed": 1},
        used_twice=0,
        num_uses=4,
        digest="",
    )
    bad = msgspec.structs.replace(good, acked=11, used_twice=1, problems=("lost",))
    for audit, expected in ((good, 0), (bad, 4)):
        monkeypatch.setattr(
            rft.buffer.audit, "audit_run", lambda run_dir, audit=audit, **more: audit
        )
        out, _, code = said("buffer", "audit", str(run_dir), *(["--json"] if as_json else []))
        assert code == expected
        assert (
            json.loads(out)["ok"] == (code == 0)
            if as_json
            else ("balanced     NO" in out) == (code == 4)
        )


# ------------------------------------------------------------ --config


def test_the_configuration_stands_for_the_folder(tmp_path: Path) -> None:
    """Also with the ledger elsewhere, which the folder's pointer names."""
    file = tmp_path / "asked.yaml"
    ledger = tmp_path / "elsewhere" / "ledger.db"
    file.write_text(
        f"name: asked\ncheckpoint_root_dir: {tmp_path}/runs\nmodel: {{model_path: none, "
        f"max_prompt_tokens: 8, max_response_tokens: 8}}\n"
        "buffer:\n  explorer_input:\n    default_workflow_type: simple_workflow\n    "
        "default_reward_fn_type: exact_answer\n"
        f'    taskset: {{path: "rft.testing.tiny:copy_tasks"}}\n  trainer_input: '
        f'{{experience_buffer: {{path: "sqlite:///{ledger}"}}}}\n'
    )
    folder = tmp_path / "runs" / "rft" / "asked"
    _, err, code = said("buffer", "stats", "--config", str(file))
    assert code == 2 and str(folder) in err  # the run has not begun
    asyncio.run(play(folder, ledger_url=f"sqlite:///{ledger}"))
    for words in (("--config", str(file)), (str(folder),)):
        out, err, code = said("buffer", "stats", "--json", *words)
        assert code == 0 and json.loads(out)["experiences"] == 22, err
    assert said(
        "buffer", "query", "--config", str(file), "SELECT count(*) AS n FROM v_experiences"
    )[0].splitlines() == [
        " n",
        "22",
    ]
    assert said("buffer", "audit", "--config", str(file), "--no-payload")[2] == 0
    assert (
        "22 experiences"
        in said("buffer", "export", "-c", str(file), "--to", str(tmp_path / "x.parquet"))[0]
    )
