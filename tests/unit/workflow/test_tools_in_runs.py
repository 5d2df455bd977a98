"""Tools: schemas, calls in text, errors told to the model, limits, tool files, a real MCP server."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from rft.errors import ConfigError
from rft.plugins import load_all
from rft.reward.run_folder import run_folder
from rft.testing import ScriptedModel, run_workflow, run_workflow_async
from rft.types.completion import Completion
from rft.types.task import SamplingArgs, Task
from rft.workflow import toolrun
from rft.workflow.recipes import Recipes
from rft.workflow.toolrun import ToolWorkflow
from rft.workflow.tools import FunctionTool, Toolbox, find, in_text


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """Forecast for a city.

    Args:
        city (str): name in English
        days: how many
    """
    if city == "Atlantis":
        raise LookupError("no such city")
    return f"{city}: {days} sunny days, {unit}"


async def add(a: int, b: Annotated[int, Field(ge=0, description="the second")]) -> dict[str, int]:
    """Adds.

    :param a: the first
    """
    return {"sum": a + b}


def slow() -> str:
    """Never done."""
    time.sleep(0.5)
    return "late"


def call(name: str, **arguments: object) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Own(ToolWorkflow):
    def make_tools(self, task):
        return [weather, add, slow]


TASK = Task(
    taskset="t",
    index=0,
    prompt="weather?",
    truth="3",
    workflow="x",
    sampling=SamplingArgs(max_tokens=8000),
)


def test_schema_from_signature_and_docstring():
    schema = FunctionTool(weather).schema["function"]
    assert (schema["name"], schema["description"]) == ("weather", "Forecast for a city.")
    p = schema["parameters"]
    assert p["required"] == ["city"] and p["properties"]["city"] == {
        "type": "string",
        "description": "name in English",
    }
    assert p["properties"]["days"] == {"type": "integer", "default": 1, "description": "how many"}
    assert p["properties"]["unit"]["enum"] == ["C", "F"] and p["additionalProperties"] is False
    props = FunctionTool(add).schema["function"]["parameters"]["properties"]
    assert props["a"]["description"] == "the first" and props["b"] == {
        "type": "integer",
        "minimum": 0,
        "description": "the second",
    }
    with pytest.raises(ConfigError, match="must have a name"):
        FunctionTool(lambda *args: "", name="x")


@pytest.mark.parametrize(
    ("text", "form", "found"),
    [
        (
            'x <tool_call>{"name": "a", "arguments": {"k": 1}}</tool_call>',
            "auto",
            [("a", {"k": 1}, "")],
        ),
        (
            '<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>',
            "hermes",
            [("a", {}, ""), ("b", {}, "")],
        ),
        ('{"name": "a", "parameters": {"k": 1}}', "json", [("a", {"k": 1}, "")]),
        (
            'so:\n```json\n[{"name": "a", "arguments": "{\\"k\\": 2}"}]\n```',
            "auto",
            [("a", {"k": 2}, "")],
        ),
        ('<tool_call>{"name": "a", "arguments": ""}</tool_call>', "auto", [("a", {}, "")]),
        (
            '<tool_call>{"type": "function", "function": {"name": "a", "arguments": '
            '"{}"}}</tool_call>',
            "auto",
            [("a", {}, "")],
        ),
        ("<tool_call>{oops</tool_call>", "auto", [("", {}, "this tool call is no JSON")]),
        ("<tool_call>[1]</tool_call>", "auto", [("", {}, 'must be an object with "name"')]),
        (
            '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
            "auto",
            [("a", {}, '"arguments" must be an object')],
        ),
        (
            '<tool_call>{"name": "a", "arguments": {"k": 5, "k": 500}}</tool_call>',
            "auto",
            [("", {}, "the key 'k' is written twice")],
        ),
        (
            '<tool_call>{"name": "a", "arguments": "{\\"k\\": 5, \\"k\\": 500}"}</tool_call>',
            "auto",
            [("a", {}, "the key 'k' is written twice")],
        ),
        ('{"answer": 3}', "json", []),
        ("the answer is 3", "auto", []),
        ('{"name": "a"}', "hermes", []),
    ],
)
def test_calls_in_text(
    text: str, form: str, found: list[tuple[str, dict[str, object], str]]
) -> None:
    calls = in_text(text, form)  # type: ignore[arg-type]
    assert [(c.name, c.arguments) for c in calls] == [f[:2] for f in found]
    assert all(
        says in c.error and bool(says) == bool(c.error)
        for c, (_, _, says) in zip(calls, found, strict=True)
    )


PAY = '<tool_call>{"name": "pay", "arguments": {"amount": %s}}</tool_call>'
DRAFT = PAY % 500
REAL = PAY % 5


@pytest.mark.parametrize(
    ("text", "opened", "amounts"),
    [
        (f"<think>Perhaps {DRAFT}? No.</think>I cannot pay.", False, []),
        (f"<think>Perhaps {DRAFT}? No.</think>{REAL}", False, [5]),
        (f"Perhaps {DRAFT}? No.</think>I cannot pay.", True, []),
        (f"Perhaps {DRAFT}? No.</think>{REAL}", True, [5]),
        (f"Perhaps {DRAFT}? No.</think>{REAL}", False, [5]),
        (f"<think>Perhaps {DRAFT}", False, []),
        (f"Perhaps {DRAFT}", True, []),
        (f"<think>one</think>{DRAFT}<think>no</think>{REAL}", False, [5]),
        (f"<think>one</think>{REAL}\n<think>or {DRAFT}", False, [5]),
        (f"<think>I may use <tool_call> for it.</think>{REAL}", False, [5]),
        ("<think>I may use <tool_call> for it.</think>I cannot pay.", False, []),
        ("I may use <tool_call> for it.\nBut I cannot pay.", False, []),
        ("The tags <tool_call> and </tool_call> stand around calls.", False, []),
        (f"After <tool_call> comes JSON: {REAL}", False, [5]),
        (f"I need no <think> tag: {REAL}", False, [5]),
        (f"I need no `</think>` here: {REAL} And no `</think>` there.", False, [5]),
        (PAY % '"a </think> b"', False, ["a </think> b"]),
        ("<think>Perhaps " + PAY % '"</think>"', False, []),
        ('<think>{"name": "pay", "arguments": {"amount": 500}}</think>No.', False, []),
        ('<think>No.</think>{"name": "pay", "arguments": {"amount": 5}}', False, [5]),
        (
            '```json\n{"name": "pay", "arguments": {"amount": 500}}\n```</think>{"name": "pay", '
            '"arguments": {"amount": 5}}',
            True,
            [5],
        ),
    ],
)
def test_a_thought_has_no_calls(text: str, opened: bool, amounts: list[object]) -> None:
    """Finding G2."""
    made = Completion(
        prompt_tokens=np.zeros(1, np.int32),
        tokens=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        text=text,
        finish_reason="stop",
        version_spans=(),
        sampling=SamplingArgs(),
        in_thought=opened,
    )
    calls = find(made)
    assert [c.arguments.get("amount") for c in calls] == amounts and not any(c.error for c in calls)


def test_a_drafted_call_is_not_run():
    """Finding G2: a draft of 500 was paid, and the real call of 5 was "not run; at most 1 calls"."""
    paid: list[int] = []

    class Pays(ToolWorkflow):
        def make_tools(self, task: Task):
            def pay(amount: int) -> str:
                paid.append(amount)
                return "paid"

            return [pay]

    model = ScriptedModel(
        f"<think>Perhaps {DRAFT}? No.</think>{REAL}", f"<think>Again {DRAFT}?</think>Done."
    )
    result = run_workflow(Pays, TASK, model, reward=lambda task, transcript: 1.0)
    assert paid == [5] and result.metrics["tool_calls"] == 1


def test_results_and_errors_are_told_and_counted():
    model = ScriptedModel(
        call("weather", city="Oslo", days=2),
        call("weather", city="Atlantis"),
        call("weather", town="Oslo"),
        call("sing"),
        "<tool_call>{</tool_call>",
        call("add", a=1, b=2) + call("add", a=3, b=4) + call("add", a=5, b=6),
        "It is 3.",
    )
    (row,) = run_workflow(
        Own, TASK, model, reward="exact_answer", workflow_args={"max_parallel_calls": 2}
    ).group.rows
    said = [m["content"] for m in row.messages if m["role"] == "tool"]
    assert said[0] == "Oslo: 2 sunny days, C" and said[1] == "Error: LookupError: no such city"
    assert "town: Extra inputs are not permitted" in said[2] and "city: Field required" in said[2]
    assert (
        "there is no tool 'sing'; there is: weather, add, slow" in said[3] and "no JSON" in said[4]
    )
    assert said[5:] == ['{"sum":3}', '{"sum":7}', "Error: not run; at most 2 calls in one answer"]
    assert (row.reward, row.metrics["tool_calls"], row.metrics["tool_errors"]) == (1.0, 8.0, 5.0)
    assert [t["function"]["name"] for t in model.calls[0].tools] == ["weather", "add", "slow"]


def test_the_engines_parser_wins_and_ids_are_kept():
    from rft.testing import tool_call

    model = ScriptedModel(tool_call("add", a=2, b=2), "4")
    run_workflow(Own, TASK, model, reward="exact_answer", may_fail=True)
    answer = model.calls[1].messages[-2:]
    assert answer[1]["role"] == "tool" and answer[1]["content"] == '{"sum":4}'
    assert answer[1]["tool_call_id"] == answer[0]["tool_calls"][0]["id"]


def test_the_system_message_may_tell_of_the_tools():
    model = ScriptedModel("3")
    run_workflow(
        Own,
        TASK,
        model,
        reward="exact_answer",
        workflow_args={"tools_in": "system", "result_role": "user"},
    )
    assert '"name":"weather"' in model.calls[0].messages[0]["content"] and not model.calls[0].tools


def test_turns_have_veRLs_names_too():
    forever = ScriptedModel(answer=lambda m: call("add", a=1, b=1))
    row = run_workflow(
        Own, TASK, forever, reward="exact_answer", workflow_args={"max_assistant_turns": 3}
    ).group.rows[0]
    assert row.metrics["turns"] == 3.0
    row = run_workflow(
        Own, TASK, forever, reward="exact_answer", workflow_args={"max_user_turns": 1}
    ).group.rows[0]
    assert row.metrics["turns"] == 2.0 and row.info["stopped"] == "max_user_turns"
    with pytest.raises(ConfigError, match="are the same"):
        run_workflow(
            Own,
            TASK,
            forever,
            reward="exact_answer",
            workflow_args={"max_turns": 3, "max_assistant_turns": 4},
        )


async def test_a_slow_tool_is_not_waited_for():
    box = Toolbox([FunctionTool(slow)], timeout_s=0.05)
    (result,) = await box.run(in_text(call("slow")))
    assert result.error and result.content == "Error: slow took longer than 0.05 s"


@pytest.mark.extra("sandbox")
async def test_waiting_for_a_free_sandbox_is_not_the_time_of_a_tool():
    """With many runs at the same time all but the first calls were told that their program took too
    long.
    """
    from rft.extras.sandbox.code_sandbox import Sandbox

    sandbox = Sandbox(size=1)
    go = threading.Event()

    async def execute() -> str:
        await sandbox._done(lambda: None)
        return "done"

    busy = asyncio.ensure_future(sandbox._done(go.wait))
    running = asyncio.ensure_future(
        Toolbox([FunctionTool(execute)], timeout_s=0.05).run(in_text(call("execute")))
    )
    try:
        assert not (await asyncio.wait({running}, timeout=0.3))[0]
    finally:
        go.set()
    assert (await busy, [r.content for r in await running]) == (True, ["done"])
    sandbox.close()


class VerlTool:
    """Methods that block, and one that takes long to begin."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.created: list[str] = []

    async def create(self, instance):
        await asyncio.sleep(0)
        self.created.append(instance)

    def execute(self, instance, given):
        self.threads.add(threading.current_thread().name)
        return f"{self.created == [instance]}", 1.0, {}

    def release(self, instance):
        self.threads.add(threading.current_thread().name)
        self.created.remove(instance)


async def test_verls_methods_may_block_and_are_called_after_create():
    """An ordinary `execute` stopped all runs while it worked, and no `tool_timeout` held for it."""
    made = VerlTool()
    box = Toolbox(
        [toolrun.ClassTool(made, {"type": "function", "function": {"name": "t"}})], parallel=2
    )
    assert [r.content for r in await box.run(in_text(call("t") + call("t")))] == ["True", "True"]
    await box.close()
    assert made.created == [] and made.threads == {"tool execute", "tool release"}


async def test_a_verl_tool_whose_create_failed_is_created_by_the_next_call():
    """Its `execute` was called without; and a result of 0 was told as nothing."""

    class Busy:
        asked = 0

        def create(self, instance):
            self.asked += 1
            if self.asked == 1:
                raise OSError("busy")

        def execute(self, instance, given):
            return self.asked - 2, None, {}

    box = Toolbox([toolrun.ClassTool(Busy(), {"type": "function", "function": {"name": "t"}})])
    said = [(await box.run(in_text(call("t"))))[0].content for _ in range(2)]
    await box.close()
    assert said == ["Error: OSError: busy", "0"]


async def test_a_tool_that_cannot_be_released_keeps_no_other_open() -> None:
    closed = []

    class Held(FunctionTool):
        async def close(self) -> None:
            closed.append(self.name)
            raise OSError(self.name)

    def one() -> str:
        return ""

    def two() -> str:
        return ""

    with pytest.raises(OSError, match="one"):
        await Toolbox([Held(one), Held(two)]).close()
    assert sorted(closed) == ["one", "two"]


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "abcd...(truncated)"),
        ("right", "(truncated)...ghij"),
        ("middle", "ab...(truncated)...ij"),
    ],
)
def test_long_results_are_cut(side: str, text: str) -> None:
    box = Toolbox(length=4, side=side)  # type: ignore[arg-type]
    assert box.shortened("abcdefghij") == text and box.shortened("abcd") == "abcd"


def test_two_tools_of_one_name():
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        Toolbox([FunctionTool(add), FunctionTool(add)])


# ---------------------------------------------------------------- files

TOOLS = '''
import os


class Counter:
    """veRL's shape."""

    def __init__(self, config, tool_schema):
        self.start, self.open = config["start"], {}

    async def create(self, instance_id, **kwargs):
        self.open[instance_id] = self.start

    async def execute(self, instance_id, parameters, **kwargs):
        self.open[instance_id] += parameters["by"]
        return f"now {self.open[instance_id]}", 0.25, {}

    async def release(self, instance_id):
        del self.open[instance_id]


def shout(text: str) -> str:
    """Says it louder."""
    return text.upper()


def server():
    from mcp.server.mcpserver import MCPServer

    app = MCPServer("demo", log_level="CRITICAL")

    @app.tool()
    def double(n: int) -> str:
        """Twice as much."""
        if n > 100:
            raise ValueError("too much")
        return str(2 * n)

    @app.tool()
    def end() -> str:
        """Takes the program with it."""
        os._exit(1)

    @app.tool()
    def nothing() -> str:
        """Has nothing to say."""
        return ""

    app.run()


if __name__ == "__main__":
    server()
'''
FILE = """
tools:
  - class_name: tools.py:Counter
    config: {start: 5}
    tool_schema:
      type: function
      function:
        name: count
        description: Counts on.
        parameters: {type: object, properties: {by: {type: integer}}, required: [by]}
  - function: tools.py:shout
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text(FILE)
    (tmp_path / "servers.json").write_text(
        f'{{"mcpServers": {{"demo": {{"command": "{sys.executable}", "args": '
        f'["{tmp_path / "tools.py"}"]}}}}}}'
    )
    return tmp_path


def test_a_tool_file(folder: Path) -> None:
    model = ScriptedModel(call("count", by=2), call("count", by=1), call("shout", text="hi"), "3")
    args = {"tool_config_path": str(folder / "tools.yaml")}
    (row,) = run_workflow(
        "tool_workflow", TASK, model, reward="exact_answer", workflow_args=args
    ).group.rows
    assert [m["content"] for m in row.messages if m["role"] == "tool"] == ["now 7", "now 8", "HI"]
    assert row.metrics["tool_reward"] == 0.5, (
        "what tools give is kept; the taskset's reward decides"
    )


@pytest.mark.parametrize(
    ("takes", "adds", "count"),
    [
        ("instance_id", "0", 5),
        ("instance_id, more=0", "more", 45),
        ("instance_id, create_kwargs=None", "create_kwargs['more']", 45),
        ("instance_id, more=0, **kwargs", "more + len(kwargs['create_kwargs'])", 46),
    ],
)
async def test_create_gets_what_the_row_has_for_its_tool(
    takes: str, adds: str, count: int, folder: Path
) -> None:
    """veRL's tools of geo3k and gsm8k compare with the ground truth that stands there."""
    create = "async def create(self, {}):\n        self.open[instance_id] = self.start{}"
    mine = create.format(takes, f" + {adds}")
    (folder / "tools.py").write_text(
        TOOLS.replace(create.format("instance_id, **kwargs", ""), mine)
    )
    of_tools = {"count": {"create_kwargs": {"more": 40}}, "other": None}
    row = {"extra_info": {"index": 3, "tools_kwargs": of_tools}}
    box = Toolbox(await toolrun.load_tool_file(str(folder / "tools.yaml"), row))
    (result,) = await box.run(in_text(call("count", by=0)))
    assert result.content == f"now {count}"


async def test_a_tool_file_in_the_home_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    names = [t.schema["function"]["name"] for t in await toolrun.load_tool_file("~/tools.yaml")]
    assert names == ["count", "shout"], "the files that it names are beside it"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tools: 3", "must hold a list `tools`"),
        ("tools: [{class_name: Nowhere}]", "needs `function`, or `class_name`"),
        (
            "tools: [{class_name: 'tools.py:Counter', config: {start: 1}}]",
            "tool_schema must be OpenAI's form",
        ),
        ("tools: [{class_name: x, config: {type: mcp}}]", "needs mcp.mcp_servers_config_path"),
        ("tools: [", "cannot be read"),
    ],
)
async def test_wrong_tool_files(folder: Path, text: str, says: str) -> None:
    (folder / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        await toolrun.load_tool_file(str(folder / "bad.yaml"))


@pytest.mark.e2e
async def test_a_server_in_this_process() -> None:
    server = pytest.importorskip("mcp.server.mcpserver")
    app = server.MCPServer("demo", log_level="CRITICAL")

    @app.tool()
    def double(n: int) -> str:
        """Twice as much."""
        return str(2 * n)

    (tool,) = await toolrun._McpServer("demo", app).tools()
    assert (
        tool.schema["function"]["name"] == "double"
        and tool.schema["function"]["description"] == "Twice as much."
    )
    box = Toolbox([tool])
    results = await box.run([*in_text(call("double", n=4)), *in_text("<tool_call>{</tool_call>")])
    assert results[0].content == "8" and results[1].error


@pytest.mark.e2e  # starting the program takes seconds
async def test_an_mcp_server(folder: Path) -> None:
    pytest.importorskip("mcp")
    model = ScriptedModel(call("double", n=4), call("double", n=400), "3")
    where = str(folder / "servers.json")
    args = {"mcp_config_path": where, "mcp_tools": ["double"]}
    result = await run_workflow_async(
        "tool_workflow", TASK, model, reward="exact_answer", workflow_args=args, timeout_s=60
    )
    (row,) = result.group.rows
    said = [m["content"] for m in row.messages if m["role"] == "tool"]
    assert said[0] == "8" and said[1].startswith("Error: ") and row.metrics["tool_errors"] == 1.0
    with pytest.raises(ConfigError, match="no MCP server has the tool 'triple'; they have double"):
        await toolrun.mcp_tools(where, ("triple",))


@pytest.mark.e2e  # starting the program takes seconds
async def test_an_mcp_server_that_dies_is_started_again_for_the_next_run(folder: Path) -> None:
    """From then on all calls of all runs failed, and the training went on without tools."""
    pytest.importorskip("mcp")
    said = []
    for _ in range(2):
        box = Toolbox(await toolrun.mcp_tools(str(folder / "servers.json")), parallel=3)
        for tool, args in (("double", {"n": 4}), ("nothing", {}), ("end", {})):
            said += [r.content for r in await box.run(in_text(call(tool, **args)))]
    assert said == ["8", "", "Error: MCPError: Connection closed"] * 2


@pytest.mark.e2e
async def test_mcp_servers_that_cannot_be_started(folder: Path) -> None:
    pytest.importorskip("mcp")
    (folder / "servers.json").write_text('{"mcpServers": {"none": {"command": "false"}}}')
    with pytest.raises(ConfigError, match="MCP server 'none' cannot be used"):
        await toolrun.mcp_tools(str(folder / "servers.json"))


async def test_what_a_server_writes_to_its_standard_error_is_in_the_message(folder: Path) -> None:
    """N18: it said "unhandled errors in a TaskGroup (1 sub-exception)", and the program's own lines
    were lost.
    """
    pytest.importorskip("mcp")
    servers = {
        "mcpServers": {
            "data base": {
                "command": "sh",
                "args": ["-c", "echo no such database: shop >&2; exit 3"],
            }
        }
    }
    (folder / "servers.json").write_text(json.dumps(servers))
    (folder / "logs").mkdir()
    token = run_folder.set(folder)
    try:
        with pytest.raises(
            ConfigError,
            match=r"MCP server 'data base' cannot be used: MCPError: Connection closed\n  no such "
            r"data",
        ) as e:
            await toolrun.mcp_tools(str(folder / "servers.json"))
    finally:
        run_folder.reset(token)
    assert "TaskGroup" not in str(e.value)
    assert (folder / "logs" / "mcp-data_base.out").read_text() == "no such database: shop\n"


def test_mcp_servers_that_are_not_there_are_named_before_anything_runs(folder: Path) -> None:
    """They were told when the first run began."""

    def told(text: str | None, name: str = "bad.json") -> str:
        if text is not None:
            (folder / name).write_text(text)
        of = Task(
            taskset="t",
            index=0,
            prompt="?",
            workflow="tool_workflow",
            workflow_args={"mcp_config_path": str(folder / name)},
        )
        with pytest.raises(ConfigError) as e:
            Recipes().find(of)
        return str(e.value)

    assert "cannot be read" in told(None, "nowhere.json") and "it must be" in told(
        '{"servers": []}'
    )
    said = told('{"mcpServers": {"none": {"command": "no-such-program"}}}')
    assert "MCP server 'none' cannot be used: 'no-such-program' is no program here" in said


def test_a_row_has_the_tools_that_the_model_was_told_of() -> None:
    (row,) = run_workflow(Own, TASK, ScriptedModel("3"), reward="exact_answer").group.rows
    assert [t["function"]["name"] for t in row.tools] == ["weather", "add", "slow"]
    (plain,) = run_workflow(
        Own, TASK, ScriptedModel("3"), reward="exact_answer", workflow_args={"tools_in": "system"}
    ).group.rows
    assert plain.tools == ()


@pytest.mark.extra("sandbox")
def test_a_program_may_not_take_longer_than_the_call_of_its_tool() -> None:
    with pytest.raises(ConfigError, match=r"python_timeout 60 must be less than tool_timeout 30"):
        run_workflow(
            "python_math_workflow", TASK, ScriptedModel("3"), workflow_args={"python_timeout": 60}
        )
    (row,) = run_workflow(
        "python_math_workflow",
        TASK,
        ScriptedModel("3"),
        reward="exact_answer",
        workflow_args={"python_timeout": 60, "tool_timeout": 90},
    ).group.rows
    assert row.reward == 1.0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tools": ["FILE:pricez"]}, "has no 'pricez'; it defines price, several"),
        ({"tools": ["FILE:several"]}, "parameter 'items' must have a name that a model can give"),
        ({"tools": ["FILE:price", "FILE:price"]}, "two tools are called 'price'"),
        ({"tool_config_path": "none.yaml"}, "the tool file cannot be read"),
    ],
)
def test_tools_that_are_not_there_are_told_before_a_run(
    tmp_path: Path, args: dict[str, Any], says: str
) -> None:
    file = tmp_path / "shop.py"
    file.write_text("def price(item: str): return 19\ndef several(*items): return 1\n")
    given = {
        k: [t.replace("FILE", str(file)) for t in v] if isinstance(v, list) else v
        for k, v in args.items()
    }
    load_all()
    with pytest.raises(ConfigError, match=says):
        Recipes().find(
            Task(taskset="t", index=0, prompt="x", workflow="tool_workflow", workflow_args=given)
        )
