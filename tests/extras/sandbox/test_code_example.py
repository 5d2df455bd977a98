"""examples/code played with written answers: its tasks, its workflow, its rewards and the sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rft.engine.scripted import ScriptedEngine
from rft.extras.sandbox import code_reward as code
from rft.extras.sandbox import code_sandbox as sandbox
from rft.plugins import load_all
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import FormatSettings, TasksetSettings
from rft.types.ids import GroupId
from rft.types.task import SamplingArgs, Task
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

LONG = SamplingArgs(max_tokens=4096)
EXAMPLE = Path(__file__).parents[3] / "examples" / "code"
TASKSET = yaml.safe_load((EXAMPLE / "config.yaml").read_text())["buffer"]["explorer_input"]


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    load_all()
    try:
        code.LOCAL.level()
    except sandbox.SandboxUnavailable as e:
        pytest.skip(str(e))
    yield
    code.LOCAL.close()


@pytest.fixture
def tasks() -> list[Task]:
    settings = TasksetSettings(
        name="programs",
        path=str(EXAMPLE / "tasks.jsonl"),
        workflow=TASKSET["default_workflow_type"],
        reward=TASKSET["default_reward_fn_type"],
        reward_args=TASKSET["taskset"]["reward_fn_args"],
        format=FormatSettings(**TASKSET["taskset"]["format"]),
    )
    taskset = open_taskset(settings)
    return [taskset.task(i) for i in range(len(taskset))]


async def test_each_solution_passes_and_an_empty_one_does_not(tasks: list[Task]) -> None:
    rows = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]
    assert len(tasks) == len(rows) == 3

    async def play(task: Task, row: dict[str, str]) -> None:
        good, lazy = (
            f"So:\n```python\n{row['prompt']}{body}```"
            for body in (row["canonical_solution"], "    return None\n")
        )
        engine = ScriptedEngine(good, lazy, "no idea", "```python\nimport os\nos._exit(0)\n```")
        four = Task(
            **{f: getattr(task, f) for f in task.__struct_fields__}
            | {"num_runs": 4, "sampling": LONG}
        )
        group = await run_group(
            four,
            Recipes().find(four),
            engine,
            GroupId(1, 0, 1, task.index),
            limits=RunLimits(max_timeout_s=60.0),
        )
        assert [r.reward_parts["right"] for r in group.rows] == [1.0, 0.0, 0.0, 0.0], [
            r.info for r in group.rows
        ]
        first = group.rows[0]
        assert (
            first.reward == pytest.approx(1.0 + 0.1 * first.reward_parts["short"])
            and "short/length" in first.reward_parts
        )
        reasons = [r.info.get("reward_reason", "") for r in group.rows]
        assert reasons[0] == "" and reasons[3].startswith("right: exit") and all(reasons[1:])
        assert (
            engine.calls[0].messages[0]["role"] == "system"
            and "```python" in engine.calls[0].messages[0]["content"]
        )

    await asyncio.gather(*map(play, tasks, rows))
