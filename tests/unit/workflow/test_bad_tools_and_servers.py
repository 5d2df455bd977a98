"""What models and tools do wrong in a conversation (I18), what strangers send to the endpoint of
agents (I22), and servers that break off in mid-answer (F23).
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rft.engine.built_in import make
from rft.engine.settings import EngineSettings, ExternalModelConfig
from rft.errors import EngineFailed
from rft.testing import ScriptedModel, run_workflow, run_workflow_async, tool_call
from rft.testing.play import WorkflowResult
from rft.types.ports import GenerateRequest
from rft.types.task import Task
from rft.workflow.agent import AgentWorkflow
from rft.workflow.toolrun import ToolWorkflow

OUTPUTS: dict[str, Callable[[], Any]] = {
    "large": lambda: "x" * 10_000_000,
    "terminal": lambda: "\x1b[2J\x1b[31mred\x07",
    "bytes": lambda: b"\xff\x00",
    "surrogate": lambda: "half \ud800 a character",
    "nothing": lambda: None,
    "not a number": lambda: {"value": float("nan")},
    "no JSON": lambda: {"value": {1, 2}},
    "a circle": lambda: _circle(),
}
NESTED = '{"name": "say", "arguments": {"what": ' + "[" * 20_000 + "]" * 20_000 + "}}"


def _circle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def say(what: str = "large") -> Any:
    """Says it."""
    return OUTPUTS[what]()


class Says(ToolWorkflow):
    def make_tools(self, task: Task) -> Any:
        return [say]


def played(answer: Any) -> WorkflowResult:
    """A run in which the model makes this call, hears what came of it, and answers."""
    result = run_workflow(Says, "?", ScriptedModel(answer, "done"), reward=lambda task, t: 1.0)
    assert result.answers[-1] == "done" and result.reward == 1.0
    return result


@pytest.mark.parametrize("what", OUTPUTS)
def test_whatever_a_tool_gives_the_run_goes_on(what: str) -> None:
    result = played(tool_call("say", what=what))
    told = result.messages[-2]["content"]
    assert isinstance(told, str) and len(told) < 1000
    assert "\x1b" not in result.trace()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (tool_call("sing"), "there is no tool 'sing'; there is: say"),
        (tool_call("s" * 20_000), "there is no tool"),
        (tool_call("say", waht="x"), "waht: Extra inputs are not permitted"),
        (tool_call("say", what="unknown"), "KeyError"),
        ("<tool_call>{oops</tool_call>", "no JSON"),
        ("<tool_call>[[1]]</tool_call>", "must be an object"),
        (f"<tool_call>{NESTED}</tool_call>", "nest"),
        ("<tool_call>" * 2000, "no JSON"),
    ],
)
def test_whatever_a_model_calls_it_is_told(answer: Any, error: str) -> None:
    result = played(answer)
    told = next(m["content"] for m in result.messages if m["role"] == "tool")
    assert told.startswith("Error: ") and error in told and len(told) < 1000
    assert result.metrics["tool_errors"] >= 1


# ---------------------------------------------------------------- servers


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rft.engine.external.FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def agent_of(agent: Callable[[str, str], Any]) -> WorkflowResult:
    class Agent(AgentWorkflow):
        async def agent(self, task: Task, base_url: str, api_key: str) -> float:
            await agent(base_url, api_key)
            async with httpx.AsyncClient(
                base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=20
            ) as own:
                answer = await own.post("chat/completions", json=CHAT)
            assert answer.status_code == 200, answer.text
            return 1.0

    return await run_workflow_async(Agent, "?", ScriptedModel("hello"), timeout_s=60.0)


@pytest.mark.e2e
async def test_strangers_get_nothing_and_change_nothing() -> None:
    seen: dict[str, int] = {}

    async def agent(base_url: str, api_key: str) -> None:
        good = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with httpx.AsyncClient(base_url=base_url, timeout=60) as c:
            for name, headers, body in [
                ("no token", {}, json.dumps(CHAT)),
                ("wrong token", {"Authorization": "Bearer x"}, json.dumps(CHAT)),
                ("other scheme", {"Authorization": f"Basic {api_key}"}, json.dumps(CHAT)),
                ("not JSON", good, b'{"messages": ['),
                ("not UTF-8", good, b'{"messages": "\xff\xfe"}'),
                ("nested", good, "[" * 200_000),
                ("wrong type", {**good, "Content-Type": "application/xml"}, b"<messages/>"),
                ("large", good, b" " * (100 << 20)),
            ]:
                seen[name] = (
                    await c.post("chat/completions", headers=headers, content=body)
                ).status_code
            seen["wrong method"] = (await c.get("chat/completions", headers=good)).status_code
            seen["above the folder"] = (
                await c.get("../../../etc/passwd", headers=good)
            ).status_code
        # 1 KiB units; our own 100 MiB body counts too, in this process
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (400 << 10)

    result = await agent_of(agent)
    assert seen == {
        "no token": 401,
        "wrong token": 401,
        "other scheme": 401,
        "not JSON": 400,
        "not UTF-8": 400,
        "nested": 413,
        "wrong type": 400,
        "large": 413,
        "wrong method": 405,
        "above the folder": 404,
    }
    assert len(result.transcript.turns) == 1, "nothing of it is recorded"


async def test_connections_that_say_nothing_hold_up_nobody() -> None:
    """Slow or silent clients: the run's own calls are answered, and the run ends with them still
    open.
    """
    writers: list[asyncio.StreamWriter] = []

    async def agent(base_url: str, api_key: str) -> None:
        url = httpx.URL(base_url)
        for i in range(300):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(
                [
                    b"",
                    b"POST /v1/chat/comp",
                    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
                ][i % 3]
            )
            writers.append(writer)

    result = await agent_of(agent)
    assert result.reward == 1.0
    assert len(writers) == 300 and not any(writer.is_closing() for writer in writers), (
        "they are still open"
    )
    for writer in writers:
        writer.close()


WHOLE = json.dumps({"choices": [{"message": {"content": "7"}, "finish_reason": "stop"}]}).encode()


@pytest.mark.parametrize("breaks", ["half a body", "half a header", "at once", "no HTTP"])
async def test_a_server_that_breaks_off_is_asked_again(breaks: str) -> None:
    """Twice it breaks off, then it answers; one that never answers is asked max_retries times more
    and no oftener.
    """
    asked = 0
    bad = 2

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        asked += 1
        answer = (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (len(WHOLE), WHOLE)
        )
        cut = {
            "half a body": len(answer) - 20,
            "half a header": 20,
            "at once": 0,
            "no HTTP": len(answer),
        }[breaks]
        if asked <= bad:
            answer = (b"hello? " if breaks == "no HTTP" else b"") + answer[:cut]
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    external = ExternalModelConfig(model_name="m", base_url=url, max_retries=2)
    async with server:
        engine = await make(EngineSettings(engine_type="external", name="judge", external=external))
        request = GenerateRequest(messages=({"role": "user", "content": "?"},))
        (c,) = await engine.generate(request)
        assert c.text == "7" and asked == 3
        asked = 0
        bad = 99
        with pytest.raises(EngineFailed, match="no answer after 3 requests"):
            await engine.generate(request)
        assert asked == 3
        await engine.close()
