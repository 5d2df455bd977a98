"""Operators between explorer and buffer: what they reject is replaced, everything is stored and
accounted for, faults end by a rule.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter

import msgspec
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.operators.base import Operator, Result, operator
from rft.buffer.settings import BufferSettings, OperatorSettings, PipelineSettings
from rft.engine.scripted import ScriptedEngine
from rft.errors import RunFailed, ShortBatch
from rft.plugins import REGISTRY
from rft.reward.base import reward
from rft.types.block import decode
from rft.types.completion import Score
from rft.types.metrics import Metric
from rft.types.ports import GenerateRequest
from rft.workflow.base import Workflow, workflow


@pytest.fixture(autouse=True)
async def deadline():
    async with asyncio.timeout(120):
        yield


@pytest.fixture
async def buffer(tmp_path):
    made = Buffer(BufferSettings(folder=tmp_path / "buffer", on_short_batch="train"))
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def plugin():
    """Marks an operator for one test."""
    names = []

    def mark(cls):
        names.append(f"test_{cls.__name__.lower()}")
        operator(names[-1])(cls)
        return names[-1]

    yield mark
    for name in names:
        del REGISTRY._plugins["operator", name]


def pipeline(*operators, **more):
    named = [(o, {}) if isinstance(o, str) else o for o in operators]
    return PipelineSettings(
        operators=tuple(
            OperatorSettings(name=n, args=a, key=f"o[{i}]") for i, (n, a) in enumerate(named)
        ),
        **more,
    )


def mixed(world, right=(), wrong=()):
    """Runs of a task are right and wrong in turn; those of the rows in `right` and `wrong` are all
    the same.
    """
    asked = Counter()

    def answer(messages):
        n = int(messages[-1]["content"][0])
        asked[n] += 1
        return str(2 * n) if n in right or (n not in wrong and asked[n] % 2) else "no"

    world.engine.answer = answer


async def test_what_dapo_rejects_is_replaced_and_all_of_it_is_accounted_for(
    world, buffer, tmp_path
):
    mixed(world, right={0, 3}, wrong={1})
    lineage = (await buffer.start_lineage(None, None)).lineage
    world.buffer = buffer.writer(lineage)
    copy = tmp_path / "copy.jsonl"
    settings = {
        "tasksets": (world.taskset(num_runs=4),),
        "batch_size": 2,
        "total_batches": 2,
        "max_refill": 8,
    }
    await world.explorer(
        lineage=lineage,
        pipeline=pipeline("pass_rate_calculator", "dapo_dynamic_sampling", input_path=copy),
        **settings,
    ).run()
    started = len(world.engine.calls)
    metrics = world.sink.of("explorer")
    groups = sum(
        m["rollout/groups/accepted"] + m["rollout/groups/rejected"] for m in metrics.values()
    )
    rejected = int(sum(m["rollout/groups/rejected"] for m in metrics.values()))
    assert rejected >= 3 and started == 4 * groups
    assert [m["rollout/groups/accepted"] for m in metrics.values()] == [2, 2]
    for m in metrics.values():
        p = {
            k.removeprefix("experience_pipeline/"): v
            for k, v in m.items()
            if k.startswith("experience_pipeline/")
        }
        assert (
            p["experience_count"] == 8 and p["filtered_count"] == 4 * m["rollout/groups/rejected"]
        )
        assert p["filtered_count"] == p["dropped_all_correct"] + p["dropped_all_wrong"]
        assert p["selection/valid_ratio"] == 2 / (2 + m["rollout/groups/rejected"])
        assert {
            "time/operator/0_pass_rate_calculator",
            "time/operator/1_dapo_dynamic_sampling",
            "time/write",
            "time/total",
        } <= p.keys()
        assert p["time/total"] >= p["time/write"] > 0
    reader = buffer.reader(lineage)
    lease = await reader.lease(1, groups=2, rows=None, deadline_s=10, max_staleness=None)
    assert len(decode(lease.frame)) == 8 and all(g.std > 0 for g in lease.groups)
    await reader.use(1)
    await reader.lease(2, groups=1, rows=None, deadline_s=10, max_staleness=None)
    audit = await buffer.audit()
    assert audit.ok and (audit.used, audit.leased, audit.available) == (8, 4, 4)
    assert audit.discarded == {"filtered": 4 * rejected}
    assert (
        audit.acked
        == started
        == audit.used + audit.leased + audit.available + sum(audit.discarded.values())
    )
    assert len(copy.read_text().splitlines()) == started
    with sqlite3.connect(next((tmp_path / "buffer").glob("*.db"))) as db:
        found = db.execute(
            "SELECT explained, reason, status, count(*) FROM experiences WHERE dropped IS NOT NULL "
            "GROUP BY 1, 2, 3"
        )
        assert found.fetchall() == [("filtered", "dapo_dynamic_sampling", "complete", 4 * rejected)]
        (reasons,) = db.execute("SELECT reasons FROM batches ORDER BY batch LIMIT 1").fetchone()
        assert set(json.loads(reasons)) == {"filtered by dapo_dynamic_sampling"}
    db.close()


async def test_what_was_filtered_is_not_played_again(world, buffer):
    """A restarted explorer knows rejected groups from the buffer, and goes on with the next
    candidate of their place.
    """
    mixed(world, right={0, 2, 4})
    lineage = (await buffer.start_lineage(None, None)).lineage
    world.buffer = buffer.writer(lineage)
    settings = {"lineage": lineage, "max_refill": 20, "pipeline": pipeline("dapo_dynamic_sampling")}
    await world.explorer(total_batches=1, **settings).run()
    played, audit = len(world.engine.calls), await buffer.audit()
    assert played > 4 and audit.acked == played
    await world.explorer(total_batches=1, **settings).run()
    assert len(world.engine.calls) == played and await buffer.audit() == audit


async def test_rows_that_are_dropped_count_in_the_leased_statistics(world, buffer):
    mixed(world)
    lineage = (await buffer.start_lineage(None, None)).lineage
    world.buffer = buffer.writer(lineage)
    await world.explorer(
        lineage=lineage,
        total_batches=1,
        tasksets=(world.taskset(num_runs=4),),
        pipeline=pipeline(("reward_filter", {"threshold": 0.5})),
    ).run()
    lease = await buffer.reader(lineage).lease(
        1, groups=2, rows=None, deadline_s=10, max_staleness=None
    )
    assert [r.reward for r in decode(lease.frame)] == [1.0] * 4
    assert [(g.mean, len(g.rewards)) for g in lease.groups] == [(0.5, 4)] * 2
    assert (await buffer.audit()).discarded == {"filtered": 4}


async def test_a_row_without_a_trained_token_is_explained(world, buffer):
    mixed(world)
    lineage = (await buffer.start_lineage(None, None)).lineage
    world.buffer = buffer.writer(lineage)
    sampling = msgspec.structs.replace(world.taskset().sampling, max_tokens=1)
    await world.explorer(
        lineage=lineage,
        total_batches=1,
        max_refill=0,
        on_short_batch="train",
        tasksets=(world.taskset(num_runs=2, sampling=sampling),),
        pipeline=pipeline("mask_response_truncated"),
    ).run()
    audit = await buffer.audit()
    assert audit.ok and audit.discarded == {"filtered": 4}
    assert world.sink.of("explorer")[1]["experience_pipeline/masked_truncated_count"] == 4


async def test_refills_end_by_the_rule_and_name_the_operator(world):
    mixed(world, right=set(range(8)))
    with pytest.raises(
        ShortBatch,
        match=r"only 0 of 2 groups can be trained \(5 filtered by dapo_dynamic_sampling\), and all "
        r"3 refills",
    ):
        await world.explorer(max_refill=3, pipeline=pipeline("dapo_dynamic_sampling")).run()
    assert all(reason == "filtered" and not accepted for _, accepted, reason in world.buffer.groups)


async def test_a_group_that_breaks_an_operator_fails_with_the_traceback_and_is_replaced(
    world, plugin
):
    class Picky(Operator):
        stage = "drop"

        async def process(self, rows, group):
            if group.task.index == 1:
                raise KeyError("no such column")
            return Result(rows)

    @workflow("test_two_rows")
    class TwoRows(Workflow):
        async def run(self, task, ctx):
            for _ in range(2):
                await ctx.chat(task.chat())
            return ctx.transcript(layout="steps")

    tasks = (world.taskset(workflow="test_two_rows"),)
    await world.explorer(tasksets=tasks, total_batches=1, pipeline=pipeline(plugin(Picky))).run()
    (bad,) = [(rows, reason) for rows, accepted, reason in world.buffer.groups if not accepted]
    assert bad[1] == "operator" and [r.status for r in bad[0]] == ["failed"] * 2
    assert bad[0][0].reason == "operator test_picky raised KeyError: 'no such column'"
    assert 'raise KeyError("no such column")' in bad[0][0].info["traceback"]
    assert world.buffer.closed == [(0, 2, 2, {"operator": 1})]
    m = world.sink.of("explorer")[1]
    assert m["experience_pipeline/failed_count"] == 2, "runs, of two rows each"
    assert m["rollout/failed"] == 0 and m["rollout/groups/rejected"] == 1


async def test_an_operator_that_always_breaks_stops_the_run(world):
    shaping = (
        "reward_shaping_mapper",
        {"reward_shaping_configs": [{"stats_key": "qualty", "op_type": "ADD"}]},
    )
    with pytest.raises(
        RunFailed,
        match=r"\d groups in a row failed completely[\s\S]*has no 'qualty' to shape its reward "
        r"by[\s\S]*built_in_operators.py",
    ):
        await world.explorer(breaker=4, max_refill=20, pipeline=pipeline(shaping)).run()


async def test_an_operator_that_breaks_its_contract_stops_the_run_at_once_and_is_closed(
    world, plugin
):
    closed = []

    class Copies(Operator):
        stage = "drop"

        def process(self, rows, group):
            return Result([*rows, rows[0]])

        async def close(self):
            closed.append(True)

    with pytest.raises(
        RunFailed, match=r"operator test_copies returned .* twice; rows are never copied"
    ):
        await world.explorer(pipeline=pipeline(plugin(Copies))).run()
    assert closed == [True] and not world.buffer.groups


@pytest.mark.parametrize("judge", ["rollout_model", "referee"])
async def test_an_operator_may_ask_the_policy_or_another_model_to_judge(world, plugin, judge):
    class Asks(Operator):
        stage = "reward"

        async def prepare(self, models):
            self.model = models[judge]

        async def process(self, rows, group):
            async def judged(row):
                question = {"role": "user", "content": f"judge {row.response_text}"}
                (verdict,) = await self.model.generate(GenerateRequest(messages=(question,)))
                return msgspec.structs.replace(
                    row, reward=float(verdict.text == "good"), info={"verdict": verdict.text}
                )

            judged_rows = await asyncio.gather(*map(judged, rows))
            return Result(judged_rows, [Metric("judged", len(rows), "sum")])

    said = iter(["good", "bad"] * 10)
    world.engine.answer = lambda m: next(said) if m[-1]["content"].startswith("judge") else "0"
    beside = {"referee": ScriptedEngine(answer=lambda m: next(said))} if judge == "referee" else {}
    await world.explorer(total_batches=1, pipeline=pipeline(plugin(Asks)), models=beside).run()
    assert sorted(r.reward for r in world.buffer.rows) == [0.0, 0.0, 1.0, 1.0]
    assert {r.info["verdict"] for r in world.buffer.rows} == {"good", "bad"}
    m = world.sink.of("explorer")[1]
    # as played: 0+0 is 0, 1+1 is not
    assert m["experience_pipeline/judged"] == 4 and m["rollout/reward/mean"] in (0.25, 0.5)


async def test_without_operators_nothing_is_reported(world):
    await world.explorer(total_batches=1).run()
    assert not [k for k in world.sink.of("explorer")[1] if k.startswith("experience_pipeline/")]


@workflow("test_pipeline_one_breaks")
class OneBreaks(Workflow):
    """The first run of the first task fails; where `greedy` is asked for, that run of it alone."""

    def __init__(self, greedy: bool = False) -> None:
        self.greedy = greedy

    async def run(self, task, ctx):
        if task.index == 0 and ctx.run == 0 and (not self.greedy or task.sampling.temperature == 0):
            raise ValueError("broken on purpose")
        await ctx.chat(task.chat())
        return ctx.transcript()


@pytest.mark.parametrize("operators", [(), ("pass_rate_calculator",)])
@pytest.mark.parametrize(
    ("more", "greedy", "reason"),
    [({"whole_groups": True}, False, "too_few"), ({"baseline": True}, True, "no_baseline")],
)
async def test_operators_do_not_make_a_rejected_group_trainable(
    world, operators, more, greedy, reason
):
    tasksets = (
        world.taskset(
            num_runs=4, workflow="test_pipeline_one_breaks", workflow_args={"greedy": greedy}
        ),
    )
    await world.explorer(
        total_batches=1, tasksets=tasksets, pipeline=pipeline(*operators), **more
    ).run()
    assert world.buffer.closed == [(0, 2, 2, {reason: 1})]
    (rejected,) = [(rows, why) for rows, accepted, why in world.buffer.groups if not accepted]
    assert rejected[1] == reason and rejected[0][0].task_index == 0


@reward("test_pipeline_says_nothing")
async def says_nothing(task, transcript):
    return Score(value=None)


async def test_a_reward_of_an_operator_makes_a_group_trainable(world, plugin):
    """Runs without a score are not lost: the others of their group go on, and an operator scores
    them.
    """

    class Scores(Operator):
        stage = "reward"

        async def process(self, rows, group):
            return Result([msgspec.structs.replace(r, reward=1.0) for r in rows])

    tasksets = (
        world.taskset(
            num_runs=4, reward="test_pipeline_says_nothing", workflow="test_pipeline_one_breaks"
        ),
    )
    settings = {
        "total_batches": 1,
        "tasksets": tasksets,
        "stop_hopeless": True,
        "max_concurrent_runs": 1,
    }
    await world.explorer(pipeline=pipeline(plugin(Scores)), **settings).run()
    assert world.buffer.closed == [(0, 2, 2, {})], "3 of 4 runs are enough"
    assert sum(r.trainable for r in world.buffer.rows) == 7
