"""Which sessions are compared with each other, and when."""

from __future__ import annotations

from rft.extras.serve.session_groups import SessionGroups


def test_a_group_closes_at_its_own_deadline_whatever_came_before_it() -> None:
    """A session of a group that the buffer refused is added again, with the time of its reward."""
    groups = SessionGroups(num_runs=2, deadline_s=10)
    groups.add("c", "late", "s1", 100)
    groups.add("c", "again", "s2", 50)
    assert groups.next_deadline == 60 and groups.expire(60) == ["s2"]
    assert groups.next_deadline == 110 and groups.waiting("c") == 1


def test_what_is_left_of_a_closed_group_waits_for_others_until_its_deadline() -> None:
    groups = SessionGroups(num_runs=2, deadline_s=10)
    for at, session in enumerate(("gone", "left")):
        groups.add("c", "t", session, at)
    groups.remove("gone")
    assert groups.take() is None and groups.waiting("c") == 1 and groups.next_deadline == 10
    groups.add("c", "t", "new", 5)
    group = groups.take()
    assert group is not None and group.sessions == ["left", "new"] and groups.take() is None


def test_sessions_of_two_clients_are_in_no_group_together() -> None:
    """R10: another client's session of the same task_id was compared with mine, and its commit
    closed my group.
    """
    groups = SessionGroups(num_runs=3, deadline_s=10)
    for at, (client, session) in enumerate([("a", "a1"), ("b", "b1"), ("a", "a2"), ("b", "b2")]):
        groups.add(client, "t", session, at)
    assert groups.take() is None and (groups.waiting("a"), groups.waiting("b")) == (2, 2)
    assert groups.commit("b") == 1 and groups.waiting("a") == 2
    group = groups.take()
    assert group is not None and group.sessions == ["b1", "b2"] and groups.take() is None
    assert (
        groups.expire(11) == []
        and (group := groups.take()) is not None
        and group.sessions == ["a1", "a2"]
    )
