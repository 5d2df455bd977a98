from __future__ import annotations

import asyncio
import threading

import pytest

from rft.buffer.settings import PipelineSettings
from rft.engine.scripted import ScriptedEngine
from rft.errors import (
    ConfigError,
    EngineFailed,
    FrameRejected,
    RunFailed,
    ShortBatch,
    WeightSyncFailed,
)
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Batch
from rft.reward.base import reward
from rft.types.block import decode, encode
from rft.types.completion import Score
from rft.types.experience import failed
from rft.types.ids import GroupId, Version
from rft.types.ports import StoredGroup
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import Workflow, workflow
from rft.workflow.group import PlayedGroup
from rft.workflow.play_run import PlayedRun

DEADLINE_S = 20


@pytest.fixture(autouse=True)
async def deadline():
    async with asyncio.timeout(DEADLINE_S):
        yield


async def test_batches_are_played_appended_closed_and_reported(world):
    await world.explorer().run()
    assert [
        (r.id.batch, r.id.task, r.id.run) for r in sorted(world.buffer.rows, key=lambda r: r.id)
    ] == [(b, t, r) for b in range(3) for t in range(2) for r in range(2)]
    assert world.buffer.closed == [(b, 2, 2, {}) for b in range(3)]
    assert world.gate.explored_batches == [0, 1, 2]
    assert world.buffer.finished == "all 3 explore batches are in the buffer"
    metrics = world.sink.of("explorer")
    assert list(metrics) == [1, 2, 3]
    # "0+0?" is answered "0", "1+1?" is answered "1"
    assert metrics[1]["rollout/reward/mean"] == 0.5
    assert (
        metrics[1]["rollout/sums/reward/mean"] == 0.5 and metrics[1]["rollout/groups/accepted"] == 2
    )
    assert (
        metrics[1]["rollout/response_length/mean"] == 2
        and metrics[1]["rollout/truncated_ratio"] == 0
    )
    assert metrics[1]["frac_reward_zero_std"] == 1.0 and metrics[1]["rollout/failed"] == 0


async def test_detailed_stats_are_percentiles(world):
    await world.explorer(percentiles=True).run()
    metrics = world.sink.of("explorer")[1]
    assert (
        metrics["rollout/reward/p10"],
        metrics["rollout/reward/p50"],
        metrics["rollout/reward/p90"],
    ) == (0.0, 0.5, 1.0)
    assert metrics["rollout/response_length/p50"] == 2 and "rollout/prompt_length/p90" in metrics
    assert metrics["rollout/time/run/p10"] <= metrics["rollout/time/run/p90"]


async def test_number_of_batches_follows_the_epochs(world):
    await world.explorer(total_batches=None, total_epochs=1).run()
    assert [b for b, *_ in world.buffer.closed] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="do not fill one batch of 9"):
        world.explorer(total_batches=None, total_epochs=1, batch_size=9)


async def test_the_gate_decides_when_a_batch_starts_and_when_all_is_over(world):
    world.gate.limit = 1
    job = asyncio.ensure_future(world.explorer(total_batches=None, total_epochs=None).run())
    await world.gate.until_explored(0)
    assert len(world.engine.calls) == 4
    await world.gate.open(2)
    await world.gate.until_explored(1)
    await world.gate.open(2, finished=True)
    await job
    assert world.buffer.finished == "the trainer is finished" and len(world.engine.calls) == 8


async def test_a_slow_group_does_not_hold_up_the_next_batch_but_its_closing(world):
    """Batch 0 is submitted and held in the engine; batch 1 starts; batches are closed in order."""
    world.engine.hold()
    job = asyncio.ensure_future(world.explorer(total_batches=2).run())
    await world.engine.waiting(8)
    assert world.buffer.closed == []
    world.engine.release()
    await job
    assert [b for b, *_ in world.buffer.closed] == [0, 1]


async def test_runs_in_flight_are_bounded(world):
    world.engine.hold()
    job = asyncio.ensure_future(world.explorer(max_concurrent_runs=3, total_batches=2).run())
    await world.engine.waiting(3)
    assert len(world.engine.calls) == 3
    world.engine.release()
    await job
    assert len(world.engine.calls) == 8


async def test_rows_wait_until_their_version_is_proven(world):
    world.gate.unproven = {Version(1, 0)}
    asked = asyncio.Event()
    real = world.gate.wait_verified

    async def wait_verified(version):
        asked.set()
        return await real(version)

    world.gate.wait_verified = wait_verified
    job = asyncio.ensure_future(world.explorer(total_batches=1).run())
    await asked.wait()
    assert world.buffer.groups == []
    await world.gate.prove(Version(1, 0))
    await job
    assert len(world.buffer.groups) == 2


async def test_rows_of_weights_that_failed_their_canary_never_train_and_are_replaced(world):
    """The rows are kept as failed runs with the reason; the batch goes on with other tasks under
    the next attempt.
    """
    failed = Version(1, 0)
    good = Version(1, 0, 1)
    world.gate.rejected = {failed}
    world.engine.version = failed
    world.gate.unproven = {failed}
    job = asyncio.ensure_future(world.explorer(total_batches=1, breaker=1).run())
    await world.gate.until_asked(failed)
    world.engine.version = good
    await world.gate.prove(failed)
    await job
    kept = {
        accepted: [rows for rows, a, _ in world.buffer.groups if a is accepted]
        for accepted in (True, False)
    }
    assert [len(groups) for groups in kept.values()] == [2, 2]
    assert {s.version for rows in kept[True] for r in rows for s in r.version_spans} == {good}
    assert {(r.status, r.reward) for rows in kept[False] for r in rows} == {("failed", None)}
    assert all("1:0 failed their canary" in r.reason for rows in kept[False] for r in rows)
    assert world.buffer.closed == [(0, 2, 2, {"rejected_weights": 2})]


async def test_a_failed_weight_sync_stops_the_run(world):
    world.gate.broken = "canary: off by 0.9"
    with pytest.raises(WeightSyncFailed, match="off by 0"):
        await world.explorer().run()
    assert world.buffer.groups == [] and world.buffer.finished is None


async def test_a_dead_engine_stops_the_run(world):
    world.engine.die()
    with pytest.raises(EngineFailed, match="killed by the test"):
        await world.explorer().run()


async def test_rejected_groups_are_replaced(world):
    @reward("test_unscored_zero")
    def unscored_zero(task, transcript):
        return Score(value=None if task.index == 0 else 1.0)

    await world.explorer(
        tasksets=(world.taskset(reward="test_unscored_zero"),), total_batches=1
    ).run()
    rejected = [
        (rows[0].id.task, reason) for rows, accepted, reason in world.buffer.groups if not accepted
    ]
    assert rejected == [(0, "unscored")]
    assert sorted(rows[0].id.task for rows, accepted, _ in world.buffer.groups if accepted) == [
        1,
        2,
    ]
    assert world.buffer.closed == [(0, 2, 2, {"unscored": 1})]
    assert world.sink.of("explorer")[1]["rollout/groups/rejected"] == 1
    assert next(r for r in world.buffer.rows if r.id.task == 2).task_index not in (0, 1)


async def test_a_short_batch_stops_the_run_or_not(world):
    @reward("test_never")
    def never(task, transcript):
        return Score(value=None)

    tasksets = (world.taskset(reward="test_never"),)
    with pytest.raises(
        ShortBatch,
        match=r"batch 0: only 0 of 2 groups can be trained \(6 unscored\), and all 4 refills are "
        r"used up",
    ):
        await world.explorer(tasksets=tasksets, max_refill=4, breaker=50).run()
    assert world.buffer.closed == [(0, 0, 2, {"unscored": 6})]
    world.buffer.closed.clear()
    await world.explorer(
        tasksets=tasksets, max_refill=0, on_short_batch="carry", total_batches=2, breaker=50
    ).run()
    assert world.buffer.closed == [(0, 0, 2, {"unscored": 2}), (1, 0, 2, {"unscored": 2})]


async def test_a_short_batch_goes_on_with_more_refills(world):
    """What it has rejected is held when the run goes on, and counts as refills, so a correction
    alone changes nothing.
    """
    world.buffer._held = [StoredGroup(0, task, False) for task in range(5)]
    with pytest.raises(
        ShortBatch,
        match=r"\(4 held\), and all 2 refills are used up.*raise buffer\.max_refill .a resumed run "
        r"repeats only groups without a",
    ):
        await world.explorer(max_refill=2).run()
    assert world.buffer.groups == []
    await world.explorer(max_refill=5, total_batches=1).run()
    assert world.buffer.closed[-1] == (0, 2, 2, {"held": 5})


async def test_groups_without_a_reward_are_told_once_and_trip_the_breaker(world):
    tasksets = (world.taskset(reward="test_never"),)
    with pytest.raises(RunFailed, match="3 groups in a row got no reward, so the run stops"):
        await world.explorer(tasksets=tasksets, breaker=3, batch_size=1).run()
    (note,) = [n for r in world.sink.records for n in r.notes]
    assert note.startswith("group 0001.00.00000000.000000 cannot be trained: unscored")


@workflow("test_raises_always")
class RaisesAlways(Workflow):
    async def run(self, task, ctx):
        raise ZeroDivisionError("my bug")


async def test_a_workflow_that_raises_every_time_trips_the_breaker(world):
    tasksets = (world.taskset(workflow="test_raises_always"),)
    with pytest.raises(RunFailed, match="5 groups in a row failed completely") as caught:
        await world.explorer(tasksets=tasksets, breaker=5, batch_size=2).run()
    assert 'raise ZeroDivisionError("my bug")' in str(caught.value)
    assert {r.status for r in world.buffer.rows} == {"failed"}
    with pytest.raises(ShortBatch, match="my bug"):
        await world.explorer(tasksets=tasksets, breaker=50, batch_size=1).run()


async def test_resume_skips_what_the_buffer_holds(world):
    world.buffer._held = [
        StoredGroup(1, 0, True),
        StoredGroup(1, 1, False),  # rejected before; so was its first replacement
        StoredGroup(1, 3, False),
        StoredGroup(2, 0, True),
        StoredGroup(2, 1, True),
    ]
    await world.explorer(cursor=1, lineage=2).run()
    assert [str(rows[0].id.group) for rows, *_ in world.buffer.groups] == [
        "0002.00.00000001.000005"
    ]
    assert [(b, n) for b, n, *_ in world.buffer.closed] == [(1, 2), (2, 2)]


async def test_resumed_and_uninterrupted_runs_play_the_same_tasks(world, tmp_path):
    def places():
        return {(r.id.batch, r.id.task): r.task_index for r in world.buffer.rows}

    settings = {"tasksets": (world.taskset(selector="shuffle"),), "total_batches": 6}
    await world.explorer(**settings).run()
    whole = places()
    world.buffer.groups.clear()
    await world.explorer(**settings, cursor=3).run()
    assert places() == {k: v for k, v in whole.items() if k[0] >= 3}


async def test_deterministic_runs_submit_in_id_order_with_fixed_seeds(world):
    settings = {"deterministic": True, "total_batches": 2, "tasksets": (world.taskset(num_runs=4),)}
    await world.explorer(**settings).run()
    first = [(c.request_id, c.sampling.seed) for c in world.engine.calls]
    assert [r for r, _ in first] == sorted(r for r, _ in first) and len({s for _, s in first}) == 16
    world.engine.calls.clear()
    await world.explorer(**settings, lineage=2).run()
    assert [c.sampling.seed for c in world.engine.calls] == [s for _, s in first]


async def test_stop_gives_up_what_is_in_flight(world):
    explorer = world.explorer()
    world.engine.hold()
    job = asyncio.ensure_future(explorer.run())
    await world.engine.waiting(4)
    await explorer.stop()
    await job
    assert (
        world.buffer.groups == []
        and world.buffer.finished is None
        and world.gate.explored_batches == []
    )
    late = world.explorer()
    await late.stop()
    await late.run()
    assert world.buffer.groups == []


async def test_cancelling_run_cancels_everything(world):
    world.engine.hold()
    before = asyncio.all_tasks()
    job = asyncio.ensure_future(world.explorer().run())
    await world.engine.waiting(4)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    world.engine.release()
    assert asyncio.all_tasks() == before


@pytest.mark.e2e
async def test_one_stuck_run_holds_up_nobody_else(world):
    """31 of 32 runs answer; the last blocks a thread for ever.  It ends as a failed row at its
    deadline.
    """
    free = threading.Event()
    played: list[int] = []

    @workflow("test_one_hangs")
    class OneHangs(Workflow):
        def run(self, task, ctx):
            played.append(ctx.run)
            if len(played) == 32:
                free.wait()
            ctx.chat(task.chat())
            return ctx.transcript()

    tasksets = (world.taskset(workflow="test_one_hangs", num_runs=8),)
    await world.explorer(tasksets=tasksets, batch_size=4, total_batches=1, max_timeout_s=1.5).run()
    free.set()
    rows = world.buffer.rows
    assert sorted(r.status for r in rows) == ["complete"] * 31 + ["failed"]
    assert next(r.reason for r in rows if r.status == "failed").startswith(
        "timeout: workflow test_one_hangs took longer than 1.5 s"
    )
    assert all(accepted for _, accepted, _ in world.buffer.groups)


async def test_evaluation_before_during_and_after(world):
    evals = (
        world.taskset("held", num_runs=2, max_rows=4),
        world.taskset("greedy", num_runs=1, max_rows=2, sampling=SamplingArgs(temperature=0)),
    )
    await world.explorer(eval_tasksets=evals, eval_interval=2, total_batches=3).run()
    held = [
        (r.step, r.values)
        for r in world.sink.records
        if r.role == "eval" and "eval/held/mean@2" in r.values
    ]
    assert [s for s, _ in held] == [0, 2, 99]
    values = held[0][1]
    assert (
        values["eval/held/mean@2"]
        == values["eval/held/best@2"]
        == values["eval/held/pass@2"]
        == 0.25
    )  # only 0+0 is answered right
    assert (
        values["eval/held/failed"] == 0
        and values["eval/held/runs"] == 8
        and values["eval/held/std@2"] == 0
    )
    assert any(r.values.get("eval/greedy/greedy") == 0.5 for r in world.sink.records)
    name, step, table = world.sink.tables[0]
    assert (name, step, len(table)) == ("eval/held", 0, 8)
    assert table[1] == {
        "task": 1,
        "run": 0,
        "prompt": "1+1?",
        "answer": "1",
        "truth": "2",
        "reward": 0.0,
        "status": "complete",
    }
    assert len(world.buffer.rows) == 12  # evaluation is never stored
    assert not {c.request_id for c in world.engine.calls if c.request_id.startswith("eval")} & {
        f"{r.id}-0" for r in world.buffer.rows
    }


async def test_no_startup_evaluation_after_a_resume_or_when_switched_off(world):
    evals = (world.taskset("held"),)
    await world.explorer(eval_tasksets=evals, eval_at_end=False, cursor=1).run()
    await world.explorer(eval_tasksets=evals, eval_at_end=False, eval_on_startup=False).run()
    assert world.sink.of("eval") == {}


async def test_failed_evaluation_runs_have_no_score(world):
    @reward("test_some_fail")
    def some_fail(task, transcript):
        if task.index < 3:
            raise ConnectionError("judge is gone")
        return 1.0

    evals = (world.taskset("held", max_rows=4, reward="test_some_fail"),)
    await world.explorer(eval_tasksets=evals, eval_at_end=False, total_batches=1).run()
    values = world.sink.of("eval")[0]
    assert values["eval/held/mean@2"] == 1.0 and values["eval/held/failed"] == 6
    with pytest.raises(
        RunFailed,
        match=r"evaluation on 'held': all 6 runs ended without a score; the first one: "
        r"ConnectionError: judge is gone",
    ):
        await world.explorer(
            eval_tasksets=(world.taskset("held", max_rows=3, reward="test_some_fail"),)
        ).run()


async def test_rows_the_buffer_refuses_become_failed_records(world):
    store = world.buffer.append

    async def append(frame, *, accepted, reason=""):
        if any(r.id.task == 1 and r.num_tokens for r in decode(frame)):
            raise FrameRejected("too_large: 40 MB")
        return await store(frame, accepted=accepted, reason=reason)

    world.buffer.append = append
    await world.explorer(total_batches=1).run()
    assert world.buffer.closed == [(0, 2, 2, {"rejected": 1})]
    refused = [r for r in world.buffer.rows if r.id.task == 1]
    assert [(r.status, r.reason) for r in refused] == [
        ("failed", "rejected by the buffer: too_large: 40 MB")
    ] * 2
    assert sorted({r.id.task for r in world.buffer.rows}) == [0, 1, 3]


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800"])
@pytest.mark.parametrize("copied", [False, True])
async def test_values_that_cannot_be_stored_become_failed_records(world, tmp_path, value, copied):
    @workflow("test_unstorable")
    class Unstorable:
        async def run(self, task, ctx):
            await ctx.chat(
                [{"role": "user", "content": "?", **({"meta": value} if task.index == 1 else {})}]
            )
            return ctx.transcript(score=Score(value=1.0))

    copy = PipelineSettings(input_path=tmp_path / "copy.jsonl" if copied else None)
    await world.explorer(
        tasksets=(world.taskset(workflow="test_unstorable", reward=None),),
        total_batches=1,
        pipeline=copy,
    ).run()
    assert world.buffer.closed == [(0, 2, 2, {"rejected": 1})]
    refused = [r for r in world.buffer.rows if r.id.task == 1]
    assert {r.status for r in refused} == {"failed"} and all(
        "not_storable: " in r.reason for r in refused
    )


def test_a_refused_group_can_be_stored():
    header = failed(
        GroupId(1, 0, 0, 0).run(0),
        taskset="t",
        task_index=0,
        workflow="w",
        reason="\udc80",
        info={"traceback": "\udc80", "n": 1},
    )
    runs = (PlayedRun((header,), None, 0.0, 0.0, 1),)
    group = PlayedGroup(
        GroupId(1, 0, 0, 0),
        Task(taskset="t", index=0, prompt="?", workflow="w"),
        runs,
        accepted=False,
        reason="failed",
    )
    (row,) = decode(encode(group.refused("why").rows))
    assert row.reason == "\\udc80" and row.info == {"traceback": "\\udc80", "n": 1}


async def test_unknown_names_are_found_before_anything_runs(world):
    with pytest.raises(ConfigError, match="Did you mean exact_answer"):
        world.explorer(tasksets=(world.taskset(reward="exact_answr"),))
    with pytest.raises(ConfigError, match="unknown workflow 'no'"):
        world.explorer(eval_tasksets=(world.taskset("held", workflow="no"),))
    assert world.engine.calls == []


async def test_math_rewards_leave_no_process_behind(world):
    from rft.reward.math import POOL

    world.engine = ScriptedEngine(answer=lambda m: "<answer>4</answer>")
    await world.explorer(tasksets=(world.taskset(reward="math_reward"),), total_batches=1).run()
    assert POOL.pids() == [] and world.sink.of("explorer")[1]["rollout/accuracy/mean"] == 0.0


def test_places_of_a_batch_take_fixed_candidates():
    batch = Batch(
        0,
        ExplorerSettings(tasksets=(), batch_size=3, max_refill=2),
        stored=[StoredGroup(0, 1, False), StoredGroup(0, 2, True)],
    )
    assert [batch.first_task(place) for place in range(3)] == [0, 4, None]
    assert (batch.replacement(4), batch.replacement(0), batch.accepted) == (7, None, 1)
