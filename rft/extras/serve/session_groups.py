"""Which rewarded sessions are compared with each other: the next `num_runs` of one task, or what is
there at the deadline.

Pure: no clock, no input or output.  Invariant: a session is in one group, open or closed, from its
reward until it is taken or removed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

Key = tuple[str, str]  # client, and task or session


@dataclass
class SessionGroup:
    """Sessions of one client and task, in the order of their rewards."""

    client: str
    task_id: str
    closes: float  # whatever it has by then
    sessions: list[str] = field(default_factory=list)


class SessionGroups:
    """`needed`: the fewest sessions that can be trained together."""

    def __init__(self, num_runs: int, deadline_s: float) -> None:
        self.num_runs = num_runs
        self._deadline_s = deadline_s
        self.needed = min(2, num_runs)
        self._open: dict[Key, SessionGroup] = {}  # the one that closes first before the others
        self._last = 0.0  # when the newest group was begun
        self._by_session: dict[
            str, tuple[Key, SessionGroup]
        ] = {}  # session: key and group, open or closed
        self.closed: deque[SessionGroup] = deque()

    def add(self, client: str, task_id: str, session: str, at: float) -> None:
        """`session` of `client` was rewarded at `at`."""
        key = (client, task_id if self.num_runs > 1 else session)
        if (group := self._open.get(key)) is None:
            group = self._open[key] = SessionGroup(client, task_id, at + self._deadline_s)
            if at < self._last:  # it was in a group that was refused
                self._open = dict(sorted(self._open.items(), key=lambda item: item[1].closes))
            self._last = max(at, self._last)
        group.sessions.append(session)
        self._by_session[session] = key, group
        if len(group.sessions) == self.num_runs:
            self.closed.append(self._open.pop(key))

    def remove(self, session: str) -> None:
        """`session` is withdrawn; a group that was closed with it keeps its others."""
        if (entry := self._by_session.pop(session, None)) is None:
            return
        key, group = entry
        group.sessions.remove(session)
        if not group.sessions and self._open.get(key) is group:
            del self._open[key]

    def take(self) -> SessionGroup | None:
        """The group that was closed first.  What is left of one that has lost sessions, and is now
        too small, waits for others again.
        """
        while self.closed:
            group = self.closed.popleft()
            for session in group.sessions:
                del self._by_session[session]
            if len(group.sessions) >= self.needed:
                return group
            for session in group.sessions:
                self.add(group.client, group.task_id, session, group.closes - self._deadline_s)
        return None

    def expire(self, now: float) -> list[str]:
        """Closes the groups whose deadline has passed; the sessions that have too few partners."""
        return self._close(
            [key for key, _ in takewhile(lambda item: item[1].closes <= now, self._open.items())],
            give_up=True,
        )

    def commit(self, client: str) -> int:
        """Closes every group of `client` that can be trained; how many."""
        before = len(self.closed)
        self._close(
            [
                k
                for k, g in self._open.items()
                if g.client == client and len(g.sessions) >= self.needed
            ],
            give_up=False,
        )
        return len(self.closed) - before

    @property
    def next_deadline(self) -> float | None:
        return next((g.closes for g in self._open.values()), None)

    def waiting(self, client: str) -> int:
        """Sessions of `client` whose group is open."""
        return sum(len(g.sessions) for g in self._open.values() if g.client == client)

    def _close(self, keys: list[Key], *, give_up: bool) -> list[str]:
        alone: list[str] = []
        for key in keys:
            group = self._open.pop(key)
            if len(group.sessions) >= self.needed:
                self.closed.append(group)
            elif give_up:
                alone += group.sessions
                for session in group.sessions:
                    del self._by_session[session]
        return alone
