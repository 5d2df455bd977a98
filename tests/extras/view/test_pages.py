"""Pages of `rft view`: what is shown of broken runs, that numbers are those of SQL, and that
nothing is changed.
"""

from __future__ import annotations

import asyncio
import csv
import html
import io
import json
import os
import re
import shutil
import socket
import sqlite3
from dataclasses import fields
from pathlib import Path
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
import pyarrow.parquet as pq
import pytest
from yarl import URL

from rft.buffer.buffer import Buffer
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.errors import ConfigError, SetupError
from rft.extras.view import view_pages
from rft.extras.view.filters import Filters
from rft.extras.view.view_pages import ViewPages
from rft.extras.view.view_server import ViewServer
from rft.monitor import read as monitor_read
from rft.testing.storage_contract import fill, row
from rft.types.block import encode
from rft.types.ids import GroupId, Version
from tests.extras.view.viewed import Page, metrics, stored, viewing


async def read(session: aiohttp.ClientSession, url: str, status: int = 200) -> str:
    async with session.get(URL(url, encoded=True)) as answer:
        text = await answer.text()
        assert answer.status == status, text
        return text


async def test_every_answer_forbids_scripts_from_elsewhere(tmp_path: Path) -> None:
    await stored(tmp_path / "run")
    async with viewing(tmp_path / "run") as (server, session):
        for path in (
            "",
            "nothing",
            "run/run/",
            "run/run/timeline.svg",
            "run/run/curves.json",
            "static/view.js",
            "run/run/sql.csv?q=SELECT+1",
        ):
            async with session.get(server.address + path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
                assert "unsafe" not in policy
                assert answer.headers["Referrer-Policy"] == "no-referrer"
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
        async with session.get(server.address.replace(server.token, "wrong")) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


async def test_a_page_shows_what_sql_says(tmp_path: Path) -> None:
    await stored(tmp_path / "run")
    async with viewing(tmp_path / "run") as (server, session):
        run = f"{server.address}run/run/"
        with open_run(tmp_path / "run") as questions:
            for path, condition in (
                (
                    "rollouts?step=1&order=worst",
                    "used_step = 1 AND reward IS NOT NULL ORDER BY reward, id",
                ),
                ("rollouts?order=best", "reward IS NOT NULL ORDER BY reward DESC, id"),
                ("rollouts?status=failed", "status = 'failed' ORDER BY id"),
                (
                    "rollouts?state=leased&order=shortest",
                    "state = 'leased' ORDER BY num_response_tokens, id",
                ),
                (
                    "rollouts?taskset=other&low=0.5&order=longest",
                    "taskset = 'other' AND reward >= 0.5 ORDER BY num_response_tokens DESC, id",
                ),
                (
                    "rollouts?reason=TIME",
                    "reason LIKE '%time%' OR explained LIKE '%time%' ORDER BY id",
                ),
                ("rollouts?text=RED", "prompt_text LIKE '%red%' OR response_text LIKE '%red%'"),
                ("rollouts?batch=1&high=0&order=best", "batch = 1 AND reward <= 0 ORDER BY id"),
                (
                    "rollouts?version=0&order=worst",
                    "newest_step = 0 AND reward IS NOT NULL ORDER BY reward, id",
                ),
                (
                    "rollouts?task=1&taskset=toy&order=worst",
                    "task_index = 1 AND taskset = 'toy' AND reward IS NOT NULL ORDER BY reward, id",
                ),
            ):
                with questions.ask(f"SELECT id FROM v_experiences WHERE {condition}") as answer:
                    expected = [id for (id,) in answer.rows]
                assert expected, path
                shown = await read(session, run + path)
                assert re.findall(r'class="go" href="[^"]*/rollout/([\d.]+)"', shown) == expected, (
                    path
                )
            (row,) = questions.row(expected[0])
            page = Page(await read(session, f"{run}rollout/{expected[0]}")).text
            assert row["content_hash"] in page
            assert f"reward{row['reward']:.6g}" in page.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize(
    "said",
    [
        ["gpt"],
        {"name": "gpt"},
        "gpt",
        [{"question": "gpt"}],
        [{"reply": ["gpt"]}],
        [{"question": "gpt", "reply": "x"}],
        [{"question": ["gpt"], "reply": "x"}],
    ],
    ids=str,
)
async def test_what_others_call_judge_is_shown_as_it_is(tmp_path: Path, said: object) -> None:
    """Metadata of a session and `info` of a workflow may have any name."""
    buffer = Buffer(BufferSettings(folder=tmp_path / "run" / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    name = GroupId(1, 0, 0, 0)
    rows = [
        msgspec.structs.replace(
            row(name.run(n), reward=float(n), version=Version(1, 0)), info={"judge": said}
        )
        for n in (0, 1)
    ]
    await buffer.writer(1).append(encode(rows), accepted=True)
    await buffer.close()
    async with viewing(tmp_path / "run") as (server, session):
        page = Page(await read(session, f"{server.address}run/run/rollout/{rows[0].id}")).text
        assert "gpt" in page


@pytest.mark.e2e
async def test_the_gold_answer_stands_before_the_reward(tmp_path: Path) -> None:
    """N9: it stood at the very end, under everything recorded."""
    buffer = Buffer(BufferSettings(folder=tmp_path / "run" / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    name = GroupId(1, 0, 0, 0)
    rows = [
        msgspec.structs.replace(row(name.run(n), version=Version(1, 0)), info=info)
        for n, info in enumerate(({"gold_answer": "<b>forty-two</b>"}, {"other": 1}))
    ]
    await buffer.writer(1).append(encode(rows), accepted=True)
    await buffer.close()
    async with viewing(tmp_path / "run") as (server, session):
        with_gold, without = [
            await read(session, f"{server.address}run/run/rollout/{r.id}") for r in rows
        ]
    shown = re.search(r'<tr id="gold"><td>gold answer</td>.*?</tr>', with_gold)
    assert shown is not None and "&lt;b&gt;forty-two&lt;/b&gt;" in shown[0]
    facts = with_gold.index('id="reward"')
    assert (
        with_gold.index('id="conversation"')
        < facts
        < shown.start()
        < with_gold.index(">reward</td>")
    )
    assert with_gold.count("forty-two") == 1 and 'id="gold"' not in without


async def test_rare_filters_are_folded_away_unless_they_are_set(tmp_path: Path) -> None:
    """N16: all twelve stood in one bar."""
    names = {f.name for f in fields(Filters)} - {"task"}  # that of a link
    await stored(tmp_path / "run")
    async with viewing(tmp_path / "run") as (server, session):
        run = f"{server.address}run/run/rollouts"
        page = await read(session, run)
        form = re.search(r'<form class="bar" id="filters">.*?</form>', page, re.DOTALL)
        assert form is not None
        bar = form[0].partition('<details id="rare">')[0]
        assert set(re.findall(r'name="(\w+)"', form[0])) == names
        assert set(re.findall(r'name="(\w+)"', bar)) == {
            "step",
            "taskset",
            "status",
            "text",
            "order",
        }
        for often in ("step=1", "task=1&taskset=toy", "status=failed", "text=a&order=best"):
            assert '<details id="rare">' in await read(session, f"{run}?{often}")
        for rare in ("batch=0", "version=0", "state=used", "reason=x", "low=0", "high=1"):
            assert '<details id="rare" open>' in await read(session, f"{run}?{rare}")
        assert (
            "min_reward: is no filter; there are step, "
            in Page(await read(session, f"{run}?min_reward=1", 422)).text
        )


def test_a_legend_has_no_values_before_the_pointer_is_there() -> None:
    """N17: it said "step: -"."""
    css = (Path(view_pages.__file__).parent / "static" / "view.css").read_text()
    rule = re.search(r"^\.chart:not\(:hover\) (.*) \{ visibility: hidden; \}", css, re.MULTILINE)
    assert rule is not None
    assert ".u-legend .u-value" in rule[1] and ".u-legend .u-series:first-child" in rule[1]


async def test_sql_page_and_files_hold_the_same_rows(tmp_path: Path) -> None:
    await stored(tmp_path / "run")
    sql = "SELECT id, reward, prompt_text FROM v_experiences ORDER BY id"
    with open_run(tmp_path / "run") as questions, questions.ask(sql) as answer:
        expected = [tuple(row) for row in answer.rows]
    async with viewing(tmp_path / "run") as (server, session):
        run = f"{server.address}run/run/"
        text = await read(session, f"{run}sql.csv?q={quote(sql)}")
        assert [tuple(r) for r in csv.reader(io.StringIO(text))][1:] == [
            tuple("" if v is None else str(v) for v in r) for r in expected
        ]
        async with session.get(URL(f"{run}sql.parquet?q={quote(sql)}", encoded=True)) as file:
            table = pq.read_table(io.BytesIO(await file.read()))
        assert [tuple(r.values()) for r in table.to_pylist()] == expected
        many = (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 4500) "
            "SELECT i, 'x' || i AS t, NULL AS no_value FROM n"
        )
        async with session.get(URL(f"{run}sql.parquet?q={quote(many)}", encoded=True)) as file:
            table = pq.read_table(io.BytesIO(await file.read()))
        assert table.column("i").to_pylist() == list(range(1, 4501))
        assert "the first 1000 rows" in Page(await read(session, f"{run}sql?q={quote(many)}")).text
        for wrong, said in (
            ("DELETE FROM experiences", "may only read"),
            ("SELECT rewrd FROM v_experiences", "Did you mean reward"),
            ("SELECT 1; SELECT 2", "one statement"),
        ):
            assert said in Page(await read(session, f"{run}sql?q={quote(wrong)}")).text
            assert said in Page(await read(session, f"{run}sql.csv?q={quote(wrong)}", 422)).text
        assert "of one name" in await read(
            session, f"{run}sql.parquet?q={quote('SELECT 1 AS a, 2 AS a')}", 422
        )
        late = many.replace("SELECT i,", "SELECT CASE WHEN i < 3000 THEN i ELSE 'x' END AS i,")
        # a file that breaks off does not look whole
        with pytest.raises(aiohttp.ClientPayloadError):
            async with session.get(URL(f"{run}sql.parquet?q={quote(late)}", encoded=True)) as file:
                await file.read()


async def test_a_run_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut line of metrics is left for the next look, new rows and states appear, and a damaged
    line is named.
    """
    monkeypatch.setattr("rft.extras.view.opened_run.REFRESH_S", 0.0)
    buffer = Buffer(BufferSettings(folder=tmp_path / "run" / "buffer"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    await fill(buffer, 1, 0)
    metrics(tmp_path / "run", steps=2)
    file = tmp_path / "run" / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"role":"trainer","step":3,"time":1.7e9,"val')
    async with viewing(tmp_path / "run") as (server, session):
        run = f"{server.address}run/run/"
        assert ">2</b><span>train step" in await read(session, run)
        assert "8 rollouts" in await read(session, run + "rollouts?order=best")
        file.write_text(
            whole
            + '{"role":"trainer","step":3,"time":1.7e9,"values":{"actor/loss":1.5}}\nno record\n'
        )
        await fill(buffer, 1, 1)
        page = await read(session, run)
        assert ">3</b><span>train step" in page
        assert "is not a metric record" in page
        assert "16 rollouts" in await read(session, run + "rollouts?order=best")
    await buffer.close()


async def test_live_pages_hear_of_changes(tmp_path: Path) -> None:
    await stored(tmp_path / "run")
    async with (
        viewing(tmp_path / "run") as (server, session),
        session.get(f"{server.address}run/run/events") as events,
    ):
        assert await events.content.readuntil(b"\n\n") == b'event: hello\ndata: "done"\n\n'
        metrics(tmp_path / "run", steps=13)
        assert await events.content.readuntil(b"\n\n") == b'event: changed\ndata: "done"\n\n'


@pytest.mark.e2e
async def test_broken_and_foreign_runs_say_what_is_wrong(tmp_path: Path) -> None:
    for name in ("half", "older", "newer", "bare", "garbage"):
        await stored(tmp_path / name)
    half = tmp_path / "half" / "buffer" / "experience_buffer.db"
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    (tmp_path / "garbage" / "buffer" / "experience_buffer.db").write_bytes(b"no database" * 1000)
    (tmp_path / "garbage" / "state.json").write_text("{")
    for name, number in (("older", "2"), ("newer", "99")):
        with sqlite3.connect(tmp_path / name / "buffer" / "experience_buffer.db") as database:
            database.execute("UPDATE meta SET value = ? WHERE key = 'format'", (number,))
        database.close()
    for file in (tmp_path / "bare" / "buffer").iterdir():
        file.unlink()
    async with viewing(tmp_path) as (server, session):
        listed = await read(session, server.address)
        for name in ("half", "older", "newer", "bare", "garbage"):
            assert f"/run/{name}/" in listed
            assert (
                "Reward"
                in json.loads(await read(session, f"{server.address}run/{name}/curves.json"))[
                    "charts"
                ][0]["title"]
            )
            await read(session, f"{server.address}run/{name}/")
        for name, said in (
            ("half", "damaged|malformed"),
            ("garbage", "damaged or not a ledger"),
            ("older", "has format 2"),
            ("newer", "use the rft that wrote it"),
            ("bare", "found none. Give the folder of a run that has begun"),
        ):
            page = await read(session, f"{server.address}run/{name}/rollouts?order=best", 422)
            assert re.search(said, page), page
        assert "is damaged" in await read(session, f"{server.address}run/garbage/")


async def test_folders_may_have_any_name(tmp_path: Path) -> None:
    for name in ("a b#c?d&e%20f+g", os.fsdecode(b"odd\xff")):
        (tmp_path / name).mkdir()
        metrics(tmp_path / name)
    async with viewing(tmp_path) as (server, session):
        origin = server.address.removesuffix(f"/{server.token}/")
        first = await read(session, server.address)
        runs = re.findall(r'href="([^"]*/run/[^"]*)"', first)
        keys = re.findall(r'name="run" value="([^"]*)"', first)
        assert len(runs) == 2
        for run in runs:
            page = await read(session, origin + run)
            assert (
                re.findall(r'data-run="([^"]*)"', page) == [run.rstrip("/")]
                and f'href="{run}sql"' in page
            )
            assert "charts" in json.loads(await read(session, f"{origin}{run}curves.json"))
        compared = await read(
            session,
            f"{server.address}compare?{urlencode([('run', html.unescape(k)) for k in keys])}",
        )
        points = re.findall(r'"([^"]*compare.json[^"]*)"', compared)[0]
        assert len(json.loads(await read(session, origin + html.unescape(points)))["charts"]) > 0


async def test_a_request_for_the_server_itself_is_refused(tmp_path: Path) -> None:
    await stored(tmp_path / "run")
    async with viewing(tmp_path) as (server, _):
        read, write = await asyncio.open_connection("127.0.0.1", URL(server.address).port)
        write.write(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await read.read()).startswith(b"HTTP/1.1 403 ")
        write.close()
        await write.wait_closed()


async def test_more_runs_at_once_than_are_held_open(tmp_path: Path) -> None:
    await stored(tmp_path / "r0")
    for number in range(1, 6):
        shutil.copytree(tmp_path / "r0", tmp_path / f"r{number}")
    async with viewing(tmp_path) as (server, session):
        pages = [
            f"{server.address}run/r{number}/{page}"
            for number in range(6)
            for page in ("", "rollouts?order=best")
        ]
        await asyncio.gather(*(read(session, page) for page in pages))
        assert len(server.pages._opened) == 3
        assert "is no place in the table" in await read(
            session, f"{pages[1]}&batch=0&after={'9' * 30}", 422
        )


async def test_compare_shows_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rate in (("a", 1e-5), ("b", 3e-5)):
        await stored(tmp_path / name)
        tree = {
            "seed": 1,
            "algorithm": {"optimizer": {"lr": rate}},
            "buffer": {"tasksets": [{"name": name}]},
        }
        (tmp_path / name / "config.json").write_text(json.dumps({"tree": tree}))
    async with viewing(tmp_path) as (server, session):
        page = Page(await read(session, f"{server.address}compare?run=a&run=b")).text
        assert "algorithm.optimizer.lr" in page
        assert "3e-05" in page
        assert "seed" not in page
        points = json.loads(
            await read(session, f"{server.address}compare.json?run=a&run=b&x=tokens")
        )
        assert [c["label"] for c in points["charts"][0]["curves"]][:2] == [
            "a",
            "a: experience/reward/mean",
        ]
        assert max(points["charts"][0]["curves"][0]["x"]) > 0
        decoded = []
        monkeypatch.setattr(monitor_read, "_record", lambda *given: decoded.append(given))
        assert points == json.loads(
            await read(session, f"{server.address}compare.json?run=a&run=b&x=tokens")
        )
        assert not decoded, "only what was added since is read"
        for wrong in ("?run=a", "?run=a&run=nothing", "?" + "&".join(["run=a"] * 3)):
            await read(session, f"{server.address}compare{wrong}", 422)


async def test_a_port_in_use_is_passed_over(tmp_path: Path) -> None:
    await stored(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = ViewServer(ViewPages(tmp_path / "run"), port=port)
        await server.start()
        try:
            assert f"127.0.0.1:{port}/" not in server.address
            async with aiohttp.ClientSession() as session:
                await read(session, server.address)
        finally:
            await server.close()


async def test_no_free_port_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await stored(tmp_path / "run")
    monkeypatch.setattr("rft.extras.view.view_server._MORE_PORTS", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SetupError, match="--port"):
            await ViewServer(ViewPages(tmp_path / "run"), port=taken.getsockname()[1]).start()


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run below"):
        ViewPages(tmp_path)


async def test_viewing_changes_nothing(tmp_path: Path) -> None:
    """Every file of the run is as it was, to the byte."""
    run_dir = await stored(tmp_path / "run")
    with sqlite3.connect(run_dir / "buffer" / "experience_buffer.db") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    kept = (".db-wal", ".db-shm")  # SQLite's own, of any reader
    before = {
        p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and not p.name.endswith(kept)
    }
    async with viewing(run_dir) as (server, session):
        for path in (
            "",
            "rollouts?order=best",
            "rollouts?text=a",
            "sql?q=SELECT+1",
            "timeline.svg",
        ):
            await read(session, f"{server.address}run/run/{path}")
    after = {
        p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and not p.name.endswith(kept)
    }
    assert after == before
