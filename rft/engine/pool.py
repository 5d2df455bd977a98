"""Several engines as one.  Does not know what kind they are.

Invariant: requests for a prompt that is already being served go to the engine that serves it (its prefix is cached there), any other
request goes to the engine with the fewest completions under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from rft.engine.base import worst
from rft.errors import EngineFailed
from rft.types.completion import Completion
from rft.types.metrics import Metric
from rft.types.ports import Engine, GenerateRequest, LoadReport, ScoreRow, WeightManifest

T = TypeVar("T")


class EnginePool:
    """Implements `Engine` over `engines`; failures of one are failures of the pool and say which engine it was."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self.engines = tuple(engines)
        self._under_way = [0] * len(engines)
        self._homes: dict[bytes, list[int]] = {}  # prompt -> [engine, requests under way]

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        prompt = msgspec.msgpack.encode((request.messages, request.tools, request.prompt_tokens))
        home = self._homes.setdefault(prompt, [min(range(len(self.engines)), key=self._under_way.__getitem__), 0])
        index = home[0]
        home[1] += 1
        self._under_way[index] += request.n
        try:
            return await self.engines[index].generate(request)
        except EngineFailed as e:
            raise EngineFailed(f"engine {index} of {len(self.engines)}: {e}") from e
        finally:
            self._under_way[index] -= request.n
            home[1] -= 1
            if home[1] == 0:
                self._homes.pop(prompt, None)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        return await self._least(lambda e: e.logprobs(row))

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        return await self._least(lambda e: e.classify(messages))

    async def _least(self, call: Callable[[Engine], Awaitable[T]]) -> T:
        """One call to the engine with the fewest requests under way."""
        index = min(range(len(self.engines)), key=self._under_way.__getitem__)
        self._under_way[index] += 1
        try:
            return await call(self.engines[index])
        except EngineFailed as e:
            raise EngineFailed(f"engine {index} of {len(self.engines)}: {e}") from e
        finally:
            self._under_way[index] -= 1

    async def pause(self, *, clear_cache: bool = True) -> None:
        await self._each(*(e.pause(clear_cache=clear_cache) for e in self.engines))

    async def load(self, manifest: WeightManifest) -> LoadReport:
        """Loads all; the report holds the worst of each, so it is good only when every engine's is."""
        return worst(await self._each(*(e.load(manifest) for e in self.engines)), manifest.version)

    async def resume(self) -> None:
        await self._each(*(e.resume() for e in self.engines))

    async def health(self) -> None:
        await self._each(*(e.health() for e in self.engines))

    async def metrics(self) -> list[Metric]:
        return [m for ms in await self._each(*(e.metrics() for e in self.engines)) for m in ms]

    async def close(self) -> None:
        await self._each(*(e.close() for e in self.engines))

    async def _each(self, *calls: Any) -> list[Any]:
        """All calls at once; waits for all, then raises the first failure."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results
