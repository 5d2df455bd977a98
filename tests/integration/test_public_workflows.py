"""Workflow and reward files of the public trinity-rft 0.6.0 package run with nothing but their imports changed.

The package is taken from the folder TRINITY_PACKAGE (its `trinity`), else from pip's download into the cache folder of the user.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rft.compat.trinity_rewards import make_transcript
from rft.plugins import load_all
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.testing.scripted import ScriptedEngine
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.worker import job_pool
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes
from tests.helpers.command import forget_plugins

pytestmark = pytest.mark.slow
LIMITS = RunLimits(max_timeout_s=60.0)
IMPORT = re.compile(r"^(\s*)from trinity\.[a-z_.]+ import", re.MULTILINE)
KEPT = (
    "common/rewards/eval_utils",
    "common/rewards/qwen25_eval",
    "common/rewards/naive_dapo_score",
)  # plain functions, used as they are


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if folder := os.environ.get("TRINITY_PACKAGE"):
        return Path(folder)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rft" / "peers"
    wheels = list(cache.glob("trinity_rft-0.6.0-*.whl"))
    if not wheels:
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "trinity-rft==0.6.0", "--no-deps", "-q", "-d", str(cache)]
        got = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if got.returncode != 0:
            pytest.skip(f"trinity-rft 0.6.0 cannot be had here: {got.stderr[-300:]}")
        wheels = list(cache.glob("trinity_rft-0.6.0-*.whl"))
    folder = tmp_path_factory.mktemp("public")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    return folder / "trinity"


@pytest.fixture
def public(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """take("common/rewards/math_reward") copies a file and what it needs into a package of its own, its imports changed."""
    load_all()
    root = tmp_path / "public_files"
    root.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    def take(file: str, *beside: str) -> str:
        for name in (file, *beside):
            source = (package / f"{name}.py").read_text()
            changed = _imports(source)
            assert _bodies(changed) == _bodies(source), "only imports are changed"
            (root / f"{Path(name).name}.py").write_text(changed)
        return str(root / f"{Path(file).name}.py")

    (root / "__init__.py").write_text("")
    yield take
    job_pool.close_all()
    for name in [n for n in sys.modules if n.startswith("public_files")]:
        del sys.modules[name]
    forget_plugins(tmp_path)


def _imports(source: str) -> str:
    """The one change: `from trinity.X import` becomes `from rft.compat import`; helpers that are copied too, come from beside."""
    for helper in KEPT:
        source = source.replace(
            f"from trinity.{helper.replace('/', '.')} import", f"from public_files.{Path(helper).name} import"
        )
    source = re.sub(r"from trinity\.common\.workflows\.envs\.[a-z_.]+\.(\w+) import", r"from public_files.\1 import", source)
    return IMPORT.sub(r"\1from rft.compat import", source)


def _bodies(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module, node.level = "", 0
    return ast.dump(tree)


def name(path: str, attribute: str) -> str:
    return f"public_files.{Path(path).stem}:{attribute}"


async def play(workflow: str, engine: ScriptedEngine, *, models=None, **of_task):
    task = Task(
        **{"taskset": "public", "index": 0, "prompt": "1+1?", "truth": "2", "workflow": workflow, "num_runs": 2, **of_task}
    )
    recipes = Recipes()
    try:
        recipe = await recipes.get(task)
        return await run_group(task, recipe, engine, GroupId(1, 0, 0, 0), limits=LIMITS, models=models or {})
    finally:
        await recipes.close()


async def test_math_boxed_workflow(public):
    file = public("common/workflows/customized_math_workflows")
    for cls in ("MathBoxedWorkflow", "AsyncMathBoxedWorkflow"):
        engine = ScriptedEngine(r"It is \boxed{2}", r"It is \boxed{3}")
        group = await play(name(file, cls), engine, workflow_args={"with_think": True})
        assert group.accepted and sorted(group.rewards) == [pytest.approx(-0.1), pytest.approx(0.9)], cls
        assert {r.status for r in group.rows} == {"complete"} and group.rows[0].metrics["accuracy"] in (0.0, 1.0)
    group = await play(
        name(file, "MathBoxedWorkflow"), ScriptedEngine(r"\boxed{2}"), workflow_args={"use_base": True}, num_runs=1
    )
    assert group.rewards == [1.0]


async def test_ruler_with_a_judge(public):
    file = public("common/workflows/math_ruler_workflow")
    judge = ScriptedEngine("Both look fine: [0.25, 0.75]")
    engine = ScriptedEngine("<think>a</think><answer>2</answer>", "<think>b</think><answer>3</answer>")
    group = await play(name(file, "MathRULERWorkflow"), engine, models={"judge": judge})
    assert group.accepted and group.rewards == [0.25, 0.75]
    assert group.rows[0].metrics["judge_success"] == 1.0 and "Candidate solution 2" in judge.calls[0].messages[1]["content"]


async def test_rubric_judge(public):
    file = public("common/workflows/rubric_judge_workflow")
    judge = ScriptedEngine('```json\n{"rating": 7}\n```', '```json\n{"rating": 3}\n```')
    row = {"rubric": [{"weight": 1, "description": "short"}]}
    group = await play(name(file, "RubricJudgeWorkflow"), ScriptedEngine("a", "b"), models={"judge": judge}, row=row)
    assert group.accepted and group.rewards == [pytest.approx(0.7), pytest.approx(0.3)]


async def test_tool_calls(public):
    file = public("common/workflows/customized_toolcall_workflows")
    call = [{"name": "add", "arguments": {"a": 1}}]
    row = {
        "tools": json.dumps([{"name": "add"}]),
        "raw_system": "You have tools. ",
        "conversations": [{"from": "human", "value": "add one"}],
        "answer": json.dumps(call),
    }
    engine = ScriptedEngine(f"<think>x</think> <tool_call>{json.dumps(call)}</tool_call>", "no")
    group = await play(name(file, "ToolCallWorkflow"), engine, row=row)
    assert sorted(group.rewards) == [0.0, 1.0]


async def test_sudoku_step_by_step(public):
    folder = "common/workflows/envs/sudoku"
    file = public(f"{folder}/sudoku_workflow", f"{folder}/sudoku_generator", f"{folder}/sudoku_judge")
    solution = [[(3 * (r % 3) + r // 3 + c) % 9 + 1 for c in range(9)] for r in range(9)]
    puzzle = [row[:] for row in solution]
    puzzle[0][0] = puzzle[8][8] = 0
    engine = ScriptedEngine(f"0 0 {solution[0][0]}", f"8 8 {solution[8][8]}")
    row = {"puzzle": puzzle, "solution": solution}
    group = await play(name(file, "SudokuWorkflow"), engine, row=row, num_runs=1)
    assert [r.reward for r in group.rows] == [0.0, 1.0] and [r.id.step for r in group.rows] == [0, 1]


async def test_frozen_lake_in_one_sequence(public):
    pytest.importorskip("gymnasium")
    folder = "common/workflows/envs/frozen_lake"
    file = public(f"{folder}/workflow", f"{folder}/utils")
    lake = {"desc": ["SFG", "FFF", "FFF"]}
    engine = ScriptedEngine(answer=lambda messages: "go ```Right```")  # also asked to count tokens
    group = await play(name(file, "FrozenLakeWorkflow"), engine, workflow_args=lake, row={"size": 3}, num_runs=1)
    (row,) = group.rows
    assert row.reason == "" and row.reward == 1.0 and row.metrics["env_steps"] == 2.0
    assert row.num_response_tokens == 2 * (len("go ```Right```") + 1), "exactly what the policy wrote"


async def test_format_reward(public):
    task = Task(taskset="t", index=0, prompt="1+1?", truth="2", workflow="w")
    file = public("common/rewards/format_reward")
    found = await score(
        build(name(file, "FormatReward"), {}), task, make_transcript("<think>\na\n</think>\n<answer>\n2\n</answer>")
    )
    assert found.parts == {"format_score": 0.1}


async def test_countdown_reward(public):
    pytest.importorskip("word2number")  # what the public file's helpers import
    file = public("common/rewards/countdown_reward", "common/rewards/eval_utils", "common/rewards/qwen25_eval")
    task = Task(taskset="t", index=0, prompt="p", truth=json.dumps({"target": 5, "numbers": [2, 3]}), workflow="w")
    found = await score(build(name(file, "CountDownRewardFn"), {}), task, make_transcript("Assistant: <answer>2+3</answer>"))
    assert found.value == 1.0


async def test_dapo_reward(public):
    pytest.importorskip("pylatexenc")
    file = public("common/rewards/dapo_reward", "common/rewards/naive_dapo_score")
    task = Task(taskset="t", index=0, prompt="1+1?", truth="2", workflow="w")
    assert (await score(build(name(file, "MathDAPORewardFn"), {}), task, make_transcript("Answer: 2"))).value == 1.0
