"""Requests that mean harm: each is refused with what is allowed, and the engine answers the next
one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.types.ports import Engine
from rft.types.task import SamplingArgs, Task
from rft.workflow import endpoint, endpoint_wire
from rft.workflow.base import RunContext
from rft.workflow.endpoint import serve, serve_models
from tests.attacks.table import attack

pytestmark = pytest.mark.e2e

HI = [{"role": "user", "content": "hi"}]
TASK = Task(
    taskset="t", index=0, prompt="hi", truth="4", workflow="w", sampling=SamplingArgs(max_tokens=3)
)


@pytest.fixture
async def transformers(tiny_model: Path) -> AsyncIterator[TransformersEngine]:
    engine = await TransformersEngine.start(
        EngineSettings(
            engine_type="transformers",
            model_path=str(tiny_model),
            max_model_len=64,
            fixed_weights=True,
        )
    )
    yield engine
    await engine.close()


async def post(
    engine: Engine, page: str, body: dict[str, Any] | bytes
) -> tuple[int, dict[str, Any]]:
    """Asks the session of a run.  An attack that is not answered hangs here until the deadline."""
    async with serve(RunContext(engine, TASK, run=0, request_id="run/0"), TASK) as run:
        return await ask(run.base_url, run.api_key, page, body)


async def ask(
    url: str, key: str, page: str, body: dict[str, Any] | bytes
) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30
    ) as http:
        answer = await http.post(page, content=content)
    return answer.status_code, answer.json()


ATTACKS: list[tuple[str, dict[str, Any], str]] = [
    ("/completions", {"prompt": [1_000_000]}, "ids from 0 to"),
    ("/completions", {"prompt": [2**31]}, "from 0 to 2147483647"),
    ("/completions", {"prompt": [-1]}, "from 0 to"),
    ("/completions", {"prompt": [True, 2]}, "whole numbers"),
    ("/completions", {"prompt": [1.5]}, "whole numbers"),
    ("/completions", {"prompt": [5] * 100}, "at most"),
    ("/completions", {"prompt": ["a"] * 1000}, "at most 128"),
    *(
        (
            "/chat/completions",
            {"messages": HI, "chat_template_kwargs": {name: value}},
            "the template reads",
        )
        for name, value in {
            "return_tensors": "pt",
            "tokenize": False,
            "return_dict": True,
            "continue_final_message": True,
            "padding": "max_length",
            "max_length": 1,
            "tokenizer_kwargs": {"return_tensors": "pt"},
            "chat_template": "{{ 1 }}",
            "add_generation_prompt": False,
            "messages": [],
            "raise_exception": 1,
            "nothing_reads_this": 1,
        }.items()
    ),
    ("/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, ""),
]


@attack(
    "H4",
    "token ids that no model has, arguments for the tokenizer behind the template, halves of "
    "characters",
    "400 with what is allowed; the engine answers the next request",
)
@pytest.mark.parametrize("page,body,allowed", ATTACKS, ids=lambda v: str(v)[:60])
async def test_it_is_refused_and_the_engine_goes_on(
    transformers: TransformersEngine, page: str, body: dict[str, Any], allowed: str
) -> None:
    status, answer = await post(transformers, page, body)
    assert status == 400 and allowed in answer["error"]["message"]
    status, _ = await post(transformers, "/chat/completions", {"messages": HI})
    assert status == 200


@attack("H4", "the same to models that are served beside runs", "the same")
async def test_other_models_are_as_safe(transformers: TransformersEngine) -> None:
    async with serve_models({"judge": transformers}) as models:
        for page, body, allowed in ATTACKS:
            status, answer = await ask(*models["judge"], page, body)
            assert status == 400 and allowed in answer["error"]["message"], body
        assert (await ask(*models["judge"], "/chat/completions", {"messages": HI}))[0] == 200


@attack("H4", "an answer that the engine's parser fails on", "500 for that request alone")
async def test_an_answer_that_cannot_be_read_fails_its_own_request(
    transformers: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(completion: object, tools: object) -> None:
        raise RuntimeError("a parser met a text that it does not know")

    with monkeypatch.context() as patch:
        patch.setattr(transformers, "_parse", broken)
        status, answer = await post(transformers, "/chat/completions", {"messages": HI, "n": 3})
    assert status == 500 and "does not know" in answer["error"]["message"]
    assert (await post(transformers, "/chat/completions", {"messages": HI}))[0] == 200


@attack(
    "H4",
    "the engine fails while it reads prompts",
    "everybody who waits is told at once; nobody waits for an hour",
)
async def test_an_engine_that_breaks_while_it_reads_prompts_answers_everybody_at_once(
    transformers: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*sequences: object) -> None:
        raise RuntimeError("the model is broken")

    monkeypatch.setattr(transformers._batch._forwards, "prefill", broken)
    asked = [post(transformers, "/chat/completions", {"messages": HI}) for _ in range(3)]
    for status, answer in await asyncio.gather(*asked):
        assert status == 503 and "the model is broken" in answer["error"]["message"]


@attack(
    "L",
    "values of a wrong kind or size in messages, tools and sampling",
    "400 with the field, never 500",
)
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": {}, "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": 5}}],
                }
            ]
        },
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": [1]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]},
        {"messages": HI, "tools": [{"type": "function", "function": {"name": 5}}]},
        {
            "messages": HI,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}],
        },
        {"messages": HI, "temperature": 10**400},
        {"messages": HI, "top_k": 10**30},
        {"messages": HI, "seed": 10**30},
        {"messages": HI, "max_tokens": 10**30},
        {"messages": HI, "repetition_penalty": 0},
        {"messages": HI, "stop": ["a"] * 65},
        {"messages": HI, "stop": "a" * 1001},
    ],
    ids=lambda b: json.dumps(b)[-60:],
)
async def test_a_value_of_the_wrong_kind_or_size_is_refused(body: dict[str, Any]) -> None:
    status, answer = await post(ScriptedEngine("a"), "/chat/completions", body)
    assert status == 400 and answer["error"]["message"]


@attack(
    "M8",
    "bodies of millions of values, without bottom, of 17 MB, or that are no JSON",
    "refused before they are parsed, 413 or 400",
)
@pytest.mark.parametrize(
    "body,status,why",
    [
        (b'{"messages": [' + b"[]," * 2_000_000 + b"[]]}", 413, "values"),
        (b'{"messages": [' + b"[" * 65 + b"]" * 65 + b"]}", 413, "deeper than 64"),
        (b"[" * 100_000, 413, "deeper than 64"),
        (b'{"prompt": "' + b"a" * (17 << 20) + b'"}', 413, ""),
        (b'{"temperature": NaN}', 400, "NaN"),
        (b'{"temperature": ' + b"1" * 5000 + b"}", 400, "not JSON"),
        ('{"prompt": "a"}'.encode("utf-16"), 400, "not JSON"),
    ],
    ids=["values", "depth", "open", "bytes", "nan", "digits", "utf-16"],
)
async def test_a_body_is_bounded_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, body: bytes, status: int, why: str
) -> None:
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr(
        endpoint_wire.json, "loads", lambda text, **kw: parsed.append(1) or loads(text, **kw)
    )
    got, answer = await post(ScriptedEngine("a"), "/chat/completions", body)
    assert (got, why in answer["error"]["message"]) == (status, True)
    assert len(parsed) <= (status == 400) + 1, "the answer is read with json.loads, too"


@attack("M8", "a text full of brackets and commas", "no values: it is read")
async def test_brackets_and_commas_of_texts_are_no_values() -> None:
    content = '[{,"\\' * 400_000
    status, _ = await post(ScriptedEngine("a"), "/completions", {"prompt": content})
    assert status == 400, "too long for the model, but read"
    assert endpoint_wire.parse(json.dumps({"prompt": content}).encode()) == {"prompt": content}


@pytest.mark.e2e
@attack(
    "L", "fifty connections that send nothing, or a byte now and then", "closed; others are served"
)
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nX-Slow: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n%sContent-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "head", "body"],
)
async def test_slow_connections_are_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Whatever arrives meanwhile: the deadline is that of the whole head, and of the whole body."""
    # a busy machine sends heads slowly
    monkeypatch.setattr(endpoint, "HEAD_S", 15.0 if sent.endswith(b"{") else 0.3)
    monkeypatch.setattr(endpoint, "BODY_S", 0.3)
    ctx = RunContext(ScriptedEngine("a"), TASK, run=0, request_id="run/0")
    async with serve(ctx, TASK) as run:
        port = httpx.URL(run.base_url).port
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        key = f"Authorization: Bearer {run.api_key}\r\n".encode()
        told = await asyncio.gather(*(drip(r, w, sent.replace(b"%s", key)) for r, w in connections))
        status, _ = await ask(run.base_url, run.api_key, "/chat/completions", {"messages": HI})
    assert status == 200, "a quick one is answered"
    assert not sent.endswith(b"{") or any(
        t.startswith(b"HTTP/1.1 408") and b"did not arrive within" in t for t in told
    )


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> bytes:
    """Sends `sent`, then a byte now and then, until the server closes the connection; what it said."""
    closed = asyncio.ensure_future(heard(reader))
    writer.write(sent)
    while not closed.done():
        await asyncio.wait({closed}, timeout=0.05)
        if sent:
            writer.write(b"a")
    writer.close()
    return closed.result()


async def heard(reader: asyncio.StreamReader) -> bytes:
    """Also what came before the connection was reset."""
    said = b""
    with suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            said += piece
    return said
