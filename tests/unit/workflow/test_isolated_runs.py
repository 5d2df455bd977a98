"""Unsafe workflows in processes of their own: the same records as in ours, and nothing of them is
left.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import psutil
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.errors import ConfigError, EngineFailed
from rft.plugins import import_file
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.workflow import isolated_child
from rft.workflow.base import Workflow, seed_for, workflow
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

ID = GroupId(1, 0, 3, 5)


@pytest.fixture(scope="module", autouse=True)
def plugins():
    import_file(Path(__file__).with_name("data") / "unsafe.py")


@pytest.fixture(scope="module")
def recipes():
    made = Recipes()  # its servers are kept from test to test
    yield made
    asyncio.run(made.close())


async def play(recipes, name, *, num_runs=1, timeout_s=60.0, engine=None, seed=None, **args):
    task = Task(
        taskset="t",
        index=0,
        prompt="2+2?",
        truth="4",
        workflow=name,
        workflow_args=args,
        num_runs=num_runs,
    )
    engine = engine or ScriptedEngine(answer=lambda m: "4")
    return await run_group(
        task, recipes.find(task), engine, ID, limits=RunLimits(timeout_s), seed=seed
    )


async def test_a_run_gives_the_same_records_as_in_our_process(recipes, monkeypatch):
    async def both(**more):
        there = await play(recipes, "unsafe_twice", num_runs=2, **more)
        monkeypatch.setattr(recipes.find(there.task).make().__class__, "isolated", False)
        here = await play(Recipes(), "unsafe_twice", num_runs=2, **more)
        monkeypatch.undo()
        return there, here

    there, here = await both(seed=lambda run: seed_for(7, run), tail="!")
    assert there.accepted and [r.status for r in there.rows] == ["complete"] * 4
    for a, b in zip(there.rows, here.rows, strict=True):
        assert (
            a.id == b.id
            and a.reward == b.reward
            and a.reward_parts == b.reward_parts
            and a.info == b.info
        )
        assert (
            np.array_equal(a.tokens, b.tokens)
            and np.array_equal(a.logprobs, b.logprobs)
            and a.messages == b.messages
        )
        assert a.sampling == b.sampling and a.version_spans == b.version_spans  # with the seeds
    assert (
        os.getpid() not in {r.metrics["pid"] for r in there.rows}
        and len({r.metrics["pid"] for r in there.rows}) == 2
    )
    assert there.rows[0].info == {"run": 0, "state": "first"}


async def test_runs_may_be_played_together(recipes):
    group = await play(recipes, "unsafe_together", num_runs=3)
    assert group.accepted and group.rewards == [0.0, 1.0, 2.0]


async def test_several_answers_to_one_call_are_all_kept(recipes):
    answers = iter("ab")
    group = await play(
        recipes, "unsafe_samples", engine=ScriptedEngine(answer=lambda m: next(answers))
    )
    assert [r.response_text for r in group.rows] == ["a", "b"] and group.rewards == [2.0]


async def test_scores_and_metrics_may_have_any_form_that_they_have_elsewhere(recipes):
    rows = (await play(recipes, "unsafe_numbers", num_runs=3)).rows
    assert [(r.reward, r.reward_parts, r.metrics) for r in rows] == [
        (1.5, {"right": 1.0, "short": 0.5}, {}),
        (1.0, {"right": 1.0}, {"right": 1.0}),
        (0.25, {}, {}),
    ]


async def test_an_answer_that_comes_too_late_holds_up_no_later_call(recipes):
    """The workflow gives its first call up; the answer comes between its others."""
    given_up = asyncio.Event()

    class Slow(ScriptedEngine):
        async def generate(self, request):
            await given_up.wait()
            return await super().generate(request)

    def answer(messages):
        given_up.set()
        return "4"

    models = {"judge": Slow(answer=lambda m: "late")}
    task = Task(taskset="t", index=0, prompt="2+2?", workflow="unsafe_impatient", num_runs=1)
    engine = ScriptedEngine(answer=answer)
    group = await run_group(
        task, recipes.find(task), engine, ID, limits=RunLimits(20.0), models=models
    )
    assert [r.reason for r in group.rows if r.status == "failed"] == [] and group.rewards == [1.0]


@pytest.fixture
def stranger():
    """A process that is nobody's run, leader of its group as one would be."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


async def test_a_dead_server_costs_no_run_and_signals_nobody(recipes, stranger):
    await play(recipes, "unsafe_twice")
    server = recipes.find(
        Task(taskset="t", index=0, prompt="?", workflow="unsafe_twice")
    ).isolation._server
    server._children.add(stranger.pid)  # as if it had the id of a run that died with its server
    server._process.kill()
    server._process.wait()
    assert server.kill(stranger.pid) is None and stranger.poll() is None and not server._children
    assert (await play(recipes, "unsafe_twice")).accepted
    first = server._process
    first.kill()
    assert (await play(recipes, "unsafe_twice")).accepted and server._process is not first


async def test_a_server_outlives_being_asked_for_a_child_that_it_has_not(recipes, stranger):
    await play(recipes, "unsafe_twice")
    server = recipes.find(
        Task(taskset="t", index=0, prompt="?", workflow="unsafe_twice")
    ).isolation._server
    first = server._process
    server._children.add(stranger.pid)
    assert server.kill(stranger.pid) is None
    assert (await play(recipes, "unsafe_twice")).accepted and server._process is first


def test_a_fork_that_fails_is_told_and_the_server_goes_on(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end, other = socket.socketpair()
    monkeypatch.setattr(
        os, "fork", Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable"))
    )
    with ours, theirs, end, other:
        for _ in range(2):
            ours.sendmsg(
                [b"Twice"],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [other.fileno()]))],
            )
            assert isolated_child._serve_order(theirs, None)
            assert ours.recv(500) == b"BlockingIOError: [Errno 11] Resource temporarily unavailable"
        ours.send(b"reap 1")
        assert isolated_child._serve_order(theirs, None) and not ours.recv(500).isdigit()


@pytest.mark.e2e
@pytest.mark.parametrize("what", ["spins", "sleeps_in_c"])
async def test_a_stuck_run_is_killed_at_its_deadline(recipes, what):
    await play(recipes, "unsafe_blocking", what="nothing")  # the server is up
    began = time.monotonic()
    group = await play(recipes, "unsafe_blocking", what=what, timeout_s=1.0)
    assert time.monotonic() - began > 0.9 and group.runs[0].ended == "timeout"
    assert not children()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("eats_memory", "MemoryError"),
        ("crashes", "ended without a result (signal SIGSEGV)"),
        ("leaves", "ended without a result (exit code 3)"),
        ("exits", "workflow unsafe_blocking called sys.exit(3)"),
        ("writes_much", "File too large"),
        ("raises", "KeyError: 'my bug'"),
    ],
)
async def test_what_ends_a_run_is_its_record(recipes, what, reason):
    group = await play(recipes, "unsafe_blocking", what=what)
    assert group.wholly_failed and reason in group.rows[0].reason
    if what == "raises":
        assert 'raise KeyError("my bug")' in group.rows[0].info["traceback"]


@pytest.mark.parametrize("what", ["leaks_children", "prints_much"])
async def test_what_a_run_leaves_behind_is_gone(recipes, what):
    group = await play(recipes, "unsafe_blocking", what=what)
    assert group.rewards == [1.0] and not children()


async def test_one_spinning_run_holds_up_no_other(recipes):
    stuck = asyncio.ensure_future(play(recipes, "unsafe_blocking", what="spins", timeout_s=30.0))
    await asyncio.sleep(0)
    assert (await play(recipes, "unsafe_twice", num_runs=4)).accepted
    assert not stuck.done()
    stuck.cancel()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(left)  # what was cancelled ends by itself
    assert not children()


async def test_a_dead_engine_is_no_failed_run(recipes):
    engine = ScriptedEngine()
    engine.die()
    with pytest.raises(EngineFailed, match="killed by the test"):
        await play(recipes, "unsafe_twice", engine=engine)
    assert not children()


async def test_a_prompt_that_is_too_long_is_named(recipes):
    task = Task(taskset="t", index=0, prompt="x" * 5000, workflow="unsafe_twice", num_runs=1)
    group = await run_group(
        task, recipes.find(task), ScriptedEngine(), ID, limits=RunLimits(60.0, max_retry_times=3)
    )
    assert group.rows[0].reason.startswith("PromptTooLong: ") and group.runs[0].attempts == 1


def test_classes_that_cannot_be_isolated_are_refused():
    @workflow("test_isolated_local")
    class Local(Workflow):
        isolated = True

        async def run(self, task, ctx): ...

    task = Task(taskset="t", index=0, prompt="?", workflow="test_isolated_local")
    with pytest.raises(ConfigError, match="must stand at the top of its file"):
        Recipes().find(task)
    Local.isolated = 3
    with pytest.raises(ConfigError, match="must be True or an Isolation"):
        Recipes().find(task)


def children() -> list[str]:
    """What runs have left behind: descendants other than the servers themselves, and is not ending."""
    servers = [
        c
        for c in psutil.Process().children()
        if "rft.workflow.isolated_child" in " ".join(c.cmdline())
    ]
    found = [p for s in servers for p in s.children(recursive=True)]
    found += [
        p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "86399"]
    ]
    return [str(p.pid) for p in psutil.wait_procs(found, timeout=10)[1]]


async def test_a_model_that_tells_its_experts_keeps_them(recipes):
    class Routed(ScriptedEngine):
        async def generate(self, request):
            done = await super().generate(request)
            sizes = [len(c.prompt_tokens) + len(c.tokens) - 1 for c in done]
            return [
                msgspec.structs.replace(c, routed_experts=np.full((n, 2, 1), 7, np.uint8))
                for c, n in zip(done, sizes, strict=True)
            ]

    group = await play(recipes, "unsafe_twice", engine=Routed(answer=lambda m: "4"))
    assert [r.reason for r in group.rows] == ["", ""] and all(
        (r.routed_experts == 7).all() for r in group.rows
    )
