"""A client of OpenAI-compatible servers, against one on loopback that does as the test says."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from rft.engine import external
from rft.engine.built_in import make
from rft.engine.pool import EnginePool
from rft.engine.settings import EngineSettings, ExternalModelConfig
from rft.errors import EngineFailed, SetupError
from rft.secrets import redact
from rft.testing.engine_contract import ask
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs
from rft.types.throttled import THROTTLED
from rft.worker.threads import Clock

KEY = "sk-of-the-judge-1234567890"


class Server:
    """Answers each request with the next of `answers` (status, body, headers), the last one for
    ever; keeps what it was sent.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any, dict[str, str]]] = [(200, said("fine"), {})]
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.at_once = self.most_at_once = 0
        self.hold: asyncio.Event | None = None
        self.four = asyncio.Event()  # set once four requests are under way
        self.drop = 0  # connections that are closed without an answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers: dict[str, str] = {}
                while head := (await reader.readline()).decode().strip():
                    name, _, value = head.partition(":")
                    headers[name.lower()] = value.strip()
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.seen.append((line.decode().split()[1], headers, body))
                if self.drop:
                    self.drop -= 1
                    break
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                if self.at_once == 4:
                    self.four.set()
                if self.hold is not None:
                    await self.hold.wait()
                self.at_once -= 1
                status, answer, more = (
                    self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                )
                text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                lines = "".join(
                    f"{k}: {v}\r\n" for k, v in {**more, "content-length": str(len(text))}.items()
                )
                writer.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + text)
                await writer.drain()
        finally:
            writer.close()


def said(*texts: str, **more: Any) -> dict[str, Any]:
    choices = [
        {
            "index": i,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": t, **more},
        }
        for i, t in enumerate(texts)
    ]
    return {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1")
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(external, "FIRST_WAIT_S", 0.01)
    yield made
    listening.close()


def settings(**more: Any) -> EngineSettings:
    server = ExternalModelConfig(
        model_name="judge-1", base_url_env="JUDGE_URL", api_key_env="JUDGE_KEY", **more
    )
    return EngineSettings(
        engine_type="external", name="aux-judge-0", external=server, request_timeout_s=20
    )


async def test_a_question_and_its_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORG", "organisation-7")
    engine = await make(
        settings(
            headers={"x-team": "rl"},
            header_envs={"x-org": "ORG"},
            extra_body={"user": "me", "max_tokens": None},
        )
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    server.answers = [(200, said("7", reasoning_content="hm", tool_calls=[call]), {})]
    tools = ({"type": "function", "function": {"name": "f"}},)
    request = GenerateRequest(
        messages=({"role": "user", "content": "grade"},),
        tools=tools,
        sampling=SamplingArgs(max_tokens=9, stop=("x",), top_k=4),
    )
    (c,) = await engine.generate(request)
    assert (c.text, c.reasoning, c.usage, c.tool_calls, c.finish_reason) == (
        "7",
        "hm",
        (7, 3),
        (call,),
        "stop",
    )
    assert len(c.tokens) == len(c.prompt_tokens) == len(c.logprobs) == 0 and c.version_spans == ()
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions"
    assert (
        headers["authorization"] == f"Bearer {KEY}"
        and headers["x-team"] == "rl"
        and headers["x-org"] == "organisation-7"
    )
    assert body == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "grade"}],
        "temperature": 1.0,
        "stop": ["x"],
        "top_k": 4,
        "tools": list(tools),
        "user": "me",
    }
    await engine.generate(
        GenerateRequest(
            messages=({"role": "user", "content": "grade"}, c.message), sampling=SamplingArgs()
        )
    )
    assert server.seen[1][2]["messages"][1] == {
        "role": "assistant",
        "content": "7",
        "tool_calls": [call],
    }
    assert KEY not in redact(f"failed with {KEY}") and "organisation-7" not in redact(
        "organisation-7"
    )
    await engine.close()


async def test_choices_by_the_log_probs_that_the_server_gives(server: Server) -> None:
    engine = await make(settings())
    request = GenerateRequest(
        messages=({"role": "user", "content": "?"},),
        choices=("yes", "no"),
        sampling=SamplingArgs(temperature=0),
    )
    told = [{"token": "Yes", "logprob": math.log(0.5)}, {"token": " yes", "logprob": math.log(0.1)}]
    told += [
        {"token": "No", "logprob": math.log(0.2)},
        {"token": "Yesterday", "logprob": math.log(0.1)},
    ]
    answer = said("Yes")
    answer["choices"][0]["logprobs"] = {"content": [{"token": "Yes", "top_logprobs": told}]}
    server.answers = [(200, answer, {})]
    (c,) = await engine.generate(request)
    assert c.text == "yes" and np.exp(c.logprobs[0]) == pytest.approx(0.6 / 0.8)
    body = server.seen[0][2]
    assert body["logprobs"] is True and body["top_logprobs"] == 20 and body["max_tokens"] == 1
    server.answers = [(200, said("Yes"), {})]  # one that gives none
    (c,) = await engine.generate(request)
    assert c.text == "" and len(c.logprobs) == 0
    await engine.close()


async def test_it_asks_again_where_the_server_was_busy_or_gone(server: Server) -> None:
    engine = await make(settings())
    server.drop = 1
    server.answers = [
        (429, "slow down", {"retry-after": "0.01"}),
        (503, "", {}),
        (200, said("at last"), {}),
    ]
    (c,) = await engine.generate(ask())
    assert c.text == "at last" and len(server.seen) == 4
    assert {m.name: m.value for m in await engine.metrics()}["engine/retries"] == 3
    await engine.close()


async def test_it_gives_up_with_the_reason(server: Server) -> None:
    engine = await make(settings(max_retries=2))
    server.answers = [(500, "broken", {})]
    with pytest.raises(
        EngineFailed, match="no answer after 3 requests; the last: HTTP 500: broken"
    ):
        await engine.generate(ask())
    server.answers = [(401, f"wrong key {KEY}", {})]
    with pytest.raises(EngineFailed, match=r"HTTP 401.*wrong key \*\*\*.*JUDGE_KEY"):
        await engine.generate(ask())
    server.answers = [(400, "too long", {})]
    with pytest.raises(ValueError, match="HTTP 400: too long"):
        await engine.generate(ask())
    for nonsense in ("<html>", {"choices": [{}]}, {"choices": []}, []):
        server.answers = [(200, nonsense, {})]
        with pytest.raises(EngineFailed, match=r"JSON|protocol|without choices"):
            await engine.generate(ask())
    await engine.close()


async def test_several_answers_also_from_servers_that_give_one(server: Server) -> None:
    engine = await make(settings())
    made = await engine.generate(ask(n=3))
    assert [c.text for c in made] == ["fine"] * 3 and [
        body.get("n", 1) for _, _, body in server.seen
    ] == [3, 2, 1]
    server.answers = [(200, said("a", "b"), {})]
    assert [c.usage for c in await engine.generate(ask(n=2))] == [(7, 3), (0, 0)]
    await engine.close()


async def test_limits(server: Server) -> None:
    engine = await make(settings(requests_per_minute=1200))
    pool = EnginePool([engine], max_concurrent=4)
    server.hold = asyncio.Event()
    jobs = [asyncio.ensure_future(pool.generate(ask(str(i)))) for i in range(8)]
    began = time.monotonic()
    await asyncio.wait_for(server.four.wait(), 120)
    assert not any(j.done() for j in jobs)
    server.hold.set()
    await asyncio.gather(*jobs)
    assert server.most_at_once == 4 and time.monotonic() - began > 7 * 60 / 1200 - 0.1
    await engine.close()


async def test_what_it_cannot_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await make(settings())
    with pytest.raises(ValueError, match="with messages"):
        await engine.generate(GenerateRequest(prompt_tokens=(1, 2)))
    with pytest.raises(ValueError, match="gives no log-probs"):
        await engine.score(ScoreRow(tokens=np.zeros(3, np.int32), prompt_length=1))
    with pytest.raises(ValueError, match="task: score"):
        await engine.classify([])
    with pytest.raises(EngineFailed, match="its owner's"):
        await engine.pause()
    await engine.close()
    with pytest.raises(SetupError, match="X_ORG"):
        await make(settings(header_envs={"x-org": "X_ORG"}))
    monkeypatch.delenv("JUDGE_URL")
    with pytest.raises(SetupError, match="set JUDGE_URL"):
        await make(settings())


@pytest.mark.e2e
async def test_a_call_held_back_for_the_rate_is_told_to_who_waits(server: Server) -> None:
    engine, clock = await make(settings(requests_per_minute=60)), Clock()
    before = THROTTLED.set(clock)
    try:
        await engine.generate(ask())
        began = time.monotonic()
        ran = clock.seconds
        await engine.generate(ask())
    finally:
        THROTTLED.reset(before)
    assert 0 < time.monotonic() - began - (clock.seconds - ran) <= 1.1, "the wait does not count"
    await engine.close()
