"""What engines count from their start becomes what they did in each explore step."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rft.engine.scripted import ScriptedEngine, echo
from rft.engine.vllm_stats import Stats
from rft.explorer.rollout_metrics import EngineMetrics, engine_metrics, rollout_metrics
from rft.testing.storage_contract import row
from rft.types.ids import GroupId
from rft.types.metrics import Metric
from rft.types.task import Task
from rft.workflow.group import PlayedGroup
from rft.workflow.play_run import PlayedRun


class Step:
    """What vLLM says of one step, as far as we read it."""

    def __init__(
        self, running: int, waiting: int, usage: float, asked: int = 0, hit: int = 0
    ) -> None:
        self.num_running_reqs = running
        self.num_waiting_reqs = waiting
        self.num_skipped_waiting_reqs = 0
        self.kv_cache_usage = usage
        self.prefix_cache_stats = self
        self.queries = asked
        self.hits = hit


class Iteration:
    num_preempted_reqs = 3
    num_generation_tokens = 4


class Model(ScriptedEngine):
    """Two engines' worth of numbers."""

    def __init__(self) -> None:
        super().__init__(answer=echo)
        self.stats = [Stats(), Stats()]
        self.tokens = 0.0

    async def metrics(self) -> list[Metric]:
        counted = [
            Metric("engine/generated_tokens", self.tokens, "sum"),
            Metric("engine/lost", 1.0, "sum"),
        ]
        return [*counted, *(m for s in self.stats for m in s.metrics())]


async def test_a_step_has_what_came_since_the_step_before() -> None:
    now = 0.0
    model = Model()
    engines = EngineMetrics(model, lambda: now)
    model.stats[0].record(Step(8, 0, 0.5, asked=100, hit=25), None)
    model.stats[0].record(Step(4, 2, 0.25), Iteration())
    model.stats[1].record(Step(0, 1, 0.0, asked=100, hit=75), None)
    model.stats[1].record(None, None)  # requests that were aborted: no step
    model.tokens = 500.0
    now = 10.0
    first = await engines.since()
    assert first == {
        "engine/generated_tokens": 500.0,
        "engine/tokens_per_s": 50.0,
        "engine/lost": 1.0,
        "engine/steps": 3.0,
        "engine/preemptions": 3.0,
        "engine/running/mean": 4.0,
        "engine/waiting/mean": 1.0,
        "engine/kv_cache_usage/mean": 0.25,
        "engine/prefix_cache_hit_rate": 0.5,
    }
    model.stats[1].record(Step(2, 0, 1.0, asked=10, hit=9), None)
    model.tokens = 600.0
    now = 15.0
    second = await engines.since()
    assert second["engine/tokens_per_s"] == 20.0 and second["engine/generated_tokens"] == 100.0
    assert (second["engine/steps"], second["engine/running/mean"], second["engine/lost"]) == (
        1.0,
        2.0,
        0.0,
    )
    assert second["engine/prefix_cache_hit_rate"] == pytest.approx(0.9)
    quiet = await engines.since()
    assert (
        quiet["engine/tokens_per_s"] == 0.0
        and "engine/running/mean" not in quiet
        and "engine/prefix_cache_hit_rate" not in quiet
    )


async def test_auxiliary_models_have_names_of_their_own() -> None:
    model = Model()
    model.tokens = 7.0
    model.stats[0].record(Step(8, 0, 0.5), None)
    policy, judge = engine_metrics(Model(), {"judge": model, "the same": model})
    assert (await policy.since())["engine/generated_tokens"] == 0
    found = await judge.since()
    assert (
        found["auxiliary/judge/generated_tokens"] == 7.0
        and found["auxiliary/judge/running/mean"] == 8.0
    )
    assert all(name.startswith("auxiliary/judge/") for name in found)


async def test_a_model_that_does_not_count_has_none() -> None:
    class Plain:
        generate = logprobs = classify = None

    assert await EngineMetrics(Plain()).since() == {}  # type: ignore[arg-type]


def measured(**fields: Any) -> dict[str, float]:
    """The numbers of a batch of one run."""
    id = GroupId(1, 0, 0, 0)
    played = PlayedRun((replace(row(id.run(0)), **fields),), fields.get("reward", 1.0), 1.0, 0.0, 1)
    task = Task(taskset="t", index=0, prompt="x", workflow="w")
    return rollout_metrics([PlayedGroup(id, task, (played,), True, "")], 1.0)


def test_a_part_of_the_reward_does_not_hide_the_reward() -> None:
    found = measured(
        reward=1.0, reward_parts={"reward": 0.25, "format": 0.75}, metrics={"response_length": -1.0}
    )
    assert found["rollout/reward/mean"] == 1.0 and found["rollout/format/mean"] == 0.75
    assert found["rollout/response_length/mean"] > 0


def test_a_run_of_many_rows_weighs_as_much_as_one_of_few() -> None:
    """Step by step each call is a row: runs of many calls decided the means of metrics and parts of
    the reward.
    """
    id = GroupId(1, 0, 0, 0)

    def run(number: int, calls: int, part: float) -> PlayedRun:
        rows = (row(id.run(number, 0, step)) for step in range(calls))
        made = tuple(
            replace(r, reward_parts={"right": part}, metrics={"calls": float(calls)}) for r in rows
        )
        return PlayedRun(made, part, 1.0, 0.0, 1)

    task = Task(taskset="t", index=0, prompt="x", workflow="w", num_runs=2)
    found = rollout_metrics(
        [PlayedGroup(id, task, (run(0, 2, 1.0), run(1, 10, 0.0)), True, "")], 1.0
    )
    assert (
        found["rollout/calls/mean"],
        found["rollout/right/mean"],
        found["rollout/right/std"],
    ) == (6.0, 0.5, 0.5)


@pytest.mark.parametrize(("formats", "share"), [((1.0, 1.0), 1.0), ((1.0, 0.0), 0.5)])
def test_groups_of_equal_parts_are_a_share(formats: tuple[float, ...], share: float) -> None:
    def played(task: int, parts: list[dict[str, float]]) -> PlayedGroup:
        id = GroupId(1, 0, 0, task)
        runs = tuple(
            PlayedRun((replace(row(id.run(n)), reward_parts=part),), 1.0, 1.0, 0.0, 1)
            for n, part in enumerate(parts)
        )
        named = Task(taskset="t", index=0, prompt="x", workflow="w", num_runs=len(parts))
        return PlayedGroup(id, named, runs, True, "")

    groups = [
        played(0, [{"format": f, "exact": float(n)} for n, f in enumerate(formats)]),
        played(1, [{"format": 0.0}, {"format": 0.0, "exact": 0.0}]),
    ]
    found = rollout_metrics(groups, 1.0)
    assert found["rollout/format/frac_zero_std"] == share
    assert found["rollout/exact/frac_zero_std"] == 0.0  # one run of the second group alone has it


def test_runs_that_never_began_took_no_time():
    """A step of over_rollout counted each of them as 0 s."""
    id = GroupId(1, 0, 0, 0)
    task = Task(taskset="t", index=0, prompt="x", workflow="w", num_runs=2)
    runs = (
        PlayedRun((row(id.run(0)),), 1.0, 3.0, 1.0, 1),
        PlayedRun((row(id.run(1)),), None, 0.0, 0.0, 1, "over_rollout"),
    )
    found = rollout_metrics(
        [PlayedGroup(id, task, runs, False, "over_rollout")], 1.0, percentiles=True
    )
    assert [found[f"rollout/time/{name}"] for name in ("run", "reward", "run/p10")] == [
        3.0,
        1.0,
        3.0,
    ]
    assert "rollout/time/run" not in rollout_metrics(
        [PlayedGroup(id, task, runs[1:], False, "over_rollout")], 1.0
    )


def test_a_batch_that_no_weights_of_ours_wrote_has_no_version() -> None:
    assert "rollout/model_version" in measured() and "rollout/model_version" not in measured(
        version_spans=(), is_expert=True
    )
