from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rft.trainer.rows.pack import Budget, TrainRow, plan
from rft.types.row_layout import AskedLayout

LAYOUTS: list[AskedLayout] = ["shared", "packed", "padded"]


# the fixture is a pure function
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(2, 9)), min_size=1, max_size=12),
    world_size=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
)
def test_each_row_once_within_budget_and_equal_counts(
    make_row: Callable[..., TrainRow],
    lengths: list[tuple[int, int]],
    world_size: int,
    layout: AskedLayout,
) -> None:
    made = [
        make_row([group] * group, list(range(length)), group=str(group))
        for group, length in lengths
    ]
    budget = Budget(tokens=20, layout=layout)
    ranks = plan(made, world_size, budget)
    assert sorted(i for mine in ranks for micro in mine for i in micro) == list(range(len(made)))
    assert len({len(mine) for mine in ranks}) == 1
    assert all(
        budget.cost([made[i].inputs for i in micro]) <= 20
        for mine in ranks
        for micro in mine
        if micro
    )


def test_dynamic_batching_is_a_hard_limit(make_row: Callable[..., TrainRow]) -> None:
    rows = [make_row([1], [2] * 6) for _ in range(3)]  # each reads 6 tokens
    (mine,) = plan(rows, 1, Budget(tokens=10, layout="padded"))
    assert mine == [[0], [1], [2]]


def test_a_group_stays_together_and_is_counted_once(make_row: Callable[..., TrainRow]) -> None:
    rows = [make_row([1, 2, 3, 4], [5 + i, 0], group="a") for i in range(4)]
    assert (
        Budget(tokens=8).cost([r.inputs for r in rows]) == 8
    )  # 4 prompt tokens, 4 first answer tokens; the last of each row is only predicted
    assert plan(rows, 1, Budget(tokens=8)) == [[[0, 1, 2, 3]]]


def test_fewer_groups_than_ranks_are_cut(make_row: Callable[..., TrainRow]) -> None:
    rows = [make_row([1, 2], [5 + i, 0], group="a") for i in range(4)]
    assert [len(mine[0]) for mine in plan(rows, 2, Budget(tokens=100))] == [2, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_longer_than_the_budget_is_a_micro_batch_alone(
    make_row: Callable[..., TrainRow], layout: AskedLayout
) -> None:
    rows = [
        make_row([7], [2]),
        make_row([1] * 10, [2, 3], group="b"),
        make_row([8], [2], group="c"),
    ]
    assert plan(rows, 1, Budget(tokens=10, layout=layout)) == [[[1], [0, 2]]]


def test_fixed_micro_batches_take_what_is_left(make_row: Callable[..., TrainRow]) -> None:
    rows = [make_row([1], [2]) for _ in range(8)]
    assert plan(rows, 2, Budget(tokens=1, rows=2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert plan(rows, 2, Budget(tokens=1, rows=3)) == [[[0, 1, 2], [3]], [[4, 5, 6], [7]]]
    assert plan(rows[:5], 4, Budget(tokens=1, rows=9)) == [[[0, 1]], [[2, 3]], [[4]], [[]]]
    assert plan([], 2, Budget(tokens=1, rows=3)) == [[], []]


# the fixture is a pure function
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=8),
    world_size=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
)
def test_a_pair_is_never_split(
    make_row: Callable[..., TrainRow], lengths: list[int], world_size: int, layout: AskedLayout
) -> None:
    made = []
    for i, length in enumerate(lengths):
        group = str(i % 2)  # several pairs of one prompt
        made += [
            replace(make_row([1, 2], list(range(n)), group=group), pair=str(i))
            for n in (length, length + 1)
        ]
    budget = Budget(tokens=24, layout=layout)
    ranks = plan(made, world_size, budget)
    micros = [micro for mine in ranks for micro in mine if micro]
    assert sorted(i for micro in micros for i in micro) == list(range(len(made)))
    assert all(
        i % 2 == 0 and j == i + 1
        for micro in micros
        for i, j in zip(micro[0::2], micro[1::2], strict=True)
    )
    assert all(budget.cost([made[i].inputs for i in micro]) <= 24 for micro in micros)


def test_what_pairs_do_not_fit(make_row: Callable[..., TrainRow]) -> None:
    pair = [replace(make_row([1], [2] * 6), pair="a") for _ in range(2)]
    assert plan(pair, 1, Budget(tokens=10, layout="padded")) == [[[0, 1]]]
    three = [replace(r, pair=name) for name in "abc" for r in pair]
    for size, cut in (
        (1, [[0, 1], [2, 3], [4, 5]]),
        (3, [[0, 1], [2, 3], [4, 5]]),
        (5, [[0, 1, 2, 3], [4, 5]]),
    ):
        assert plan(three, 1, Budget(tokens=10, rows=size)) == [cut]
    assert plan(three, 2, Budget(tokens=10, rows=8)) == [[[0, 1, 2, 3]], [[4, 5]]], (
        "ranks part no pair either"
    )
    with pytest.raises(ValueError, match="is not followed by the other one"):
        plan(three[1:], 1, Budget(tokens=10, rows=2))
    with pytest.raises(ValueError, match="row 0 of pair 'a' is not followed by the other one"):
        plan([pair[0], replace(pair[0], pair="b"), pair[1]], 1, Budget(tokens=100))
