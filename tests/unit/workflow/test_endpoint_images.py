"""Images through the endpoint: one conversation whichever dialect spoke, and refusals in its form."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image as Picture

from rft.engine.scripted import ScriptedEngine
from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.images import data_url
from rft.images.decode import MAX_FILE_BYTES
from rft.plugins import load_all
from rft.testing import tiny_vision
from rft.types import block
from rft.types.ids import GroupId
from rft.types.images import Image
from rft.types.task import SamplingArgs, Task
from rft.workflow.agent import AgentWorkflow
from rft.workflow.base import RunContext, Workflow, workflow
from rft.workflow.endpoint import serve
from rft.workflow.group import PlayedGroup, run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes
from tests.helpers.talks import ParsedEngine, Written

RED = Image.of(tiny_vision.picture((220, 30, 30), size=(32, 16)))
BLUE = Image.of(tiny_vision.picture((40, 60, 220), size=(16, 24)))
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
PAGES = ("/chat/completions", "/responses", "/messages")
Parts = list[str | bytes]


def pieces(page: str, parts: Parts) -> list[dict[str, Any]]:
    """Content in the form of a page's dialect; bytes are images."""
    written: list[dict[str, Any]] = []
    for part in parts:
        text = isinstance(part, str)
        if page == "/messages":
            source = {"type": "base64", "media_type": "image/png"}
            source |= {"data": "" if text else base64.b64encode(part).decode()}  # type: ignore[arg-type]
            written.append(
                {"type": "text", "text": part} if text else {"type": "image", "source": source}
            )
            continue
        of_responses = page == "/responses"
        url = "" if text else f"data:image/png;base64,{base64.b64encode(part).decode()}"  # type: ignore[arg-type]
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        if not of_responses:
            image = {"type": "image_url", "image_url": {"url": url}}
        kind = "input_text" if of_responses else "text"
        written.append({"type": kind, "text": part} if text else image)
    return written


def body(page: str, user: Parts, *later: tuple[str, Any]) -> dict[str, Any]:
    """A request of one message of the user and `later` ones: (user, parts), (assistant, text),
    (call, arguments) or (result, parts).
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": pieces(page, user)}]
    for role, given in later:
        if role in ("user", "assistant"):
            content = given if role == "assistant" else pieces(page, given)
            messages.append({"role": role, "content": content})
        elif page == "/chat/completions":
            call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [call]}
                if role == "call"
                else {"role": "tool", "tool_call_id": "c1", "content": pieces(page, given)}
            )
        elif page == "/responses":
            call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
            output = {"type": "function_call_output", "call_id": "c1"}
            messages.append(call if role == "call" else {**output, "output": pieces(page, given)})
        else:
            call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "c1"}
            messages.append(
                {"role": "assistant", "content": [call]}
                if role == "call"
                else {"role": "user", "content": [{**result, "content": pieces(page, given)}]}
            )
    if page == "/responses":
        return {"input": messages}
    return {"messages": messages} | ({"model": "m", "max_tokens": 6} if page == "/messages" else {})


def text_of(page: str, answer: dict[str, Any]) -> str:
    if page == "/chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    content = answer["content"] if page == "/messages" else answer["output"][0]["content"]
    return "".join(part["text"] for part in content)


async def test_results_of_tools_show_images_in_each_dialect() -> None:
    asked = []
    for page in PAGES:
        engine = ParsedEngine(Written("a"))
        task = Task(taskset="t", index=0, prompt="hi", workflow="w")
        ctx = RunContext(engine, task, run=0, request_id="r")
        async with serve(ctx, task) as run, httpx.AsyncClient(base_url=run.base_url) as http:
            http.headers["x-api-key"] = run.api_key
            result: Parts = ["this ", "one: ", BLUE.data]
            sent = body(page, ["what ", RED.data, "is", ""], ("call", ""), ("result", result))
            got = await http.post(page, json=sent)
        assert got.status_code == 200, got.text
        (call,) = engine.calls
        asked.append((call.messages, call.images))
    messages, images = asked[0]
    assert messages[0]["content"] == [
        {"type": "text", "text": "what "},
        RED.part,
        {"type": "text", "text": "is"},
    ]
    assert messages[2]["role"] == "tool"
    assert messages[2]["content"] == [{"type": "text", "text": "this one: "}, BLUE.part]
    assert images == (RED, BLUE) and asked == [asked[0]] * 3


# ---------------------------------------------------------------- with a model that sees


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_all()


async def started(folder: Path) -> TransformersEngine:
    return await TransformersEngine.start(
        EngineSettings(
            engine_type="transformers",
            model_path=str(folder),
            max_model_len=300,
            fixed_weights=True,
        )
    )


async def play(engine: TransformersEngine, cls: type, **task: Any) -> PlayedGroup:
    name = "test_endpoint_images_agent"
    workflow(name)(cls)
    sampling = SamplingArgs(max_tokens=6, seed=1)
    made = Task(taskset="t", index=0, workflow=name, sampling=sampling, **task)
    limits = RunLimits(max_timeout_s=60)
    group = await run_group(made, Recipes().find(made), engine, GroupId(1, 0, 3, 5), limits=limits)
    assert group.rows[0].reason == "", group.rows[0].reason
    return group


@pytest.mark.e2e
async def test_rows_hold_images_as_those_of_a_task_whichever_dialect_spoke(tmp_path: Path) -> None:
    engine = await started(tiny_vision.make(tmp_path / "model"))
    rows, files = [], []

    class OfTheTask(Workflow):
        async def run(self, task: Task, ctx: RunContext) -> Any:
            messages = task.chat()
            answer = await ctx.chat(messages)
            more = {"role": "user", "content": [{"type": "image", "image": BLUE.data}]}
            await ctx.chat([*messages, answer.message, more])
            return ctx.transcript(score={"a": 1.0}, layout="chains", info={})  # type: ignore[arg-type]

    for page in PAGES:

        async def agent(self: Any, task: Task, base_url: str, api_key: str) -> float:
            async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
                http.headers["x-api-key"] = api_key
                opening: Parts = ["see", RED.data]
                first = await http.post(page, json=body(page, opening))  # noqa: B023
                assert first.status_code == 200, first.text
                answer = text_of(page, first.json())  # noqa: B023
                later = [("assistant", answer), ("user", [BLUE.data])]
                second = await http.post(page, json=body(page, opening, *later))  # noqa: B023
                assert second.status_code == 200, second.text
            return 1.0

        group = await play(engine, type("Plays", (AgentWorkflow,), {"agent": agent}), prompt="hi")
        (row,) = group.rows
        rows.append(block.encode([row]))
        files.append(group.images)
    assert len(set(rows)) == 1 and files == [{x.sha256: x.data for x in (RED, BLUE)}] * 3
    shown = [{"type": "text", "text": "see"}, RED.part]
    task = {"messages": ({"role": "user", "content": shown},), "images": (RED,)}
    group = await play(engine, OfTheTask, **task)
    (own,) = group.rows
    assert (own.tokens == row.tokens).all() and (own.logprobs == row.logprobs).all()
    assert own.images == row.images and [p.sha256 for p in row.images] == [RED.sha256, BLUE.sha256]
    assert group.images == files[0]
    await engine.close()


def _encoded(kind: str, *frames: Picture.Image, **more: Any) -> bytes:
    file = io.BytesIO()
    frames[0].save(file, kind, append_images=frames[1:], save_all=len(frames) > 1, **more)
    return file.getvalue()


def _one(page: str, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A request of one image, whose part is changed."""
    sent = body(page, [RED.data])
    change(sent["input" if page == "/responses" else "messages"][0]["content"][0])
    return sent


def _address(page: str) -> dict[str, Any]:
    url = "https://images.example/x.png"

    def change(part: dict[str, Any]) -> None:
        if page == "/messages":
            part["source"] = {"type": "url", "url": url}
        else:
            part["image_url"] = url if page == "/responses" else {"url": url}

    return _one(page, change)


def _no_base64(page: str) -> dict[str, Any]:
    def change(part: dict[str, Any]) -> None:
        if page == "/messages":
            part["source"]["data"] = "?"
        elif page == "/responses":
            part["image_url"] += "?"
        else:
            part["image_url"]["url"] += "?"

    return _one(page, change)


def _in_an_instruction(page: str) -> dict[str, Any]:
    role = "system" if page != "/responses" else "developer"
    content = pieces(page, ["x", RED.data])
    key = "input" if page == "/responses" else "messages"
    sent = body(page, ["hi"])
    return {**sent, key: [{"role": role, "content": content}, *sent[key]]}


BAD: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "truncated": (lambda page: body(page, [RED.data[:-40]]), "damaged PNG|not a readable"),
    "no_image": (lambda page: body(page, ["x", b"GIF8"]), "not a readable image"),
    "empty": (lambda page: body(page, [b""]), "has no bytes"),
    "bomb": (
        lambda page: body(page, [_encoded("PNG", Picture.new("1", (30_000, 30_000)))]),
        "30000 x 30000|decompression bomb",
    ),
    "animated": (
        lambda page: body(
            page,
            [_encoded("GIF", Picture.new("RGB", (8, 8)), Picture.new("RGB", (8, 8), "red"))],
        ),
        "an animated image",
    ),
    "cmyk": (lambda page: body(page, [_encoded("JPEG", Picture.new("CMYK", (8, 8)))]), "mode CMYK"),
    "placeholder": (
        lambda page: body(page, ["<|vision_start|><|image_pad|>", RED.data]),
        "2 placeholders",
    ),
    "budget": (lambda page: body(page, ["x", *[RED.data, BLUE.data] * 40]), "tokens"),
    "address": (_address, "nothing is downloaded"),
    "no_base64": (_no_base64, "is not base64"),
    "instruction": (_in_an_instruction, "images are for the user|a list of text parts"),
}


async def refused(engine: TransformersEngine, page: str, sent: dict[str, Any], reason: str) -> None:
    """Post a request that is refused in the form of its dialect, and another that is answered."""
    task = Task(
        taskset="t", index=0, prompt="hi", workflow="w", sampling=SamplingArgs(max_tokens=2)
    )
    ctx = RunContext(engine, task, run=0, request_id="r")
    async with (
        serve(ctx, task) as run,
        httpx.AsyncClient(base_url=run.base_url, timeout=60) as http,
    ):
        http.headers["x-api-key"] = run.api_key
        got = await http.post(page, json=sent)
        assert got.status_code == 400, (page, got.text[:300])
        error = got.json()["error"]
        assert any(words in error["message"] for words in reason.split("|")), error
        named = {"type", "message"} if page == "/messages" else {"message", "type", "param", "code"}
        assert error.keys() == named and error["type"] == "invalid_request_error"
        assert not ctx.completions
        assert (await http.post(page, json=body(page, ["hi"]))).status_code == 200


@pytest.mark.e2e
async def test_bad_images_are_refused_in_each_dialect(tmp_path: Path) -> None:
    engine = await started(tiny_vision.make(tmp_path / "model"))
    for name, (request, reason) in BAD.items():
        for page in PAGES:
            try:
                await refused(engine, page, request(page), reason)
            except AssertionError as e:
                raise AssertionError(f"{name} {page}: {e}") from e
    await engine.close()


@pytest.mark.e2e
async def test_a_model_of_texts_refuses_images_in_each_dialect(tiny_model: Path) -> None:
    engine = await started(tiny_model)
    for page in PAGES:
        await refused(engine, page, body(page, [RED.data]), "no model of a family")
    await engine.close()


def test_data_urls_are_read_as_they_are_written() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF"):
        file = _encoded(kind, Picture.new("RGB", (8, 8)))
        url = data_url.write(file)
        assert url.startswith(f"data:image/{kind.lower()};base64,") and data_url.read(url) == file
    assert data_url.read("data:,a%20b") == b"a b"
    for wrong, reason in (("http://x/y.png", "no data URL"), (None, "no data URL")):
        with pytest.raises(ValueError, match=reason):
            data_url.read(wrong)
    with pytest.raises(ValueError, match="too large"):
        data_url.read("data:," + "x" * (2 * MAX_FILE_BYTES))
    with pytest.raises(ValueError, match="is no image"):
        data_url.write(b"text")


PROGRAM = """
import json, os, sys, urllib.request
messages = json.load(sys.stdin)["messages"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "m", "messages": messages}).encode(),
    {"x-api-key": os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


async def test_a_program_gets_the_images_of_its_task_as_it_sends_them() -> None:
    content = [{"type": "text", "text": "see"}, RED.part]
    args = {"command": [sys.executable, "-c", PROGRAM]}
    of = {"workflow": "agent_command_workflow", "workflow_args": args, "reward": "exact_answer"}
    messages = ({"role": "user", "content": content},)
    task = Task(taskset="t", index=0, messages=messages, images=(RED,), truth="4", **of)  # type: ignore[arg-type]
    engine = ScriptedEngine("4")
    limits = RunLimits(max_timeout_s=30)
    group = await run_group(task, Recipes().find(task), engine, GroupId(1, 0, 3, 5), limits=limits)
    assert group.rows[0].reason == "" and group.rows[0].reward == 1.0
    (call,) = engine.calls
    assert call.messages[0]["content"] == content and call.images == (RED,)
