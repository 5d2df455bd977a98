"""`rft buffer` on a ledger in PostgreSQL: the same answers, and nothing can be changed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psycopg
import pyarrow.parquet as pq
import pytest

from rft.buffer.query import open_run
from rft.errors import ConfigError
from tests.helpers.asked_ledger import play, said
from tests.helpers.postgres import PostgresServer


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Path:
    folder = tmp_path_factory.mktemp("asked_pg") / "run"
    asyncio.run(play(folder, ledger_url=postgres.url, run="asked/pg"))
    return folder


def test_stats_and_audit(run_dir: Path) -> None:
    out, _, code = said("buffer", "stats", str(run_dir), "--json")
    facts = json.loads(out)
    assert code == 0 and facts["states"] == {"available": 5, "explained": 1, "leased": 8, "used": 8}
    assert (
        facts["waiting"]["tokens"] == 60
        and facts["bytes"]["database"] > 0
        and "schema asked_pg" in facts["ledger"]
    )
    assert "experiences  22 in 6 groups" in said("buffer", "stats", str(run_dir))[0]
    assert said("buffer", "audit", str(run_dir))[2] == 0


def test_query(run_dir: Path) -> None:
    sql = (
        "SELECT state, count(*) AS n, sum(num_tokens) AS tokens, avg(reward) AS mean FROM "
        "v_experiences GROUP BY state ORDER BY state"
    )
    assert json.loads(said("buffer", "query", str(run_dir), sql, "-f", "json")[0])[0] == {
        "state": "available",
        "n": 5,
        "tokens": 60,
        "mean": 0.6,
    }
    assert said("buffer", "query", str(run_dir), "SELECT 1 AS a WHERE false")[0].splitlines() == [
        "a",
        "(no rows)",
    ]
    out, err, _ = said(
        "buffer",
        "query",
        str(run_dir),
        "SELECT id FROM v_experiences WHERE taskset LIKE 't%'",
        "--limit",
        "3",
    )
    assert len(out.splitlines()) == 4 and "the first 3 rows" in err
    out, _, _ = said(
        "buffer",
        "query",
        str(run_dir),
        "SELECT response_text FROM v_experiences WHERE taskset = 'other'",
    )
    assert "gnp.exe" in out and "\x1b" not in out


WRONG = [
    ("", "is empty"),
    ("SELECT * FROM v_experiences WHERE", "syntax error"),
    ("SELECT rewrd FROM v_experiences", 'column "rewrd" does not exist. Did you mean reward?'),
    ("SELECT * FROM experience_buffer", "The views are v_experiences"),
    ("SELECT unknown(1)", "does not exist"),
    ("SELECT 1; SELECT 2", "more than one statement"),
    ("SELECT 1; COMMIT; DELETE FROM experiences", "more than one statement"),
    ("UPDATE experiences SET reward = 1", "begins with 'UPDATE'"),
    ("COPY experiences TO '/x'", "begins with 'COPY'"),
    ("WITH x AS (DELETE FROM experiences RETURNING id) SELECT * FROM x", "a query may only read"),
    ("SELECT nextval('payloads_id_seq')", "a query may only read"),
    ("SELECT * FROM experiences FOR UPDATE", "a query may only read"),
    ("EXPLAIN ANALYZE DELETE FROM experiences", "a query may only read"),
    ("SELECT 1 / 0", "division by zero"),
]


@pytest.mark.parametrize(("sql", "why"), WRONG)
def test_wrong_questions_have_an_answer(run_dir: Path, sql: str, why: str) -> None:
    out, err, code = said("buffer", "query", str(run_dir), sql)
    assert code == 2 and not out
    assert why in err and len(err.splitlines()) == 1, err


def test_a_question_ends_by_its_deadline(run_dir: Path) -> None:
    out, err, code = said(
        "buffer",
        "query",
        str(run_dir),
        "SELECT count(*) FROM generate_series(1, 100000000000)",
        "--timeout",
        "0.3",
    )
    assert code == 2 and "took longer than 0.3 s" in err and not out


def test_export_and_sample(run_dir: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.parquet"
    where = "taskset LIKE 'to%' AND status <> 'failed'"
    assert (
        "17 experiences"
        in said("buffer", "export", str(run_dir), "--to", str(to), "--tokens", "--where", where)[0]
    )
    rows = pq.read_table(to).to_pylist()
    assert {len(r["tokens"]) for r in rows} == {12} and {r["state"] for r in rows} == {
        "used",
        "leased",
        "available",
    }
    out, _, code = said(
        "buffer", "sample", str(run_dir), "--id", "0001.00.00000000.000000.0001.00.0000", "--tokens"
    )
    assert (
        code == 0
        and "trained in   step 1:1, first in checkpoint global_step_1\n" in out
        and "⟦" in out
    )
    assert len(json.loads(said("buffer", "sample", str(run_dir), "--json", "-n", "2")[0])) == 2


def test_an_open_question_holds_no_writer_up(run_dir: Path, postgres: PostgresServer) -> None:
    """A writer that gives up on any lock at once never has to."""
    with open_run(run_dir) as questions, questions.ask("SELECT id FROM v_experiences") as answer:
        assert next(answer.rows)
        postgres.run(
            "SET lock_timeout = '1ms'; UPDATE asked_pg_experience_buffer.experiences SET reward = "
            "reward"
        )
        assert len(list(answer.rows)) == 21


def test_who_may_edit_rewards_needs_no_more_rights_than_that(
    run_dir: Path, postgres: PostgresServer
) -> None:
    schema = "asked_pg_experience_buffer"
    postgres.run(
        f"CREATE ROLE judge; GRANT USAGE ON SCHEMA {schema} TO judge; GRANT SELECT, UPDATE "
        f"(reward) ON {schema}.experiences TO judge"
    )
    edit = (
        f"SET ROLE judge; UPDATE {schema}.experiences SET reward = 0.25 WHERE id = "
        f"'0001.00.00000002.000001.0001.00.0000'"
    )
    postgres.run(edit)
    assert postgres.run(f"SELECT old_reward, new_reward FROM {schema}.reward_edits") == [
        (1.0, 0.25)
    ]
    assert json.loads(said("buffer", "stats", str(run_dir), "--json")[0])["edits"] == 1
    for wrong in (
        edit.replace("0.25", "'NaN'"),
        edit.replace("reward =", "state ="),
        edit.replace("00000002", "00000001"),
    ):
        with pytest.raises(
            psycopg.Error, match=r"finite number|permission denied|is leased or was trained"
        ):
            postgres.run(wrong)


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    folder.mkdir()
    url = f"postgresql://rft:geheim@/postgres?host={tmp_path}"
    pointer = {"name": "experience_buffer", "url": url.replace(":geheim", ""), "schema": "x"}
    (folder / "experience_buffer.ledger.json").write_text(json.dumps(pointer))
    _, err, code = said("buffer", "stats", str(tmp_path))
    assert code == 2 and "schema x" in err and len(err.splitlines()) == 1
    with pytest.raises(ConfigError) as e, open_run(tmp_path, url):
        pass
    assert "geheim" not in str(e.value)
