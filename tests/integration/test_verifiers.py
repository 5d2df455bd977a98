"""Environments of verifiers (v1) are played and trained on by their own harnesses, in a Python of their
own; skipped where VERIFIERS_PYTHON does not name it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from rft.buffer.experience_export import export
from rft.buffer.query import open_run
from rft.engine.scripted import ScriptedEngine
from rft.launch.execute import execute
from rft.preflight.check import check
from rft.testing import run_workflow_async
from rft.types.ports import GenerateRequest
from tests.helpers.calling_engine import Called, CallingEngine

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verifiers"
PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", "no Python"))
COUNTER = "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"
LENGTHS = """
import verifiers.v1 as vf

__all__ = ["Lengths"]


class LengthsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        if self.data.prompt == "7":
            raise ValueError("seven cannot be judged")
        return sum((trace.last_reply or "").encode()) / 1000


class Lengths(vf.Taskset[LengthsTask]):
    def load(self):
        for number in range(64):
            yield LengthsTask(vf.TaskData(prompt=str(number)))
"""


@cache
def why_uv_fails() -> str:
    """Return why uv loads no packages here; harnesses call it."""
    line = [PYTHON.with_name("uv"), "run", "--no-project", "--with", "tenacity", "true"]
    ran = subprocess.run(line, capture_output=True, text=True)
    return ran.stderr[-300:] if ran.returncode else ""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PYTHON.is_file():
        pytest.skip("VERIFIERS_PYTHON names no Python with verifiers: make agents test-agents")
    if reason := why_uv_fails():
        pytest.skip(f"uv loads no packages: {reason}")
    monkeypatch.chdir(ROOT)


def workflow_args() -> dict[str, Any]:
    """Return those of the example."""
    plan = check(EXAMPLE / "config.yaml", schema_only=True).plan
    assert plan is not None
    return plan.explorer.tasksets[0].workflow_args


def of_taskset(taskset: dict[str, Any], **env: str) -> dict[str, Any]:
    """Return the example's arguments with another taskset of verifiers and environment variables."""
    args = workflow_args()
    *program, played = args["command"]
    return args | {
        "command": [*program, json.dumps(json.loads(played) | {"taskset": taskset})],
        "env": env,
    }


@pytest.mark.parametrize(("answer", "reward"), [("It is 72.", 1.0), ("It is 13.", 0.0)])
async def test_the_example_plays(answer: str, reward: float) -> None:
    engine = ScriptedEngine(answer=lambda messages: answer)
    result = await run_workflow_async(
        "agent_command_workflow",
        {"prompt": "3"},
        engine,
        workflow_args=workflow_args(),
        timeout_s=120,
    )
    (experience,) = result.group.rows
    assert experience.reward == reward and experience.response_text == answer
    (call,) = engine.calls
    assert call.messages[-1]["content"] == "Which is the largest of [72, 13, 59, 65]? End with it."


@pytest.fixture
def lengths(tmp_path: Path) -> dict[str, Any]:
    """Arguments of the workflow for an environment that rewards what a tiny model can do."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    return of_taskset({"id": "lengths"}, PYTHONPATH=str(tmp_path))


async def test_an_environment_that_fails_is_a_failed_run(lengths: dict[str, Any]) -> None:
    result = await run_workflow_async(
        "agent_command_workflow",
        {"prompt": "7"},
        ScriptedEngine(answer=lambda messages: "7"),
        workflow_args=lengths,
        timeout_s=120,
        may_fail=True,
    )
    assert "seven cannot be judged" in result.group.rows[0].reason


def trained(args: dict[str, Any], model: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of three steps with these arguments of the workflow."""
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config["buffer"]["explorer_input"]["taskset"]["workflow_args"] = args
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    tasks = "".join(f'{{"prompt": "{number}"}}\n' for number in range(6))
    (folder / "tasks.jsonl").write_text(tasks)
    more = (
        f"buffer.explorer_input.taskset.path={folder / 'tasks.jsonl'}",
        f"model.model_path={model}",
        f"checkpoint_root_dir={folder / 'runs'}",
        "model.max_prompt_tokens=500",
        "model.max_response_tokens=4",
        "explorer.rollout_model.engine_type=transformers",
        "algorithm.repeat_times=2",
        "buffer.batch_size=2",
        "trainer.total_steps=3",
    )
    run = execute(folder / "config.yaml", list(more), in_process=True).run_dir
    with open_run(run) as questions:
        assert export(questions, folder / "rows.parquet") == 3 * 2 * 2
    rows: list[dict[str, Any]] = pq.read_table(folder / "rows.parquet").to_pylist()
    assert {row["used_step"] for row in rows} == {1, 2, 3}
    return rows


def test_an_environment_is_trained_on(
    lengths: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    assert len({row["reward"] for row in trained(lengths, tiny_model, tmp_path)}) > 1


@pytest.fixture
def uv(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the program, with a Python that NeMo Gym runs on."""
    program = PYTHON.with_name("uv")
    for folder in Path.home().glob(".pyenv/versions/3.1[23].*/bin"):
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    for version in ("3.12", "3.13"):
        found = subprocess.run([program, "python", "find", version], capture_output=True, text=True)
        if found.returncode == 0:
            monkeypatch.setenv("UV_PYTHON", found.stdout.strip())
            return program
    pytest.skip("NeMo Gym needs Python 3.12 or 3.13, and uv finds none")


def counter(**task: Any) -> dict[str, Any]:
    """Return arguments of the workflow for the example of NeMo Gym."""
    taskset = {"id": "counter", "dataset": str(EXAMPLE / "counter.jsonl"), "task": task}
    return of_taskset(taskset, UV_PYTHON=os.environ["UV_PYTHON"])


async def test_an_environment_of_nemo_gym_plays(uv: Path) -> None:
    def decide(request: GenerateRequest) -> tuple[str, Called | None]:
        turn = sum(message["role"] == "tool" for message in request.messages) + 1
        return ("Done.", None) if turn > 2 else ("", ("increment_counter", {"count": turn}))

    engine = CallingEngine(decide)
    result = await run_workflow_async(
        "agent_command_workflow", {"prompt": "0"}, engine, workflow_args=counter(), timeout_s=600
    )
    (experience,) = result.group.rows
    assert experience.reward == 1.0 and len(engine.calls) == 3, "3, and 1 and 2 added"


@pytest.fixture
def address(uv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the counter's server, whose port is in a file as soon as it has one."""
    where = "import importlib.util as i; print(i.find_spec('verifiers').origin)"
    package = subprocess.check_output([PYTHON, "-c", where], text=True).strip()
    script = Path(package).parent / "v1" / "tasksets" / "nemo_gym" / "server.py"
    monkeypatch.setenv("NEMO_GYM_RESOURCE_SERVER", COUNTER)
    line = [uv, "run", "--no-project", "--script", script]
    with subprocess.Popen(
        line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as server:
        assert server.stdout is not None
        for text in server.stdout:
            if b"startup complete" in text:
                break
        yield f"http://127.0.0.1:{(tmp_path / 'nemo_gym.port').read_text()}"
        server.terminate()


def test_an_environment_of_nemo_gym_is_trained_on(
    address: str, tiny_model: Path, tmp_path: Path
) -> None:
    rows = trained(counter(resources_url=address), tiny_model, tmp_path)
    assert {row["reward"] for row in rows} == {0.0, 1.0}, "nothing is added in two of the tasks"
