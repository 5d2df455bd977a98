"""Tasks of Harbor's form: each of the twenty is passed by its solution and not by an empty answer; an
agent inside a runtime plays them; fields work, or are refused by name.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.engine.scripted import ScriptedEngine
from rft.extras.sandbox.harbor_tasks import harbor_tasks, read_reward, read_task
from rft.extras.sandbox.image import built_from
from rft.extras.sandbox.local_runtime import MachineDriver
from rft.extras.sandbox.processes import SandboxUnavailable
from rft.extras.sandbox.terminal_workflow import TerminalArgs, solved
from rft.plugins import load_all
from rft.testing import run_workflow_async
from rft.types.runtimes import RuntimeFailed, RuntimeSpec
from rft.workflow.agent import AgentFailed
from tests.extras.sandbox import containers
from tests.helpers import runs

pytestmark = pytest.mark.e2e

EXAMPLE = runs.ROOT / "examples" / "terminal_tasks"
TASKS = sorted(path.name for path in (EXAMPLE / "tasks").iterdir())
QUICK = ("copy-word", "spaced-backup", "build-order")
IN_CONTAINERS = ("sort-names", "leap-year")


@pytest.fixture(scope="module", autouse=True)
def offered() -> None:
    load_all()
    try:
        MachineDriver().start(RuntimeSpec()).kill()
    except SandboxUnavailable as e:
        pytest.skip(str(e))


def _task(folder: Path, table: str = "", **files: str) -> Path:
    """A task whose tests pass where /app/a is "yes"."""
    given = {
        "instruction.md": "Write yes into a.",
        "task.toml": table,
        "environment/Dockerfile": "FROM x\nWORKDIR /app\n",
        "tests/test.sh": '#!/bin/sh\n[ "$(cat a)" = yes ] && echo 1 > /logs/verifier/reward.txt '
        "|| echo 0 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\necho yes > a\n",
    }
    for name, text in {**given, **files}.items():
        path = folder / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "task"


def test_there_are_twenty() -> None:
    rows = harbor_tasks(split="train", folder=str(EXAMPLE / "tasks"))
    assert [row["name"] for row in rows] == TASKS
    assert len(TASKS) == 20
    levels = [read_task(Path(row["folder"])).table.metadata["difficulty"] for row in rows]
    assert {level: levels.count(level) >= 5 for level in levels} == dict.fromkeys(
        ("easy", "medium", "hard"), True
    )


@pytest.mark.parametrize("name", ["judge.py", "test.sh"])
def test_common_files_of_the_tasks_are_the_same(name: str) -> None:
    """A folder of Harbor's form is whole by itself, so each task has its own copy."""
    assert len({(EXAMPLE / "tasks" / task / "tests" / name).read_bytes() for task in TASKS}) == 1


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.e2e) for n in TASKS],
)
async def test_a_solution_passes_and_an_empty_answer_does_not(name: str) -> None:
    folder = EXAMPLE / "tasks" / name
    assert (await solved(folder)).value == 1.0
    assert (await solved(folder, empty=True)).value == 0.0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.e2e if n in IN_CONTAINERS else pytest.mark.slow)
        for n in TASKS
    ],
)
async def test_containers_judge_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = containers.command(monkeypatch)
    args = TerminalArgs(command=["true"], sandbox="container")
    folder = EXAMPLE / "tasks" / name
    with containers.built_images(engine, tmp_path):
        assert (await solved(folder, args)).value == 1.0
        assert (await solved(folder, args, empty=True)).value == 0.0


def _example_args() -> dict[str, Any]:
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    args: dict[str, Any] = config["buffer"]["explorer_input"]["taskset"]["workflow_args"]
    return args


@pytest.mark.parametrize("sandbox", ["local", pytest.param("container", marks=pytest.mark.e2e)])
async def test_the_agent_of_the_example_plays_inside(
    sandbox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _task(tmp_path, **{"environment/app/word.txt": "yes\n"})
    args = {**_example_args(), "sandbox": sandbox}
    docker = "FROM x\nWORKDIR /app\nCOPY app/word.txt .\n"
    if sandbox == "container":
        engine = containers.command(monkeypatch)
        docker = docker.replace("x", containers.image(engine, tmp_path), 1)
    (folder / "environment/Dockerfile").write_text(docker)
    (row,) = harbor_tasks(split="train", folder=str(tmp_path))
    model = ScriptedEngine(
        "First a look.\n```sh\ncat word.txt; ls /tests /solution\n```",
        "```sh\ncp word.txt a\n```",
        "It is done.",
    )
    result = await run_workflow_async(
        "terminal_workflow", row, model, workflow_args=args, timeout_s=300.0
    )
    assert result.rewards == [1.0], result
    assert len(model.calls) == 3
    shown = model.calls[1].messages[-1]["content"]
    assert shown.startswith("yes\n")
    assert "/tests'" in shown and "/solution'" in shown  # they are not there
    if sandbox == "container":
        image = built_from(folder / "environment")
        await asyncio.to_thread(subprocess.run, [*engine, "rmi", "--force", image], check=True)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["no-such-agent"], "no-such-agent cannot be started"),
        (["sh", "-c", "echo no provider >&2; exit 1"], "made no model call: no provider"),
    ],
    ids=["it cannot start", "it asks nothing"],
)
async def test_an_agent_without_a_call_fails_the_run(
    command: list[str], why: str, tmp_path: Path
) -> None:
    row = {"prompt": "p", "folder": str(_task(tmp_path))}
    with pytest.raises(AgentFailed, match=why):
        await run_workflow_async(
            "terminal_workflow", row, ScriptedEngine("x"), workflow_args={"command": command}
        )


@pytest.mark.e2e
async def test_limits_variables_and_artifacts_of_a_task(tmp_path: Path) -> None:
    table = (
        'artifacts = ["/srv/out", {source = "/srv/more"}]\n'
        '[environment]\nenv = {A = "1"}\n[agent]\ntimeout_sec = 1.5\n[solution]\nenv = {B = "2"}\n'
        '[verifier]\nenv = {C = "3"}\ntimeout_sec = 30.0\n'
    )
    folder = _task(
        tmp_path,
        table,
        **{
            "solution/solve.sh": "#!/bin/sh\nmkdir /srv; echo $A$B > /srv/out; echo m > /srv/more; "
            "rm old; sleep 600\n",
            "environment/Dockerfile": "FROM x\nWORKDIR /app\nENV D=4\nRUN echo old > old && echo $D > d\n",
            "tests/test.sh": "#!/bin/sh\n"
            '[ "$(cat /srv/out /srv/more d)$A$C$(ls)" = "12\nm\n413d" ] && r=1 || r=0.25\n'
            'echo "{\\"reward\\": $r, \\"seconds\\": 2}" > /logs/verifier/reward.json\n',
        },
    )
    score = await solved(folder)
    assert (score.value, score.parts) == (1.0, {"reward": 1.0, "seconds": 2.0})


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("[environment]\ngpus = 1", "environment.gpus"),
        ('[environment]\nos = "Windows"', "environment.*Windows"),
        ('[environment]\nskills_dir = "/s"', "environment.skills_dir"),
        ('[environment]\nmemory = "2 pounds"', "memory '2 pounds'"),
        ('[environment.healthcheck]\ncommand = "x"', "environment.healthcheck"),
        ('[environment]\nenv = {K = "${KEY}"}', "environment.env.*K takes"),
        ('[[environment.mcp_servers]]\nname = "x"', "environment.mcp_servers"),
        ('[[steps]]\nname = "a"', "steps"),
        ('[[verifier.collect]]\ncommand = "a"', "verifier.collect"),
        ('[verifier.environment]\nworkdir = "/a"', "verifier.environment"),
        ('[agent]\ntimeout_sec = "soon"', "agent.timeout_sec"),
        ('[[artifacts]]\nsource = "/a"\nservice = "db"', "artifacts"),
        ("= 1", "cannot be read"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(tmp_path: Path, table: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_task(_task(tmp_path, table))


@pytest.mark.parametrize("name", ["trajectory.json", "tests/Dockerfile", "tests/.harborignore"])
def test_files_that_are_not_offered_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not offered"):
        read_task(_task(tmp_path, **{name: "x"}))


def test_a_task_that_asks_for_a_network_is_refused_or_played_without(tmp_path: Path) -> None:
    _task(tmp_path, '[environment]\nnetwork_mode = "public"')
    with pytest.raises(ValueError, match=r"environment\.network_mode"):
        harbor_tasks(split="train", folder=str(tmp_path))
    assert harbor_tasks(split="train", folder=str(tmp_path), network="none")


def test_marks_for_searches_in_training_data_are_not_shown(tmp_path: Path) -> None:
    text = "<!-- a canary GUID 1 -->\n# canary 2\n\nWrite yes."
    assert read_task(_task(tmp_path, **{"instruction.md": text})).instruction == "Write yes."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reward.txt", ""),
        ("reward.txt", "nan"),
        ("reward.txt", "1 2"),
        ("reward.json", "1"),
        ("reward.json", "{}"),
        ("reward.json", '{"a": "1"}'),
        ("reward.json", '{"a": Infinity}'),
        ("reward.json", '{"a": 1, "b": 2}'),
    ],
)
def test_a_file_that_is_no_reward_is_an_error(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        read_reward(name, text.encode())


@pytest.mark.e2e
async def test_tests_without_a_reward_fail_the_run(tmp_path: Path) -> None:
    folder = _task(tmp_path, **{"tests/test.sh": "#!/bin/sh\necho broken\nexit 3\n"})
    with pytest.raises(RuntimeFailed, match=r"wrote no reward \(exit 3\): broken"):
        await solved(folder)
    shutil.rmtree(folder)
    with pytest.raises(RuntimeFailed, match="no end after 1 s"):
        await solved(
            _task(
                tmp_path,
                "[verifier]\ntimeout_sec = 1.0",
                **{"tests/test.sh": "#!/bin/sh\nsleep 60\n"},
            )
        )
