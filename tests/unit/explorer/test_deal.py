"""Batches dealt to several explorers: each to one at a time, the lowest first, again after its explorer has gone."""

from __future__ import annotations

import random

import pytest

from rft.explorer.deal import Deal


def test_the_lowest_free_batch_is_dealt_first():
    deal = Deal(3, 7)
    assert [deal.take(owner) for owner in "abab"] == [(3, False), (4, False), (5, False), (6, False)]
    assert deal.candidate is None and not deal.over and not deal.ready(None)
    for batch in (6, 3, 5, 4):
        deal.close(batch)
    assert deal.over and deal.first_open == 7


def test_what_a_dead_explorer_had_comes_first_and_is_marked():
    deal = Deal(0, None)
    for owner in "abba":
        deal.take(owner)
    deal.close(1)
    assert deal.give_back("b") == [2] and deal.give_back("b") == []
    assert deal.first_open == 0 and deal.candidate == 2
    assert deal.take("a") == (2, True) and deal.take("a") == (4, False)


def test_max_inflight_counts_over_all_explorers():
    deal = Deal(0, None, 2)
    deal.take("a"), deal.take("b")
    assert not deal.ready(None)
    deal.give_back("a")
    assert deal.ready(None), "what nobody plays is not under way"
    deal.take("b")
    assert not deal.ready(None)
    deal.close(1)
    assert deal.ready(None)


@pytest.mark.parametrize(
    ("lag", "closed", "ready"), [(0, (0, 1), True), (0, (1,), False), (1, (0,), True), (2, (), True), (1, (1,), False)]
)
def test_a_choice_that_looks_back_waits_for_what_it_looks_at(lag, closed, ready):
    deal = Deal(0, 9)
    deal.take("a"), deal.take("b")
    for batch in closed:
        deal.close(batch)
    assert deal.ready(lag) is ready and deal.ready(None)


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_is_closed_once_whoever_dies(seed):
    draw, deal = random.Random(seed), Deal(0, 30)
    out: dict[str, list[int]] = {name: [] for name in "abc"}
    closed = []
    while not deal.over:
        name = draw.choice("abc")
        what = draw.random()
        if what < 0.1:
            assert deal.give_back(name) == sorted(out[name])
            out[name] = []
        elif what < 0.5 and out[name]:
            batch = out[name].pop(draw.randrange(len(out[name])))
            deal.close(batch)
            closed.append(batch)
        elif deal.ready(None):
            out[name].append(deal.take(name)[0])
    assert sorted(closed) == list(range(30))
