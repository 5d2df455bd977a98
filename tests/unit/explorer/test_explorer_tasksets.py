"""What tasksets ask of the explorer: a workflow and a reward for each row, the order of evaluation, feedback, and the same rows again."""

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
        more = [*task.chat(), {"role": "assistant", "content": first.text}, {"role": "user", "content": "again"}]
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
    mixed = world.taskset(path=str(path), format=FormatSettings(workflow_key="flow", reward_fn_key="score"))
    await world.explorer(tasksets=(mixed,), total_batches=1).run()
    found = {(r.task_index, r.workflow, r.reward, len(r.sampling)) for r in world.buffer.rows}
    assert found == {(0, "simple_workflow", 1.0, 1), (1, "test_says_twice", 0.5, 2)}


async def test_evaluation_keeps_its_selectors_order(world):
    held_out = world.taskset("held_out", is_eval=True, num_runs=1, selector="shuffle", seed=5)
    explorer = world.explorer(
        eval_tasksets=(held_out,), total_batches=1, eval_on_startup=True, eval_at_end=False, max_concurrent_runs=1
    )
    await explorer.run()
    asked = [c.messages[-1]["content"] for c in world.engine.calls if c.request_id.startswith("eval-")]
    assert sorted(asked) == [f"{i}+{i}?" for i in range(8)] != asked
    (order,) = explorer._evaluator.tasksets.values()
    assert asked == [f"{i}+{i}?" for i in order]


async def test_a_selector_that_learns_hears_of_every_closed_batch_but_the_last_ones(world, monkeypatch):
    rows = [{"prompt": f"{i % 2}+0?", "response": "0", "weak": i / 40, "strong": i / 20} for i in range(20)]
    world._file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    chosen = {"selector": "difficulty_based", "feature_keys": ("weak", "strong")}
    explorer = world.explorer(tasksets=(world.taskset(**chosen),), batch_size=3, total_batches=6, feedback_lag=2)
    heard, learn = [], explorer.order.learn
    monkeypatch.setattr(
        explorer.order, "learn", lambda n, o: (heard.append((n, sorted((x.index, x.pass_rate) for x in o))), learn(n, o))
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
            with pytest.raises(ConfigError, match="the rows of sums are not those that the checkpoint was trained on"):
                await world.explorer(lineage=lineage, cursor=1).run()
            world._file.write_text(world._file.read_text().replace("9+9?", "7+7?"))
            await world.explorer(lineage=lineage, cursor=1).run()
            lineage = (await buffer.start_lineage(None, None)).lineage
            await buffer.writer(lineage).same_tasksets({"other": "rows"})
    finally:
        await buffer.close()
