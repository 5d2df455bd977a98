"""Images in the results of tools: MCP servers, functions and veRL's tools, for models that see and not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from PIL import Image as Picture

from rft.engine.settings import EngineSettings
from rft.engine.transformers import TransformersEngine
from rft.testing import ScriptedModel, run_workflow, run_workflow_async, tiny, tiny_vision
from rft.types.completion import Completion
from rft.types.images import Image
from rft.types.task import SamplingArgs, Task
from rft.workflow.toolrun import ClassTool, ToolWorkflow
from rft.workflow.tools import Toolbox, in_text
from rft.workflow.turns import Reply
from tests.unit.workflow.test_tools_in_runs import call

RED = tiny_vision.picture((220, 30, 30))
SERVER = f"""
import base64
from mcp.server.mcpserver import Image, MCPServer
from mcp_types import BlobResourceContents, EmbeddedResource, TextResourceContents

RED = {RED!r}
app = MCPServer("camera", log_level="CRITICAL")


@app.tool()
def photo() -> list:
    return ["a photo", "of", Image(data=RED, format="png"), "from here"]


@app.tool()
def files() -> list:
    note = TextResourceContents(uri="note:/a.txt", text="a note")
    blob = base64.b64encode(RED).decode()
    scan = BlobResourceContents(uri="note:/a.png", mime_type="image/png", blob=blob)
    return [EmbeddedResource(resource=note), EmbeddedResource(resource=scan)]


@app.tool()
def damaged() -> Image:
    return Image(data=RED[:40], format="png")


app.run()
"""
TASK = Task(
    taskset="t",
    index=0,
    prompt="look",
    truth="3",
    workflow="x",
    sampling=SamplingArgs(max_tokens=8000, seed=1),
)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture
def servers(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("mcp")
    (tmp_path / "camera.py").write_text(SERVER)
    command = {"command": sys.executable, "args": [str(tmp_path / "camera.py")]}
    (tmp_path / "servers.json").write_bytes(msgspec.json.encode({"mcpServers": {"c": command}}))
    return {"mcp_config_path": str(tmp_path / "servers.json")}


class Photographs(ToolWorkflow):
    """Whatever the model writes, it calls `photo`."""

    async def react(self, answer: Completion) -> Reply:
        return await super().react(msgspec.structs.replace(answer, text=call("photo")))


@pytest.mark.e2e  # starting the program takes seconds
async def test_images_of_an_mcp_server_are_parts_of_the_tools_message(
    servers: dict[str, Any],
) -> None:
    model = ScriptedModel(call("photo"), call("files"), call("damaged"), "done")
    result = await run_workflow_async(
        "tool_workflow", TASK, model, reward="exact_answer", workflow_args=servers, timeout_s=60
    )
    image = Image.of(RED)
    contents = [m["content"] for m in model.calls[-1].messages if m["role"] == "tool"]
    assert contents[:2] == [
        [text("a photo\nof"), image.part, text("from here")],
        [text("a note"), image.part],
    ]
    assert contents[2].startswith("Error: ValueError: not a readable image (its 40 bytes begin")
    assert model.calls[-1].images == (image,)
    assert result.group.rows[0].metrics["tool_errors"] == 1.0


@pytest.mark.e2e
@pytest.mark.parametrize("sees", [True, False])
async def test_a_model_sees_them_or_its_run_fails_with_the_reason(
    sees: bool, servers: dict[str, Any], tmp_path: Path
) -> None:
    folder = (tiny_vision if sees else tiny).make(tmp_path / "model")
    settings = EngineSettings(
        engine_type="transformers", model_path=str(folder), max_model_len=500, fixed_weights=True
    )
    engine = await TransformersEngine.start(settings)
    args = {**servers, "mcp_tools": ["photo"], "max_turns": 2, "max_turn_tokens": 4}
    result = await run_workflow_async(
        Photographs,
        TASK,
        engine,
        reward="exact_answer",
        workflow_args=args,
        timeout_s=60,
        may_fail=True,
    )
    await engine.close()
    (row,) = result.group.rows
    if not sees:
        assert row.status == "failed"
        assert "the messages show 1 images, and " in row.reason
        assert "is no model of a family that is offered with images" in row.reason
        return
    assert row.status == "truncated", row.reason
    (place,) = row.images
    assert result.group.images == {place.sha256: RED}
    assert not row.loss_mask[place.start : place.start + place.length].any()


def look(colour: str) -> Any:
    """Look at something."""
    return {"red": ["so: ", RED], "only": RED, "torn": RED[:-30], "text": ["so: ", 1]}[colour]


class Own(ToolWorkflow):
    def make_tools(self, task: Task) -> Any:
        return [look]


def test_functions_return_images_among_texts() -> None:
    said = [call("look", colour=colour) for colour in ("red", "only", "torn", "text")]
    model = ScriptedModel(*said, "done")
    run_workflow(Own, TASK, model, reward="exact_answer")
    part = Image.of(RED).part
    contents = [m["content"] for m in model.calls[-1].messages if m["role"] == "tool"]
    assert contents[:2] == [[text("so: "), part], [part]]
    assert contents[2].startswith("Error: ValueError: a damaged PNG image")
    assert contents[3] == '["so: ",1]'


async def test_verls_tools_return_pictures_before_their_text() -> None:
    class Zoom:
        def execute(self, instance: str, given: dict[str, Any]) -> Any:
            pictures = [Picture.new("RGB", (8, 8)), RED]
            return SimpleNamespace(text="x" * 9, image=pictures, video=None), 0.5, {}

    schema = {"type": "function", "function": {"name": "zoom"}}
    box = Toolbox([ClassTool(Zoom(), schema)], length=4, side="left")
    ((black, red, words),) = [r.content for r in await box.run(in_text(call("zoom")))]
    assert isinstance(black, bytes) and black.startswith(b"\x89PNG") and red == RED
    assert words == "xxxx...(truncated)"
