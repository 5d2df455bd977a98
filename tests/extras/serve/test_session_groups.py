"""Which sessions are compared with each other, and when."""

from __future__ import annotations

from rft.extras.serve.session_groups import SessionGroups


def test_a_group_closes_at_its_own_deadline_whatever_came_before_it() -> None:
    """A session of a group that the buffer refused is added again, with the time of its reward."""
    groups = SessionGroups(num_runs=2, deadline_s=10)
    groups.add("late", "s1", 100)
    groups.add("again", "s2", 50)
    assert groups.next_deadline == 60 and groups.expire(60) == ["s2"]
    assert groups.next_deadline == 110 and groups.waiting == 1


def test_what_is_left_of_a_closed_group_waits_for_others_until_its_deadline() -> None:
    groups = SessionGroups(num_runs=2, deadline_s=10)
    for at, session in enumerate(("gone", "left")):
        groups.add("t", session, at)
    groups.remove("gone")
    assert groups.take() is None and groups.waiting == 1 and groups.next_deadline == 10
    groups.add("t", "new", 5)
    group = groups.take()
    assert group is not None and group.sessions == ["left", "new"] and groups.take() is None
