"""Several engines behind one interface, whatever their type.

A request goes to the engine that has its beginning in its cache (because it serves or recently
served the same prompt, or wrote the answer that the request extends), else to the engine with the
fewest completions in progress.

An engine that is about to load weights refuses requests; they go to another engine, and wait only
if all refuse.  A failed engine is taken out until `revive` returns, and its requests are repeated
elsewhere; without `revive` its failure is the pool's.
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
from rft.types.completion import Completion, TokenScores
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import Engine, GenerateRequest, ScoreRow
from rft.types.throttled import THROTTLED
from rft.worker.waiting import waits

log = logging.getLogger(__name__)
T = TypeVar("T")
Revive = Callable[[int], Awaitable[None]]
REMEMBERED = 1 << 16  # number of beginnings whose engine is remembered
# a cached beginning is ignored if its engine has over this many more completions than twice the
# least loaded one
SPILL = 16
# the only engine metric that is a gauge, not a counter
RUNNING = "engine/requests_running"
RETRIES = 2  # of a request whose engine failed


class EnginePool:
    """A `ChatModel` over `engines`; errors name the engine.

    Weights are loaded into each engine separately (`rft.sync.engines`).  `identity` distinguishes
    models.  `max_concurrent` limits completions in progress; further requests queue.  `revive(i)`
    returns when engine i serves again.  `unscorable`: why it cannot score the policy's tokens.
    `verified(version)`: whether scores of a version count; those of a rejected one are asked again.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        max_concurrent: int | None = None,
        revive: Revive | None = None,
        identity: str = "",
        name: str = "the policy",
        unscorable: str = "",
        verified: Callable[[Version], Awaitable[bool]] | None = None,
    ) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self.engines = tuple(engines)
        self.identity = identity  # model id for caches of its answers
        self._name = name
        self._unscorable = unscorable
        self._verified = verified
        self._valid: set[Version] = set()  # verified versions
        self._revive = revive
        self._turn = asyncio.Semaphore(max_concurrent or 1 << 30)
        self._under_way = [0] * len(engines)
        self._serving: Counter[bytes] = Counter()  # requests in progress by beginning
        # beginning -> engine that has the beginning in its cache
        self._homes: OrderedDict[bytes, int] = OrderedDict()
        self._lost: dict[int, asyncio.Future[None]] = {}  # engines being revived
        self._counted = dict.fromkeys(("lost", "stalled", "asked_again"), 0)
        # last metrics of each engine's current process
        self._reported: list[dict[str, Metric]] = [{} for _ in engines]
        self._former: list[Metric] = []  # last metrics of ended processes

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        key = b"" if len(self.engines) == 1 else _beginning(request)
        hurried = (
            request if len(self.engines) == 1 else msgspec.structs.replace(request, may_wait=False)
        )
        return await self._ask(
            lambda e, may_wait: e.generate(request if may_wait else hurried), key, request.n
        )

    async def score(self, row: ScoreRow) -> TokenScores:
        if self._unscorable:
            raise ValueError(self._unscorable)
        while True:
            scores = await self._ask(lambda e, _: e.score(row))
            if self._verified is None or scores.version in self._valid:
                return scores
            if await self._verified(scores.version):
                self._valid.add(scores.version)

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
        """Return the engine for a request, preferably one that has not `refused` the request.

        Waits while no engine is up; raises EngineFailed if an engine could not be revived.
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

    def _lose(self, index: int, failure: EngineFailed, error: EngineFailed) -> None:
        assert self._revive is not None
        if index in self._lost:
            return
        self._counted["lost"] += 1
        self._counted["stalled"] += isinstance(error, EngineStalled)
        log.warning("%s; it is brought back", failure)

        async def back(revive: Revive) -> None:
            await revive(index)
            log.info("engine %d of %d is back", index, len(self.engines))
            del self._lost[index]

        task = self._lost[index] = asyncio.ensure_future(back(self._revive))
        # marks the exception as retrieved; `_choose` raises it
        task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def metrics(self) -> list[Metric]:
        """Return the metrics of all engines that answer; counters of ended processes keep their
        last value.
        """
        up = [i for i in range(len(self.engines)) if i not in self._lost]
        for i, engine_metrics in zip(
            up, await asyncio.gather(*(self._metrics(self.engines[i]) for i in up)), strict=True
        ):
            earlier = self._reported[i]
            now = {m.name: m for m in engine_metrics}
            if now and any(
                now[name].value < earlier[name].value
                for name in earlier
                if name in now and name != RUNNING
            ):
                self._former += [m for m in earlier.values() if m.name != RUNNING]
            if now:
                self._reported[i] = now
        pool_metrics = [
            Metric(f"engine/{name}", float(value), "sum") for name, value in self._counted.items()
        ]
        return [
            *pool_metrics,
            *self._former,
            *(m for reported in self._reported for m in reported.values()),
        ]

    async def _metrics(self, engine: Engine) -> list[Metric]:
        try:
            return await engine.metrics()
        except EngineFailed as e:
            log.warning("no metrics: %s", e)
            return []


def _beginning(request: GenerateRequest) -> bytes:
    """Hash the tokens that the request extends, or else its whole prompt; equal hashes can share a
    cache.
    """
    if request.prefix_tokens is not None:
        return _digest(request.prefix_tokens)
    return xxhash.xxh3_128_digest(
        msgspec.msgpack.encode((request.messages, request.tools, request.prompt_tokens))
    )


def _digest(tokens: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(tokens, np.int32).tobytes())
