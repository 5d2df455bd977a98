"""Every style of the schedule in simulated time, with the real explorer, buffer, gate, synchronizer
and trainer loop.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft.errors import RftError, ShortBatch
from rft.sync.schedule import Schedule
from tests.helpers import simulated

World = simulated.World
play = simulated.play

STYLES = ("fixed", "explorer_driven", "trainer_driven", "fully_async")
TIMES = {
    "even": ((1.0,), (1.0,)),
    "fast explorer": ((0.1,), (1.0,)),
    "fast trainer": ((1.0,), (0.1,)),
    "slow tasks": ((0.3, 0.3, 9.0, 0.3, 0.3), (1.0, 0.5)),
}


def schedules() -> list[Schedule]:
    """Style x interval x offset x max_staleness: none, the least that can be kept, and two more;
    quotas for fully_async.
    """
    found = []
    for style, k, s in itertools.product(STYLES, (1, 2, 3), (0, 2)):
        if s and style in ("trainer_driven", "fully_async"):
            continue
        for threshold in (None, 0.0, 0.5, 1.0) if style == "fully_async" else (None,):
            plain = Schedule(style=style, interval=k, offset=s, threshold=threshold)
            found += [plain]
            found += [
                Schedule(
                    style=style,
                    interval=k,
                    offset=s,
                    threshold=threshold,
                    max_staleness=plain.least_staleness + more,
                )
                for more in (0, 2)
            ]
    return found


def name(s: Schedule) -> str:
    return f"{s.style} k={s.interval} s={s.offset} sigma={s.threshold} max={s.max_staleness}"


def check(world: Any, folder: Path) -> Any:
    found = play(world, folder)
    s = world.schedule
    assert len(found.steps) == world.steps and found.audit.ok, "every step is trained"
    assert found.end < 1000, "nobody waited for a deadline"
    if (bound := s.staleness_bound) is not None:
        assert found.oldest <= bound
    assert all(version >= s.required_step(b, 0) for b, version in found.versions.items())
    assert list(found.versions.values()) == sorted(found.versions.values()), "nobody goes back"
    return found


GRID = [(s, times) for s in schedules() for times in TIMES]


@pytest.mark.parametrize(
    ("schedule", "times"),
    GRID[:: len(GRID) // 8],
    ids=lambda x: x if isinstance(x, str) else name(x),
)
def test_a_part_of_the_grid(schedule: Schedule, times: str, tmp_path: Path) -> None:
    explore_s, train_s = TIMES[times]
    check(World(schedule=schedule, steps=7, explore_s=explore_s, train_s=train_s), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "times"), GRID, ids=lambda x: x if isinstance(x, str) else name(x)
)
def test_the_whole_grid(schedule: Schedule, times: str, tmp_path: Path) -> None:
    explore_s, train_s = TIMES[times]
    check(
        World(schedule=schedule, steps=9, explore_s=explore_s, train_s=train_s, load_s=0.05),
        tmp_path,
    )


# ---------------------------------------------------------------- the four modes of asynchronous
# training


def test_on_policy_pipeline(tmp_path: Path) -> None:
    """K 1, sigma 0: every window is explored and trained alone."""
    found = check(World(schedule=Schedule(style="fully_async", threshold=0.0), steps=4), tmp_path)
    assert found.oldest == 0 and found.versions == {0: 0, 1: 1, 2: 2, 3: 3}
    assert found.end == pytest.approx(8.0)


def test_streaming_off_policy(tmp_path: Path) -> None:
    """K > 1, sigma 0: W samples in each window, trained as they come, nothing left over."""
    world = World(
        schedule=Schedule(style="fully_async", interval=2, threshold=0.0), steps=6, max_inflight=1
    )
    found = check(world, tmp_path)
    assert found.oldest == 1 and found.versions == {0: 0, 1: 0, 2: 2, 3: 2, 4: 4, 5: 4}
    assert found.most_ahead == 4, "exactly W"
    assert found.end == pytest.approx(9.0), (
        "one step of each window is trained while the other is explored"
    )


@pytest.mark.parametrize("partial", [False, True])
def test_asynchronous(tmp_path: Path, partial: bool) -> None:
    """sigma > 0: some of the next window begin early; under way at a sync they are waited for, or
    go on under the new weights.
    """
    schedule = Schedule(style="fully_async", interval=2, threshold=0.5)
    slow = (*[1.0] * 8, *[5.0] * 4)  # the third batch, of the next window
    found = check(
        World(schedule=schedule, steps=8, explore_s=slow, partial_rollout=partial), tmp_path
    )
    assert found.most_ahead == 6, "Q = floor(1.5 x 4)"
    assert found.oldest == 2
    mixed = [step for step, age, least in found.rows if age != least]
    assert (len(mixed) > 0) == partial
    assert (max(found.playing_at_load) > 0) == partial
    closed = [
        r.values for r in found.records if r.role == "trainer" and "buffer/partial_num" in r.values
    ]
    assert (
        sum(v["buffer/partial_num"] for v in closed)
        == sum(v["fully_async/partial/total_partial_num"] for v in closed)
        == len(mixed)
    )
    assert max(v["buffer/max_partial_span"] for v in closed) == partial
    # written by versions before the newest
    late = sum(step - 1 - least < (step - 1) // 2 * 2 for step, _, least in found.rows)
    assert closed[-1]["fully_async/count/stale_trajectory_processed"] == late
    assert all(0 <= v["trainer/idle_ratio"] <= 1 for v in closed)


def test_require_batches(tmp_path: Path) -> None:
    """Two batches have to be there before the first of them is trained."""
    world = World(
        schedule=Schedule(style="fully_async", interval=2, threshold=0.0),
        steps=6,
        max_inflight=1,
        require_batches=2,
        batches=6,
    )
    found = check(world, tmp_path)
    assert [begin for _, begin, _ in found.steps] == pytest.approx([2, 3, 6, 7, 10, 11])


# ---------------------------------------------------------------- what each style is for


def test_trainer_driven_never_waits_for_the_explorer_and_only_the_bound_holds_that_back(
    tmp_path: Path,
) -> None:
    for limit in (1, 3):
        folder = tmp_path / str(limit)
        folder.mkdir()
        schedule = Schedule(style="trainer_driven", interval=2, max_staleness=limit)
        found = check(World(schedule=schedule, steps=8, explore_s=(0.1,)), folder)
        assert [step for _, step in found.published] == [0, 2, 4, 6, 8]
        assert found.oldest == limit, "a fast explorer comes as far as it may"
    free = tmp_path / "free"
    free.mkdir()
    found = play(World(schedule=Schedule(style="trainer_driven"), steps=8, explore_s=(0.1,)), free)
    assert found.oldest > 3, "without a bound it runs ahead"


def test_explorer_driven_publishes_only_what_is_asked_for(tmp_path: Path) -> None:
    found = check(
        World(schedule=Schedule(style="explorer_driven", interval=3), steps=9, explore_s=(1.0,)),
        tmp_path,
    )
    assert len(found.published) <= 4 and found.published[-1][1] == 9, (
        "before explore batches 3 and 6, and at the end"
    )
    slow = tmp_path / "slow"
    slow.mkdir()
    found = check(
        World(
            schedule=Schedule(style="explorer_driven"), steps=6, explore_s=(0.1,), train_s=(1.0,)
        ),
        slow,
    )
    assert found.oldest <= 1, "it waits for the step under way"


def test_slow_tasks_are_waited_for_and_none_is_dropped(tmp_path: Path) -> None:
    schedule = Schedule(style="fully_async", interval=2, threshold=1.0, max_staleness=2)
    found = check(World(schedule=schedule, steps=10, explore_s=(0.2, 0.2, 0.2, 30.0)), tmp_path)
    assert len(found.rows) == 10 * 2 * 2 and not found.audit.discarded


# ---------------------------------------------------------------- what goes wrong

SOME = [
    pytest.param(Schedule(interval=2, offset=1), marks=pytest.mark.slow),
    pytest.param(
        Schedule(style="explorer_driven", interval=2, max_staleness=1), marks=pytest.mark.slow
    ),
    pytest.param(
        Schedule(style="trainer_driven", interval=2, max_staleness=2), marks=pytest.mark.slow
    ),
    pytest.param(Schedule(style="fully_async", interval=2, threshold=0.5), marks=pytest.mark.slow),
    Schedule(style="fully_async", interval=2, threshold=0.25, max_staleness=1),
    Schedule(style="explorer_driven", max_staleness=1),
]


@pytest.mark.parametrize("schedule", SOME, ids=name)
@pytest.mark.parametrize("policy", ["train", "carry"])
def test_short_batches_and_failed_runs(schedule: Schedule, policy: str, tmp_path: Path) -> None:
    world = World(
        schedule=schedule,
        steps=5,
        batches=16,
        fails=0.2,
        on_short_batch=policy,
        groups=3,
        step_groups=3,
        max_refill=1,
        seed=3,
    )
    found = play(world, tmp_path)
    assert len(found.steps) == 5 and found.end < 1000
    bound = schedule.staleness_bound
    assert bound is None or found.oldest <= bound + (
        policy == "carry" and schedule.max_staleness is None
    )


@pytest.mark.parametrize("schedule", SOME, ids=name)
def test_a_short_batch_ends_a_run_that_does_not_allow_it(
    schedule: Schedule, tmp_path: Path
) -> None:
    with pytest.raises(ShortBatch):
        play(World(schedule=schedule, fails=0.8, on_short_batch="stop", seed=1), tmp_path)


@pytest.mark.parametrize("schedule", SOME, ids=name)
@pytest.mark.parametrize("side", ["explorer", "trainer"])
def test_either_side_dies_first(schedule: Schedule, side: str, tmp_path: Path) -> None:
    world = World(schedule=schedule, **{f"{side}_dies_at": 3})
    with pytest.raises(RftError, match=f"the {side} dies"):
        play(world, tmp_path)


@pytest.mark.parametrize("schedule", SOME, ids=name)
@pytest.mark.parametrize(
    ("steps", "batches"), [(3, 9), (9, 4)], ids=["trainer first", "explorer first"]
)
def test_either_side_finishes_first(
    schedule: Schedule, steps: int, batches: int, tmp_path: Path
) -> None:
    found = play(
        World(schedule=schedule, steps=steps, batches=batches, explore_s=(1.0, 3.0)), tmp_path
    )
    assert len(found.steps) == min(steps, batches) and found.end < 1000 and found.audit.ok


@pytest.mark.parametrize("schedule", SOME, ids=name)
@pytest.mark.parametrize("background", [True, False])
def test_evaluation_in_flight(schedule: Schedule, background: bool, tmp_path: Path) -> None:
    world = World(
        schedule=schedule,
        steps=6,
        eval_interval=2,
        eval_in_background=background,
        explore_s=(1.0, 1.5),
    )
    found = check(world, tmp_path)
    assert len(found.evaluated) >= 3
    assert found.evaluated[-1][1] == 6, "the last weights are evaluated"


@pytest.mark.parametrize("schedule", SOME, ids=name)
@pytest.mark.parametrize(
    ("groups", "step_groups"),
    [
        pytest.param(4, 2, marks=pytest.mark.slow),
        pytest.param(2, 4, marks=pytest.mark.slow),
        (3, 2),
    ],
)
def test_batches_and_steps_of_other_sizes(
    schedule: Schedule, groups: int, step_groups: int, tmp_path: Path
) -> None:
    sized = replace(schedule, batch_units=groups, step_units=step_groups, max_staleness=None)
    limit = (
        None if schedule.max_staleness is None else schedule.max_staleness + sized.least_staleness
    )
    sized = replace(sized, max_staleness=limit)
    check(
        World(schedule=sized, steps=6, groups=groups, step_groups=step_groups, capacity=12),
        tmp_path,
    )
