from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.errors import ConfigError
from rft.taskset.base import RowSource, Taskset, sample_fingerprint
from rft.taskset.settings import TasksetSettings
from rft.taskset.task_order import TaskOrder, num_batches


def rows(name: str, count: int, **changes):
    settings = TasksetSettings(name=name, path=name, workflow="w", **changes)
    made = [{"prompt": f"{name}{i}"} for i in range(count)]
    return Taskset(
        settings, RowSource(rows=made, where=str, fingerprint=f"{name}{count}", check_all=False)
    )


def names(tasks):
    return [t.prompt for t in tasks]


def test_sequential_goes_round():
    order = TaskOrder([rows("a", 5)], 2, 1)
    assert [names(order.batch(b)) for b in range(4)] == [
        ["a0", "a1"],
        ["a2", "a3"],
        ["a4", "a0"],
        ["a1", "a2"],
    ]
    assert num_batches([5], 2, 1) == 2 and num_batches([5], 2, 2) == 5


def test_shuffle_is_another_permutation_each_epoch():
    order = TaskOrder([rows("a", 6, selector="shuffle")], 3, 1)
    epochs = [names(order.batch(2 * e)) + names(order.batch(2 * e + 1)) for e in range(3)]
    assert all(sorted(e) == [f"a{i}" for i in range(6)] for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3


def test_random_does_not_repeat_inside_a_batch():
    order = TaskOrder([rows("a", 5, selector="random")], 4, 1)
    batches = [names(order.batch(b)) for b in range(20)]
    assert all(len(set(b)) == 4 for b in batches) and len({tuple(b) for b in batches}) > 5
    assert len(TaskOrder([rows("a", 2, selector="random")], 4, 1).batch(0)) == 4


@given(
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    batch=st.integers(1, 9),
    selector=st.sampled_from(["sequential", "shuffle", "random"]),
    asked=st.lists(st.integers(0, 40), max_size=8),
)
def test_batches_do_not_depend_on_what_was_asked_before(seed, sizes, batch, selector, asked):
    def make():
        return TaskOrder(
            [rows(f"t{i}-", n, selector=selector) for i, n in enumerate(sizes)], batch, seed
        )

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
    order = TaskOrder([rows("a", 6, selector="shuffle"), rows("b", 18)], 4, 7)
    seen = collections.Counter(p for b in range(6) for p in names(order.batch(b)))
    assert len(seen) == 24 and set(seen.values()) == {1}


@pytest.mark.parametrize(
    "weights", [(3.0, 1.0), (0.75, 0.25), (1.0, 1.0, 2.0), (5.0, 3.0, 1.0, 0.5), (1.0, 1 / 3, 0.01)]
)
@pytest.mark.parametrize("sizes", [(10, 1000, 7, 50), (400, 3, 2000, 1)])
def test_weights_are_kept_after_any_number_of_tasks(weights, sizes):
    tasksets = [
        rows(f"t{i}", n, weight=w) for i, (w, n) in enumerate(zip(weights, sizes, strict=False))
    ]
    order = TaskOrder(tasksets, 4, 7)
    seen = collections.Counter()
    for b in range(600):
        seen.update(t.taskset for t in order.batch(b))
        for i, w in enumerate(weights):
            assert (
                abs(seen[f"t{i}"] - seen.total() * w / sum(weights))
                < 0.5 + len(weights) / 2 + seen.total() / 1000
            )


def test_three_to_one_in_every_batch_of_four():
    order = TaskOrder([rows("a", 10, weight=3.0), rows("b", 1000, weight=1.0)], 4, 7)
    assert all(
        collections.Counter(t.taskset for t in order.batch(b)) == {"a": 3, "b": 1}
        for b in range(300)
    )


def test_a_weighted_taskset_is_shuffled_anew_in_each_pass():
    order = TaskOrder(
        [rows("a", 6, weight=3.0, selector="shuffle"), rows("b", 50, weight=1.0)], 8, 1
    )
    drawn = [p for b in range(5) for p in names(order.batch(b)) if p.startswith("a")]
    passes = [drawn[i : i + 6] for i in range(0, len(drawn), 6)]
    assert len(passes) == 5 and all(sorted(p) == [f"a{i}" for i in range(6)] for p in passes)
    assert len({tuple(p) for p in passes}) == 5


def test_an_epoch_of_a_mixture_is_as_many_tasks_as_there_are_rows():
    tasksets = [rows("a", 10, weight=3.0), rows("b", 30, weight=1.0)]
    assert num_batches(list(map(len, tasksets)), 4, 1) == 10
    taken = collections.Counter(
        t.taskset for b in range(10) for t in TaskOrder(tasksets, 4, 1).batch(b)
    )
    assert taken == {"a": 30, "b": 10}


def test_a_resumed_mixture_goes_on_where_it_was():
    def make():
        return TaskOrder(
            [
                rows("a", 6, weight=2.0, selector="shuffle"),
                rows("b", 9, weight=1.0, selector="random"),
            ],
            5,
            3,
        )

    whole = make()
    resumed = make()
    for b in range(400):
        whole.batch(b)
    assert [names(resumed.batch(b)) for b in range(396, 402)] == [
        names(whole.batch(b)) for b in range(396, 402)
    ]
    assert resumed.fingerprint == whole.fingerprint


def test_spares_are_other_rows():
    order = TaskOrder([rows("a", 10)], 4, 1)
    batch = set(names(order.batch(0)))
    spares = [order.spare(0, j).prompt for j in range(12)]
    assert not batch & set(spares) and len(set(spares)) == 6
    assert TaskOrder([rows("a", 2)], 4, 1).spare(0, 0).prompt in {"a0", "a1"}


def test_fingerprint_tells_what_changed():
    prints = {
        TaskOrder([rows("a", 5)], 2, 1).fingerprint,
        TaskOrder([rows("a", 6)], 2, 1).fingerprint,
        TaskOrder([rows("a", 5)], 3, 1).fingerprint,
        TaskOrder([rows("a", 5)], 2, 2).fingerprint,
        TaskOrder([rows("a", 5, selector="shuffle")], 2, 1).fingerprint,
    }
    assert len(prints) == 5


@pytest.mark.parametrize(
    ("tasksets", "batch", "message"),
    [
        ([], 1, "no taskset"),
        (
            [rows("a", 3, selector="best")],
            1,
            "unknown selector 'best'.  Known: difficulty_based, offline_easy2hard, random, seq",
        ),
    ],
)
def test_refused(tasksets, batch, message):
    with pytest.raises(ConfigError, match=message):
        TaskOrder(tasksets, batch, 1)


def test_too_few_rows_for_one_batch_are_refused():
    with pytest.raises(ConfigError, match="3 rows in 1 epoch do not fill one batch of 4 tasks"):
        num_batches([3], 4, 1)


def test_rows_have_the_fingerprints_of_earlier_versions() -> None:
    """They stand in the ledgers of runs that go on."""
    rows = [
        {"prompt": "2+2?", "answer": 4, "nested": {"b": [1.5, None], "a": "ä"}},
        {"answer": 5, "prompt": "x"},
    ]
    assert sample_fingerprint(rows, ("split", "train")) == "fc1d6af4dfa5bf3b7c2b5d71bdac3bc1"
    assert sample_fingerprint([{1: "a", "b": (1, 2)}]) == "87ecf9378289afb7e85a97a99ee84d51"
