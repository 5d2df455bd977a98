"""The schedule under a fake clock: nobody waits for ever, nothing is trained too old."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rft.errors import ConfigError
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, FullyAsyncSync, SyncConfig


def simulate(
    schedule: Schedule,
    steps: int,
    *,
    explore_s: list[float],
    train_s: list[float],
    cursor: int = 0,
    held: int = 0,
    used: int = 0,
) -> tuple[list[int], float]:
    """Explorer and trainer as two events on a fake clock.

    After a resume `held` batches from `cursor` on are in the buffer already, the first of them with
    `used` units gone.

    Returns the staleness of every trained step and the end time.  Raises RuntimeError when neither
    can continue.
    """
    published = trained = schedule.start_step
    # batch -> version step that began it
    done: dict[int, int] = {cursor + i: schedule.start_step for i in range(held)}
    next_batch = cursor + held
    exploring = False
    training = False
    clock = 0.0  # type: ignore[var-annotated]
    events = []
    order = itertools.count()
    ages: list[int] = []
    units = {b: schedule.batch_units - (used if b == cursor else 0) for b in done}
    while trained < steps:
        if not exploring and schedule.may_explore(next_batch, published):
            exploring = True
            heapq.heappush(
                events,
                (
                    clock + explore_s[next_batch % len(explore_s)],
                    next(order),
                    "explored",
                    (next_batch, published),
                ),
            )
        if not training:
            lease = []
            need = schedule.step_units
            for b in sorted(units):
                take = min(need, units[b])
                if take:
                    lease.append((b, take))
                    need -= take
            if need == 0:
                oldest = min(done[b] for b, _ in lease)
                assert schedule.max_staleness is None or trained - oldest <= schedule.max_staleness
                ages.append(trained - oldest)
                for b, take in lease:
                    units[b] -= take
                training = True
                heapq.heappush(
                    events,
                    (clock + train_s[trained % len(train_s)], next(order), "trained", trained + 1),
                )
        if not events:
            raise RuntimeError(
                f"deadlock: {trained} trained, {published} published, batch {next_batch} waits"
            )
        clock, _, what, value = heapq.heappop(events)
        if what == "explored":
            done[value[0]], units[value[0]] = value[1], schedule.batch_units
            next_batch = next_batch + 1
            exploring = False
        else:
            trained = value
            training = False
            if schedule.must_publish(trained):
                published = trained
    return ages, clock


TIMES = [([1.0], [1.0]), ([0.1], [1.0]), ([1.0], [0.1]), ([1.0, 5.0, 0.2], [0.7, 2.0])]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("s", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("times", TIMES, ids=["even", "fast-explorer", "fast-trainer", "uneven"])
def test_no_deadlock_and_no_row_above_the_bound(
    k: int, s: int, times: tuple[list[float], list[float]]
) -> None:
    schedule = Schedule(interval=k, offset=s, max_staleness=s + k - 1)
    assert schedule.staleness_bound == s + k - 1
    ages, _ = simulate(schedule, 40, explore_s=times[0], train_s=times[1])
    assert len(ages) == 40
    assert max(ages) <= schedule.staleness_bound
    if times == TIMES[1]:
        assert max(ages) == schedule.staleness_bound, "a fast explorer reaches the bound"


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("s", [0, 1, 4])
@pytest.mark.parametrize("start", [1, 2, 5, 9])
@pytest.mark.parametrize("held", [0, 1, 3])
def test_resume_at_any_step_goes_on_within_the_bound(k: int, s: int, start: int, held: int) -> None:
    schedule = Schedule(interval=k, offset=s, max_staleness=max(s + k - 1, held), start_step=start)
    ages, _ = simulate(
        schedule, start + 20, explore_s=[1.0, 0.3], train_s=[0.5], cursor=start, held=held
    )
    assert len(ages) == 20
    assert max(ages[held:]) <= s + k - 1


@settings(max_examples=300)
@given(
    k=st.integers(1, 6),
    s=st.integers(0, 6),
    batch=st.integers(1, 12),
    step=st.integers(1, 12),
    start=st.integers(0, 7),
    seed=st.integers(0, 1 << 16),
)
def test_any_ratio_of_batch_to_step(
    k: int, s: int, batch: int, step: int, start: int, seed: int
) -> None:
    rng = random.Random(seed)
    schedule = Schedule(interval=k, offset=s, start_step=start, batch_units=batch, step_units=step)
    # every batch before was used, and a part of this one
    cursor, used = divmod(start * step, batch)
    times = [rng.choice([0.1, 1.0, 4.0]) for _ in range(7)]
    ages, _ = simulate(
        schedule,
        start + 15,
        explore_s=times,
        train_s=times[::-1],
        cursor=cursor,
        held=int(used > 0),
        used=used,
    )
    assert max(ages) <= schedule.staleness_bound


def test_offset_buys_overlap() -> None:
    alternate = simulate(Schedule(), 20, explore_s=[1.0], train_s=[1.0])[1]
    overlap = simulate(Schedule(offset=1), 20, explore_s=[1.0], train_s=[1.0])[1]
    assert alternate == pytest.approx(40)
    assert overlap == pytest.approx(21)


def test_both_questions() -> None:
    x = Schedule(interval=2, offset=1)
    assert [x.required_step(e) for e in range(7)] == [0, 0, 0, 2, 2, 4, 4]
    assert x.may_explore(2, 0) and not x.may_explore(3, 1) and x.may_explore(3, 2)
    assert [t for t in range(1, 7) if x.must_publish(t)] == [2, 4, 6]


@pytest.mark.parametrize(("k", "s", "limit"), [(1, 1, 0), (2, 0, 0), (3, 2, 3)])
def test_a_bound_that_cannot_be_kept_is_refused(k: int, s: int, limit: int) -> None:
    with pytest.raises(
        ConfigError, match=f"synchronizer.max_staleness: {limit} cannot be kept.*{s + k - 1}"
    ):
        Schedule(interval=k, offset=s, max_staleness=limit)


@pytest.mark.parametrize(
    ("section", "key", "wrong"),
    [
        (FixedSync, "sync_interval", 0),
        (FixedSync, "sync_offset", -1),
        (FixedSync, "sync_style", "dynamic"),
        (FullyAsyncSync, "staleness_threshold", -0.1),
    ],
)
def test_nonsense_is_refused(section: type[SyncConfig], key: str, wrong: object) -> None:
    with pytest.raises(ValidationError, match=key):
        section.model_validate({key: wrong})


@given(
    k=st.integers(1, 5),
    s=st.integers(0, 5),
    batch=st.integers(1, 9),
    size=st.integers(1, 9),
    start=st.integers(0, 7),
    ahead=st.integers(1, 12),
)
def test_which_batches_may_begin_before_a_step_is_trained(
    k: int, s: int, batch: int, size: int, start: int, ahead: int
) -> None:
    schedule = Schedule(interval=k, offset=s, start_step=start, batch_units=batch, step_units=size)
    step = start + ahead
    newest = max(
        (t for t in range(start, step) if t == start or schedule.must_publish(t)), default=start
    )
    first = schedule.first_after(step)
    assert not schedule.may_explore(first, newest)
    assert all(schedule.may_explore(b, newest) for b in range(first))
