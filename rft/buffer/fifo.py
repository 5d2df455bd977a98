"""Reading oldest first: batches in order (batch, explorer), groups in order of their task, rows in order of their id.

So the same stored groups give the same train batches, however fast each of them came.
The one invariant: rows that came back (a further use) stand again where they stood before.
"""

from __future__ import annotations

import heapq
from itertools import count

from rft.buffer.order import Choice, Closed, Group, Key, Portion, Row, Wanted, clipped, short_batch
from rft.buffer.settings import BufferSettings

_Place = tuple[int, int, int, int, str, str]  # batch, explorer, 0 = before the groups, task, group, first row


class Fifo:
    """See `rft.buffer.order.Selector`.  Nothing rests."""

    def __init__(self, settings: BufferSettings) -> None:
        self._policy = settings.on_short_batch
        self._heap: list[tuple[_Place, int, Portion]] = []
        self._numbers = count()
        self._short: dict[Key, Closed] = {}

    def closed(self, key: Key, closed: Closed) -> None:
        if closed.short and self._policy != "carry":
            self._short[key] = closed
            self._push(Portion(None, [], key, gaps=closed.short))

    def put(self, group: Group, rows: list[Row], *, rested: bool = True) -> None:
        del rested
        self._push(Portion(group, rows, group.key))

    def pick(self, wanted: Wanted) -> Choice:
        choice = Choice(missing=wanted.amount)
        while choice.missing and self._heap:
            portion = heapq.heappop(self._heap)[2]
            if portion.dead:
                continue
            choice.taken.append(portion)
            if portion.group is not None:
                clipped(wanted, choice, portion, self._push)
            elif self._policy == "stop":
                self.undo(choice)
                raise short_batch(wanted.step, portion.batch, self._short[portion.batch])
            else:
                self._gap(wanted, choice, portion)
        return choice

    def undo(self, choice: Choice) -> None:
        for portion in choice.split:
            portion.dead = True
        for portion in choice.taken:
            self._push(portion)

    def resting(self, wanted: Wanted) -> tuple[float | None, int]:
        del wanted
        return None, 0

    def _gap(self, wanted: Wanted, choice: Choice, portion: Portion) -> None:
        """A short batch leaves its step short, if that step trains the batch's groups, or if the batch has none."""
        mine = any(g.key == portion.batch for g, _ in choice.picked)
        if wanted.rows is None and (mine or self._short[portion.batch].accepted == 0):
            choice.gaps += portion.gaps
            choice.missing = wanted.lacks(choice.num_rows, len(choice.picked) + choice.gaps)

    def _push(self, portion: Portion) -> None:
        batch, explorer = portion.batch
        place: _Place
        if portion.group is None:
            place = (batch, explorer, 0 if self._policy == "stop" else 2, 0, "", "")
        else:
            place = (batch, explorer, 1, portion.group.task, portion.group.id, portion.rows[0].id)
        heapq.heappush(self._heap, (place, next(self._numbers), portion))
