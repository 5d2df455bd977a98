"""What ends a slow or hopeless run: deadlines of runs and groups, the dynamic timeout,
over-rollout; and that all of it is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine
from rft.errors import RunFailed, ShortBatch
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Batch, Breaker, RunTimes, Slots
from rft.reward.base import reward
from rft.reward.judge_base import Judge
from rft.types.completion import Score
from rft.types.ids import GroupId
from rft.types.task import Task
from rft.worker.waiting import activities, sentence
from rft.workflow.base import Workflow, workflow
from rft.workflow.group import Ending, run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

ID = GroupId(1, 0, 3, 5)


@pytest.fixture(autouse=True)
async def deadline():
    async with asyncio.timeout(120):
        yield


@workflow("test_limits_by_run")
class ByRun(Workflow):
    """Runs named in `stuck` never end, those in `broken` raise; the others answer and get their
    number as the reward.
    """

    def __init__(self, stuck: list[int] | None = None, broken: list[int] | None = None) -> None:
        self.stuck = stuck or []
        self.broken = broken or []

    async def run(self, task, ctx):
        if ctx.run in self.broken:
            raise ValueError("broken on purpose")
        await ctx.chat(task.chat())
        if ctx.run in self.stuck:
            await asyncio.Event().wait()  # for ever
        return ctx.transcript(score=Score(value=float(ctx.run)))


async def play(num_runs=4, *, limits, ending=None, **args):
    task = Task(
        taskset="t",
        index=0,
        prompt="2+2?",
        truth="4",
        workflow="test_limits_by_run",
        workflow_args=args,
        num_runs=num_runs,
    )
    return await run_group(
        task,
        Recipes().find(task),
        ScriptedEngine(answer=lambda m: "4"),
        ID,
        limits=limits,
        ending=ending,
    )


def ends(group):
    return Counter(r.ended for r in group.runs)


async def test_a_group_ends_at_its_deadline_and_is_trained_without_the_missing_runs():
    group = await play(limits=RunLimits(600.0, max_group_s=0.4), stuck=[3])
    assert group.accepted and ends(group) == {"": 3, "group_timeout": 1}
    assert (
        group.runs[3].experiences[0].reason
        == "ended: the runs of its task took longer than explorer.max_group_timeout"
    )
    assert [r.experiences[0].id.run for r in group.runs] == [0, 1, 2, 3] and group.rewards == [
        0.0,
        1.0,
        2.0,
    ]


@pytest.mark.parametrize(
    ("stuck", "whole", "accepted"),
    [([2, 3], False, True), ([1, 2, 3], False, False), ([3], True, False)],
)
async def test_group_policies(stuck, whole, accepted):
    group = await play(limits=RunLimits(600.0, max_group_s=0.4, whole_groups=whole), stuck=stuck)
    assert (group.accepted, group.reason) == ((True, "") if accepted else (False, "group_timeout"))
    assert len(group.rewards) == 4 - len(stuck)  # what was scored is kept as a record


async def test_the_others_of_a_hopeless_group_are_ended():
    group = await play(limits=RunLimits(600.0, stop_hopeless=True), broken=[0, 1, 2], stuck=[3])
    assert not group.accepted and ends(group) == {"": 3, "hopeless": 1} and group.reason == "failed"
    group = await play(
        limits=RunLimits(600.0, stop_hopeless=True, whole_groups=True), broken=[0], stuck=[1, 2, 3]
    )
    assert ends(group) == {"": 1, "hopeless": 3}
    group = await play(limits=RunLimits(600.0, stop_hopeless=True), broken=[0, 1])
    assert group.accepted and ends(group) == {"": 4}


@pytest.mark.parametrize("partial", [False, True])
async def test_an_ending_cuts_what_is_under_way_and_what_has_not_begun(partial):
    ending = Ending(partial=partial)
    job = asyncio.ensure_future(play(limits=RunLimits(600.0), stuck=[2, 3], ending=ending))
    engine_said = asyncio.get_running_loop().call_later(0.4, ending.end, "over_rollout")
    group = await job
    engine_said.cancel()
    assert ends(group) == {"": 2, "over_rollout": 2}
    assert (group.accepted, group.reason) == ((True, "") if partial else (False, "over_rollout"))
    late = await play(limits=RunLimits(600.0), ending=ending)
    assert ends(late) == {"over_rollout": 4} and late.reason == "over_rollout" and not late.accepted


def slow_first(stuck_tasks):
    """An engine answer is at once; tasks with these numbers wait for ever."""

    @workflow("test_limits_slow")
    class Slow(Workflow):
        async def run(self, task, ctx):
            await ctx.chat(task.chat())
            if task.index in stuck_tasks:
                await asyncio.Event().wait()  # for ever
            return ctx.transcript()

    return "test_limits_slow"


def at_once():
    """A reward that needs no thread, so that runs which are played are also scored."""

    @reward("test_limits_at_once")
    async def zero(task, transcript):
        return 0.0

    return "test_limits_at_once"


async def test_over_rollout_ends_the_slowest_tasks_and_the_step_is_short(world):
    name = slow_first({1})
    await world.explorer(
        tasksets=(world.taskset(workflow=name, reward=at_once()),),
        batch_size=4,
        total_batches=2,
        over_rollout=0.25,
        wait_after_s=0.0,
        on_short_batch="train",
        breaker=1,
    ).run()
    assert (
        world.buffer.closed[0] == (0, 3, 4, {"over_rollout": 1}) and world.buffer.closed[1][1] == 4
    )
    told = world.sink.of("explorer")[1]
    assert (
        told["rollout/ended/over_rollout"] == 2
        and told["rollout/groups/rejected"] == 1
        and told["rollout/timeouts"] == 0
    )
    cut = [r for r in world.buffer.rows if r.status == "failed"]
    assert {(r.id.batch, r.task_index) for r in cut} == {(0, 1)}


async def test_over_rollout_waits_for_those_that_are_near_the_end(world):
    """The clock of the wait starts when enough are done, and a batch that is whole before it ends
    is not cut.
    """
    await world.explorer(
        batch_size=4, total_batches=1, over_rollout=0.5, wait_after_s=600.0, on_short_batch="train"
    ).run()
    assert world.buffer.closed == [(0, 4, 4, {})]


async def test_a_batch_whose_runs_never_began_is_still_closed(world):
    """Room for one run: the second run of the slow task is ended while it waits for room."""
    name = slow_first({2})
    await world.explorer(
        tasksets=(world.taskset(workflow=name),),
        batch_size=3,
        total_batches=1,
        max_concurrent_runs=1,
        over_rollout=0.6,
        wait_after_s=0.0,
        on_short_batch="carry",
    ).run()
    assert world.buffer.closed == [(0, 2, 3, {"over_rollout": 1})]
    assert len(world.engine.calls) == 5


async def test_deadlines_are_counted(world):
    name = slow_first({0})
    await world.explorer(
        tasksets=(world.taskset(workflow=name),),
        total_batches=1,
        max_timeout_s=0.05,
        on_short_batch="train",
        max_refill=0,
    ).run()
    told = world.sink.of("explorer")[1]
    assert told["rollout/timeouts"] == 2 and world.buffer.closed == [(0, 1, 2, {"failed": 1})]


async def test_the_dynamic_timeout_follows_the_mean_after_the_warm_up(world):
    explorer = world.explorer(
        total_batches=2, timeout_ratio=2.0, timeout_warmup=1, max_timeout_s=50.0
    )
    await explorer.run()
    told = world.sink.of("explorer")
    assert told[1]["rollout/time/limit"] == 50.0 and 0 < told[2]["rollout/time/limit"] < 50.0


async def test_a_run_time_limit():
    group = await play(limits=RunLimits(600.0))
    times = RunTimes(100.0, 3.0, 1)
    assert times.limit_s == 100.0
    times.add([group])
    mean = sum(r.run_s + r.reward_s for r in group.runs) / 4
    assert times.limit_s == pytest.approx(3.0 * mean)
    slow = await play(1, limits=RunLimits(0.05), stuck=[0])
    times.add([slow])  # counts with its deadline
    assert times.limit_s > 3.0 * 0.05 / 5
    assert RunTimes(100.0, None, 0).limit_s == 100.0


async def test_slots_come_first_go_first_all_at_once_and_background_waits():
    slots = Slots(2)
    order = []

    async def take(name, count, **more):
        async with slots.take(count, **more):
            order.append(name)
            await asyncio.sleep(0)

    async with slots.take(1):
        jobs = [
            asyncio.ensure_future(take(n, c, **m))
            for n, c, m in (("behind", 1, {"behind": True}), ("pair", 5, {}), ("one", 1, {}))
        ]
        await asyncio.sleep(0)
        assert order == ["behind"] or slots.waiting
        jobs[2].cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    assert order == ["behind", "pair"] and slots.free == 2 and slots.waiting == 0


async def test_background_evaluation_lets_training_runs_pass():
    slots = Slots(1)
    order = []

    async def take(name, behind):
        async with slots.take(behind=behind):
            order.append(name)

    async with slots.take():
        jobs = [asyncio.ensure_future(take(n, b)) for n, b in (("eval", True), ("train", False))]
        await asyncio.sleep(0)
        assert slots.waiting == 2
    await asyncio.gather(*jobs)
    assert order == ["train", "eval"]


async def test_slow_groups_do_not_trip_the_breaker():
    ending = Ending()
    ending.end("over_rollout")
    Breaker(1).check(await play(limits=RunLimits(600.0), ending=ending))
    batch = Batch(
        0, ExplorerSettings(tasksets=(), batch_size=4, over_rollout=0.5, wait_after_s=0.0)
    )
    assert batch.replacement(0) == 4
    batch.ending.end("over_rollout")
    assert batch.replacement(4) is None


async def test_a_slow_engine_is_named_and_the_log_says_so_at_its_interval(world, monkeypatch):
    said = asyncio.Queue()
    monkeypatch.setattr(
        "rft.explorer.explorer.log.info", lambda form, *given: said.put_nowait(form % given)
    )
    world.engine.hold()
    explorer = world.explorer(total_batches=1, report_interval_s=0.01, max_concurrent_runs=3)
    job = asyncio.ensure_future(explorer.run())
    await world.engine.waiting(3)
    assert (
        sentence(activities())
        == "explore step 1: 0 of 2 groups, 0 s; 3 runs wait for workflow simple_workflow, 0 s"
    )
    assert [a.text for a in activities() if a.idle] == [
        "runs wait for room beside 3 others (explorer.max_concurrent_runs)"
    ]
    while "3 runs wait for workflow" not in await said.get():
        pass
    world.engine.release()
    await job
    assert activities() == []


@reward("test_limits_judge")
class SlowJudge(Judge):
    def prompt(self, case, delimit):
        return delimit("answer", case.answer) + delimit.ask(score=self.scale)


async def test_a_judge_that_does_not_answer_is_named_before_any_group_is_stored(world):
    """N2: a run whose judge was slow said nothing: what it waited for was said only after a group
    was stored.
    """
    judge = ScriptedEngine(answer=lambda messages: "no verdict")
    judge.hold()
    taskset = world.taskset(
        reward="test_limits_judge", num_runs=4, reward_args={"max_retries": 0, "max_concurrent": 2}
    )
    explorer = world.explorer(
        tasksets=(taskset,), models={"judge": EnginePool([judge])}, batch_size=2, total_batches=1
    )
    job = asyncio.ensure_future(explorer.run())
    await judge.waiting(2)
    assert (
        sentence(activities())
        == "explore step 1: 0 of 2 groups, 0 s; 8 questions wait for judge test_limits_judge, 0 s"
    )
    assert world.buffer.groups == []
    judge.release()
    with pytest.raises(ShortBatch):  # nothing was scored
        await job


async def test_an_engine_that_answers_nothing_any_more_ends_the_run_with_its_reason(world):
    """It is not dead, so nothing restarts it: its runs pass their deadline, and the run stops
    instead of waiting for ever.
    """
    world.engine.hold()
    with pytest.raises(
        RunFailed, match=r"2 groups in a row failed completely.*took longer than 0\.05 s"
    ):
        await world.explorer(
            total_batches=9, max_timeout_s=0.05, max_retry_times=0, breaker=2, batch_size=1
        ).run()
    world.engine.release()


async def test_the_stop_tells_the_cause_not_a_run_that_was_ended_for_it() -> None:
    """Run 0 hangs until the others of its task have failed; their error is what a person needs."""
    group = await play(limits=RunLimits(600.0, stop_hopeless=True), stuck=[0], broken=[1, 2, 3])
    assert group.rows[0].reason.startswith("ended: "), group.rows[0].reason
    with pytest.raises(RunFailed, match=r"(?s)1 groups in a row.*broken on purpose"):
        Breaker(1).check(group)
