"""Whoever reaches a port without a key cannot fill the disk or the terminal: R7."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from rft.engine.scripted import ScriptedEngine
from rft.extras.view.view_pages import ViewPages
from rft.extras.view.view_server import ViewServer
from rft.secrets import OncePerMinute
from rft.workflow.endpoint import public
from tests.attacks.table import attack
from tests.extras.serve.serving import serving

HEADS = (
    b"GET / HTTP/1.1\r\nX-A : b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: "
    b"3\r\n\r\nabc",
    b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: "
    b"3\r\n\r\nabc",
    b"POST /feedback HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://[::/ HTTP/1.1\r\nHost: [::\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
    b"GET / HTTP/1.1\r\nHost: \x1b]0;x\x07\r\nX\x00Y: z\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\nExpect: nonsense\r\n\r\n",
)


async def flood(address: str, times: int) -> list[bytes]:
    """What the server says to each head, sent over a connection of its own, `times` times."""
    host, _, port = address.partition("://")[2].partition("/")[0].rpartition(":")
    said = []
    for head in HEADS * times:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        writer.write_eof()
        said.append(await asyncio.wait_for(reader.read(), 20))
        writer.close()
    return said


@attack(
    "R7",
    "requests that are no HTTP, without a key and without end",
    "a line a minute in the log, none on the terminal",
)
@pytest.mark.parametrize("server", ["serve", "observers", "view"])
async def test_a_flood_without_a_key_leaves_a_line_a_minute(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name in ("rft.endpoint.http", "rft.view.http"):
        for quiet in [f for f in logging.getLogger(name).filters if isinstance(f, OncePerMinute)]:
            quiet._next = 0.0
    if server == "serve":
        async with serving(tmp_path, monkeypatch) as served:
            said = await flood(served.address, 5)
    elif server == "observers":
        async with public(ScriptedEngine("a"), "policy", port=None, key=None) as found:
            said = await flood(found["base_url"], 5)
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "state.json").write_text("{}")
        view = ViewServer(ViewPages(tmp_path), port=0)
        await view.start()
        said = await flood(view.address, 5)
        await view.close()
    assert all(b" 200 " not in answer.split(b"\r\n")[0] for answer in said)
    records = [r for r in caplog.records if r.levelno > logging.INFO or ".http" in r.name]
    assert len(records) == 1, [(r.name, r.levelname, r.getMessage()) for r in records]
    assert (
        records[0].levelno == logging.INFO
        and records[0].exc_info is None
        and len(records[0].getMessage()) < 300
    )


@attack(
    "R7",
    "control characters in the head of such a request",
    "escaped in the line, which counts those since the one before",
)
def test_the_next_line_says_how_many_there_were(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    log = logging.getLogger("test.http.floods")
    log.addFilter(OncePerMinute((ValueError,), clock=lambda: now[0]))

    def refused(error: Exception) -> None:
        log.error("from %s", "1.2.3.4", exc_info=error)

    for at in (0.0, 1.0, 59.9, 61.0, 62.0):
        now[0] = at
        refused(ValueError(f"at {at:g}\x1b"))
    assert [r.getMessage() for r in caplog.records] == [
        "from 1.2.3.4: at 0\\x1b",
        "from 1.2.3.4: at 61\\x1b; 2 more since the line before",
    ]
    refused(KeyError("ours"))
    assert caplog.records[-1].levelno == logging.ERROR and caplog.records[-1].exc_info, (
        "a fault of ours is told whole"
    )
