"""Rows out of databases and classes of one's own, bad rows left out, rows that name their own
workflow.
"""

from __future__ import annotations

import json
import math
import sqlite3

import pytest

from rft.errors import ConfigError, PluginError
from rft.secrets import learn_secrets
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import FormatSettings, TasksetSettings


def settings(path, **changes):
    return TasksetSettings(
        **{"name": "tasks", "path": str(path), "workflow": "simple_workflow", **changes}
    )


def prompts(taskset):
    return [taskset.task(i).prompt for i in range(len(taskset))]


# ---------------------------------------------------------------- sql


@pytest.fixture
def database(tmp_path):
    file = tmp_path / "odd name?#%.db"
    with sqlite3.connect(file) as db:
        db.execute("CREATE TABLE tasks (id INTEGER PRIMARY KEY, raw_task JSON)")
        for i in (3, 1, 2):
            db.execute(
                "INSERT INTO tasks VALUES (?, ?)",
                (i, json.dumps({"prompt": f"p{i}", "response": str(i)})),
            )
        db.execute("CREATE TABLE plain (prompt TEXT, response TEXT, level REAL, born DATE)")
        db.executemany(
            "INSERT INTO plain VALUES (?, ?, ?, ?)",
            [("a", "1", 0.5, "2026-01-02"), ("b", "2", 0.25, "2026-01-03")],
        )
        db.execute(
            "CREATE TABLE sizes (id INTEGER PRIMARY KEY, prompt TEXT, response DECIMAL(10, 2))"
        )
        db.executemany(
            "INSERT INTO sizes VALUES (?, ?, ?)", [(1, "a", 2), (2, "b", 2.5), (3, "c", math.inf)]
        )
        db.execute("CREATE TABLE blobs (id INTEGER PRIMARY KEY, prompt TEXT, picture BLOB)")
        db.execute("INSERT INTO blobs VALUES (1, 'a', x'00ff')")
    db.close()
    return file


def sql(path, **changes):
    return open_taskset(settings(path, storage_type="sql", **changes))


def test_sql_tables_and_queries(database):
    whole = sql(database)  # the table of the taskset's name; rows as JSON, by primary key
    assert prompts(whole) == ["p1", "p2", "p3"] and whole.task(2).truth == "3"
    assert prompts(sql(database, max_rows=2)) == ["p1", "p2"]
    plain = sql(database, args={"table": "plain", "order_by": ["level"]})
    assert prompts(plain) == ["b", "a"] and plain.task(0).row["born"] == "2026-01-03"
    asked = sql(
        database,
        args={"query": "SELECT prompt, 'x' || response AS response FROM plain WHERE level > 0.3"},
    )
    assert prompts(asked) == ["a"] and asked.task(0).truth == "x1"
    assert (
        len({whole.fingerprint, plain.fingerprint, asked.fingerprint}) == 3
        and whole.fingerprint == sql(database).fingerprint
    )
    with sqlite3.connect(database) as db:
        db.execute("UPDATE plain SET prompt = 'c' WHERE prompt = 'b'")
    db.close()
    assert (
        sql(database, args={"table": "plain", "order_by": ["level"]}).fingerprint
        != plain.fingerprint
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"table": "tasks; DROP TABLE tasks"},
            "is no name of a table or column; letters, digits and _, at most 63",
        ),
        ({"table": "taks"}, "there is no table 'taks' .*there are blobs, plain, sizes, tasks"),
        (
            {"table": "plain"},
            r"has no primary key, so its rows have no order; write args\.order_by",
        ),
        (
            {"table": "plain", "order_by": ["lvl"]},
            "no column 'lvl' to order by; it has prompt, response, level, born",
        ),
        ({"table": "blobs"}, "table blobs, row 0, column picture: holds bytes"),
        ({"query": "DELETE FROM plain"}, "must begin with SELECT or WITH"),
        (
            {"query": "WITH x AS (SELECT 1) DELETE FROM plain"},
            "attempt to write a readonly database",
        ),
        ({"query": "SELECT nope"}, "no such column: nope"),
        ({"query": "SELECT 1", "table": "plain"}, "query cannot be combined with table"),
        ({"tabel": "plain"}, "tabel: Extra inputs are not permitted"),
    ],
)
def test_sql_refuses(database, args, message):
    with pytest.raises(ConfigError, match=message) as caught:
        sql(database, args=args)
    assert caught.value.key in ("taskset tasks.args", "taskset tasks.path")
    with sqlite3.connect(database) as db:
        assert db.execute("SELECT count(*) FROM plain").fetchone() == (2,)
    db.close()


def test_sql_decimals(database):
    sizes = sql(database, args={"table": "sizes"})
    truths = [sizes.task(i).truth for i in range(3)]
    assert truths == [2, 2.5, math.inf] and type(truths[0]) is int


def test_sql_addresses(tmp_path):
    with pytest.raises(
        ConfigError, match=r"none\.db does not exist; name a SQLite file, sqlite:///FILE"
    ):
        sql(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(ConfigError, match="no driver for this database is installed"):
        sql("nosuch://host/db")
    with pytest.raises(ConfigError) as caught:
        sql("postgresql://me:hunter22@127.0.0.1:9/db")
    assert (
        "hunter22" not in f"{caught.value} {caught.value.given!r}"
        and "postgresql://me:***@127.0.0.1:9/db" in str(caught.value)
    )
    learn_secrets(["hunter22"])


# ---------------------------------------------------------------- a class of one's own

READER = """
class Rows:
    def __init__(self, path, split, *, size=3):
        self.path, self.split, self.size = path, split, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if i == 7:
            raise OSError("disk on fire")
        return {"prompt": f"{self.path} {self.split} {i}"} if i != 5 else "five"


class NoRows:
    pass


def rows(path, split):
    return []
"""


@pytest.fixture
def reader(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(READER)
    return lambda name="Rows", **changes: open_taskset(
        settings("data", storage_type=f"{path}:{name}", **changes)
    )


def test_a_reader_of_ones_own(reader):
    made = reader(split="test")
    assert prompts(made) == ["data test 0", "data test 1", "data test 2"]
    assert made.fingerprint == reader(split="test").fingerprint != reader().fingerprint
    skipping = reader(
        args={"size": 9}, skip_bad_rows=True, format=FormatSettings(response_key="prompt")
    )
    assert len(skipping) == 7 and skipping.task(5).index == 6
    assert "2 of 9 rows are left out (skip_bad_rows): " in str(
        skipping.skipped
    ) and "disk on fire" in str(skipping.skipped)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Rows", {"size": 6}, "Rows, row 5: is str; it must be a dict of columns"),
        (
            "Rows",
            {"size": 8, "sise": 1},
            "cannot be called with path, split, size, sise by name: .*'sise'",
        ),
        ("NoRows", {}, "has no __len__ and no __getitem__; it must be a class"),
        ("rows", {}, "is no class"),
    ],
)
def test_readers_refused(reader, name, args, message):
    with pytest.raises(ConfigError, match=message):
        reader(name, args=args)
    with pytest.raises(PluginError, match="has no 'Nothing'"):
        reader("Nothing")


BROKEN = """
import sys
from rft.taskset.base import TaskSource

def raises(split):
    return [{"prompt": {}["none"]}]

def leaves(split):
    sys.exit(3)

def numbers(split):
    return [{"prompt": "a"}, 2]

class Made:
    def __init__(self, path, split): raise OSError("no such place")
    def __len__(self): return 1
    def __getitem__(self, i): return {"prompt": "a"}

class Rows(TaskSource):
    def __init__(self, path, split): pass
    def __len__(self): return 1
    def __getitem__(self, i): return 5

class Length(Rows):
    def __len__(self): raise OSError("no such length")

class Where(Rows):
    def where(self, i): raise OSError("no such row")

class Print(Rows):
    def fingerprint(self): raise OSError("no such print")
"""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"path": "FILE:raises"}, "line 6, in raises.*KeyError: 'none'"),
        ({"path": "FILE:leaves"}, "line 9, in leaves.*SystemExit: 3"),
        ({"path": "FILE:numbers"}, "returned list of int; it must return a list of dicts"),
        ({"storage_type": "FILE:Made"}, "line 15, in __init__.*OSError: no such place"),
        ({"storage_type": "FILE:Length"}, "in __len__.*OSError: no such length"),
        ({"storage_type": "FILE:Where"}, "in where.*OSError: no such row"),
        ({"storage_type": "FILE:Print"}, "in fingerprint.*OSError: no such print"),
    ],
)
def test_what_code_for_rows_raises_is_told_with_its_authors_lines(tmp_path, changes, says):
    (tmp_path / "mine.py").write_text(BROKEN)
    changes = {name: text.replace("FILE", f"{tmp_path}/mine.py") for name, text in changes.items()}
    with pytest.raises(ConfigError, match=f"(?s){says}") as caught:
        open_taskset(settings(**{"path": "data", **changes}))
    assert (
        caught.value.key == f"taskset tasks.{next(iter(changes))}"
        and "open_source.py" not in str(caught.value)
    )


INTERRUPTED = """
def rows(split): raise KeyboardInterrupt

class Rows:
    def __init__(self, path, split): raise KeyboardInterrupt
    def __len__(self): return 1
    def __getitem__(self, i): return {}
"""


@pytest.mark.parametrize("changes", [{"path": "FILE:rows"}, {"storage_type": "FILE:Rows"}])
def test_a_person_may_interrupt_code_for_rows(tmp_path, changes):
    (tmp_path / "slow.py").write_text(INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        open_taskset(
            settings(
                **{
                    "path": "data",
                    **{n: t.replace("FILE", f"{tmp_path}/slow.py") for n, t in changes.items()},
                }
            )
        )


MANY = """
class Many:
    def __init__(self, path, split, odd=-1): self.odd = odd
    def __len__(self): return 3000
    def __getitem__(self, i): return {"prompt": f"p{i}" + "!" * (i == self.odd)}
"""


def test_a_change_of_any_row_of_a_source_is_noticed(tmp_path):
    (tmp_path / "many.py").write_text(MANY)

    def opened(**args):
        return open_taskset(settings("data", storage_type=f"{tmp_path}/many.py:Many", args=args))

    now = opened()
    between = opened(odd=1)
    sampled = opened(odd=3)
    assert len({t.fingerprint for t in (now, between, sampled)}) == 3
    # what earlier versions noted; runs that go on compare the end
    sample = now.fingerprint.partition("-")[2]
    assert between.fingerprint.endswith(sample) and not sampled.fingerprint.endswith(sample)


# ---------------------------------------------------------------- bad rows

BAD = (
    b'\xef\xbb\xbf{"prompt": "a", "response": "1"}\r\n'
    b'{"prompt": "b", \r\n'
    b"[1]\r\n"
    b'{"prompt": "\xff"}\n'
    b'{"response": "2"}\n'
    b'{"prompt": 3, "response": "2"}\n'
    b'{"prompt": "c"}\n\n'
    b'{"prompt": "d", "response": "4"}'
)


def test_bad_rows_are_refused_or_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(BAD)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: not JSON"):
        open_taskset(settings(path))
    made = open_taskset(settings(path, skip_bad_rows=True))
    assert prompts(made) == ["a", "d"]
    assert (made.skipped.count, made.skipped.total) == (6, 8)
    assert "rows.jsonl:2: not JSON" in str(made.skipped) and str(made.skipped).endswith(
        "; and 3 more"
    )
    assert "6 of 8 rows are left out (skip_bad_rows)" in caplog.text
    assert open_taskset(settings(path, skip_bad_rows=True)).fingerprint == made.fingerprint
    path.write_bytes(BAD.replace(b'"prompt": 3', b'"prompt": "3"'))
    assert len(open_taskset(settings(path, skip_bad_rows=True))) == 3
    path.write_text('{"prompt": 1}\n{"prompt": 2}\n')
    with pytest.raises(
        ConfigError,
        match=r"none of 2 rows can be read; the first: .*rows\.jsonl:1: key 'prompt' is 1",
    ):
        open_taskset(settings(path, skip_bad_rows=True))
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match=r"has no rows: .*rows\.jsonl:1: not JSON"):
        open_taskset(settings(path, skip_bad_rows=True))


def test_tables_are_checked_as_a_whole(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    rows = [
        {"prompt": "a", "response": "1"},
        {"prompt": None, "response": "2"},
        {"prompt": "c", "response": "3"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(ConfigError, match=r"rows\.parquet, row 1: key 'prompt' is None"):
        open_taskset(settings(path))
    assert prompts(open_taskset(settings(path, skip_bad_rows=True))) == ["a", "c"]
    pq.write_table(pa.Table.from_pylist([{"prompt": i, "response": "1"} for i in range(3)]), path)
    with pytest.raises(
        ConfigError, match=r"row 0: key 'prompt' is 0 \(int\); it must be a non-empty text"
    ):
        open_taskset(settings(path))


def test_other_files_leave_out_bad_rows_too(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "a", "response": "1"}, 3]))
    (tmp_path / "a.csv").write_text("prompt,response\na,1\nb\nc,3\n")
    assert prompts(open_taskset(settings(tmp_path / "a.json", skip_bad_rows=True))) == ["a"]
    assert prompts(open_taskset(settings(tmp_path / "a.csv", skip_bad_rows=True))) == ["a", "c"]


def test_a_monstrous_prompt_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x" * ((32 << 20) + 1)}) + "\n")
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: key 'prompt' is 'xxx.*at most 33,554,432 characters"
    ):
        open_taskset(settings(path))


def test_rows_name_their_workflows_and_rewards(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        ("simple_workflow", "exact_answer"),
        ("math_workflow", "math_reward"),
        ("simple_workflow", "math_reward"),
    ]
    path.write_text(
        "".join(
            json.dumps({"prompt": "a", "response": "1", "flow": w, "score": r}) + "\n"
            for w, r in rows
        )
    )
    made = open_taskset(
        settings(path, format=FormatSettings(workflow_key="flow", reward_fn_key="score"))
    )
    assert made.workflows() == {"simple_workflow": 0, "math_workflow": 1}
    assert made.rewards() == {"exact_answer": 0, "math_reward": 1}
    assert [(made.task(i).workflow, made.task(i).reward) for i in range(3)] == rows


def test_sql_of_a_postgres_server(postgres):
    import psycopg

    with psycopg.connect(postgres.url) as db:
        db.execute("DROP SCHEMA IF EXISTS lessons CASCADE")
        db.execute("CREATE SCHEMA lessons")
        db.execute("CREATE TABLE lessons.sums (id INT PRIMARY KEY, raw_task JSONB)")
        db.execute(
            """INSERT INTO lessons.sums VALUES (2, '{"prompt": "b", "response": "2"}'), (1, '{"prompt": "a", "response": "1"}')"""
        )
        db.execute(
            "CREATE TABLE lessons.plain (prompt TEXT PRIMARY KEY, response NUMERIC, at TIMESTAMPTZ "
            "DEFAULT now())"
        )
        db.execute("INSERT INTO lessons.plain VALUES ('c', 1.5)")
    whole = sql(postgres.url, args={"table": "lessons.sums"})
    assert prompts(whole) == ["a", "b"] and whole.task(1).truth == "2"
    assert sql(postgres.url, args={"table": "lessons.plain"}).task(0).truth == 1.5
    asked = sql(
        postgres.url,
        args={
            "query": "SELECT raw_task FROM lessons.sums WHERE raw_task->>'prompt' LIKE '%b' ORDER "
            "BY id"
        },
    )
    assert prompts(asked) == ["b"]
    with pytest.raises(ConfigError, match="read-only transaction"):
        sql(
            postgres.url,
            args={
                "query": "WITH gone AS (DELETE FROM lessons.sums RETURNING *) SELECT * FROM gone"
            },
        )
    assert len(sql(postgres.url, args={"table": "lessons.sums"})) == 2
