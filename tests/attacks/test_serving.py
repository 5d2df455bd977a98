"""`rft serve` faces programs of others: bodies, slow clients, sessions of others, keys, what is
told and logged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from rft.extras.serve import gateway
from rft.extras.serve.access import line_of
from rft.workflow import endpoint, endpoint_wire
from tests.attacks.table import attack
from tests.attacks.test_requests import drip
from tests.extras.serve.serving import HI, KEY, Served, serving

pytestmark = pytest.mark.e2e

OTHER = "other-client-0123456789"
ADDRESSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/sessions",
    "/v1/sessions/{id}/reward",
    "/feedback",
)
BODIES = {
    "values": b'{"metadata": [' + b"[]," * 2_000_000 + b"[]]}",
    "depth": b'{"metadata": ' + b'{"a":' * 65 + b"1" + b"}" * 66,
    "open": b"[" * 100_000,
    "bytes": b'{"task_id": "' + b"a" * (17 << 20) + b'"}',
}


def two(folder: Path) -> dict[str, Path]:
    """A second client, for whom the service listens too."""
    file = folder / "clients"
    file.write_text(f"{line_of('other', OTHER)}\n")
    return {"clients_file": str(file)}


@attack(
    "M8",
    "bodies of millions of values, without bottom, or of 17 MB, to every address",
    "413, before they are parsed",
)
@pytest.mark.parametrize("address", ADDRESSES)
async def test_a_body_is_bounded_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        parsed: list[int] = []
        loads = json.loads
        monkeypatch.setattr(
            endpoint_wire.json, "loads", lambda text, **kw: parsed.append(1) or loads(text, **kw)
        )
        for name, body in BODIES.items():
            answer = await served.client.post(address.format(**session), content=body)
            assert (answer.status_code, name) == (413, name), answer.text
        assert not parsed


@attack(
    "M8", "a body from whoever shows no key, or a wrong one", "401 while it is still being sent"
)
@pytest.mark.parametrize("address", ADDRESSES)
async def test_without_a_key_no_body_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    async with serving(tmp_path, monkeypatch) as served:
        line = f"POST {address.format(**await served.open())} HTTP/1.1"
        for key in (
            "",
            "Authorization: Bearer guess\r\n",
            f"Authorization: Basic {KEY}\r\n",
            "X-Api-Key: guess\r\n",
        ):
            assert (
                await raw(served, f"{line}\r\nHost: x\r\n{key}Content-Length: 1000000\r\n\r\n{{")
                == b"401"
            ), key


async def raw(served: Served, sent: str) -> bytes:
    """The status of the answer to bytes on a connection of their own; empty: it was closed without
    one.
    """
    url = httpx.URL(served.address)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(sent.encode())
    async with asyncio.timeout(30):
        line = await reader.readline()
    writer.close()
    return line.split(b" ")[1] if b" " in line else b""


@pytest.mark.e2e
@attack(
    "L",
    "fifty connections to the service that send nothing, or a byte now and then",
    "closed; clients are served meanwhile",
)
@pytest.mark.parametrize(
    "sent",
    [
        "",
        "POST /v1/sessions HTTP/1.1\r\nX-Slow: ",
        "POST /v1/sessions HTTP/1.1\r\nHost: h\r\n%sContent-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "head", "body"],
)
async def test_slow_clients_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    # a busy machine sends heads slowly
    monkeypatch.setattr(endpoint, "HEAD_S", 15.0 if sent.endswith("{") else 0.3)
    monkeypatch.setattr(endpoint, "BODY_S", 0.3)
    async with serving(tmp_path, monkeypatch) as served:
        port = httpx.URL(served.address).port
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        whole = sent.replace("%s", f"Authorization: Bearer {KEY}\r\n").encode()
        slow = [asyncio.ensure_future(drip(r, w, whole)) for r, w in connections]
        assert (await served.ask(await served.open())).status_code == 200, "a quick one is answered"
        await asyncio.gather(*slow)
        assert len(served.service.book.sessions) == 1


@attack(
    "–",
    "one request in two shapes: two lengths, a length and chunks, a folded or a huge head",
    "refused, and the connection is closed",
)
@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 2\r\nContent-Length: 40",
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked, identity",
        "Content-Length: -1",
        "Content-Length: 2\r\n Content-Length: 40",
        "X-Big: " + "a" * 1_000_000,
    ],
    ids=lambda h: h[:40],
)
async def test_a_request_has_one_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    async with serving(tmp_path, monkeypatch) as served:
        rest = "{}DELETE /v1/sessions/x HTTP/1.1\r\n\r\n"
        sent = (
            f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            f"{KEY}\r\n{head}\r\n\r\n{rest}"
        )
        assert await raw(served, sent) in (b"400", b"") and not served.service.book.sessions


IDS = (
    "%2e%2e",
    "%2e%2e%2fsessions",
    "%",
    "_",
    "*",
    "s%",
    "' OR 1=1 --",
    "x' UNION SELECT * FROM sessions --",
    "%00",
    "\ud7ff",
    "{id}%00",
    "{id}-0",
    "{id}/",
    "{id};",
    "{ID}",
    "{half}",
    "a" * 5000,
)


@attack(
    "–",
    "17 ids that are patterns, statements, paths, or nearly another client's",
    "401 to a session's key, 404 to a client's",
)
async def test_an_id_is_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(tmp_path, monkeypatch, **two(tmp_path)) as served,
        served.http(OTHER) as other,
    ):
        theirs = await served.played()
        mine = (await other.post("/v1/sessions", json={})).json()
        async with served.http(mine["api_key"]) as own:
            for id in IDS:
                name = (
                    id.replace("{id}", theirs["id"])
                    .replace("{ID}", theirs["id"].upper())
                    .replace("{half}", theirs["id"][:-1])
                )
                for http, refused in ((other, {404, 405}), (own, {401, 404, 405})):
                    for method, address in (("GET", ""), ("DELETE", ""), ("POST", "/reward")):
                        answer = await http.request(
                            method, f"/v1/sessions/{name}{address}", json={"reward": 0.0}
                        )
                        assert answer.status_code in refused and '"state"' not in answer.text, (
                            method,
                            name,
                            answer.text,
                        )
        assert (await served.state(theirs))["reward"] == 1.0


@attack(
    "–",
    "metadata that says that a session is another client's, or another session",
    "a row says whose it is",
)
async def test_metadata_does_not_change_whose_a_row_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = {"client": "environment", "session": "s0", "task_id": "theirs", "mine": 1}
    async with (
        serving(tmp_path, monkeypatch, **two(tmp_path)) as served,
        served.http(OTHER) as http,
    ):
        session = (
            await http.post("/v1/sessions", json={"task_id": "t", "metadata": claimed})
        ).json()
        live = served.service.book.sessions[session["id"]]
        assert (await served.ask(session)).status_code == 200
        told = live.transcript().info
        assert told == {"client": "other", "session": session["id"], "task_id": "t", "mine": 1}


@attack(
    "–",
    "another client's Idempotency-Key",
    "a session of one's own: no answer of another client is given back",
)
async def test_a_retry_key_is_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(tmp_path, monkeypatch, **two(tmp_path)) as served,
        served.http(OTHER) as other,
    ):
        ids = set()
        for http, text in ((served.client, "a secret"), (other, "a secret"), (other, "a secret")):
            body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
            answer = await http.post(
                "/v1/chat/completions", json=body, headers={"Idempotency-Key": "1"}
            )
            ids.add(answer.json()["id"])
        assert len(ids) == 2 and {
            s.stored.client for s in served.service.book.sessions.values()
        } == {"environment", "other"}


@attack(
    "–",
    "keys are guessed letter by letter, by the time that a comparison takes",
    "hashes are compared, those of sessions in constant time",
)
async def test_keys_are_compared_by_their_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[Any, Any]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        gateway.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b)
    )
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        keys = [*served.service.gateway._clients, *served.service.gateway._keys]
        assert len(keys) == 2 and all(re.fullmatch(r"[0-9a-f]{64}", key) for key in keys)
        for guess in (session["api_key"][:-1], session["api_key"] + "a", session["api_key"]):
            async with served.http(guess) as http:
                answer = await http.get(f"/v1/sessions/{session['id']}")
            assert answer.status_code == (200 if guess == session["api_key"] else 401)
    assert len(compared) >= 3 and all(
        re.fullmatch(r"[0-9a-f]{64}", one) for pair in compared for one in pair
    )


@attack(
    "M4",
    "keys where they do not belong: in addresses, fields, retry keys, and in calls that fail",
    "in no log and no answer of others",
)
async def test_no_key_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine_error = RuntimeError("the parser broke")
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        served.service.book.sessions[session["id"]]._ctx._model.will_fail(engine_error)
        assert (await served.ask(session)).status_code == 500
        for key in (session["api_key"], KEY):
            headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": key}
            for method, address, body in (
                ("GET", f"/v1/sessions/{key}", None),
                ("POST", f"/{key}", {}),
                ("POST", "/v1/chat/completions", {"model": key, "messages": HI, "nothing": key}),
                ("POST", "/v1/sessions", {"owner": key}),
                ("POST", "/feedback", {"reward": 1.0, "msg_ids": [key], "task_id": "t"}),
            ):
                await served.client.request(method, address, json=body, headers=headers)
                async with served.http(OTHER) as http:
                    answer = await http.request(method, address.replace(key, "x"), json=body)
                assert answer.status_code in (401, 404)
                assert key not in answer.text
    ours = [r for r in caplog.records if not r.name.startswith("http")]  # this test's own client
    told = [r.getMessage() + (r.exc_text or "") for r in ours]
    assert any("a call of" in line for line in told), "the call that failed is logged"
    assert not [line for line in told if KEY in line or session["api_key"] in line]
