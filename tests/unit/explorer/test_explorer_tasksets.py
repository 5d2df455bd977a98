"""What tasksets ask of the explorer: a workflow and a reward for each row, the order of evaluation,
feedback, and the same rows again.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.errors import ConfigError
from rft.reward.base import reward
from rft.taskset.settings import FormatSettings
from rft.types.ids import Version
from rft.workflow.base import Workflow, workflow


@workflow("test_says_twice")
class SaysTwice(Workflow):
    async def run(self, task, ctx):
        first = await ctx.chat(task.chat())
        more = [
            *task.chat(),
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "again"},
        ]
        await ctx.chat(more)
        return ctx.transcript()


@reward("test_always_half")
def always_half(task, transcript):
    return 0.5


async def test_two_rows_of_one_file_run_different_workflows_and_rewards(world, tmp_path):
    path = tmp_path / "mixed.jsonl"
    lines = [
        {"prompt": "0+0?", "response": "0", "flow": "simple_workflow", "score": "exact_answer"},
        {"prompt": "1+1?", "response": "2", "flow": "test_says_twice", "score": "test_always_half"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mixed = world.taskset(
        path=str(path), format=FormatSettings(workflow_key="flow", reward_fn_key="score")
    )
    await world.explorer(tasksets=(mixed,), total_batches=1).run()
    found = {(r.task_index, r.workflow, r.reward, len(r.sampling)) for r in world.buffer.rows}
    assert found == {(0, "simple_workflow", 1.0, 1), (1, "test_says_twice", 0.5, 2)}


async def test_evaluation_keeps_its_selectors_order(world):
    held_out = world.taskset("held_out", is_eval=True, num_runs=1, selector="shuffle", seed=5)
    explorer = world.explorer(
        eval_tasksets=(held_out,),
        total_batches=1,
        eval_on_startup=True,
        eval_at_end=False,
        max_concurrent_runs=1,
    )
    await explorer.run()
    asked = [
        c.messages[-1]["content"] for c in world.engine.calls if c.request_id.startswith("eval-")
    ]
    assert sorted(asked) == [f"{i}+{i}?" for i in range(8)] != asked
    (order,) = explorer._evaluator.tasksets.values()
    assert asked == [f"{i}+{i}?" for i in order]


async def test_a_selector_that_learns_hears_of_every_closed_batch_but_the_last_ones(
    world, monkeypatch
):
    rows = [
        {"prompt": f"{i % 2}+0?", "response": "0", "weak": i / 40, "strong": i / 20}
        for i in range(20)
    ]
    world._file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    chosen = {"selector": "difficulty_based", "feature_keys": ("weak", "strong")}
    explorer = world.explorer(
        tasksets=(world.taskset(**chosen),), batch_size=3, total_batches=6, feedback_lag=2
    )
    heard = []
    learn = explorer.order.learn
    monkeypatch.setattr(
        explorer.order,
        "learn",
        lambda n, o: (heard.append((n, sorted((x.index, x.pass_rate) for x in o))), learn(n, o)),
    )
    await explorer.run()
    assert [n for n, _ in heard] == [0, 1, 2]
    for n, outcomes in heard:
        rewards = {r.task_index: r.reward for r in world.buffer.rows if r.id.batch == n}
        assert outcomes == sorted(rewards.items()) and set(rewards.values()) <= {0.0, 1.0}


async def test_other_rows_are_refused_where_a_run_goes_on(world, tmp_path):
    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await buffer.open()
    try:
        async with asyncio.timeout(120):
            lineage = (await buffer.start_lineage(None, None)).lineage
            world.buffer = buffer.writer(lineage)
            await world.explorer(lineage=lineage).run()
            reader = buffer.reader(lineage)
            await reader.lease(1, groups=2, rows=None, deadline_s=5, max_staleness=None)
            await reader.use(1)
            found = await reader.consumption(1)
            world._file.write_text(world._file.read_text().replace("7+7?", "9+9?"))
            lineage = (await buffer.start_lineage(Version(lineage, 1), found)).lineage
            world.buffer = buffer.writer(lineage)
            with pytest.raises(
                ConfigError, match="the rows of sums are not those that the run has explored so far"
            ):
                await world.explorer(lineage=lineage, cursor=1).run()
            world._file.write_text(world._file.read_text().replace("9+9?", "7+7?"))
            await world.explorer(lineage=lineage, cursor=1).run()
            lineage = (await buffer.start_lineage(None, None)).lineage
            await buffer.writer(lineage).check_taskset_fingerprints({"other": "rows"})
    finally:
        await buffer.close()


async def test_other_rows_of_an_evaluation_are_told_where_a_run_goes_on(world, tmp_path):
    """Its curve goes on, with values of two sets of rows."""
    held = tmp_path / "held.jsonl"
    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await buffer.open()

    async def told(parent, rows, names=("held",)):
        held.write_text(
            "".join(json.dumps({"prompt": f"{n}+1?", "response": str(n + 1)}) + "\n" for n in rows)
        )
        lineage = (await buffer.start_lineage(*parent)).lineage
        world.buffer = buffer.writer(lineage)
        world.sink.records = []
        cursor = parent[1].cursor if parent[1] else 0
        evals = tuple(world.taskset(name, path=str(held), is_eval=True) for name in names)
        await world.explorer(
            lineage=lineage, cursor=cursor, eval_tasksets=evals, eval_on_startup=False
        ).run()
        return lineage, [note for r in world.sink.records for note in r.notes]

    try:
        async with asyncio.timeout(120):
            lineage, notes = await told((None, None), range(3))
            reader = buffer.reader(lineage)
            await reader.lease(1, groups=2, rows=None, deadline_s=5, max_staleness=None)
            await reader.use(1)
            parent = (Version(lineage, 1), await reader.consumption(1))
            assert notes == []
            assert (await told(parent, range(3), ("held", "new")))[1] == []
            assert (await told(parent, range(4)))[1] == [
                "the rows of held are not those of earlier evaluations: do not compare their "
                "values with later ones"
            ]
            assert (await told(parent, range(4)))[1] == [], "told once"
            anew = buffer.writer((await buffer.start_lineage(None, None)).lineage)
            assert await anew.check_taskset_fingerprints({"eval/held": "other rows"}) == [], (
                "no value is left to compare with"
            )
    finally:
        await buffer.close()


async def test_a_mark_that_an_earlier_version_made_is_the_end_of_todays(tmp_path):
    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await buffer.open()
    try:
        first = buffer.reader((await buffer.start_lineage(None, None)).lineage)
        await buffer.writer(1).check_taskset_fingerprints({"sums": "sample", "eval/held": "sample"})
        parent = (Version(1, 0), await first.consumption(0))
        writer = buffer.writer((await buffer.start_lineage(*parent)).lineage)
        assert (
            await writer.check_taskset_fingerprints(
                {"sums": "whole-sample", "eval/held": "whole-sample"}
            )
            == []
        )
        writer = buffer.writer((await buffer.start_lineage(*parent)).lineage)
        with pytest.raises(ConfigError, match="the rows of sums are not"):
            await writer.check_taskset_fingerprints(
                {"sums": "other-sample", "eval/held": "whole-sample"}
            )
        with pytest.raises(ConfigError, match="the rows of more, sums are not"):
            await writer.check_taskset_fingerprints({"more": "rows"})
        assert await writer.check_taskset_fingerprints(
            {"sums": "whole-sample", "eval/held": "other-sample"}
        ) == ["held"]
    finally:
        await buffer.close()


async def test_other_rows_are_refused_where_those_of_an_attempt_without_a_checkpoint_are_kept(
    tmp_path,
):
    buffer = Buffer(BufferSettings(folder=tmp_path / "buffer", resume_rows="keep"))
    await buffer.open()
    try:
        for rows in ("old", "old", "new"):
            writer = buffer.writer((await buffer.start_lineage(None, None)).lineage)
            if rows == "new":
                with pytest.raises(
                    ConfigError, match="the rows of sums are not those that the run has explored"
                ):
                    await writer.check_taskset_fingerprints({"sums": rows})
            else:
                assert await writer.check_taskset_fingerprints({"sums": rows}) == []
    finally:
        await buffer.close()
