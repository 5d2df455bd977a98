"""Malformed bodies of each dialect: its error form names the field, and nothing is recorded."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.types.task import Task
from rft.workflow.base import RunContext
from rft.workflow.endpoint import serve

TASK = Task(taskset="t", index=0, prompt="hi", workflow="w")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "max_tokens": 9,
    "temperature": 0.5,
    "stop": ["x"],
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "s",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 9,
    "temperature": 0.5,
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "3"}],
                }
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
}
PAGES = {"/chat/completions": CHAT, "/responses": RESPONSES, "/messages": MESSAGES}
WRONG: tuple[Any, ...] = (7, -1.5, "x", True, [], [7], {}, {"type": "image"}, "\ud800")
# (page, changed fields, what the message names)
NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("/responses", {"input": []}, "input"),
    ("/responses", {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
    ("/responses", {"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ("/responses", {"input": [{"type": "computer_call"}]}, "input[0].type"),
    ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (
        "/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content",
    ),
    ("/responses", {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ("/responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/responses", {"tools": [{"type": "function"}]}, "tools[0].name"),
    ("/responses", {"tool_choice": "required"}, "tool_choice"),
    ("/responses", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ("/responses", {"text": {"format": {"type": "json_schema"}}}, "text"),
    ("/responses", {"include": ["message.output_text.logprobs"]}, "include"),
    ("/responses", {"background": True}, "background"),
    ("/responses", {"truncation": "auto"}, "truncation"),
    ("/responses", {"top_logprobs": 3}, "top_logprobs"),
    ("/responses", {"conversation": "c"}, "conversation"),
    ("/responses", {"prompt": {"id": "p"}}, "prompt"),
    ("/responses", {"previous_response_id": "resp_nothing"}, "previous_response_id"),
    ("/responses", {"messages": []}, "messages"),
    ("/messages", {"max_tokens": None}, "max_tokens"),
    ("/messages", {"messages": []}, "messages"),
    ("/messages", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ("/messages", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        "/messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0].source",
    ),
    (
        "/messages",
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        "/messages",
        {"messages": [{"role": "user", "content": [{"type": "thinking"}]}]},
        "messages[0].content[0].type",
    ),
    ("/messages", {"messages": [{"role": "assistant", "content": "so"}]}, "messages"),
    ("/messages", {"system": [{"type": "image"}]}, "system"),
    ("/messages", {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    ("/messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ("/messages", {"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ("/messages", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.type"),
    ("/messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ("/messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ("/messages", {"container": "c"}, "container"),
    ("/messages", {"stop_sequences": [""]}, "stop_sequences"),
    ("/messages", {"top_k": 0}, "top_k"),
    ("/messages", {"logit_bias": {"1": 2}}, "logit_bias"),
]


def mutations(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each place of a body, with each wrong value and without its value."""
    pairs = body.items() if isinstance(body, dict) else enumerate(body)
    for key, value in pairs:
        for wrong in WRONG:
            yield (*path, key), wrong
        if isinstance(value, dict | list):
            yield from mutations(value, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    place: Any = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return body


def check_form(page: str, got: httpx.Response) -> str:
    """The message of an error, which has the form of its dialect."""
    error = got.json()["error"]
    if page == "/messages":
        assert got.json()["type"] == "error" and error.keys() == {"type", "message"}
    else:
        assert error.keys() == {"message", "type", "param", "code"}
    kinds = {"invalid_request_error", "request_too_large"}
    assert error["type"] in kinds and error["message"], error
    return str(error["message"])


@pytest.mark.e2e
@pytest.mark.parametrize("page", PAGES)
async def test_a_malformed_body_is_refused_in_its_dialect(page: str) -> None:
    ctx = RunContext(ScriptedEngine(answer=lambda m: "a"), TASK, run=0, request_id="r")
    refused = 0
    async with (
        serve(ctx, TASK) as session,
        httpx.AsyncClient(base_url=session.base_url, timeout=20) as http,
    ):
        http.headers["x-api-key"] = session.api_key
        assert (await http.post(page, json=PAGES[page])).status_code == 200
        for content in (b"", b"{", b"[]", b"null", b"\xff", b'"x"', b"[" * 1000):
            got = await http.post(page, content=content)
            assert got.status_code in (400, 413), content
            check_form(page, got)
        for path, value in mutations(PAGES[page]):
            before = len(ctx.completions)
            got = await http.post(page, content=json.dumps(changed(PAGES[page], path, value)))
            if got.status_code == 200:
                assert len(ctx.completions) == before + 1
                continue
            refused += 1
            assert got.status_code == 400 and len(ctx.completions) == before, (path, value)
            check_form(page, got)
    assert refused >= 60, refused


@pytest.mark.parametrize(("page", "fields", "named"), NAMED)
async def test_what_a_dialect_cannot_keep_is_named(
    page: str, fields: dict[str, Any], named: str
) -> None:
    ctx = RunContext(ScriptedEngine(answer=lambda m: "a"), TASK, run=0, request_id="r")
    async with (
        serve(ctx, TASK) as session,
        httpx.AsyncClient(base_url=session.base_url, timeout=20) as http,
    ):
        http.headers["x-api-key"] = session.api_key
        got = await http.post(page, json=PAGES[page] | fields)
    assert got.status_code == 400, got.text
    assert named in check_form(page, got).split(":")[0], got.text
    assert not ctx.completions
