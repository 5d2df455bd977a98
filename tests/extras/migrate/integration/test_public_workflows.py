"""Workflow and reward files of the public trinity-rft 0.6.0 package run with nothing but their
imports changed.

The package is taken from the folder TRINITY_PACKAGE (its `trinity`), else from pip's download into
the cache folder of the user.
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

from rft.engine.scripted import ScriptedEngine
from rft.extras.migrate.compat.trinity_rewards import make_transcript
from rft.plugins import load_all
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.testing.fakes import ScriptedModel
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.worker import job_pool
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes
from tests.helpers.command import forget_plugins
from tests.helpers.households import tidy_household

pytestmark = [
    pytest.mark.slow,
    # TextWorld and ScienceWorld leave files open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LIMITS = RunLimits(max_timeout_s=60.0)
IMPORT = re.compile(r"^(\s*)from (?:trinity|verl)\.[a-z_.]+ import", re.MULTILINE)
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
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "trinity-rft==0.6.0",
            "--no-deps",
            "-q",
            "-d",
            str(cache),
        ]
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
    """take("common/rewards/math_reward") copies a file and what it needs into a package of its own,
    its imports changed.
    """
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
    """The one change: `from trinity.X import`, or verl's, becomes `from rft.extras.migrate.compat
    import`; copied helpers come from beside.
    """
    for helper in KEPT:
        source = source.replace(
            f"from trinity.{helper.replace('/', '.')} import",
            f"from public_files.{Path(helper).name} import",
        )
    source = re.sub(
        r"from trinity\.common\.workflows\.envs\.[a-z_.]+\.(\w+) import",
        r"from public_files.\1 import",
        source,
    )
    return IMPORT.sub(r"\1from rft.extras.migrate.compat import", source)


def _bodies(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module = ""
            node.level = 0
    return ast.dump(tree)


def name(path: str, attribute: str) -> str:
    return f"public_files.{Path(path).stem}:{attribute}"


async def play(workflow: str, engine: ScriptedEngine, *, models=None, **of_task):
    task = Task(
        **{
            "taskset": "public",
            "index": 0,
            "prompt": "1+1?",
            "truth": "2",
            "workflow": workflow,
            "num_runs": 2,
            **of_task,
        }
    )
    recipes = Recipes()
    try:
        recipe = await recipes.get(task)
        return await run_group(
            task, recipe, engine, GroupId(1, 0, 0, 0), limits=LIMITS, models=models or {}
        )
    finally:
        await recipes.close()


async def test_math_boxed_workflow(public):
    file = public("common/workflows/customized_math_workflows")
    for cls in ("MathBoxedWorkflow", "AsyncMathBoxedWorkflow"):
        engine = ScriptedEngine(r"It is \boxed{2}", r"It is \boxed{3}")
        group = await play(name(file, cls), engine, workflow_args={"with_think": True})
        assert group.accepted and sorted(group.rewards) == [
            pytest.approx(-0.1),
            pytest.approx(0.9),
        ], cls
        assert {r.status for r in group.rows} == {"complete"} and group.rows[0].metrics[
            "accuracy"
        ] in (0.0, 1.0)
    group = await play(
        name(file, "MathBoxedWorkflow"),
        ScriptedEngine(r"\boxed{2}"),
        workflow_args={"use_base": True},
        num_runs=1,
    )
    assert group.rewards == [1.0]


async def test_ruler_with_a_judge(public):
    file = public("common/workflows/math_ruler_workflow")
    judge = ScriptedEngine("Both look fine: [0.25, 0.75]")
    engine = ScriptedEngine(
        "<think>a</think><answer>2</answer>", "<think>b</think><answer>3</answer>"
    )
    group = await play(name(file, "MathRULERWorkflow"), engine, models={"judge": judge})
    assert group.accepted and group.rewards == [0.25, 0.75]
    assert (
        group.rows[0].metrics["judge_success"] == 1.0
        and "Candidate solution 2" in judge.calls[0].messages[1]["content"]
    )


async def test_rubric_judge(public):
    file = public("common/workflows/rubric_judge_workflow")
    judge = ScriptedEngine('```json\n{"rating": 7}\n```', '```json\n{"rating": 3}\n```')
    row = {"rubric": [{"weight": 1, "description": "short"}]}
    group = await play(
        name(file, "RubricJudgeWorkflow"),
        ScriptedEngine("a", "b"),
        models={"judge": judge},
        row=row,
    )
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
    file = public(
        f"{folder}/sudoku_workflow", f"{folder}/sudoku_generator", f"{folder}/sudoku_judge"
    )
    solution = [[(3 * (r % 3) + r // 3 + c) % 9 + 1 for c in range(9)] for r in range(9)]
    puzzle = [row[:] for row in solution]
    puzzle[0][0] = puzzle[8][8] = 0
    engine = ScriptedEngine(f"0 0 {solution[0][0]}", f"8 8 {solution[8][8]}")
    row = {"puzzle": puzzle, "solution": solution}
    group = await play(name(file, "SudokuWorkflow"), engine, row=row, num_runs=1)
    assert [r.reward for r in group.rows] == [0.0, 1.0] and [r.id.step for r in group.rows] == [
        0,
        1,
    ]


async def test_frozen_lake_in_one_sequence(public):
    pytest.importorskip("gymnasium")
    folder = "common/workflows/envs/frozen_lake"
    file = public(f"{folder}/workflow", f"{folder}/utils")
    lake = {"desc": ["SFG", "FFF", "FFF"]}
    engine = ScriptedEngine(answer=lambda messages: "go ```Right```")  # also asked to count tokens
    group = await play(
        name(file, "FrozenLakeWorkflow"), engine, workflow_args=lake, row={"size": 3}, num_runs=1
    )
    (row,) = group.rows
    assert row.reason == "" and row.reward == 1.0 and row.metrics["env_steps"] == 2.0
    assert row.num_response_tokens == 2 * (len("go ```Right```") + 1), (
        "exactly what the policy wrote"
    )


async def test_a_reward_that_sees_the_conversation(public):
    file = public("common/workflows/math_rm_workflow")
    for cls in ("MathRMWorkflow", "AsyncMathRMWorkflow"):
        engine = ScriptedEngine(
            "<think>a</think><answer>2</answer>", "<think>a</think><answer>3</answer>"
        )
        group = await play(name(file, cls), engine, reward="math_reward")
        assert group.accepted and sorted(group.rewards) == [
            pytest.approx(0.1),
            pytest.approx(1.1),
        ], cls


async def test_math_evaluation(public):
    pytest.importorskip("word2number")  # what the public file's helpers import
    file = public(
        "common/workflows/eval_workflow", "common/rewards/qwen25_eval", "common/rewards/eval_utils"
    )
    for cls in ("MathEvalWorkflow", "AsyncMathEvalWorkflow"):
        group = await play(
            name(file, cls),
            ScriptedEngine(r"\boxed{2}"),
            row={"question": "1+1?"},
            reward="math_boxed_reward",
            num_runs=1,
            is_eval=True,
        )
        assert group.rewards == [1.0] and group.rows[0].metrics["accuracy"] == 1.0, cls
        assert "put your final answer within" in group.rows[0].messages[1]["content"]


async def test_on_policy_distillation(public):
    pytest.importorskip("word2number")
    file = public(
        "common/workflows/on_policy_distill_workflow",
        "common/rewards/qwen25_eval",
        "common/rewards/eval_utils",
    )
    for cls, rewards in (
        ("OnPolicyDistillWorkflow", [0.0, 0.0]),
        ("OnPolicyDistillMathWorkflow", [0.0, 1.0]),
    ):
        group = await play(
            name(file, cls),
            ScriptedEngine(r"\boxed{2}", r"\boxed{3}"),
            models={"teacher": ScriptedEngine()},
            num_runs=2,
        )
        assert group.accepted and sorted(group.rewards) == rewards, cls
        assert all(
            row.teacher_logprobs is not None and row.teacher_logprobs[row.loss_mask].any()
            for row in group.rows
        )


STEPS = """

class {0}Played({0}):
    max_step_num = 3

    def step(self, step_num):
        client = self.model.get_openai_client()
        said = client.chat.completions.create(model=client.model_path, messages=[{{"role": "user", "content": str(step_num)}}])
        return said.choices[0].message.content != "stop"

    def reward(self, exps{1}):
        return {2}
"""


def add(file: str, text: str) -> None:
    Path(file).write_text(Path(file).read_text() + text)


@pytest.mark.parametrize(
    ("cls", "arguments", "reward", "rewards"),
    [
        ("StepWiseRewardWorkflow", ", step_num", "float(step_num)", [0.0, 1.0]),
        ("RewardPropagationWorkflow", "", "len(exps) / 2", [1.0, 1.0]),
    ],
)
async def test_steps_with_a_reward_each_or_one_for_all(public, cls, arguments, reward, rewards):
    file = public("common/workflows/step_wise_workflow")
    add(file, STEPS.format(cls, arguments, reward))
    group = await play(name(file, f"{cls}Played"), ScriptedEngine("go", "stop"), num_runs=1)
    assert [(r.id.step, r.reward) for r in group.rows] == list(enumerate(rewards))


async def test_a_ruler_that_is_the_policy(public, monkeypatch):
    file = public("common/workflows/math_trainable_ruler_workflow")
    answers = (
        "<think>a</think><answer>2</answer>",
        "<think>b</think><answer>3</answer>",
        "So [0.25, 0.75]",
        "So [1, 0]",
    )
    task = {"workflow": name(file, "MathTrainableRULERWorkflow"), "reward": "math_reward"}
    monkeypatch.setattr("numpy.random.rand", lambda: 0.9)  # the gold answer is not used
    group = await play(task["workflow"], ScriptedEngine(*answers), reward=task["reward"])
    assert group.accepted and group.rewards == [0.25, 0.75]
    monkeypatch.setattr("numpy.random.rand", lambda: 0.1)
    group = await play(task["workflow"], ScriptedEngine(*answers), reward=task["reward"])
    assert group.reason == "failed" and "math_trainable_ruler_workflow" in group.rows[0].reason, (
        "two kinds of rows are not one group"
    )


def acts(*commands: str) -> ScriptedModel:
    return ScriptedModel(
        *(f"<experience>e</experience><think>so</think><action>{c}</action>" for c in commands)
    )


TIDY = (
    "go to diningtable 1",
    "take mug 1 from diningtable 1",
    "go to shelf 1",
    "move mug 1 to shelf 1",
)


async def test_households(public, tmp_path):
    pytest.importorskip("alfworld")
    household = tidy_household(tmp_path)
    task = {"prompt": str(household), "row": {"game_file": str(household)}, "num_runs": 1}
    file = public("common/workflows/envs/alfworld/alfworld_workflow")
    group = await play(name(file, "AlfworldWorkflow"), acts(*TIDY), **task)
    assert group.rewards == [1.0], group.rows[0]
    assert group.rows[0].metrics["env_rounds"] == 3.0
    group = await play(
        name(file, "AlfworldWorkflow"),
        acts("look", "look"),
        **task,
        workflow_args={"max_env_steps": 2},
    )
    assert group.rewards == [-0.1]
    group = await play(name(file, "StepWiseAlfworldWorkflow"), acts(*TIDY), **task)
    assert [r.reward for r in group.rows] == [1.0] * 4 and len(
        {r.info["env_state_hash"] for r in group.rows}
    ) == 4


async def test_households_that_are_imitated(public, tmp_path):
    pytest.importorskip("alfworld")
    folder = "common/workflows/envs/alfworld"
    file = public(f"{folder}/RAFT_alfworld_workflow", f"{folder}/RAFT_utils")
    # its prompts are not in the package
    (prompts := tmp_path / "public_files" / "RAFT_prompt").mkdir()
    (prompts / "alfworld_system.j2").write_text("You act in a household.")
    household = tidy_household(tmp_path)
    task = {
        "prompt": str(household),
        "row": {"game_file": str(household)},
        "num_runs": 1,
        "reward": "accuracy_reward",
    }
    group = await play(name(file, "RAFTAlfworldWorkflow"), acts(*TIDY), **task)
    assert (
        group.rows[0].reason == ""
        and group.rows[0].metrics["reward"] == 1.0
        and group.rows[0].num_response_tokens > 0
    )
    group = await play(name(file, "RAFTAlfworldWorkflow"), acts("look", "look", "look"), **task)
    assert group.reason == "too_few" and group.rows[0].num_response_tokens == 0, (
        "a run that failed is kept, and not trained"
    )


async def test_households_with_a_second_attempt(public, tmp_path, monkeypatch):
    pytest.importorskip("alfworld")
    folder = "common/workflows/envs/alfworld"
    beside = (f"{folder}/RAFT_alfworld_workflow", f"{folder}/RAFT_utils")
    file = public(f"{folder}/RAFT_reflect_alfworld_workflow", *beside)
    (prompts := tmp_path / "public_files" / "RAFT_prompt").mkdir()
    for prompt in ("alfworld_system", "second_attempt_guidance"):
        (prompts / f"{prompt}.j2").write_text("You act in a household. {{ reward_feedback }}")
    monkeypatch.chdir(tmp_path)  # where it writes what it has seen
    household = tidy_household(tmp_path)
    task = {
        "prompt": str(household),
        "row": {"game_file": str(household)},
        "num_runs": 1,
        "reward": "accuracy_reward",
    }
    group = await play(name(file, "RAFTReflectAlfworldWorkflow"), acts(*TIDY), **task)
    assert group.rows[0].reason == "" and group.rows[0].num_response_tokens > 0
    group = await play(
        name(file, "RAFTReflectAlfworldWorkflow"), acts("look", "look", "look", *TIDY), **task
    )
    assert group.reason == "too_few" and group.rows[0].num_response_tokens == 0
    assert group.rows[0].metrics["improvement"] == 1.0, (
        "it was better, and is not trained behind another prompt than its own"
    )


async def test_experiments(public):
    pytest.importorskip("scienceworld")
    file = public("common/workflows/envs/sciworld/sciworld_workflow")
    prompt = json.dumps({"task_name": "find-living-thing", "var_num": 0, "jar_path": None})
    engine = ScriptedModel(answer=lambda messages: "<think>so</think><action>look around</action>")
    group = await play(name(file, "SciWorldWorkflow"), engine, prompt=prompt, num_runs=1)
    assert (
        group.rows[0].reason == ""
        and group.rows[0].metrics["env_rounds"] == 29.0
        and group.rewards[0] >= 0.0
    )


async def test_math_and_accuracy_rewards(public):
    task = Task(taskset="t", index=0, prompt="1+1?", truth="2", workflow="w")
    pytest.importorskip("word2number")
    helpers = ("common/rewards/eval_utils", "common/rewards/qwen25_eval")
    file = public("common/rewards/accuracy_reward", *helpers)
    assert (
        await score(
            build(name(file, "AccuracyReward"), {}), task, make_transcript(r"It is \boxed{2}")
        )
    ).value == 1.0
    file = public("common/rewards/math_reward", "common/rewards/format_reward", *helpers)
    found = await score(
        build(name(file, "MathRewardFn"), {}),
        task,
        make_transcript("<think>\na\n</think>\n<answer>\n2\n</answer>"),
    )
    assert found.value == pytest.approx(1.1)


async def test_format_reward(public):
    task = Task(taskset="t", index=0, prompt="1+1?", truth="2", workflow="w")
    file = public("common/rewards/format_reward")
    found = await score(
        build(name(file, "FormatReward"), {}),
        task,
        make_transcript("<think>\na\n</think>\n<answer>\n2\n</answer>"),
    )
    assert found.parts == {"format_score": 0.1}


async def test_countdown_reward(public):
    pytest.importorskip("word2number")  # what the public file's helpers import
    file = public(
        "common/rewards/countdown_reward", "common/rewards/eval_utils", "common/rewards/qwen25_eval"
    )
    task = Task(
        taskset="t",
        index=0,
        prompt="p",
        truth=json.dumps({"target": 5, "numbers": [2, 3]}),
        workflow="w",
    )
    found = await score(
        build(name(file, "CountDownRewardFn"), {}),
        task,
        make_transcript("Assistant: <answer>2+3</answer>"),
    )
    assert found.value == 1.0


async def test_dapo_reward(public):
    pytest.importorskip("pylatexenc")
    file = public("common/rewards/dapo_reward", "common/rewards/naive_dapo_score")
    task = Task(taskset="t", index=0, prompt="1+1?", truth="2", workflow="w")
    assert (
        await score(
            build(name(file, "MathDAPORewardFn"), {}), task, make_transcript(r"So \boxed{2}")
        )
    ).value == 1.0
