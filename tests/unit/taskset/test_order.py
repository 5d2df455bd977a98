from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.errors import ConfigError
from rft.taskset.base import RowTaskset
from rft.taskset.order import Order
from rft.taskset.settings import TasksetSettings


def rows(name: str, count: int, **changes):
    settings = TasksetSettings(name=name, path=name, workflow="w", **changes)
    made = [{"prompt": f"{name}{i}"} for i in range(count)]
    return RowTaskset(settings, made, where=str, fingerprint=f"{name}{count}", check_all=False)


def names(tasks):
    return [t.prompt for t in tasks]


def test_sequential_goes_round():
    order = Order([rows("a", 5)], 2, 1)
    assert [names(order.batch(b)) for b in range(4)] == [["a0", "a1"], ["a2", "a3"], ["a4", "a0"], ["a1", "a2"]]
    assert order.num_batches(1) == 2 and order.num_batches(2) == 5


def test_shuffle_is_another_permutation_each_epoch():
    order = Order([rows("a", 6, selector="shuffle")], 3, 1)
    epochs = [names(order.batch(2 * e)) + names(order.batch(2 * e + 1)) for e in range(3)]
    assert all(sorted(e) == [f"a{i}" for i in range(6)] for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3


def test_random_does_not_repeat_inside_a_batch():
    order = Order([rows("a", 5, selector="random")], 4, 1)
    batches = [names(order.batch(b)) for b in range(20)]
    assert all(len(set(b)) == 4 for b in batches) and len({tuple(b) for b in batches}) > 5
    assert len(Order([rows("a", 2, selector="random")], 4, 1).batch(0)) == 4


@given(
    seed=st.integers(0, 99), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3), batch=st.integers(1, 9),
    selector=st.sampled_from(["sequential", "shuffle", "random"]), asked=st.lists(st.integers(0, 40), max_size=8),
)  # fmt: skip
def test_batches_do_not_depend_on_what_was_asked_before(seed, sizes, batch, selector, asked):
    def make():
        return Order([rows(f"t{i}-", n, selector=selector) for i, n in enumerate(sizes)], batch, seed)

    used = make()
    for b in asked:
        used.batch(b)
        used.spare(b, 3)
    for b in asked:
        fresh = make()
        assert names(used.batch(b)) == names(fresh.batch(b)) and len(used.batch(b)) == batch
        assert used.spare(b, 1).prompt == fresh.spare(b, 1).prompt
    assert used.fingerprint == make().fingerprint


def test_one_pass_over_several_tasksets_takes_every_row_once():
    order = Order([rows("a", 6, selector="shuffle"), rows("b", 18)], 4, 7)
    seen = collections.Counter(p for b in range(order.num_batches(1)) for p in names(order.batch(b)))
    assert len(seen) == 24 and set(seen.values()) == {1}


def test_weights_set_the_shares():
    order = Order([rows("a", 10, weight=3.0), rows("b", 1000, weight=1.0)], 10, 7)
    seen = collections.Counter(t.taskset for b in range(101) for t in order.batch(b))
    assert seen["a"] / seen.total() == pytest.approx(0.75, abs=0.02)


def test_spares_are_other_rows():
    order = Order([rows("a", 10)], 4, 1)
    batch = set(names(order.batch(0)))
    spares = [order.spare(0, j).prompt for j in range(12)]
    assert not batch & set(spares) and len(set(spares)) == 6
    assert Order([rows("a", 2)], 4, 1).spare(0, 0).prompt in {"a0", "a1"}


def test_fingerprint_tells_what_changed():
    prints = {
        Order([rows("a", 5)], 2, 1).fingerprint,
        Order([rows("a", 6)], 2, 1).fingerprint,
        Order([rows("a", 5)], 3, 1).fingerprint,
        Order([rows("a", 5)], 2, 2).fingerprint,
        Order([rows("a", 5, selector="shuffle")], 2, 1).fingerprint,
    }
    assert len(prints) == 5


@pytest.mark.parametrize(
    ("tasksets", "batch", "message"),
    [
        ([], 1, "no taskset"),
        ([rows("a", 3)], 0, "at least 1"),
        ([rows("a", 3), rows("a", 3)], 1, "names must differ"),
        ([rows("a", 3, selector="best")], 1, "'best' is not known; use sequential, shuffle or random"),
        ([rows("a", 3, weight=1.0), rows("b", 3)], 1, "given for all tasksets or for none; given a: 1.0, b: None"),
        ([rows("a", 3, weight=0.0)], 1, "must be positive"),
    ],
)
def test_refused(tasksets, batch, message):
    with pytest.raises(ConfigError, match=message):
        Order(tasksets, batch, 1)


def test_too_few_rows_for_one_batch_are_refused():
    with pytest.raises(ConfigError, match="3 rows and 1 epochs do not fill one batch of 4 tasks"):
        Order([rows("a", 3)], 4, 1).num_batches(1)
