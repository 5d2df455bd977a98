"""Three APIs, one conversation: what is recorded does not depend on the dialect."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.errors import EngineFailed
from rft.plugins import load_all
from rft.types import block
from rft.types.experience import Experience
from rft.types.ids import GroupId
from rft.types.task import SamplingArgs, Task
from rft.workflow import endpoint
from rft.workflow.agent import AgentWorkflow
from rft.workflow.base import RunContext, workflow
from rft.workflow.endpoint import serve
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes
from tests.helpers.talks import EDITING, TALKS, Heard, ParsedEngine, Written, add

ID = GroupId(1, 0, 3, 5)
SCRIPT = (
    Written("I add.", "two sums", ('{"a":1,  "b":2}', '{"b": 4, "a": 3}')),
    Written("3 and 7", "both are there"),
    Written("", "", ('{"a": 5, "b": 6.0}',)),
    Written("11 \n", "so"),
)


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_all()


async def play(engine: ParsedEngine, agent: Any) -> tuple[Experience, ...]:
    """Rows of one run of an agent."""
    name = "test_dialects_agent"
    workflow(name)(type("Plays", (AgentWorkflow,), {"agent": agent}))
    sampling = SamplingArgs(max_tokens=300)
    task = Task(taskset="t", index=0, prompt="hi", workflow=name, sampling=sampling)
    limits = RunLimits(max_timeout_s=30)
    return (await run_group(task, Recipes().find(task), engine, ID, limits=limits)).rows


async def converse(talk: Any) -> list[Heard]:
    heard = [await talk.say("1+2 and 3+4?")]
    heard.append(await talk.give({id: add(arguments) for id, arguments in heard[0].calls}))
    heard.append(await talk.say("5+6?"))
    heard.append(await talk.give({id: add(arguments) for id, arguments in heard[2].calls}))
    return heard


@pytest.mark.e2e
async def test_rows_are_equal_whichever_dialect_was_spoken() -> None:
    rows = {}
    for dialect, streamed in itertools.product(TALKS, (False, True)):
        heard: list[Heard] = []

        async def agent(self: Any, task: Task, base_url: str, api_key: str) -> float:
            heard.extend(await converse(TALKS[dialect](base_url, api_key, streamed)))  # noqa: B023
            return 1.0

        engine = ParsedEngine(*SCRIPT)
        (row,) = await play(engine, agent)
        assert row.reason == "", (dialect, row.reason)
        assert [(h.text, h.thought, len(h.calls)) for h in heard] == [
            (w.text, w.thought, len(w.calls)) for w in SCRIPT
        ]
        assert [call.prefix_messages for call in engine.calls] == [0, 3, 6, 8]
        rows[dialect, streamed] = block.encode([row])
    assert len(set(rows.values())) == 1, [*rows]


@pytest.mark.e2e
@pytest.mark.parametrize("dialect", EDITING)
async def test_a_client_that_edits_history_continues_its_tokens(dialect: str) -> None:
    rows = []
    for talks in (TALKS, EDITING):

        async def agent(self: Any, task: Task, base_url: str, api_key: str) -> float:
            await converse(talks[dialect](base_url, api_key))  # noqa: B023
            return 1.0

        engine = ParsedEngine(*SCRIPT)
        (row,) = await play(engine, agent)
        assert row.reason == "", row.reason
        assert [call.prefix_messages for call in engine.calls] == [0, 3, 6, 8]
        rows.append(block.encode([row]))
    assert rows[0] == rows[1]


PROGRAM = """
import json, os, urllib.request
body = {"model": "m", "max_tokens": 9, "messages": json.load(__import__("sys").stdin)["messages"]}
request = urllib.request.Request(
    os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
    json.dumps(body).encode(),
    {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["content"][0]["text"])
"""


async def test_a_program_finds_messages_by_its_environment() -> None:
    args = {"command": [sys.executable, "-c", PROGRAM]}
    of = {"workflow": "agent_command_workflow", "workflow_args": args, "reward": "exact_answer"}
    task = Task(taskset="t", index=0, prompt="hi", truth="4", **of)  # type: ignore[arg-type]
    limits = RunLimits(max_timeout_s=30)
    engine = ScriptedEngine("4")
    (row,) = (await run_group(task, Recipes().find(task), engine, ID, limits=limits)).rows
    assert (row.reason, row.reward, row.info["agent_output"]) == ("", 1.0, "4\n")


def session(engine: Any, **fields: Any) -> tuple[RunContext, Any]:
    task = Task(taskset="t", index=0, prompt="hi", workflow="w", **fields)
    ctx = RunContext(engine, task, run=0, request_id="r")
    return ctx, serve(ctx, task)


@asynccontextmanager
async def http_client(opened: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        opened as run,
        httpx.AsyncClient(base_url=run.base_url, timeout=20) as http,
    ):
        http.headers["x-api-key"] = run.api_key
        yield http


def message(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A body of Messages."""
    messages = [{"role": "user", "content": content}]
    return {"model": "m", "max_tokens": 99, "messages": messages, **fields}


HOSTILE_ARGUMENTS = (
    "not JSON",
    "[1]",
    "null",
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"a": "\\ud800"}',
    '{"a": 123456789012345678901234567890}',
    '{"a": 1, "a": 2}',
    '{"a":' * 40 + "1" + "}" * 40,
    "",
)


@pytest.mark.parametrize("arguments", HOSTILE_ARGUMENTS)
async def test_arguments_of_any_form_come_back_as_written(arguments: str) -> None:
    engine = ParsedEngine(Written("", "", (arguments,)))
    _, opened = session(engine)
    async with http_client(opened) as http:
        got = (await http.post("/messages", json=message())).json()
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": got["content"]},
            message([{"type": "tool_result", "tool_use_id": "call00000"}])["messages"][0],
        ]
        answer = await http.post("/messages", json=message(messages=history))
    assert answer.status_code == 200, answer.text
    assert engine.calls[1].prefix_messages == 2
    (call,) = engine.calls[1].messages[1]["tool_calls"]
    assert call["function"]["arguments"] == arguments


async def test_calls_in_another_order_are_the_same_answer() -> None:
    engine = ParsedEngine(Written("", "", ('{"a": 1}', '{"b": 2.0}')))
    ctx, opened = session(engine)
    async with http_client(opened) as http:
        calls = (await http.post("/messages", json=message())).json()["content"]
        history = [*message()["messages"], {"role": "assistant", "content": calls[::-1]}]
        results = [{"type": "tool_result", "tool_use_id": c["id"], "content": "3"} for c in calls]
        history.append({"role": "user", "content": [*results, {"type": "text", "text": "so?"}]})
        await http.post("/messages", json=message(messages=history))
        changed = copy.deepcopy(history)
        changed[1]["content"][0]["input"] = {"b": 3}
        await http.post("/messages", json=message(messages=changed))
    assert [call.prefix_messages for call in engine.calls] == [0, 2, 0]
    assert [m["role"] for m in engine.calls[1].messages[1:]] == [
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert len(ctx.completions) == 3


async def test_a_line_that_differs_in_each_request_is_no_prompt() -> None:
    engine = ParsedEngine(Written("a"))
    _, opened = session(engine)
    async with http_client(opened) as http:
        for number in range(2):
            line = f"x-anthropic-billing-header: cc_version=2; cch={number};"
            system = [{"type": "text", "text": text} for text in (line, "You add.")]
            await http.post("/messages", json=message(system=system))
    assert engine.calls[0].messages == engine.calls[1].messages
    assert engine.calls[0].messages[0] == {"role": "system", "content": "You add."}


@pytest.mark.e2e
async def test_counted_tokens_are_those_of_the_prompt() -> None:
    anthropic = pytest.importorskip("anthropic")
    engine = ParsedEngine(Written("a"))
    ctx, opened = session(engine)
    async with opened as run:
        address = run.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=address, api_key=run.api_key) as client:
            args: Any = {"model": "m", "system": "You add.", "messages": message()["messages"]}
            counted = await client.messages.count_tokens(**args)
            assert not ctx.completions
            answer = await client.messages.create(**args, max_tokens=9)
            assert counted.input_tokens == answer.usage.input_tokens > 10
            args["messages"] = message("x" * 5000)["messages"]
            assert (await client.messages.count_tokens(**args)).input_tokens > 5000
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens"):
                await client.messages.create(**args, max_tokens=9)
    assert [call.request_id for call in engine.calls] == ["r-0", "r-0", "r-1", "r-1"]
    assert len(ctx.completions) == 1


@pytest.mark.e2e
async def test_both_clients_list_the_models_and_read_a_wrong_key() -> None:
    anthropic = pytest.importorskip("anthropic")
    _, opened = session(ParsedEngine(Written("a")))
    async with opened as run:
        address = run.base_url.removesuffix("/v1")
        args: Any = {"base_url": address, "api_key": run.api_key}
        async with anthropic.AsyncAnthropic(**args) as client:
            assert [(m.type, m.id) async for m in client.models.list()] == [("model", "policy")]
        async with anthropic.AsyncAnthropic(**args | {"api_key": "wrong"}) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**message())
        assert refused.value.body["error"]["type"] == "authentication_error"
        async with anthropic.AsyncAnthropic(base_url=address, auth_token=run.api_key) as client:
            assert (await client.messages.create(**message())).content[0].text == "a"
        async with openai.AsyncOpenAI(base_url=run.base_url, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="wrong key"):
                await client.responses.create(model="m", input="hi")
        async with openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
            assert [m.id async for m in client.models.list()] == ["policy"]


async def test_the_end_of_an_answer_has_its_reason() -> None:
    sampling = SamplingArgs(max_tokens=3, stop=("!",))
    engine = ScriptedEngine(answer=lambda messages: messages[-1]["content"])
    _, opened = session(engine, sampling=sampling)
    async with http_client(opened) as http:
        found = []
        for text in ("abcdef", "a", "a.b", "a!b"):
            body = message(text, stop_sequences=["."])
            got = (await http.post("/messages", json=body)).json()
            found.append((got["stop_reason"], got["stop_sequence"]))
        cut = (await http.post("/responses", json={"input": "abcdef"})).json()
        events = (await http.post("/responses", json={"input": "abcdef", "stream": True})).text
    reasons = [("max_tokens", None), ("end_turn", None), ("stop_sequence", "."), ("end_turn", None)]
    assert found == reasons
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert "event: response.incomplete" in events and "response.completed" not in events


async def test_instructions_are_of_one_request_alone() -> None:
    engine = ParsedEngine(Written("a"))
    _, opened = session(engine)
    async with http_client(opened) as http:
        previous = None
        for instructions in ("first", "second", None, None):
            body = {"input": "hi", "instructions": instructions, "previous_response_id": previous}
            previous = (await http.post("/responses", json=body)).json()["id"]
    turn = ["user", "assistant"]
    assert [[m["role"] for m in call.messages] for call in engine.calls] == [
        ["system", "user"],
        ["system", *turn, "user"],
        [*turn * 2, "user"],
        [*turn * 3, "user"],
    ]
    assert engine.calls[1].messages[0]["content"] == "second"
    assert [call.prefix_messages for call in engine.calls] == [0, 0, 0, 6]


async def test_fields_that_are_not_applied_are_listed() -> None:
    _, opened = session(ParsedEngine(Written("a")))
    async with http_client(opened) as http:
        body: dict[str, Any] = {"input": "hi", "reasoning": {"effort": "low"}, "temperature": 0.5}
        body |= {"parallel_tool_calls": False, "text": {"verbosity": "low"}, "store": False}
        got = await http.post("/responses", json=body)
        assert got.headers["x-rft-ignored"] == (
            "parallel_tool_calls, reasoning, temperature, text.verbosity"
        )
        more = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "top_k": 5}
        got = await http.post("/messages", json=message(**more, metadata={"user_id": "u"}))
        assert got.headers["x-rft-ignored"] == "output_config, thinking, top_k"
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        chat |= {"reasoning_effort": "low", "verbosity": "low", "prompt_cache_retention": "24h"}
        got = await http.post("/chat/completions", json=chat)
        assert got.headers["x-rft-ignored"] == "reasoning_effort, verbosity"


STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/responses", {"input": "hi"}),
    ("/messages", message()),
]


@pytest.mark.parametrize(("page", "body"), STREAMS)
async def test_a_client_that_leaves_a_stream_harms_no_other(
    page: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.01)
    engine = ScriptedEngine(answer=lambda messages: "a")
    engine.hold()
    (leaving, first), (staying, second) = session(engine), session(engine)
    async with http_client(first) as one, http_client(second) as other:

        async def stay() -> str:
            return (await other.post(page, json={**body, "stream": True})).text

        whole = asyncio.ensure_future(stay())
        await engine.waiting(1)
        async with one.stream("POST", page, json={**body, "stream": True}) as stream:
            assert (await anext(stream.aiter_bytes())).startswith(b": ")
            await engine.waiting(2)
        async with asyncio.timeout(20), engine._changed:
            await engine._changed.wait_for(lambda: engine._under_way == 1)
        engine.release()
        events = (await whole).split("\n\n")
    assert events[0].startswith(": ") and '"a"' in "".join(events)
    assert not leaving.completions and len(staying.completions) == 1


@pytest.mark.e2e
async def test_a_stream_that_fails_raises_in_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    anthropic = pytest.importorskip("anthropic")
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.01)

    async def fail(call: Any, *errors: type[Exception]) -> Exception:
        engine = ScriptedEngine(answer=lambda messages: "a")
        engine.hold()
        _, opened = session(engine)
        async with opened as run:
            job = asyncio.ensure_future(call(run))
            await engine.waiting(1)
            engine.die("gone")
            with pytest.raises(errors) as raised:
                await job
            with contextlib.suppress(EngineFailed):
                await run.watch(asyncio.sleep(0))
        return raised.value

    async def messages(run: Any) -> None:
        address = run.base_url.removesuffix("/v1")
        async with (
            anthropic.AsyncAnthropic(base_url=address, api_key=run.api_key) as client,
            client.messages.stream(**message()) as stream,
        ):
            await stream.get_final_message()

    async def responses(run: Any) -> None:
        async with (
            openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client,
            client.responses.stream(model="m", input="hi") as stream,
        ):
            await stream.get_final_response()

    assert "overloaded_error" in str(await fail(messages, anthropic.APIStatusError))
    assert "the engine failed" in str(await fail(responses, openai.APIError))
