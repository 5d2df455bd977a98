"""Agents on the command line, unchanged, play a task by their recipes: the real programs against a
scripted engine behind the run's own endpoint.  Those that are not on PATH are skipped by name.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rft.preflight.check import check
from rft.taskset.settings import TasksetSettings
from rft.testing import run_workflow_async
from rft.types.ports import GenerateRequest
from tests.helpers.calling_engine import Called, CallingEngine

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "command_line_agents"
CAT = "cat numbers.txt"
SHELL = {
    "claude": ("Bash", {"command": CAT, "description": "read the numbers"}),
    "codex": ("exec_command", {"cmd": CAT}),
    "mini": ("bash", {"command": CAT}),
    "opencode": ("bash", {"command": CAT, "description": "read the numbers"}),
    "pi": ("bash", {"command": CAT}),
    "qwen": ("run_shell_command", {"command": CAT, "is_background": False}),
}
# the one that ends by a command
LAST = {"mini": ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})}


def shell_engine(program: str) -> CallingEngine:
    """Reads the numbers by a tool, then answers with the last of them."""

    def decide(request: GenerateRequest) -> tuple[str, Called | None]:
        last = request.messages[-1]
        if last["role"] != "tool":
            return "", SHELL[program]
        numbers = [
            line for line in last["content"].replace("\\n", "\n").split("\n") if line.isdigit()
        ]
        return f"Answer: {numbers[-1]}", LAST.get(program)

    return CallingEngine(decide)


def taskset(recipe: Path) -> TasksetSettings:
    """Return the taskset of a recipe."""
    plan = check(recipe, schema_only=True).plan
    assert plan is not None
    return plan.explorer.tasksets[0]


@pytest.fixture(params=sorted(SHELL))
def program(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: make agents")
    monkeypatch.chdir(ROOT)
    return name


def homes() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("rft-agent-*"))


@pytest_asyncio.fixture
async def outside() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Address of a proxy to the rest of the world, which is never there, and what it was asked."""
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def test_a_program_plays_a_task_unchanged(
    program: str, outside: tuple[str, list[bytes]]
) -> None:
    of = taskset(RECIPES / f"{program}.yaml")
    proxy, asked = outside
    env = {"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy, "NO_PROXY": "127.0.0.1"}
    args = of.workflow_args | {"env": of.workflow_args.get("env", {}) | env}
    row = json.loads((await asyncio.to_thread(Path(of.path).read_text)).splitlines()[2])
    task = {"prompt": row["question"], "truth": row["answer"]}
    engine = shell_engine(program)
    before = homes()
    result = await run_workflow_async(
        of.workflow, task, engine, reward=of.reward, workflow_args=args, timeout_s=120
    )
    # run_workflow_async has compared tokens, log-probs and masks of the row with the engine's
    (run,), (experience,) = result.runs, result.group.rows
    assert run.transcript is not None and len(run.transcript.turns) == len(engine.calls) == 2
    assert [call.prefix_messages > 0 for call in engine.calls] == [False, True]
    assert experience.reward == 1.0 and run.transcript.answer == "Answer: 40"
    assert not asked
    assert homes() <= before
    assert not psutil.Process(os.getpid()).children(recursive=True)
