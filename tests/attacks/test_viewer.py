"""Pages of `rft view` that others want to read, or to write into: who has no token gets nothing,
and texts of a run stay texts.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from rft.secrets import safe
from tests.attacks.table import attack
from tests.extras.view.viewed import INJECTIONS, TAGS, Page, hostile, viewing

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True)
class Viewed:
    """A hostile run; `ids` has three rows for each injection."""

    folder: Path
    ids: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    folder = tmp_path_factory.mktemp("viewed") / "run"
    yield Viewed(folder, asyncio.run(hostile(folder)))


async def read(session: aiohttp.ClientSession, url: str, status: int = 200) -> str:
    async with session.get(URL(url, encoded=True)) as answer:
        text = await answer.text()
        assert answer.status == status, text
        return text


def tame(text: str, token: str) -> None:
    """A page holds our tags alone, no handler, no style, no link to elsewhere, and nothing that
    hides or turns text.
    """
    page = Page(text)
    assert set(page.tags) <= TAGS
    assert page.tags.count("script") == 2
    assert not [
        a
        for a in page.attributes
        if a[0].startswith("on") or a[0] in ("style", "srcdoc", "formaction", "http-equiv")
    ]
    assert not [link for link in page.links if not link.startswith((f"/{token}/", "#")) and link]
    assert not HIDDEN.search(text)


@pytest.mark.e2e
@attack(
    "–",
    "HTML, scripts, terminal codes, turned text, templates, SQL in all texts of a run and fields "
    "of a page",
    "shown as text",
)
@pytest.mark.parametrize("number", range(len(INJECTIONS)))
async def test_texts_stay_texts(run: Viewed, number: int) -> None:
    ids = run.ids[3 * number : 3 * number + 3]
    evil = INJECTIONS[number].encode("utf-8", "replace").decode()
    asked = quote(evil, safe="")
    async with viewing(run.folder) as (server, session):
        base = f"{server.address}run/run/"
        pages = [
            "",
            "rollouts",
            f"group/{ids[0][:27]}",
            *(f"rollout/{id}" for id in ids),
            f"sql?q={asked}",
            f"task?taskset={asked}&task={number}",
        ]
        pages += [
            f"rollouts?text={asked}",
            f"rollouts?taskset={asked}&reason={asked}",
            "sql?q=SELECT+*+FROM+v_experiences",
        ]
        for path in pages:
            tame(await read(session, base + path), server.token)
        for path in (f"rollout/{asked}", f"rollouts?order={asked}", f"rollouts?step={asked}"):
            async with session.get(URL(base + path, encoded=True)) as answer:
                assert answer.status in (404, 422)
                tame(await answer.text(), server.token)
        shown = Page(await read(session, base + f"rollout/{ids[0]}")).text
        # prompt, answer, call, question, reply, reason
        assert shown.count(safe(evil, lines=True)) >= 6
        picture = await read(session, base + "timeline.svg")
        assert "<script" not in picture
        found = json.loads(
            await read(session, base + "curves.json?name=" + quote(f"alarm/{evil}", safe=""))
        )
        if evil == INJECTIONS[number]:
            assert found["charts"][0]["title"] == f"alarm/{evil}"


@attack(
    "–",
    "an address without the token, with a part of it, or with it elsewhere",
    "403, and no word of the run",
)
@pytest.mark.parametrize(
    "path",
    [
        "",
        "wrong/",
        "{short}/",
        "{token}x/",
        "wrong/{token}/",
        "?{token}",
        "run/run/",
        "%C3%A9/",
        "{upper}/",
        "static/view.js",
    ],
)
async def test_the_whole_token_is_needed(run: Viewed, path: str) -> None:
    async with viewing(run.folder) as (server, session):
        token = server.token
        base = server.address.removesuffix(f"{token}/")
        made = path.format(token=token, short=token[:-1], upper=token.swapcase())
        assert token not in await read(session, base + made, 403)


@attack(
    "–", "a name of another site that leads to this machine (DNS rebinding), with the token", "403"
)
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7373",
        "127.0.0.1.evil.example",
        "localhost.evil:1",
        "[::2]:7373",
        "",
    ],
)
async def test_another_host_name_is_refused(run: Viewed, host: str) -> None:
    async with (
        viewing(run.folder) as (server, session),
        session.get(server.address, headers={"Host": host}) as answer,
    ):
        assert answer.status == 403


@attack("–", "methods that change something", "405")
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(run: Viewed, method: str) -> None:
    async with (
        viewing(run.folder) as (server, session),
        session.request(method, f"{server.address}run/run/sql?q=SELECT+1") as answer,
    ):
        assert answer.status == 405


@attack("–", "paths that lead out of the viewer's folder or out of the runs", "403 or 404")
@pytest.mark.parametrize(
    "path",
    [
        "static/../../view_server.py",
        "static/%2e%2e/view_server.py",
        "static//etc/passwd",
        "static/",
        "run/..%2f..%2fetc/",
        "run/%2fetc/",
        "run/~~/",
        "run/./",
    ],
)
async def test_no_path_leads_out(run: Viewed, path: str) -> None:
    async with (
        viewing(run.folder) as (server, session),
        session.get(URL(server.address + path, encoded=True)) as answer,
    ):
        assert answer.status in (403, 404)


@pytest.fixture(scope="module")
def view_process(run: Viewed) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`rft view` and its address."""
    command = [sys.executable, "-m", "rft", "view", str(run.folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        yield process, address
        process.terminate()


def most_memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) "
LARGE = {  # SQL: words of the page
    NUMBERS.format(3000) + "SELECT hex(zeroblob(300000)) FROM n": "the first 1000 rows",
    NUMBERS.format(12) + "SELECT hex(zeroblob(7000000)) FROM n": "12 rows",
    NUMBERS.format(1000) + f"SELECT {', '.join(['hex(zeroblob(400))'] * 40)} FROM n": (
        "the page shows 2 MiB"
    ),
    f"SELECT {', '.join(['hex(zeroblob(7000000))'] * 200)}": "more memory",
    "SELECT hex(zeroblob(9000000))": "too big",
    NUMBERS.format(900) + "SELECT group_concat(hex(zeroblob(1000000))) FROM n": "too big",
    "SELECT replace(hex(zeroblob(3000000)), '0', hex(zeroblob(3000000)))": "too big",
}


@pytest.mark.e2e
@attack("R4", "queries whose answer is gigabytes", "cut to 2 MiB, or refused; under 500 MB")
@pytest.mark.parametrize("sql", LARGE)
async def test_large_answers_take_little_memory(
    view_process: tuple[subprocess.Popen[str], str], sql: str
) -> None:
    process, address = view_process
    async with aiohttp.ClientSession() as session:
        page = await read(session, f"{address}run/run/sql?q={quote(sql)}")
        assert LARGE[sql] in Page(page).text
        assert len(page) < 16 << 20
        if LARGE[sql] == "12 rows":  # 168 MB
            async with session.get(
                URL(f"{address}run/run/sql.csv?q={quote(sql)}", encoded=True)
            ) as f:
                assert sum([len(part) async for part in f.content.iter_any()]) > 168e6
    assert most_memory(process.pid) < 500 << 20


@attack(
    "–",
    "SQL that writes, attaches another file, loads a library, or asks for too much",
    "refused with what is allowed",
)
@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM experiences",
        "WITH x AS (SELECT 1) INSERT INTO meta VALUES ('a', 'b')",
        "ATTACH 'other.db' AS o",
        "PRAGMA writable_schema = 1",
        "SELECT load_extension('x')",
        "SELECT 1; DROP TABLE experiences",
        "VACUUM INTO 'copy.db'",
        "SELECT writefile('x', 'y')",
        "SELECT length(zeroblob(2000000000))",
    ],
)
async def test_sql_only_reads(run: Viewed, sql: str) -> None:
    async with viewing(run.folder) as (server, session):
        for page in ("sql", "sql.csv", "sql.parquet"):
            text = await read(
                session,
                f"{server.address}run/run/{page}?q={quote(sql)}",
                200 if page == "sql" else 422,
            )
            assert 'role="alert"' in text
