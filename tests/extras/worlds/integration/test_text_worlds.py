"""Scripted episodes in the simulators themselves: TextWorld, ALFWorld, ScienceWorld; and programs
in the sandbox.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rft.plugins import REGISTRY
from rft.testing import ScriptedModel, run_workflow
from rft.testing.trace import WorkflowResult
from rft.worker import job_pool
from tests.helpers.households import tidy_household

play = partial(run_workflow, timeout_s=300.0)  # simulators start slowly on a busy machine

# the simulators leave files open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def does(*commands: str) -> ScriptedModel:
    return ScriptedModel(*(f"<think>so</think><action>{c}</action>" for c in commands))


def needs(library: str, program: str = "python") -> pytest.MarkDecorator:
    there = importlib.util.find_spec(library) is not None and (
        program == "python" or shutil.which(program) is not None
    )
    return pytest.mark.skipif(not there, reason=f"{library} or its {program} is not installed")


def observed(result: WorkflowResult) -> str:
    return "\n".join(str(m["content"]) for m in result.messages if m["role"] == "user")


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A game of two rooms, and the commands that win it."""
    import textworld

    options = textworld.GameOptions()
    options.nb_rooms = 2
    options.nb_objects = 3
    options.quest_length = 2
    options.seeds = 1
    options.path = str(tmp_path_factory.mktemp("games") / "game.z8")
    options.force_recompile = True
    made = textworld.generator.make_game(options)
    return Path(textworld.generator.compile_game(made, options)), list(made.metadata["walkthrough"])


@needs("textworld")
# jericho, of a game that was just made
@pytest.mark.filterwarnings("ignore:Game '.*' is not fully supported")
def test_a_game_is_won(game: tuple[Path, list[str]]) -> None:
    path, walkthrough = game
    result = play("textworld_workflow", {"game_file": str(path)}, does(*walkthrough))
    assert result.reward == 1.0 and result.runs[0].transcript.score.parts["success"] == 1.0
    lost = play(
        "textworld_workflow",
        {"prompt": str(path)},
        does("look", "look"),
        workflow_args={"max_env_steps": 2},
    )
    assert lost.reward == 0.0 and "Observation:" in observed(lost)


@pytest.fixture
def household(tmp_path: Path) -> Path:
    return tidy_household(tmp_path)


@needs("alfworld")
@pytest.mark.parametrize("workflow", ["alfworld_workflow", "step_wise_alfworld_workflow"])
def test_a_household_task_is_done(workflow: str, household: Path) -> None:
    row = {"game_file": str(household), "prompt": str(household)}
    start = play(workflow, row, does("look"), workflow_args={"max_env_steps": 1})
    assert start.reward == -0.1 and "put a mug on the shelf" in observed(start), observed(start)
    tidy = does(
        "go to diningtable 1",
        "take mug 1 from diningtable 1",
        "go to shelf 1",
        "move mug 1 to shelf 1",
    )
    result = play(workflow, row, tidy)
    assert result.reward == 1.0, observed(result)
    rows = result.runs[0].experiences
    assert len(rows) == (4 if workflow.startswith("step") else 1) and {r.reward for r in rows} == {
        1.0
    }
    if len(rows) > 1:
        assert len({r.info["env_state_hash"] for r in rows}) > 1


@pytest.fixture
def simulators() -> Iterator[None]:
    """Those that wait for another experiment end with the test."""
    yield
    importlib.import_module(
        REGISTRY.get("workflow", "sciworld_workflow").obj.__module__
    )._close_idle()


@needs("scienceworld", "java")
@pytest.mark.usefixtures("simulators")
def test_an_experiment_is_scored() -> None:
    row = {
        "prompt": json.dumps(
            {"task_name": "find-living-thing", "var_num": 0, "jar_path": "anywhere"}
        )
    }
    result = play(
        "sciworld_workflow",
        row,
        does("look around", "open door to kitchen"),
        workflow_args={"max_env_steps": 2},
    )
    said = observed(result)
    assert 0.0 < result.reward < 1.0 and "Your task is to find" in said and "door" in said
    again = play(
        "sciworld_workflow",
        {"task_name": "boil", "var_num": 1},
        ScriptedModel("no command"),
        workflow_args={"max_turns": 1},
    )
    assert again.reward == 0.0 and "Your task is to boil" in observed(again), (
        "the same simulator, another experiment"
    )


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'execute_python_code', 'arguments': {'code': code}})}</tool_call>"


@pytest.mark.parametrize("name", ["python_math_workflow", "agentscope_react_workflow"])
def test_programs_are_run_and_told(name: str) -> None:
    answers = (call("print(6 * 7)"), call("1 / 0"), call("open('/etc/passwd')"), "So \\boxed{42}")
    try:
        result = play(
            name,
            {"prompt": "6 * 7?", "truth": "It is.\n#### 42"},
            ScriptedModel(*answers),
            reward="math_boxed_reward",
        )
    finally:
        job_pool.close_all()
    told: list[Any] = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert (
        told[0].strip() == "42"
        and "ZeroDivisionError" in told[1]
        and ("No such file" in told[2] or "denied" in told[2])
    )
    assert result.reward == 1.0
