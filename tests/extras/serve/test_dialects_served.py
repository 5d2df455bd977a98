"""Responses and Messages of a service: stored before they leave, rewarded by their ids, the same again
after a restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from rft.engine.scripted import ScriptedEngine
from tests.extras.serve.serving import HI, Served, serving

BODIES: dict[str, dict[str, Any]] = {
    "/responses": {"input": "hi", "instructions": "be kind"},
    "/messages": {"model": "m", "max_tokens": 9, "messages": HI},
}


async def post(
    served: Served, session: dict[str, Any], page: str, body: dict[str, Any], retry_key: str = ""
) -> httpx.Response:
    headers = {"x-api-key": session["api_key"]} | (
        {"Idempotency-Key": retry_key} if retry_key else {}
    )
    address = f"{served.address}/run/{session['id']}/v1{page}"
    async with httpx.AsyncClient(timeout=20) as http:
        return await http.post(address, json=body, headers=headers)


@pytest.mark.parametrize("page", BODIES)
async def test_the_same_request_again_counts_once(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(answer=lambda m: "a")
    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await served.open()
        first = await post(served, session, page, BODIES[page], "k1")
        assert first.status_code == 200, first.text
    async with serving(tmp_path, monkeypatch, engine) as served:
        again = await post(served, session, page, BODIES[page], "k1")
        assert again.json() == first.json() and len(engine.calls) == 1
        other = await post(served, session, page, BODIES[page] | {"temperature": 0.5}, "k1")
        assert other.status_code == 409
        body = {"message": first.json()["id"], "final": True}
        assert (await served.reward(session, 1.0, **body)).status_code == 200
        await served.gate.wait_explored(1)
        assert (await served.state(session))["state"] == "accepted"


async def test_a_response_is_continued_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(answer=lambda m: "a")
    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await served.open()
        first = (await post(served, session, "/responses", BODIES["/responses"])).json()
    async with serving(tmp_path, monkeypatch, engine) as served:
        more = BODIES["/responses"] | {"previous_response_id": first["id"]}
        assert (await post(served, session, "/responses", more)).status_code == 200
        stranger = await served.open()
        refused = await post(served, stranger, "/responses", more)
        assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert engine.calls[1].prefix_messages == 3
    assert [m["role"] for m in engine.calls[1].messages] == ["system", "user", "assistant", "user"]


async def test_counted_tokens_are_limited_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "/v1/messages/count_tokens"
    async with serving(tmp_path, monkeypatch, requests_per_minute=3) as served:
        body = {"model": "m", "messages": HI}
        session = await served.open()
        path = f"/run/{session['id']}{page}"
        answers = [await served.client.post(page, json=body) for _ in range(2)]
        async with served.http(session["api_key"]) as http:
            answers += [await http.post(path, json=body) for _ in range(2)]
        assert [a.status_code for a in answers] == [200, 200, 200, 429]
        assert answers[0].json() == answers[2].json() == {"input_tokens": 20}
        assert answers[3].json()["error"]["type"] == "rate_limit_error"
        nothing = await served.reward(session, 1.0)
        assert nothing.json()["error"]["code"] == "no_calls"
