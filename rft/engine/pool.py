"""Several engines as one.  Does not know what kind they are.

Where a request goes: to the engine that has its beginning in its cache (it serves the same prompt
now, served it lately, or wrote the answer that the request goes on from), any other to the engine
with the fewest completions under way.

An engine that is about to load new weights while others serve refuses requests; they go to another,
and wait only where all refuse. An engine that fails is taken out until `revive` has brought it
back, and its requests are asked again elsewhere; without `revive` its failure is the pool's.
Invariant: a request is answered once, by one engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from rft.engine.admission import Draining
from rft.errors import EngineFailed, EngineStalled
from rft.types.completion import Completion
from rft.types.metrics import Metric
from rft.types.ports import Engine, GenerateRequest, ScoreRow
from rft.types.throttled import THROTTLED
from rft.worker.waiting import waits

log = logging.getLogger(__name__)
T = TypeVar("T")
Revive = Callable[[int], Awaitable[None]]
REMEMBERED = 1 << 16  # beginnings whose engine is known
# a cached beginning is not worth waiting behind so many more completions than elsewhere (and twice
# as many)
SPILL = 16
# the one metric of engines that is not counted from their start
RUNNING = "engine/requests_running"
RETRIES = 2  # of a request whose engine failed


class EnginePool:
    """A `ChatModel` over `engines`; what one of them raises says which it was.

    Each engine gets its weights by itself (`rft.sync.engines`).  `identity` tells models apart.
    `max_concurrent`: completions under way; further ones wait their turn.  `revive(i)` returns when
    engine i serves again.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        max_concurrent: int | None = None,
        revive: Revive | None = None,
        identity: str = "",
        name: str = "the policy",
    ) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self.engines = tuple(engines)
        self.identity = identity  # which model this is, for what remembers its answers
        self._name = name
        self._revive = revive
        self._turn = asyncio.Semaphore(max_concurrent or 1 << 30)
        self._under_way = [0] * len(engines)
        self._serving: Counter[bytes] = Counter()  # beginnings, by requests under way
        # beginning -> engine that has it in its cache
        self._homes: OrderedDict[bytes, int] = OrderedDict()
        self._lost: dict[int, asyncio.Future[None]] = {}  # engines that are being brought back
        self._counted = dict.fromkeys(("lost", "stalled", "asked_again"), 0)
        # what each process of an engine said last
        self._told: list[dict[str, Metric]] = [{} for _ in engines]
        self._former: list[Metric] = []  # what processes that are gone had said

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        key = b"" if len(self.engines) == 1 else _beginning(request)
        hurried = (
            request if len(self.engines) == 1 else msgspec.structs.replace(request, may_wait=False)
        )
        return await self._ask(
            lambda e, may_wait: e.generate(request if may_wait else hurried), key, request.n
        )

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        return await self._ask(lambda e, _: e.logprobs(row))

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        return await self._ask(lambda e, _: e.classify(messages))

    async def _ask(
        self, call: Callable[[Engine, bool], Awaitable[T]], key: bytes = b"", weight: int = 1
    ) -> T:
        with waits("call", self._name, count=weight):
            return await self._answered(call, key, weight)

    async def _answered(
        self, call: Callable[[Engine, bool], Awaitable[T]], key: bytes, weight: int
    ) -> T:
        failures = 0
        refused = set[int]()
        async with THROTTLED.get().turn(self._turn):
            while True:
                index = await self._choose(key, refused)
                self._under_way[index] += weight
                self._serving[key] += 1
                try:
                    result = await call(self.engines[index], index in refused)
                except Draining:
                    refused.add(index)
                except EngineFailed as e:
                    failures += 1
                    failure = EngineFailed(f"engine {index} of {len(self.engines)}: {e}")
                    if self._revive is None or failures > RETRIES:
                        raise failure from e
                    self._lose(index, failure, e)
                    self._counted["asked_again"] += 1
                else:
                    if key and isinstance(result, list):
                        for c in result:
                            self._remember(
                                _digest(np.concatenate([c.prompt_tokens, c.tokens])), index
                            )
                    return result
                finally:
                    self._under_way[index] -= weight
                    self._serving[key] -= 1
                    if not self._serving[key]:
                        del self._serving[key]

    async def _choose(self, key: bytes, refused: Collection[int]) -> int:
        """The engine for a request, one that has not `refused` it before one that has.

        Waits while none is there; raises EngineFailed when one could not be brought back.
        """
        while True:
            for task in self._lost.values():
                if task.done():
                    task.result()
            up = [i for i in range(len(self.engines)) if i not in self._lost]
            if up:
                break
            await asyncio.wait(self._lost.values(), return_when=asyncio.FIRST_COMPLETED)
        up = [i for i in up if i not in refused] or up
        least = min(up, key=self._under_way.__getitem__)
        home = self._homes.get(key) if key else None
        crowded = (
            home is not None
            and not self._serving[key]
            and self._under_way[home] > 2 * self._under_way[least] + SPILL
        )
        if home is None or home not in up or crowded:
            home = least
        if key:
            self._remember(key, home)
        return home

    def _remember(self, key: bytes, index: int) -> None:
        self._homes[key] = index
        self._homes.move_to_end(key)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    def _lose(self, index: int, failure: EngineFailed, why: EngineFailed) -> None:
        assert self._revive is not None
        if index in self._lost:
            return
        self._counted["lost"] += 1
        self._counted["stalled"] += isinstance(why, EngineStalled)
        log.warning("%s; it is brought back", failure)

        async def back(revive: Revive) -> None:
            await revive(index)
            log.info("engine %d of %d is back", index, len(self.engines))
            del self._lost[index]

        task = self._lost[index] = asyncio.ensure_future(back(self._revive))
        # told to whoever asks next
        task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def metrics(self) -> list[Metric]:
        """Of all engines that can answer; numbers of a process that has ended are kept as it said
        them last.
        """
        up = [i for i in range(len(self.engines)) if i not in self._lost]
        for i, found in zip(
            up, await asyncio.gather(*(self._metrics(self.engines[i]) for i in up)), strict=True
        ):
            told = self._told[i]
            now = {m.name: m for m in found}
            if now and any(
                now[name].value < told[name].value
                for name in told
                if name in now and name != RUNNING
            ):
                self._former += [m for m in told.values() if m.name != RUNNING]
            if now:
                self._told[i] = now
        own = [
            Metric(f"engine/{name}", float(value), "sum") for name, value in self._counted.items()
        ]
        return [*own, *self._former, *(m for told in self._told for m in told.values())]

    async def _metrics(self, engine: Engine) -> list[Metric]:
        try:
            return await engine.metrics()
        except EngineFailed as e:
            log.warning("no metrics: %s", e)
            return []


def _beginning(request: GenerateRequest) -> bytes:
    """What tells apart requests that can share a cache: the tokens they go on from, or else their
    whole prompt.
    """
    if request.prefix_tokens is not None:
        return _digest(request.prefix_tokens)
    return xxhash.xxh3_128_digest(
        msgspec.msgpack.encode((request.messages, request.tools, request.prompt_tokens))
    )


def _digest(tokens: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(tokens, np.int32).tobytes())
