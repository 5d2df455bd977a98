"""Reading by priority, with replay: a group may be trained again, after a rest, until it was used `max_uses` times.

It knows priorities and a clock, not the ledger.  The one invariant: between two uses of a row lie at least `cooldown_s` seconds of
the clock; a new process counts them anew.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from itertools import count

from rft.buffer.fifo import Fifo
from rft.buffer.order import Choice, Closed, Group, Key, Portion, Row, Selector, Wanted, clipped
from rft.buffer.priority import Candidate, PriorityFn
from rft.buffer.settings import BufferSettings, ReplaySettings
from rft.errors import BufferFailed
from rft.plugins import REGISTRY

Clock = Callable[[], float]  # seconds that only go forward


def make_selector(settings: BufferSettings, clock: Clock = time.monotonic) -> Selector:
    """The order of reading that the settings ask for."""
    return Fifo(settings) if settings.replay is None else ByPriority(settings, settings.replay, clock)


class ByPriority:
    """See `rft.buffer.order.Selector`.  At most `capacity` groups are kept for another use; beyond it the lowest are evicted."""

    def __init__(self, settings: BufferSettings, replay: ReplaySettings, clock: Clock) -> None:
        plugin = REGISTRY.get("priority", replay.priority_fn)
        args = plugin.args(**replay.priority_fn_args) if plugin.args is not None else None
        self._name = replay.priority_fn
        self._fn: PriorityFn = plugin.obj(args, replay.seed)
        self._cooldown = replay.cooldown_s or 0.0
        self._capacity = settings.capacity
        self._clock = clock
        self._numbers = count()
        self._ready: list[tuple[float, str, int, Portion]] = []  # highest first, then by the first row's id
        self._resting: list[tuple[float, int, Portion]] = []  # soonest first
        self._used: list[tuple[float, str, int, Portion]] = []  # of both, what was used before: lowest first
        self._num_used = 0

    def closed(self, key: Key, closed: Closed) -> None:
        """A short batch is no matter of its own here: only a lease that cannot be filled is."""

    def put(self, group: Group, rows: list[Row], *, rested: bool = True) -> None:
        portion = Portion(group, rows, group.key, priority=self._priority(group, rows))
        if rested:
            self._push(portion)
        else:
            heapq.heappush(self._resting, (self._clock() + self._cooldown, next(self._numbers), portion))
        self._count(portion)

    def pick(self, wanted: Wanted) -> Choice:
        now, choice = self._clock(), Choice(missing=wanted.amount)
        while self._resting and self._resting[0][0] <= now:
            self._push(heapq.heappop(self._resting)[2])
        while choice.missing and self._ready:
            portion = heapq.heappop(self._ready)[3]
            if not portion.dead:
                self._take(choice, portion)
                clipped(wanted, choice, portion, self._again)
        if not choice.missing:
            self._evict(choice)
        return choice

    def undo(self, choice: Choice) -> None:
        for portion in choice.split:
            self._kill(portion)
        for portion in choice.taken:
            fresh = Portion(portion.group, portion.rows, portion.batch, priority=portion.priority)
            self._again(fresh)

    def resting(self, wanted: Wanted) -> tuple[float | None, int]:
        alive = [(at, p) for at, _, p in self._resting if not p.dead]
        fresh = [len(wanted.split(p.rows)[0]) for _, p in alive]
        first = min((at for at, _ in alive), default=None)
        return first, sum(fresh) if wanted.rows is not None else sum(bool(n) for n in fresh)

    # ------------------------------------------------------------ inside

    def _priority(self, group: Group, rows: list[Row]) -> float:
        x = Candidate(
            group=group.id,
            batch=group.batch,
            task=group.task,
            model_version=min((r.oldest_step for r in rows if r.oldest_step is not None), default=0),
            use_count=max(r.uses for r in rows),
            rewards=tuple(r.reward for r in rows),
        )
        try:
            found = float(self._fn(x))
        except Exception as e:  # whatever a plugin raises, the message names it
            raise BufferFailed(f"priority function {self._name!r} failed on {x}: {type(e).__name__}: {e}") from e
        if math.isnan(found):
            raise BufferFailed(f"priority function {self._name!r} gave NaN for {x}; it must give a number")
        return found

    def _push(self, portion: Portion) -> None:
        if not portion.dead:
            heapq.heappush(self._ready, (-portion.priority, portion.rows[0].id, next(self._numbers), portion))

    def _again(self, portion: Portion) -> None:
        self._push(portion)
        self._count(portion)

    def _count(self, portion: Portion) -> None:
        if portion.rows[0].uses:
            self._num_used += 1
            heapq.heappush(self._used, (portion.priority, portion.rows[0].id, next(self._numbers), portion))

    def _kill(self, portion: Portion) -> None:
        """It is in no heap any more (what is left of it there is passed over)."""
        portion.dead = True
        if portion.rows[0].uses:
            self._num_used -= 1

    def _take(self, choice: Choice, portion: Portion) -> None:
        choice.taken.append(portion)
        self._kill(portion)

    def _evict(self, choice: Choice) -> None:
        while self._num_used > self._capacity:
            portion = heapq.heappop(self._used)[3]
            if not portion.dead:
                assert portion.group is not None
                self._take(choice, portion)
                choice.drop("evicted", portion.group, portion.rows)
