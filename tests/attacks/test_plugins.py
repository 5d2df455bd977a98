"""M3 and M9: a plugin that exits, raises what no `except Exception` catches, sleeps or blocks is a failure with its name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rft.algorithm.composition import _bind
from rft.blocked import held_up_by, is_ours, name_what_blocks
from rft.errors import PluginStopped
from rft.plugins import REGISTRY, unmarked
from rft.reward.base import FunctionReward, Reward, score, score_group
from rft.reward.build_reward import of
from rft.threads import contained, in_thread, within
from rft.types.completion import Transcript
from rft.types.task import Task
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
        says = "StopIteration"
    with pytest.raises(RuntimeError, match=says):
        if kind == "group":
            await score_group(Whole(), task("4"), [said("4")])
        else:
            fn = {"function": ends, "async": waits, "class": One()}[kind]
            await score(fn, task("4"), said("4"))


@pytest.mark.parametrize("how", ENDS)
async def test_m3_code_in_threads_and_parts_of_algorithms(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, says = ENDS[how]
    with pytest.raises(PluginStopped, match=f"the tool {says}"):
        await in_thread(ends, "the tool")
    if how != "StopIteration":
        with pytest.raises(PluginStopped, match=says), contained("it"):
            ends()
        monkeypatch.setattr("rft.algorithm.composition.check_args", lambda *_: None)
        monkeypatch.setattr(REGISTRY, "get", lambda kind, name: unmarked(kind, name, ends))
        with pytest.raises(PluginStopped, match=f"advantage_fn mine {says}"):
            _bind("advantage_fn", "mine", {})(1)
        with pytest.raises(PluginStopped, match="reward made"):
            of(unmarked("reward", "made", type("Made", (Reward,), {"__init__": lambda self: ends(), "__call__": ends})), {})


async def test_m3_cancelling_stays_cancelling() -> None:
    job = asyncio.ensure_future(score(_never, task("4"), said("4")))
    await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job


async def _never(task: Task, transcript: Transcript) -> float:
    await asyncio.Event().wait()
    return 1.0


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


async def test_m9_an_ordinary_reward_sees_one_answer_after_another() -> None:
    inside, most = 0, 0

    def counts(task: Task, transcript: Transcript) -> float:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        inside -= 1
        return 1.0

    await asyncio.gather(*(score(counts, task("4"), said("4")) for _ in range(50)))
    assert most == 1


def test_m9_what_blocks_the_main_thread_is_named(tmp_path: Path) -> None:
    file = tmp_path / "slow_plugin.py"
    file.write_text("def slow(until, _):\n    until.wait(60)\n")
    told, heard = [], threading.Event()

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


def test_a_script_that_waits_for_rft_is_not_what_blocks() -> None:
    """`rft run` itself is such a script: it must not be told as a plugin that does not end."""
    seen, looked, main = [], threading.Event(), threading.get_ident()

    def look() -> None:
        seen.append(held_up_by(main))
        looked.set()

    threading.Thread(target=look).start()
    within(60, looked.wait)
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
    "reward exits": ((f"{INPUT}.default_reward_fn_type=FILE:reward_exits",), ("called sys.exit(0)",)),
    "async reward exits": ((f"{INPUT}.default_reward_fn_type=FILE:reward_exits_async",), ("called sys.exit(0)",)),
    "reward raises its own": ((f"{INPUT}.default_reward_fn_type=FILE:reward_own",), ("raised Own: nothing catches me",)),
    "workflow raises its own": ((f"{INPUT}.default_workflow_type=FILE:Leaves",), ("workflow", "raised Own: nothing catches me")),
    "workflow blocks": (
        (f"{INPUT}.default_workflow_type=FILE:Blocks", "cluster.stall_timeout=3"),
        ("run() in FILE", "blocks its event loop"),
    ),
    "isolated workflow dies": ((f"{INPUT}.default_workflow_type=FILE:Dies",), ("10 groups in a row failed completely",)),
    "operator exits": (("data_processor.experience_pipeline.operators=[{name: 'FILE:OperatorExits'}]",), ("called sys.exit(0)",)),
    "source exits": ((f"{INPUT}.taskset.storage_type=FILE:Source",), ("called sys.exit(0)",)),
    "source exits when made": ((f"{INPUT}.taskset.storage_type=FILE:SourceExits",), ("called sys.exit(0)",)),
    "advantage exits": (("algorithm.advantage_fn=leaves",), ("advantage_fn leaves called sys.exit(0)",)),
    "loss exits": (("algorithm.policy_loss_fn=leaves",), ("policy_loss_fn leaves called sys.exit(0)",)),
}


@pytest.mark.e2e
@pytest.mark.parametrize("kind", RUNS)
def test_m3_m9_a_run_ends_with_the_name_and_never_with_success(tiny_model: Path, tmp_path: Path, kind: str) -> None:
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


def test_m3_a_plugin_that_exits_while_it_is_looked_at_is_no_success(tmp_path: Path) -> None:
    """Not through a guarded door: the program's own end looks at who called it."""
    file = tmp_path / "leave.py"
    file.write_text("def leave(*_, **__):\n    exit(0)\n")
    code = (
        f"import rft.cli.main as m, runpy; leave = runpy.run_path({str(file)!r})['leave']; "
        "m.make = lambda verb: leave; m.main(['check'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4 and f"{file}, line 2, called sys.exit(0)" in done.stderr
