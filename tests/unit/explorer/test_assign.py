"""Batches assigned to several explorers: each to one at a time, the lowest first, again after its
explorer has gone.
"""

from __future__ import annotations

import random

import pytest

from rft.explorer.assign import Assignments


def test_the_lowest_free_batch_is_assigned_first():
    assignments = Assignments(3, 7)
    assert [assignments.take(owner) for owner in "abab"] == [
        (3, False),
        (4, False),
        (5, False),
        (6, False),
    ]
    assert assignments.candidate is None and not assignments.over and not assignments.ready(None)
    for batch in (6, 3, 5, 4):
        assignments.close(batch)
    assert assignments.over and assignments.first_open == 7


def test_what_a_dead_explorer_had_comes_first_and_is_marked():
    assignments = Assignments(0, None)
    for owner in "abba":
        assignments.take(owner)
    assignments.close(1)
    assert assignments.give_back("b") == [2] and assignments.give_back("b") == []
    assert assignments.first_open == 0 and assignments.candidate == 2
    assert assignments.take("a") == (2, True) and assignments.take("a") == (4, False)


def test_max_inflight_counts_over_all_explorers():
    assignments = Assignments(0, None, 2)
    assignments.take("a"), assignments.take("b")
    assert not assignments.ready(None)
    assignments.give_back("a")
    assert assignments.ready(None), "what nobody plays is not under way"
    assignments.take("b")
    assert not assignments.ready(None)
    assignments.close(1)
    assert assignments.ready(None)


@pytest.mark.parametrize(
    ("lag", "closed", "ready"),
    [(0, (0, 1), True), (0, (1,), False), (1, (0,), True), (2, (), True), (1, (1,), False)],
)
def test_a_choice_that_looks_back_waits_for_what_it_looks_at(lag, closed, ready):
    assignments = Assignments(0, 9)
    assignments.take("a"), assignments.take("b")
    for batch in closed:
        assignments.close(batch)
    assert assignments.ready(lag) is ready and assignments.ready(None)


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_is_closed_once_whoever_dies(seed):
    draw = random.Random(seed)
    assignments = Assignments(0, 30)
    out: dict[str, list[int]] = {name: [] for name in "abc"}
    closed = []
    while not assignments.over:
        name = draw.choice("abc")
        what = draw.random()
        if what < 0.1:
            assert assignments.give_back(name) == sorted(out[name])
            out[name] = []
        elif what < 0.5 and out[name]:
            batch = out[name].pop(draw.randrange(len(out[name])))
            assignments.close(batch)
            closed.append(batch)
        elif assignments.ready(None):
            out[name].append(assignments.take(name)[0])
    assert sorted(closed) == list(range(30))
