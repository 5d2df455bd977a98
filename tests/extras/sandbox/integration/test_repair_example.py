"""The example of small projects: what is shown, what hidden tests say of answers, in either
sandbox.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rft.engine.scripted import ScriptedEngine
from rft.extras.sandbox.image import built
from rft.extras.sandbox.processes import SandboxError
from rft.taskset.task_folders import task_folders
from rft.testing import run_workflow_async
from tests.extras.sandbox import containers
from tests.helpers import runs

TASKS = runs.ROOT / "examples" / "repair" / "tasks"
REPAIRED = {
    "clamp": "def clamp(x, low, high):\n    return min(high, max(low, x))\n",
    "words": "import collections, re\ndef count(text):\n    return "
    "dict(collections.Counter(re.findall('[a-z]+', text.lower())))\n",
    "stack": "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, "
    "item):\n        self.items.append(item)\n"
    "    def pop(self):\n        return self.items.pop()\n",
}


def args(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"sandbox": kind} | (
        {"image": containers.image(containers.command(monkeypatch), folder)}
        if kind == "container"
        else {}
    )


@pytest.mark.parametrize("kind", ["local", "container"])
async def test_hidden_tests_decide(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = args(kind, tmp_path, monkeypatch)
    for row in task_folders(split="train", folder=str(TASKS)):
        (name,) = row["files"]
        answers = {
            1.0: f"It was wrong.\n```{name}\n{REPAIRED[row['name']]}```",
            0.0: f"```{name}\n{row['files'][name]}```",
        }
        for reward, answer in answers.items():
            engine = ScriptedEngine(answer)
            found = await run_workflow_async(
                "repair_workflow", row, engine, workflow_args=given, timeout_s=120.0
            )
            assert found.rewards == [reward], found
            asked = str(engine.calls[0].messages)
            assert row["prompt"] in asked and "unittest" not in asked and "Dockerfile" not in asked


async def test_a_dockerfile_makes_the_image_of_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it copies is there when the hidden tests run; it is built once."""
    started = containers.command(monkeypatch)
    dockerfile = f"FROM {containers.image(started, tmp_path)}\nCOPY . /opt/task\n"
    tests = {
        "test_there.py": "import unittest\nclass T(unittest.TestCase):\n    def test(self): "
        "open('/opt/task/a.py').close()\n"
    }
    row = {
        "prompt": "p",
        "name": "n",
        "files": {"a.py": "1\n"},
        "tests": tests,
        "image": "",
        "dockerfile": dockerfile,
    }
    name = built({**row["files"], "Dockerfile": dockerfile})
    try:
        assert built({**row["files"], "Dockerfile": dockerfile}) == name
        found = await run_workflow_async(
            "repair_workflow",
            row,
            ScriptedEngine("```a.py\n2\n```"),
            workflow_args={"sandbox": "container"},
            timeout_s=120.0,
        )
        assert found.rewards == [1.0], found
        with pytest.raises(SandboxError, match="cannot be built"):
            built({"Dockerfile": dockerfile.replace("COPY .", "COPY nothing")})
    finally:
        await asyncio.to_thread(
            subprocess.run, [*started, "rmi", "--force", name], check=True, capture_output=True
        )


async def test_an_answer_without_a_file_is_wrong() -> None:
    (row, *_) = task_folders(split="train", folder=str(TASKS))
    found = await run_workflow_async(
        "repair_workflow",
        row,
        ScriptedEngine("I would change a line.\n```test_clamp.py\npass\n```"),
    )
    assert found.rewards == [0.0]


@pytest.mark.parametrize(
    ("made", "told"), [((), "no task of split"), (("instruction.md",), "is no task")]
)
def test_folders_that_are_no_tasks_are_refused(
    tmp_path: Path, made: tuple[str, ...], told: str
) -> None:
    for name in made:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text("x")
    with pytest.raises(ValueError, match=told):
        task_folders(split="train", folder=str(tmp_path))
