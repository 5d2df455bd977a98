"""M3 and M9: a plugin that exits, raises what no `except Exception` catches, sleeps or blocks is a
failure with its name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rft import Judge, Scale
from rft.algorithm.composition import _bind
from rft.algorithm.settings import AlgorithmSettings
from rft.config.context import Problems
from rft.engine.scripted import ScriptedEngine
from rft.errors import ConfigError, PluginStopped, RunFailed, is_ours
from rft.extras.migrate.score_functions.one_answer import reward_of
from rft.extras.migrate.score_functions.reward_managers import ManagerArgs
from rft.plugins import REGISTRY, load_all, unmarked
from rft.preflight import gold_answers
from rft.preflight.gold_answers import score_gold_answers
from rft.reward.base import FunctionReward, Reward, score, score_group
from rft.reward.build_reward import from_plugin
from rft.testing.judge import FakeJudge
from rft.types.completion import Transcript
from rft.types.task import Task
from rft.worker.blocked import held_up_by, name_what_blocks
from rft.worker.threads import contained, in_thread
from rft.workflow.agent import AgentWorkflow
from rft.workflow.base import RunContext
from rft.workflow.recipes import Recipes
from rft.workflow.tools import FunctionTool, Toolbox, ToolCall
from tests.attacks.table import attack
from tests.helpers.answers import make_transcript as said
from tests.helpers.answers import task

CONFIG = Path(__file__).parents[1] / "integration" / "tiny_config.yaml"
INPUT = "buffer.explorer_input"
FOR_EVER = threading.Event()


class OwnError(BaseException):
    pass


def _exits(*_: Any) -> float:
    sys.exit(0)


def _own(*_: Any) -> float:
    raise OwnError("neither here nor there")


def _interrupts(*_: Any) -> float:
    raise KeyboardInterrupt


def _stops(*_: Any) -> float:
    raise StopIteration


ENDS = {
    "exits": (_exits, r"called sys.exit\(0\)"),
    "own BaseException": (_own, "raised OwnError: neither here nor there"),
    "interrupts": (_interrupts, "raised KeyboardInterrupt"),
    "StopIteration": (_stops, "raised StopIteration"),
}


@attack(
    "M3",
    "a reward exits, raises its own BaseException, interrupts, stops",
    "a failed record with its name",
)
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("kind", ["function", "async", "class", "group"])
async def test_m3_a_reward_never_ends_the_loop(how: str, kind: str) -> None:
    ends, says = ENDS[how]

    async def waits(task: Task, transcript: Transcript) -> float:
        await asyncio.sleep(0)
        return ends()

    class Whole(Reward):
        whole_group = True

        def __call__(self, task: Task, transcripts: Any) -> Any:
            return [ends()]

    class One(Reward):
        def __call__(self, task: Task, transcript: Any) -> Any:
            return ends()

    if kind == "async" and how == "StopIteration":
        says = "StopIteration"  # Python itself made something else of it
    with pytest.raises(RuntimeError, match=says):
        if kind == "group":
            await score_group(Whole(), task("4"), [said("4")])
        else:
            fn = {"function": ends, "async": waits, "class": One()}[kind]
            await score(fn, task("4"), said("4"))


@attack("M3", "the same in threads, advantages and constructors", "a failure with its name")
@pytest.mark.parametrize("how", ENDS)
async def test_m3_code_in_threads_and_parts_of_algorithms(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, says = ENDS[how]
    with pytest.raises(PluginStopped, match=f"the tool {says}"):
        await in_thread(ends, "the tool")
    with pytest.raises(PluginStopped, match=f"it {says}"), contained("it"):
        ends()
    if how != "StopIteration":
        monkeypatch.setattr("rft.algorithm.composition.part_args", lambda *_: None)
        monkeypatch.setattr(REGISTRY, "get", lambda kind, name: unmarked(kind, name, ends))
        with pytest.raises(PluginStopped, match=f"advantage_fn mine {says}"):
            _bind("advantage_fn", AlgorithmSettings(advantage_fn="mine"))(1)
        with pytest.raises(ConfigError, match="reward 'made' cannot be made"):
            from_plugin(
                unmarked(
                    "reward",
                    "made",
                    type("Made", (Reward,), {"__init__": lambda self: ends(), "__call__": ends}),
                ),
                {},
            )


async def _in_a_reward_with_a_deadline(ends: Any) -> None:
    async def waits(*_: Any) -> float:
        return float(ends())

    await score(waits, task("4"), said("4"), timeout_s=30)


async def _in_compute_score_with_a_deadline(ends: Any) -> None:
    async def compute_score(solution_str: str, ground_truth: str) -> float:
        return float(ends())

    made = reward_of(compute_score, {}, ManagerArgs(reward_timeout_s=30), name="mine", key="reward")
    await score(made, task("4"), said("4"))


async def _in_prepare(ends: Any) -> None:
    class Prepares(Reward):
        async def prepare(self, models: Any) -> None:
            ends()

        def __call__(self, task: Task, transcript: Any) -> float:
            return 0.0

    load_all()
    recipes = Recipes()
    made = msgspec.structs.replace(task("4"), workflow="simple_workflow")
    await recipes._prepare(dataclasses.replace(recipes.find(made), reward=Prepares()))


async def _in_an_agent(ends: Any) -> None:
    class Agent(AgentWorkflow):
        async def agent(self, task: Task, base_url: str, api_key: str) -> float:
            return float(ends())

    await Agent().run(task("4"), RunContext(ScriptedEngine("a"), task("4"), run=0, request_id="r"))


async def _in_a_judge(ends: Any) -> None:
    class Reads(Judge):
        scale = Scale(1, 5)

        def prompt(self, case: Any, delimit: Any) -> str:
            return f"{delimit('answer', case.answer)}{delimit.ask(score=self.scale)}"

        def read(self, reply: str, delimit: Any) -> Any:
            return ends()

    judge = Reads()
    await judge.prepare({"judge": FakeJudge(4)})
    try:
        await score(judge, task("4"), said("4"))
    finally:
        await judge.close()


@attack(
    "M3",
    "the same in async rewards with a deadline, `prepare`, agents, judges",
    "a failure with its name; the event loop goes on",
)
# which Python changes in a coroutine
@pytest.mark.parametrize("how", [how for how in ENDS if how != "StopIteration"])
@pytest.mark.parametrize(
    "where",
    [
        _in_a_reward_with_a_deadline,
        _in_compute_score_with_a_deadline,
        _in_prepare,
        _in_an_agent,
        _in_a_judge,
    ],
)
async def test_m3_code_in_tasks_of_their_own_never_ends_the_loop(how: str, where: Any) -> None:
    """asyncio lets SystemExit and KeyboardInterrupt of a task out of the loop, past whoever waits
    for it.
    """
    ends, says = ENDS[how]
    with pytest.raises(RunFailed if where is _in_prepare else PluginStopped, match=says):
        await where(ends)


@attack(
    "M3", "the same in tools, of which one answer calls several", "an error that the model is told"
)
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_m3_a_tool_that_ends_is_an_error_that_the_model_is_told(
    how: str, asynchronous: bool
) -> None:
    """Calls of one answer are tasks of their own: what ended one of them ended the loop."""
    ends, says = ENDS[how]

    def plain() -> str:
        return str(ends())

    async def waits() -> str:
        await asyncio.sleep(0)
        return str(ends())

    box = Toolbox([FunctionTool(waits if asynchronous else plain, name="it")])
    (result,) = await box.run([ToolCall("it", {})])
    assert result.error and re.search(
        "StopIteration" if how == "StopIteration" else f"tool it {says}", result.content
    )


@attack("–", "a reward that is cancelled", "is cancelled, not a failure")
async def test_m3_cancelling_stays_cancelling() -> None:
    job = asyncio.ensure_future(score(_never, task("4"), said("4")))
    await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job


async def _never(task: Task, transcript: Transcript) -> float:
    await asyncio.Event().wait()
    return 1.0


@attack("M9", "a reward that sleeps for ever", "holds up nobody; a named failure at its deadline")
async def test_m9_a_reward_that_sleeps_holds_up_nobody_and_has_a_deadline() -> None:
    def sleeps(task: Task, transcript: Transcript) -> float:
        FOR_EVER.wait()
        return 1.0

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.ensure_future(tick())
    with pytest.raises(TimeoutError):
        await score_group(sleeps, task("4"), [said("4")], timeout_s=0.3)
    assert ticks > 2
    ticking.cancel()
    FOR_EVER.set()


@attack(
    "M9", "many answers to one ordinary reward", "one call after another, as its author expects"
)
async def test_m9_an_ordinary_reward_sees_one_answer_after_another() -> None:
    inside = 0
    most = 0

    def counts(task: Task, transcript: Transcript) -> float:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        inside -= 1
        return 1.0

    await asyncio.gather(*(score(counts, task("4"), said("4")) for _ in range(50)))
    assert most == 1


@attack("M9", "a plugin blocks the main thread", "named with file and line")
def test_m9_what_blocks_the_main_thread_is_named(tmp_path: Path) -> None:
    file = tmp_path / "slow_plugin.py"
    file.write_text("def slow(until, _):\n    until.wait(60)\n")
    told = []
    heard = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        heard.set()

    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)  # noqa: S102
    over = name_what_blocks(tell, after_s=0.1)
    FunctionReward(scope["slow"])(heard, None)
    over.set()
    assert "s for slow() in " in told[0] and f"{file}, line 2" in told[0]
    assert is_ours(os.__file__) and is_ours(str(Path(pytest.__file__))) and not is_ours(str(file))
    assert held_up_by(-1) is None


@pytest.mark.e2e
@attack(
    "M9",
    "a plugin blocks the check of a configuration and computes nothing",
    "named, then ended with exit code 4",
)
def test_m9_what_blocks_a_check_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "slow_plugin.py"
    file.write_text("async def slow(task, transcript):\n    return not OVER.wait(60)\n")
    told: list[str] = []
    ended = threading.Event()

    def end(why: str) -> None:
        told.append(why)
        ended.set()

    scope: dict[str, Any] = {"OVER": ended}
    exec(compile(file.read_text(), str(file), "exec"), scope)  # noqa: S102
    monkeypatch.setattr("rft.worker.blocked._IDLE_SHARE", 0.5)
    over = name_what_blocks(told.append, end, after_s=0.3, end_after_s=1.0)
    asyncio.run(_blocked_outside_of_a_check(FunctionReward(scope["slow"]), ended))
    assert told and not any("not returned" in text for text in told)
    ended.clear()
    score_gold_answers([task("4")], [FunctionReward(scope["slow"])])
    over.set()
    assert f"slow() in {file}, line 2 has not returned for 1 s" in told[-1]
    code = "import rft.cli.main as m; m._end_check('it has not returned')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (
        done.returncode == 4
        and "RunFailed: the check of the configuration hangs: it has not returned" in done.stderr
    )


async def _blocked_outside_of_a_check(reward: Reward, ended: threading.Event) -> None:
    threading.Timer(2.0, ended.set).start()
    await score(reward, task("4"), said("4"))


@attack(
    "M9",
    "a reward sleeps while the gold answers of several rows are checked",
    "named once, and not asked again",
)
def test_m9_a_reward_that_sleeps_is_asked_once_by_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    over = threading.Event()

    def sleeps(task: Task, transcript: Transcript) -> float:
        asked.append(task.index)
        over.wait(60)
        return 1.0

    monkeypatch.setattr(gold_answers, "REWARD_TIMEOUT_S", 0.2)
    problems = Problems()
    hung = set[str]()
    one = FunctionReward(sleeps)
    for row in (task("4"), task("5"), task("6")):
        gold_answers.check_gold_answer(
            msgspec.structs.replace(row, reward="sleeps"), one, "key", problems, hung
        )
    over.set()
    assert len(asked) == 1 and len(problems.warnings) == 1
    assert (
        "the reward sleeps took longer than 0.2 s on the gold answer of row" in problems.warnings[0]
    )


@attack("M9", "a script that waits for rft", "is not named as what blocks")
def test_a_script_that_waits_for_rft_is_not_what_blocks() -> None:
    """`rft run` itself is such a script: it must not be told as a plugin that does not end."""
    seen = []
    looked = threading.Event()
    main = threading.get_ident()

    def look() -> None:
        seen.append(held_up_by(main))
        looked.set()

    threading.Thread(target=look).start()
    assert looked.wait(60)
    assert seen == [None]


# ------------------------------------------------------------ whole runs

PLUGINS = """
import asyncio, os, sys, time
from rft import register
from rft.buffer.operators.base import Operator
from rft.workflow.base import Workflow

class Own(BaseException): pass

def reward_exits(task, transcript): sys.exit(0)
async def reward_exits_async(task, transcript): sys.exit(0)
def reward_leaves(task, transcript): os._exit(0)
def reward_own(task, transcript): raise Own("nothing catches me")

class Blocks(Workflow):
    async def run(self, task, ctx):
        time.sleep(10000)

class Leaves(Workflow):
    async def run(self, task, ctx):
        raise Own("nothing catches me")

class Dies(Workflow):
    isolated = True
    def run(self, task, ctx):
        os._exit(0)

class OperatorExits(Operator):
    stage = "reward"
    async def prepare(self, models): sys.exit(0)
    def process(self, rows, group): return rows

class Source:
    def __init__(self, path, split): pass
    def __len__(self): return 4
    def __getitem__(self, i): sys.exit(0)

class SourceExits(Source):
    def __init__(self, path, split): sys.exit(0)

@register.advantage("leaves")
def leaves(x, args): sys.exit(0)

@register.policy_loss("leaves")
def leaves_loss(x, args): sys.exit(0)
"""

RUNS = {
    "reward exits": (
        (f"{INPUT}.default_reward_fn_type=FILE:reward_exits",),
        ("called sys.exit(0)",),
    ),
    "async reward exits": (
        (f"{INPUT}.default_reward_fn_type=FILE:reward_exits_async",),
        ("called sys.exit(0)",),
    ),
    "reward ends the process": (
        (f"{INPUT}.default_reward_fn_type=FILE:reward_leaves",),
        ("FILE, line", "called os._exit(0); a plugin must not end the program"),
    ),
    "reward raises its own": (
        (f"{INPUT}.default_reward_fn_type=FILE:reward_own",),
        ("raised Own: nothing catches me",),
    ),
    "workflow raises its own": (
        (f"{INPUT}.default_workflow_type=FILE:Leaves",),
        ("workflow", "raised Own: nothing catches me"),
    ),
    "workflow blocks": (
        (f"{INPUT}.default_workflow_type=FILE:Blocks", "cluster.stall_timeout=3"),
        ("run() in FILE", "blocks its event loop"),
    ),
    "isolated workflow dies": (
        (f"{INPUT}.default_workflow_type=FILE:Dies",),
        ("10 groups in a row failed completely",),
    ),
    "operator exits": (
        ("data_processor.experience_pipeline.operators=[{name: 'FILE:OperatorExits'}]",),
        ("called sys.exit(0)",),
    ),
    "source exits": ((f"{INPUT}.taskset.storage_type=FILE:Source",), ("called sys.exit(0)",)),
    "source exits when made": (
        (f"{INPUT}.taskset.storage_type=FILE:SourceExits",),
        ("in __init__", "SystemExit: 0"),
    ),
    "advantage exits": (
        ("algorithm.advantage_fn=leaves",),
        ("advantage_fn leaves called sys.exit(0)",),
    ),
    "loss exits": (
        ("algorithm.policy_loss_fn=leaves",),
        ("policy_loss_fn leaves called sys.exit(0)",),
    ),
}


# of those that end by the same code as another, and take as long
ALIKE = ("reward raises its own", "source exits", "advantage exits", "operator exits")


@attack(
    "M3, M9",
    "whole runs whose reward, workflow, operator, source, advantage or loss does so",
    "exit code 4 with its name, never 0",
)
@pytest.mark.e2e
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in ALIKE)) for k in RUNS]
)
def test_m3_m9_a_run_ends_with_the_name_and_never_with_success(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "plugins"
    folder.mkdir()
    file = folder / "hostile.py"
    file.write_text(PLUGINS)
    changes, says = RUNS[kind]
    places = (f"model.model_path={tiny_model}", f"checkpoint_root_dir={tmp_path / 'runs'}")
    command = [
        sys.executable,
        "-m",
        "rft.cli.main",
        "run",
        "--in-process",
        "--plugin-dir",
        str(folder),
        "-c",
        str(CONFIG),
        *places,
    ]
    command += [change.replace("FILE", str(file)) for change in changes]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False
    )  # one that hangs is ended with its process
    output = ended.stdout + ended.stderr
    assert ended.returncode in ((2, 4) if "source" in kind else (4,)), output
    for text in says:
        assert text.replace("FILE", str(file)) in output, output
    assert "bug in rft" not in output


@attack(
    "M3",
    "a plugin that exits where nothing guards it",
    "no success: the program's end looks at who called it",
)
def test_m3_a_plugin_that_exits_while_it_is_looked_at_is_no_success(tmp_path: Path) -> None:
    """Not through a guarded door: the program's own end looks at who called it."""
    file = tmp_path / "leave.py"
    file.write_text("def leave(*_, **__):\n    exit(0)\n")
    code = (
        f"import rft.cli.main as m, runpy; leave = runpy.run_path({str(file)!r})['leave']; "
        "m.make = lambda verb: leave; m.main(['check'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 4 and f"{file}, line 2, called sys.exit(0)" in done.stderr


@pytest.mark.e2e
@attack(
    "R8", "a plugin that ends the process while rft check imports it", "exit code 4 with its name"
)
@pytest.mark.parametrize("code", [0, 3])
def test_an_import_that_ends_the_process_is_named(
    tiny_model: Path, tmp_path: Path, code: int
) -> None:
    file = tmp_path / "leave.py"
    file.write_text(f"import os\n\nos._exit({code})\n")
    command = [sys.executable, "-m", "rft", "check", "-c", str(CONFIG)]
    command += [f"model.model_path={tiny_model}", f"{INPUT}.default_reward_fn_type={file}:reward"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"{file}, line 3, called os._exit({code})" in done.stderr
