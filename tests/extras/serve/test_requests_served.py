"""What a service refuses: malformed requests, and keys that reach for what is not theirs."""

from __future__ import annotations

import asyncio
import json
import math
import socket

import pytest

from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine
from rft.errors import SetupError
from rft.explorer.service_settings import ServeConfig, ServeRuntime
from rft.extras.serve.access import ENVIRONMENT, clients, line_of
from rft.extras.serve.client import AsyncClient
from rft.launch.execute import execute
from tests.extras.serve.serving import HI, KEY, serving
from tests.helpers.runs import ROOT

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
OPEN = "/v1/sessions"
FEEDBACK = "/feedback"
REWARD = "/v1/sessions/{id}/reward"
M = {"model": "m", "messages": HI}

MALFORMED = [  # (address, body, status)
    (CHAT, b"", 400),
    (CHAT, b"{", 400),
    (CHAT, b"[]", 400),
    (CHAT, b"null", 400),
    (CHAT, b"\xff\xfe", 400),
    (CHAT, b'"x"', 400),
    (CHAT, b'{"messages": [NaN]}', 400),
    (CHAT, b"[" * 100_000, 413),
    (CHAT, b'{"a":' * 100 + b"1" + b"}" * 100, 413),
    (CHAT, {"model": "m"}, 400),
    (CHAT, {**M, "messages": []}, 400),
    (CHAT, {**M, "messages": "hi"}, 400),
    (CHAT, {**M, "messages": [1]}, 400),
    (CHAT, {**M, "messages": [{"role": "king", "content": "x"}]}, 400),
    (CHAT, {**M, "messages": [{"role": "user", "content": 1}]}, 400),
    (CHAT, {**M, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    (CHAT, {**M, "n": 0}, 400),
    (CHAT, {**M, "n": 129}, 400),
    (CHAT, {**M, "n": True}, 400),
    (CHAT, {**M, "n": "2"}, 400),
    (CHAT, {**M, "temperature": "hot"}, 400),
    (CHAT, {**M, "temperature": -1}, 400),
    (CHAT, {**M, "top_p": 0}, 400),
    (CHAT, {**M, "max_tokens": 0}, 400),
    (CHAT, {**M, "max_tokens": 1.5}, 400),
    (CHAT, {**M, "seed": -1}, 400),
    (CHAT, {**M, "stop": 3}, 400),
    (CHAT, {**M, "stop": [""]}, 400),
    (CHAT, {**M, "stop": ["x"] * 65}, 400),
    (CHAT, {**M, "stream": "yes"}, 400),
    (CHAT, {**M, "logprobs": 5}, 400),
    (CHAT, {**M, "tools": {}}, 400),
    (CHAT, {**M, "tools": [{"type": "function"}]}, 400),
    (CHAT, {**M, "response_format": {"type": "json_object"}}, 400),
    (CHAT, {**M, "logit_bias": {"1": 2}}, 400),
    (CHAT, {**M, "tool_choice": "required"}, 400),
    (CHAT, {**M, "colour": "red"}, 400),
    (TEXT, {"model": "m"}, 400),
    (TEXT, {"model": "m", "prompt": ""}, 400),
    (TEXT, {"model": "m", "prompt": [1, -1]}, 400),
    (TEXT, {"model": "m", "prompt": {"a": 1}}, 400),
    (TEXT, {"model": "m", "prompt": ["a"] * 129}, 400),
    (TEXT, {"model": "m", "prompt": "x", "echo": True}, 400),
    (OPEN, {}, 400),
    (OPEN, {"task_id": 3}, 400),
    (OPEN, {"task_id": "x" * 201}, 400),
    (OPEN, {"task_id": "a\x00b"}, 400),
    (OPEN, b'{"task_id": "\\ud800"}', 400),
    (OPEN, {"task_id": "t", "ttl": 0}, 400),
    (OPEN, {"task_id": "t", "ttl": "1"}, 400),
    (OPEN, {"task_id": "t", "metadata": []}, 400),
    (OPEN, {"task_id": "t", "metadata": {"a": "x" * 20_000}}, 400),
    (OPEN, {"task_id": "t", "owner": "me"}, 400),
    (OPEN, [], 400),
    (REWARD, {}, 400),
    (REWARD, {"reward": None}, 400),
    (REWARD, {"reward": "1"}, 400),
    (REWARD, {"reward": True}, 400),
    (REWARD, b'{"reward": NaN}', 400),
    (REWARD, b'{"reward": Infinity}', 400),
    (REWARD, b'{"reward": 1e999}', 400),
    (REWARD, {"reward": 1e19}, 400),
    (REWARD, {"reward": {"a": 6e17, "b": 6e17}}, 400),
    (REWARD, {"reward": {"a": "b"}}, 400),
    (REWARD, {"reward": 1, "final": "no"}, 400),
    (REWARD, {"reward": 1, "message": 7}, 400),
    (REWARD, {"reward": 1, "message": "chatcmpl-s1-0"}, 404),
    (REWARD, {"reward": 1, "target": "run"}, 400),
    (REWARD, b"1", 400),
    (FEEDBACK, {}, 400),
    (FEEDBACK, {"reward": 1, "msg_ids": [], "task_id": "t"}, 400),
    (FEEDBACK, {"reward": 1, "msg_ids": ["chatcmpl-x-0"], "task_id": "t"}, 404),
    (FEEDBACK, {"reward": 1, "msg_ids": ["chatcmpl-x-0"]}, 404),
    (FEEDBACK, {"reward": math.pi, "msg_ids": "x", "task_id": "t"}, 400),
]


async def test_malformed_requests_are_refused_in_openais_form_and_change_nothing(
    tmp_path, monkeypatch
):
    engine = ScriptedEngine(answer=lambda m: "a")
    async with serving(tmp_path, monkeypatch, engine, num_runs=2) as served:
        session = await served.open(task_id="t")
        assert (await served.ask(session)).status_code == 200
        before = await served.buffer.audit()
        calls = len(engine.calls)
        sessions = len(served.service.book.sessions)
        for address, body, status in MALFORMED:
            data = body if isinstance(body, bytes) else json.dumps(body)
            answer = await served.client.post(address.format(**session), content=data)
            assert answer.status_code == status, (
                address,
                body if len(str(body)) < 200 else "...",
                answer.text,
            )
            error = answer.json()["error"]
            assert "constrained" not in answer.text, "a name of pydantic's"
            assert (
                error["message"]
                and error["type"] == "invalid_request_error"
                and {"param", "code"} <= error.keys()
            )
        assert await served.buffer.audit() == before and len(engine.calls) == calls
        assert len(served.service.book.sessions) == sessions
    assert len(MALFORMED) >= 60


def attempts(mine, theirs, message):
    """(method, address, body, key): each reaches for what belongs to another session or client."""
    root = theirs["base_url"].removesuffix("/v1")
    key = mine["api_key"]
    reward = {"reward": 1.0}
    feedback = {"reward": 1.0, "msg_ids": [message], "task_id": "t"}
    at = f"/v1/sessions/{theirs['id']}"
    return [
        ("POST", f"{root}{CHAT}", M, key),
        ("POST", f"{root}{TEXT}", {"prompt": "x"}, key),
        ("GET", f"{root}/v1/models", None, key),
        ("GET", at, None, key),
        ("DELETE", at, None, key),
        ("POST", f"{at}/reward", reward, key),
        ("POST", f"{at}/reward", {**reward, "message": message}, key),
        ("POST", OPEN, {"task_id": "t"}, key),
        ("POST", FEEDBACK, feedback, key),
        ("POST", "/commit", None, key),
        ("GET", "/metrics", None, key),
        ("POST", f"/v1/sessions/{mine['id']}/reward", {**reward, "message": message}, key),
        ("GET", at, None, ""),
        ("DELETE", at, None, "rft-guess"),
        ("POST", f"{at}/reward", reward, ""),
        ("POST", CHAT, M, "rft-guess"),
        ("GET", at, None, "other-client-0123456789"),
        ("DELETE", at, None, "other-client-0123456789"),
        ("POST", f"{at}/reward", reward, "other-client-0123456789"),
        ("POST", FEEDBACK, feedback, "other-client-0123456789"),
        ("POST", f"{root}{CHAT}", M, "other-client-0123456789"),
        ("POST", f"{root}{CHAT}", M, KEY),
        ("GET", "/v1/models", None, ""),
    ]


async def test_a_key_reaches_nothing_of_others(tmp_path, monkeypatch):
    file = tmp_path / "clients"
    file.write_text(f"# two\n{line_of('other', 'other-client-0123456789')}\n")
    engine = ScriptedEngine(answer=lambda m: "a")
    async with (
        serving(tmp_path, monkeypatch, engine, num_runs=2, clients_file=str(file)) as served,
        served.http() as http,
    ):
        mine, theirs = await served.open(task_id="t"), await served.open(task_id="t")
        await served.ask(mine)
        message = (await served.ask(theirs)).json()["id"]
        before, calls = await served.buffer.audit(), len(engine.calls)
        tried = attempts(mine, theirs, message)
        for method, address, body, key in tried:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            answer = await http.request(method, address, json=body, headers=headers)
            assert answer.status_code in (401, 403, 404), (
                method,
                address,
                answer.status_code,
                answer.text,
            )
            assert theirs["api_key"] not in answer.text and KEY not in answer.text
        assert (
            await served.buffer.audit() == before
            and len(engine.calls) == calls
            and len(tried) >= 20
        )
        assert (await served.state(theirs))["state"] == "open"


async def test_keys_are_stored_as_hashes_alone(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        await served.ask(session)
    stored = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert (
        session["id"].encode() in stored
        and session["api_key"].encode() not in stored
        and KEY.encode() not in stored
    )


async def test_limits_answer_429_and_say_when_to_come_back(tmp_path, monkeypatch):
    engine = ScriptedEngine(answer=lambda m: "a")
    limits = {"requests_per_minute": 3, "max_concurrent": 2, "max_sessions": 2}
    async with serving(tmp_path, monkeypatch, engine, **limits) as served:
        session = await served.open()
        other = await served.open()
        refused = await served.client.post(OPEN, json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
        (quota,) = served.service.gateway.quotas.values()
        now = quota.clock()
        quota.clock = lambda: now  # nothing comes back meanwhile
        engine.hold()
        under_way = [asyncio.ensure_future(served.ask(s)) for s in (session, other)]
        await engine.waiting(2)
        crowded = await served.ask(session)
        assert (
            crowded.status_code == 429
            and "under way" in crowded.text
            and int(crowded.headers["Retry-After"]) >= 1
        )
        engine.release()
        assert [a.status_code for a in await asyncio.gather(*under_way)] == [200, 200]
        assert (await served.ask(session)).status_code == 200
        spent = await served.ask(other)
        assert (spent.status_code, spent.json()["error"]["type"]) == (429, "rate_limit_error"), (
            "the client's three are used up"
        )
        assert 1 <= int(spent.headers["Retry-After"]) <= 20
    async with serving(tmp_path / "2", monkeypatch, engine, tokens_per_minute=10) as served:
        session = await served.open()
        assert [(await served.ask(session)).status_code for _ in range(2)] == [200, 429], (
            "the first answer cost more than ten tokens"
        )


@pytest.mark.parametrize(
    ("address", "body"),
    [
        ("/v1/sessions", '{"task_id": "a", "task_id": "b"}'),
        ("/v1/sessions", '{"metadata": {"app": "a", "app": "b"}}'),
        ("/v1/sessions/ID/reward", '{"reward": 1.0, "reward": 0.0}'),
        ("/v1/sessions/ID/reward", '{"reward": {"right": 1.0, "right": 0.0}}'),
        (
            "/run/ID/v1/chat/completions",
            '{"model": "m", "messages": [{"role": "user", "content": "hi", "content": "ho"}]}',
        ),
        (
            "/v1/chat/completions",
            '{"model": "m", "messages": [], "messages": [{"role": "user", "content": "hi"}]}',
        ),
        ("/feedback", '{"reward": 1.0, "msg_ids": ["a"], "msg_ids": ["b"]}'),
    ],
)
async def test_a_body_with_a_key_twice_is_refused(tmp_path, monkeypatch, address, body):
    """R16: the last one was taken."""
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        before = dict(served.service.book.counts)
        key = session["api_key"] if address.startswith("/run") else KEY
        headers = {"Authorization": f"Bearer {key}"}
        answer = await served.client.post(
            address.replace("ID", session["id"]), content=body, headers=headers
        )
        assert (
            answer.status_code == 400 and "is written twice" in answer.json()["error"]["message"]
        ), answer.text
        assert (
            dict(served.service.book.counts) == before
            and (await served.state(session))["state"] == "open"
        )


async def test_what_a_limit_refuses_leaves_nothing_behind(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, requests_per_minute=2) as served:
        gateway = served.service.gateway
        session = await served.open()
        (quota,) = gateway.quotas.values()
        now = quota.clock()
        quota.clock = lambda: now  # nothing comes back meanwhile
        assert [(await served.client.post(CHAT, json=M)).status_code for _ in range(4)] == [
            200,
            200,
            429,
            429,
        ]
        assert len(served.service.book.sessions) == 3, (
            "the one that was opened, and those of two calls"
        )
        assert (await served.ask(session)).status_code == 429, "of its client"
        assert gateway.values()["serve/limited"] == 3
        gateway.counts["prompt_tokens"] = 123_456_789
        assert "rft_serve_prompt_tokens 123456789\n" in (await served.client.get("/metrics")).text


async def test_a_reward_waits_for_the_answers_under_way(tmp_path, monkeypatch):
    engine = ScriptedEngine(answer=lambda m: "a")
    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await served.open()
        empty = await served.reward(session, 1.0)
        assert (empty.status_code, empty.json()["error"]["code"]) == (400, "no_calls")
        await served.ask(session)
        engine.hold()
        asking = asyncio.ensure_future(served.ask(session))
        await engine.waiting(1)
        early = await served.reward(session, 1.0)
        assert (early.status_code, early.json()["error"]["code"]) == (409, "calls_under_way")
        engine.release()
        await asking
        assert (await served.reward(session, 1.0)).status_code == 200


async def test_what_openais_protocol_offers(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        several = (
            await served.ask(session, n=2, logprobs=True, seed=7, stop=["x"], max_tokens=5)
        ).json()
        assert [c["index"] for c in several["choices"]] == [0, 1] and several["choices"][0][
            "logprobs"
        ]["content"]
        refused = await served.reward(session, 1.0, message=several["id"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "several_answers")
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        text = await served.client.post(TEXT, json={"model": "m", "prompt": "go"}, headers=headers)
        assert text.json()["object"] == "text_completion"
        models = await served.client.get("/v1/models", headers=headers)
        assert models.json()["data"][0]["id"] == "policy"
        async with served.http() as http:
            assert (await http.get("/health")).json() == {"status": "ok"}
        metrics = (await served.client.get("/metrics")).text
        assert "rft_serve_calls 2\n" in metrics and "rft_serve_sessions_opened 1\n" in metrics


@pytest.mark.parametrize(
    "value", ["1" + "0" * 30, '"\\ud800"'], ids=["a number beyond 64 bits", "half a character"]
)
async def test_what_fits_into_no_record_is_refused_and_harms_nobody(tmp_path, monkeypatch, value):
    """Such a number in a session's metadata ended the service, at each start anew, when its group
    was formed.
    """
    async with serving(tmp_path, monkeypatch) as served:
        refused = await served.client.post(
            "/v1/sessions", content=f'{{"task_id": "a", "metadata": {{"a": {value}}}}}'
        )
        assert (refused.status_code, "can be stored" in refused.text) == (400, True)
        await served.played()
        await served.gate.wait_explored(1)


async def test_headers_that_are_no_text(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch) as served, served.http() as http:
        for headers, status in (
            ([(b"Authorization", b"Bearer \xff")], 401),
            ([(b"Authorization", f"Bearer {KEY}".encode()), (b"Idempotency-Key", b"\xff")], 400),
        ):
            answer = await http.post(
                "/v1/chat/completions", json={"model": "policy", "messages": HI}, headers=headers
            )
            assert answer.status_code == status, answer.text


async def test_a_reward_without_parts_is_none(tmp_path, monkeypatch):
    """It counted as 0."""
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        await served.ask(session)
        assert (await served.reward(session, {})).status_code == 400
        assert (await served.state(session))["state"] == "open"


async def test_metrics_are_those_of_all_engines(tmp_path, monkeypatch):
    """Those of the last one were shown."""
    pool = EnginePool([ScriptedEngine(answer=lambda m: "a") for _ in range(2)])
    async with serving(tmp_path, monkeypatch, pool) as served:
        session = await served.open()
        for text in ("x", "y", "z"):
            assert (await served.ask(session, text)).status_code == 200
        generated = sum(
            m.value for m in await pool.metrics() if m.name == "engine/generated_tokens"
        )
        assert (
            f"rft_engine_generated_tokens {generated:g}\n"
            in (await served.client.get("/metrics")).text
        )


@pytest.mark.parametrize(
    ("environment", "lines", "told"),
    [
        ("", None, "no client key"),
        ("short", None, "5 characters"),
        ("", "me nothash", "line 1"),
        ("", "absent", "cannot be read"),
    ],
)
def test_without_a_good_key_nothing_starts(tmp_path, monkeypatch, environment, lines, told):
    monkeypatch.setenv(ENVIRONMENT, environment)
    file = None if lines is None else tmp_path / "clients"
    if lines not in (None, "absent"):
        file.write_text(lines)
    with pytest.raises(SetupError, match=told):
        config = ServeConfig(clients_file=None if file is None else str(file))
        clients(ServeRuntime(config=config, batch_size=1))


@pytest.mark.parametrize(
    "example, given",
    [
        ("serve", ["explorer.proxy_port={port}"]),
        (
            "tiny",
            [
                "explorer.rollout_model.enable_openai_api=true",
                "explorer.rollout_model.base_port={port}",
            ],
        ),
    ],
)
def test_a_port_that_is_taken_is_told_before_anything_starts(
    tmp_path, monkeypatch, tiny_model, example, given
):
    """It was told when the engines were there."""
    monkeypatch.setenv(ENVIRONMENT, KEY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = [
            f"model.model_path={tiny_model}",
            f"checkpoint_root_dir={tmp_path}",
            *(g.format(port=port) for g in given),
        ]
        with pytest.raises(
            SetupError, match=f"cannot listen on .*:{port} .*explorer.proxy_port.*base_port"
        ):
            execute(ROOT / "examples" / example / "config.yaml", given, in_process=True)
    assert not list(tmp_path.iterdir())


async def test_a_session_is_played_at_the_address_that_its_client_knows(tmp_path, monkeypatch):
    """It was told the address that the service listens on: 0.0.0.0, or one behind a proxy."""
    async with serving(tmp_path, monkeypatch) as served:
        for scheme, more in (("http", {}), ("https", {"X-Forwarded-Proto": "https"})):
            opened = (
                await served.client.post(
                    "/v1/sessions", json={}, headers={"Host": "rft.example:81", **more}
                )
            ).json()
            assert opened["base_url"] == f"{scheme}://rft.example:81/run/{opened['id']}/v1"
        async with AsyncClient(served.address.replace("127.0.0.1", "localhost"), KEY) as rft:
            session = await rft.session()
        assert (
            session.base_url
            == f"{served.address.replace('127.0.0.1', 'localhost')}/run/{session.id}/v1"
        )


async def test_an_address_of_the_newer_form(tmp_path, monkeypatch):
    """http://::1:8010 is none."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with serving(tmp_path, monkeypatch, host="::1") as served:
        assert served.address.startswith("http://[::1]:")
        await served.played()
        await served.gate.wait_explored(1)
