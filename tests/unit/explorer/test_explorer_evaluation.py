"""Numbers of an evaluation against brute force, evaluation in the background, and the greedy run
that remax compares with.
"""

from __future__ import annotations

import asyncio
import itertools
from statistics import fmean

import pytest

from rft.errors import ConfigError, RunFailed
from rft.explorer.evaluate import at_k, bench
from rft.explorer.settings import ExplorerSettings
from rft.explorer.state import Batch
from rft.reward import judge_metrics
from rft.reward.base import Reward, reward
from rft.types.completion import Score
from rft.types.ids import Version
from rft.types.task import SamplingArgs


@pytest.fixture(autouse=True)
async def deadline():
    async with asyncio.timeout(120):
        yield


def brute(rewards, k, reduce):
    return fmean(reduce(drawn) for drawn in itertools.combinations(rewards, k))


@pytest.mark.parametrize("n", [1, 2, 3, 6, 8])
def test_at_k_is_the_mean_over_all_draws(n):
    tasks = [[((i * 7 + t * 3) % 5) / 4 for i in range(n)] for t in range(3)]
    told = at_k("e", tasks, n)
    ks = sorted({k for k in (1, 2, 4, 8) if k <= n} | {n})
    assert {name.split("@")[1] for name in told if "pass" in name} == {str(k) for k in ks}
    for k in ks:
        assert told[f"e/pass@{k}"] == pytest.approx(
            fmean(brute(r, k, lambda d: max(d) >= 1.0) for r in tasks)
        )
        if k > 1:
            assert told[f"e/best@{k}"] == pytest.approx(fmean(brute(r, k, max) for r in tasks))
            assert told[f"e/worst@{k}"] == pytest.approx(fmean(brute(r, k, min) for r in tasks))


def test_tasks_with_too_few_scores_are_left_out_of_these_k():
    told = at_k("e", [[1.0, 1.0, 1.0, 1.0], [0.0]], 4)
    assert told["e/pass@1"] == 0.5 and told["e/pass@4"] == told["e/worst@4"] == 1.0
    assert "e/best@4" not in at_k("e", [[1.0], [0.0]], 4)


async def test_each_taskset_has_its_own_runs_and_arguments(world):
    tasksets = (
        world.taskset("many", is_eval=True, num_runs=4),
        world.taskset(
            "greedy", is_eval=True, num_runs=1, sampling=SamplingArgs(temperature=0.0, max_tokens=3)
        ),
    )
    await world.explorer(eval_tasksets=tasksets, total_batches=1, eval_at_end=False).run()
    told = {k: v for r in world.sink.records if r.role == "eval" for k, v in r.values.items()}
    assert {
        f"eval/many/{k}"
        for k in ("mean@4", "std@4", "best@2", "best@4", "worst@2", "pass@1", "pass@2", "pass@4")
    } <= set(told)
    assert (
        told["eval/greedy/greedy"] == told["eval/greedy/mean@1"]
        and told["eval/many/model_version/max"] == 0
    )
    assert {
        c.sampling.max_tokens for c in world.engine.calls if c.request_id.startswith("eval-greedy-")
    } == {3}


async def test_evaluations_draw_the_same_random_numbers(world):
    """Two evaluations of a run that is not deterministic: seeds by taskset, task, run and turn."""
    held = world.taskset("held", is_eval=True, num_runs=2)
    drawn = []
    for lineage in (1, 2):
        world.engine.calls.clear()
        await world.explorer(
            lineage=lineage, eval_tasksets=(held,), total_batches=1, eval_at_end=False
        ).run()
        calls = [c for c in world.engine.calls if c.request_id.startswith("eval-held-")]
        drawn.append(sorted((c.messages[-1]["content"], c.sampling.seed) for c in calls))
    assert drawn[0] == drawn[1]
    assert len({seed for _, seed in drawn[0]}) == 16  # 8 tasks, 2 runs


async def test_an_evaluation_tells_the_parts_of_its_rewards(world):
    """Parts 1 and 0.25 of tasks with an even index, 0 and 0.25 of others: means 0.5 and 0.25."""

    @reward("test_scores_parts")
    class Parts:
        async def __call__(self, task, transcript):
            return {"even": float(task.index % 2 == 0), "constant": 0.25}

    held = world.taskset("held", is_eval=True, reward="test_scores_parts")
    await world.explorer(eval_tasksets=(held,), total_batches=1, eval_at_end=False).run()
    told = world.sink.of("eval")[0]
    assert told["eval/held/parts/even"] == 0.5
    assert told["eval/held/parts/constant"] == 0.25
    assert told["eval/held/mean@2"] == 0.75


async def test_a_run_without_a_score_is_counted_as_one(world):
    """It was left out of the mean and counted nowhere."""

    @reward("test_scores_half")
    class Half:
        async def __call__(self, task, transcript):
            return Score(value=1.0 if task.index % 2 else None, reason="too long to be judged")

    held = world.taskset("held", is_eval=True, reward="test_scores_half")
    await world.explorer(eval_tasksets=(held,), total_batches=1, eval_at_end=False).run()
    told = world.sink.of("eval")[0]
    assert (told["eval/held/runs"], told["eval/held/failed"], told["eval/held/mean@2"]) == (
        16,
        8,
        1.0,
    )


async def test_what_judges_did_in_the_last_evaluation_is_told(world, monkeypatch):
    monkeypatch.setattr(judge_metrics, "_BY_NAME", {})

    @reward("test_pays")
    class Pays:
        async def __call__(self, task, transcript):
            judge_metrics.for_judge("paid").calls += 1
            return 1.0

    tasks = world.taskset(reward="test_pays")
    held = world.taskset("held", is_eval=True, reward="test_pays")
    settings = {
        "tasksets": (tasks,),
        "eval_tasksets": (held,),
        "total_batches": 2,
        "eval_on_startup": False,
    }
    await world.explorer(**settings).run()
    told = [
        (r.step, r.values["judge/paid/calls"])
        for r in world.sink.records
        if "judge/paid/calls" in r.values
    ]
    assert told == [(1, 4), (2, 8), (3, 24)] and {r.role for r in world.sink.records[-1:]} == {
        "explorer"
    }
    await bench(
        ExplorerSettings(tasksets=(), eval_tasksets=(held,), batch_size=1),
        world.engine,
        world.sink,
        Version(1, 7),
    )
    last = world.sink.records[-1]
    assert (last.role, last.step, last.values["judge/paid/calls"]) == ("eval", 7, 40)


async def test_rewards_are_closed_where_the_final_evaluation_fails(world):
    closed = []

    @reward("test_is_closed")
    class IsClosed(Reward):
        async def __call__(self, task, transcript):
            if task.taskset == "held":
                raise ConnectionError("judge is gone")
            return float(task.index % 2)

        async def close(self):
            closed.append(self)
            raise ValueError("this does not hide why the run ends")

    tasks, held = (
        world.taskset(name, reward="test_is_closed", max_rows=2) for name in ("tasks", "held")
    )
    with pytest.raises(RunFailed, match="judge is gone"):
        await world.explorer(
            tasksets=(tasks,), eval_tasksets=(held,), eval_on_startup=False, total_batches=1
        ).run()
    assert closed


async def test_exploring_goes_on_while_an_evaluation_runs_in_the_background(world):
    """The evaluation's first answer is held; both batches are explored and closed; then it reports
    at its own version.
    """
    go = asyncio.Event()

    @reward("test_evaluation_waits")
    class Waits:
        async def __call__(self, task, transcript):
            await go.wait()
            return Score(value=1.0)

    held_out = world.taskset("held_out", is_eval=True, reward="test_evaluation_waits")
    job = asyncio.ensure_future(
        world.explorer(
            eval_tasksets=(held_out,), total_batches=2, eval_in_background=True, eval_at_end=False
        ).run()
    )
    await world.gate.until_explored(1)
    assert world.sink.of("eval") == {0: {"eval/held_out/due": 1.0}}, (
        "announced: its checkpoint stays until it has ended"
    )
    assert world.buffer.finished is None
    go.set()
    await job
    assert (
        list(world.sink.of("eval")) == [0]
        and world.sink.of("eval")[0]["eval/held_out/mean@2"] == 1.0
    )


async def test_two_background_evaluations_do_not_overlap_and_a_broken_one_ends_the_run(world):
    held_out = world.taskset("held_out", is_eval=True)
    await world.explorer(
        eval_tasksets=(held_out,),
        total_batches=3,
        eval_interval=1,
        eval_in_background=True,
        eval_at_end=False,
    ).run()
    assert list(world.sink.of("eval")) == [0, 1, 2]
    never = world.taskset("held_out", is_eval=True, reward=None)
    with pytest.raises(
        Exception, match="evaluation on 'held_out': all 16 runs ended without a score"
    ):
        await world.explorer(eval_tasksets=(never,), total_batches=3, eval_in_background=True).run()


async def test_remax_gets_the_reward_of_a_greedy_run_of_the_same_weights(world):
    await world.explorer(total_batches=1, baseline=True).run()
    greedy = [c for c in world.engine.calls if c.request_id.startswith("greedy-")]
    assert (
        len(greedy) == 2
        and {c.sampling.temperature for c in greedy} == {0.0}
        and len(world.engine.calls) == 6
    )
    assert len(world.buffer.rows) == 4  # the greedy runs are not stored
    # a scripted answer does not vary
    assert all(r.info["baseline_reward"] == r.reward for r in world.buffer.rows)
    assert {v for r in world.buffer.rows for v in (s.version for s in r.version_spans)} == {
        Version(1, 0)
    }


async def test_a_greedy_run_is_no_run_of_its_batch(world, monkeypatch):
    begun = []
    count = Batch.note_begun
    monkeypatch.setattr(
        Batch, "note_begun", lambda self, runs: (begun.append(runs), count(self, runs))
    )
    await world.explorer(total_batches=1, baseline=True).run()
    assert sorted(begun) == [0, 0, 1, 1, 1, 1]  # four runs and the ends of two groups


async def test_remax_refuses_rewards_that_compare_runs(world):
    @reward("test_evaluation_compares")
    class Compares:
        whole_group = True

        def __call__(self, task, transcripts):
            return [0.0 for _ in transcripts]

    given = (world.taskset(reward="test_evaluation_compares"),)
    with pytest.raises(
        ConfigError,
        match=r"default_reward_fn_type: this algorithm takes the reward of a greedy run.*use one "
        r"that",
    ):
        world.explorer(tasksets=given, baseline=True)
    world.explorer(tasksets=given)
    world.explorer(
        eval_tasksets=(world.taskset("held", reward="test_evaluation_compares"),), baseline=True
    )


async def test_a_group_without_a_baseline_is_replaced(world):
    @reward("test_evaluation_no_greedy")
    def no_greedy(task, transcript):
        if task.index == 0 and task.sampling.temperature == 0:
            raise ValueError("judge is away")
        return Score(value=1.0)

    await world.explorer(
        tasksets=(world.taskset(reward="test_evaluation_no_greedy"),),
        total_batches=1,
        baseline=True,
    ).run()
    assert world.buffer.closed == [(0, 2, 2, {"no_baseline": 1})]


@pytest.mark.parametrize(("interval", "played"), [(5, [1]), (0, [])])
async def test_an_evaluation_that_a_stop_interrupted_is_played_once_when_the_run_goes_on(
    world, interval, played
):
    """Under the weights of the checkpoint; unless there are to be no more evaluations."""
    held_out = world.taskset("held_out", is_eval=True)
    explorer = world.explorer(
        cursor=1,
        resumes_evaluation=True,
        eval_tasksets=(held_out,),
        eval_interval=interval,
        eval_in_background=True,
        eval_at_end=False,
    )
    await explorer.run()
    assert list(world.sink.of("eval")) == played
