"""The set of engines: membership, calls to all engines, and restarts of dead ones.

Depends on neither versions nor schedules.  Invariant: an engine's number is never reused, and every
call has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from rft.errors import EngineFailed, EngineStalled
from rft.sync.waits import Waits
from rft.types.ports import Engine

log = logging.getLogger(__name__)
T = TypeVar("T")
Restart = Callable[[int], Awaitable[None]]


class NoEngines(Exception):
    """All called engines have left."""


class Rejected(Exception):
    """An attempt failed."""


class Died(Rejected):
    """An attempt failed because an engine must be restarted; the weights are not suspect."""


class EngineSet:
    """Engines by number.  Engines of an owner may leave; the others stay for the whole run.

    `restart(i)` gives engine i a new process, without weights; None: dead engines stay dead.
    `on_evicted(owner, reason)` is called when the engines of an owner had to leave.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        workers: Sequence[int],
        waits: Waits,
        timeout_s: float,
        restart: Restart | None,
        on_evicted: Callable[[str, str], None],
    ) -> None:
        self._engines: dict[int, Engine] = dict(enumerate(engines))
        self._workers = dict(enumerate(workers))  # number of workers by engine
        self._owners: dict[int, str] = {}
        self._numbers = itertools.count(len(engines))
        self._dead: set[int] = set()  # must be restarted before the next call
        self._stalled: set[int] = set()  # those of `_dead` that hang
        # since the last report
        self._restarts = {"engines_restarted": 0, "engines_stalled": 0}
        self._waits = waits
        self._timeout_s = timeout_s
        self._restart = restart
        self._on_evicted = on_evicted
        self.departures = 0

    # ------------------------------------------------------------ membership

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self._engines)

    def __contains__(self, index: int) -> bool:
        return index in self._engines

    def workers(self, numbers: Sequence[int]) -> dict[int, int]:
        """Return the number of workers of each of these engines."""
        return {i: self._workers.get(i, 1) for i in numbers}

    def add(
        self, owner: str | None, engines: Sequence[Engine], workers: Sequence[int]
    ) -> tuple[int, ...]:
        """Add engines and return their numbers.  With an `owner` they may leave."""
        numbers = tuple(itertools.islice(self._numbers, len(engines)))
        self._engines |= dict(zip(numbers, engines, strict=True))
        self._workers |= dict(zip(numbers, workers or [1] * len(numbers), strict=True))
        if owner is not None:
            self._owners |= dict.fromkeys(numbers, owner)
        return numbers

    async def remove(self, numbers: Collection[int]) -> None:
        """Remove engines that have left or must not be called any more."""
        for index in numbers:
            self._engines.pop(index, None)
            self._owners.pop(index, None)
            self._dead.discard(index)
            self._stalled.discard(index)
        self.departures += 1
        await self._waits.changed()

    def owned(self, owner: str) -> list[int]:
        return [i for i, o in self._owners.items() if o == owner]

    def owner(self, index: int) -> str | None:
        return self._owners.get(index)

    async def evict(self, owner: str, reason: str) -> None:
        log.error("explorer %s leaves: %s", owner, reason)
        await self.remove(self.owned(owner))
        self._on_evicted(owner, reason)

    # ------------------------------------------------------------ asking

    async def ask_all(
        self, what: str, ask: Callable[[Engine], Awaitable[T]], numbers: Sequence[int] | None = None
    ) -> dict[int, T]:
        """Call all engines, or those with `numbers`, and return their answers.

        A failure becomes Rejected and names the engine.
        """
        chosen = self.numbers if numbers is None else numbers
        return await self.gather({i: self.ask(i, what, ask) for i in chosen})

    async def gather(self, calls: Mapping[int, Awaitable[T]]) -> dict[int, T]:
        """Return all answers, ignoring engines that have left meanwhile.

        Of several failures, one that casts doubt on the weights takes precedence over a dead
        engine. Raises NoEngines if all have left.
        """
        answers = await asyncio.gather(*calls.values(), return_exceptions=True)
        results = {i: r for i, r in zip(calls, answers, strict=True) if i in self._engines}
        failures = [r for r in results.values() if isinstance(r, BaseException)]
        if failures:
            raise next((f for f in failures if not isinstance(f, Died)), failures[0])
        if not results:
            raise NoEngines
        return results  # type: ignore[return-value]  # exceptions are gone

    async def ask(self, index: int, what: str, ask: Callable[[Engine], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                if (engine := self._engines.get(index)) is None:
                    raise EngineFailed("it has left")
                return await ask(engine)
        except TimeoutError:
            raise Rejected(
                f"engine {index} did not answer `{what}` within {self._timeout_s:g} s"
            ) from None
        except Exception as e:  # a remote engine may raise anything; any error leads to a roll-back
            reason = f"engine {index}: {what}: {type(e).__name__}: {e}"
            if isinstance(e, EngineFailed) and self._restart is not None and index in self._engines:
                self._dead.add(index)
                if isinstance(e, EngineStalled):
                    self._stalled.add(index)
                raise Died(reason) from e
            raise Rejected(reason) from e

    # ------------------------------------------------------------ restarting

    async def why_dead(self, index: int) -> str:
        """Return why engine `index` must be restarted; empty if it is healthy."""
        if index in self._dead:
            return f"engine {index} died"
        try:
            await self.ask(index, "health", lambda e: e.health())
        except Rejected as e:
            if self._restart is not None:
                self._dead.add(index)  # including an engine that only hangs
            return str(e)
        return ""

    async def restart_dead(self) -> list[int]:
        """Restart every dead engine; return the restarted engines, which have no weights.

        An engine that cannot be restarted leaves with its owner; without an owner it raises
        Rejected.
        """
        restarted: list[int] = []
        for index in sorted(self._dead):
            if index not in self._dead:
                continue  # it has left
            assert self._restart is not None
            try:
                await self._restart(index)
            except Exception as e:  # the launcher may raise anything
                reason = f"engine {index} could not be restarted: {type(e).__name__}: {e}"
                if (owner := self.owner(index)) is None:
                    raise Rejected(reason) from e
                await self.evict(owner, reason)
                continue
            log.warning("engine %d was restarted", index)
            self._restarts["engines_restarted"] += 1
            self._restarts["engines_stalled"] += index in self._stalled
            self._dead.discard(index)
            self._stalled.discard(index)
            restarted.append(index)
        return restarted

    @property
    def dead(self) -> bool:
        """Return whether some engine must be restarted."""
        return bool(self._dead)

    def take_restarts(self) -> dict[str, int]:
        """Return the restarts since the last call."""
        restarts, self._restarts = self._restarts, dict.fromkeys(self._restarts, 0)
        return restarts
