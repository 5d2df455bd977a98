"""The schedule's styles by numbers: quotas, the four modes of asynchronous training, bounds, and
who is never made to wait for himself.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.errors import ConfigError
from rft.sync.schedule import Schedule, Style
from rft.sync.timeline import picture, simulate

# (mini batch, require_batches, trigger_parameter_sync_step, threshold) -> samples of a local
# update, of a window, quota
VECTORS = [
    ((32, 4, 4, 0.1), (128, 512, 563)),
    ((32, 1, 16, 0.0), (32, 512, 512)),
    ((128, 1, 4, 0.5), (128, 512, 768)),
    ((16, 1, 4, 0.1), (16, 64, 70)),
]


def quota(mini: int, require: int, updates: int, threshold: float, **more: int) -> Schedule:
    """Samples are groups; a train step is one mini batch, so a window has require x updates of
    them.
    """
    units = {"batch_units": mini, "step_units": mini}
    return Schedule(
        style="fully_async", interval=require * updates, threshold=threshold, **units, **more
    )


@pytest.mark.parametrize(("given", "expected"), VECTORS)
def test_quota(given: tuple[int, int, int, float], expected: tuple[int, int, int]) -> None:
    mini, require, updates, threshold = given
    local, window, most = expected
    s = quota(mini, require, updates, threshold)
    assert (mini * require, s.interval * s.step_units, s.quota) == (local, window, most)
    begun = [
        (b, g) for b in range(2 * s.interval) for g in range(mini) if s.may_explore(b, 0, group=g)
    ]
    assert len(begun) == most, "so many begin under the first version"
    assert begun == sorted(begun) and begun[-1] == divmod(most - 1, mini), "oldest first"
    after = [
        (b, g)
        for b in range(3 * s.interval)
        for g in range(mini)
        if s.may_explore(b, s.interval, group=g)
    ]
    assert len(after) - most == window, (
        "with all begun ones waiting or under way, one window more after a sync"
    )
    assert s.staleness_bound == (most - 1) // mini


@pytest.mark.parametrize(
    ("updates", "threshold", "lag"),
    [(1, 0.0, 0), (4, 0.0, 0), (1, 0.5, 1), (4, 0.5, 1), (4, 1.0, 1), (2, 1.5, 2)],
    ids=[
        "on-policy pipeline",
        "streaming off-policy",
        "async",
        "async K=4",
        "one window ahead",
        "more than one",
    ],
)
def test_lag_in_versions(updates: int, threshold: float, lag: int) -> None:
    """What finished is at most ceil(threshold) versions old when it is trained; without a threshold
    nothing is left over at a sync.
    """
    s = quota(8, 1, updates, threshold)
    mini = 8
    worst = 0
    for unit in range(400):
        batch, group = divmod(unit, mini)
        begun = next(v for v in range(0, 400, updates) if s.may_explore(batch, v, group=group))
        worst = max(worst, (unit // mini - begun) // updates)
    assert worst == lag
    assert (s.quota == s.interval * mini) == (threshold == 0)


def test_windows_of_a_run() -> None:
    """floor(total_rollout_steps / W); with train_batch_size x iterations samples, K =
    train_batch_size / R: as many as iterations.
    """
    train_batch_size = 512
    iterations = 10
    mini = 32
    s = quota(mini, 1, train_batch_size // mini, 0.0)
    steps = train_batch_size * iterations // mini
    assert sum(s.must_publish(t) for t in range(1, steps + 1)) == iterations


@pytest.mark.parametrize("style", ["explorer_driven", "trainer_driven", "fully_async"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_bound_is_kept_from_the_least_one_on(style: Style, k: int) -> None:
    least = 0 if style == "explorer_driven" else k - 1
    assert Schedule(style=style, interval=k).least_staleness == least
    assert Schedule(style=style, interval=k, max_staleness=least).staleness_bound == least
    assert Schedule(style=style, interval=k).staleness_bound is None
    if least:
        with pytest.raises(
            ConfigError,
            match=f"max_staleness: {least - 1} cannot be kept: weights move every {k} steps",
        ):
            Schedule(style=style, interval=k, max_staleness=least - 1)


def test_a_quota_that_is_no_number_of_batches_never_stops_the_trainer() -> None:
    s = Schedule(style="fully_async", threshold=0.0, batch_units=8, step_units=4)
    assert (
        s.quota == 4
        and s.may_explore(0, 0)
        and not s.may_explore(1, 0, group=0)
        and not s.may_explore(1, 1)
    )
    assert s.may_explore(1, 2) and s.staleness_bound == 1


def test_when_the_explorer_asks() -> None:
    s = Schedule(style="explorer_driven", interval=2, offset=1)
    assert [b for b in range(8) if s.syncs_before(b)] == [3, 5, 7]
    assert s.may_explore(2, 0, prior=0, newest=9), "between two syncs it goes on"
    assert not s.may_explore(3, 0, prior=0, newest=1), "a step is under way"
    assert s.may_explore(3, 0, prior=0, newest=0), "there is nothing newer"
    assert s.may_explore(3, 1, prior=0, newest=5), "a version came since it asked"
    assert s.must_publish(3, requested=True) and not s.must_publish(2)
    fixed = Schedule(interval=2)
    assert not fixed.must_publish(3, requested=True) and fixed.must_publish(2)


def test_pictures() -> None:
    assert picture(Schedule(interval=2)) == [
        "explore ▓0▓ ▓1▓     ▓2▓ ▓3▓     ▓4▓ ▓5▓     ▓6▓ ▓7▓",
        "train       ▒1▒ ▒2▒     ▒3▒ ▒4▒     ▒5▒ ▒6▒     ▒7▒ ▒8▒",
        "weights 0           2           4           6           8",
    ]
    assert (
        picture(Schedule(style="trainer_driven", interval=2, max_staleness=2))[2]
        == "weights 0           2       4       6       8"
    )


CASES = st.fixed_dictionaries(
    {
        "style": st.sampled_from(["fixed", "explorer_driven", "trainer_driven", "fully_async"]),
        "interval": st.integers(1, 5),
        "offset": st.integers(0, 4),
        "batch_units": st.integers(1, 9),
        "step_units": st.integers(1, 9),
        "threshold": st.sampled_from([None, 0.0, 0.1, 0.5, 1.0, 2.5]),
    }
)


def bounded(case: dict[str, object], extra: int | None) -> Schedule:
    plain = Schedule(**case)  # type: ignore[arg-type]
    return plain if extra is None else Schedule(**case, max_staleness=plain.least_staleness + extra)  # type: ignore[arg-type]


@settings(max_examples=150)
@given(case=CASES, extra=st.sampled_from([None, 0, 1, 3]), seed=st.integers(0, 1 << 16))
def test_nobody_waits_for_ever_and_nothing_is_too_old(
    case: dict[str, object], extra: int | None, seed: int
) -> None:
    s = bounded(case, extra)
    rng = random.Random(seed)
    found = simulate(
        s, steps=15, explore_s=rng.choice([0.1, 1.0, 4.0]), train_s=rng.choice([0.1, 1.0, 4.0])
    )
    assert len(found.trained) == 15
    ages = [x.number - 1 - x.version for x in found.trained]
    assert s.staleness_bound is None or max(ages) <= s.staleness_bound
    assert s.max_staleness is None or max(ages) <= s.max_staleness


@settings(max_examples=150)
@given(
    case=CASES,
    extra=st.sampled_from([None, 0, 2]),
    start=st.integers(0, 9),
    ahead=st.integers(1, 12),
)
def test_the_first_batch_that_waits_for_a_step(
    case: dict[str, object], extra: int | None, start: int, ahead: int
) -> None:
    plain = bounded(case, extra)
    s = Schedule(
        **{name: getattr(plain, name) for name in plain.__dataclass_fields__}
        | {"start_step": start}
    )
    step = start + ahead
    newest = max(
        (t for t in range(start, step) if t == start or s.must_publish(t, requested=True)),
        default=start,
    )
    first = s.first_after(step)
    if first is None:
        assert s.max_staleness is None and s.quota is None
        return
    assert not s.may_explore(first, newest)
    assert all(s.may_explore(b, newest) for b in range(first))
    # whole batches that step needs, as if none was lacking
    needed = -(-step * s.step_units // s.batch_units)
    assert first >= needed, "no step waits for a batch that waits for it"
