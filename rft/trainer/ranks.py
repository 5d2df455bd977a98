"""All ranks of the trainer as one: a call goes to every rank together, and the first failure is everyone's.

The local rank works in one thread of its own, so the event loop stays free (the canary asks for scores while weights are published).
Knows neither Ray nor buffers.  Invariant: collective calls reach every rank in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rft.algorithm.argbase import Computed
from rft.errors import ConfigError
from rft.trainer.pack import Budget, RankBatch, TrainRow, plan
from rft.types.ids import Version
from rft.types.ports import ScoreRow, WeightManifest

if TYPE_CHECKING:
    from rft.sync.base import Transport
    from rft.trainer.learner import Learner, Scored, StepResult


class RankPort(Protocol):
    """A rank in another process."""

    async def call(self, method: str, *args: Any) -> Any:
        """The result of the learner's method `method`."""
        ...

    async def aside(self, method: str, *args: Any) -> Any:
        """The same, beside the calls that are at work: for methods that no other rank waits for."""
        ...


@dataclass(frozen=True)
class StepReport:
    """One step over all ranks: sums added, maxima combined."""

    sums: dict[str, float]
    maxima: dict[str, float]
    trained_tokens: int
    computed_positions: int
    finite: bool
    grad_norm: float
    lr: float
    seconds: dict[str, float]


class Ranks:
    """`local` is rank 0; `remote` are ranks 1, 2, ... in order."""

    def __init__(self, local: Learner, remote: Sequence[RankPort] = ()) -> None:
        self.settings = local.settings
        self.algorithm = local.algorithm
        self._local, self._remote = local, tuple(remote)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._turn = asyncio.Lock()
        if (count := 1 + len(self._remote)) != self.settings.world_size:
            raise ValueError(f"{count} ranks, but the learner was made for a world of {self.settings.world_size}")

    @property
    def world_size(self) -> int:
        return self.settings.world_size

    @property
    def budget(self) -> Budget:
        s = self.settings
        if not s.use_dynamic_bsz and s.micro_batch_size is None:
            raise ConfigError("is needed with use_dynamic_bsz: false", key="trainer.micro_batch_size_per_gpu")
        return Budget(s.max_token_len_per_gpu, s.share_prompts, None if s.use_dynamic_bsz else s.micro_batch_size)

    async def step(self, shares: Sequence[RankBatch]) -> StepReport:
        """One train step; `shares[r]` is rank r's."""
        results: list[StepResult] = await self._all("step", [(share,) for share in shares])
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for result in results:
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in result.maxima.items():
                maxima[name] = max(maxima.get(name, value), value)
        return StepReport(
            sums=sums,
            maxima=maxima,
            trained_tokens=sum(r.trained_tokens for r in results),
            computed_positions=sum(r.computed_positions for r in results),
            finite=all(r.finite for r in results),
            grad_norm=results[0].grad_norm,
            lr=results[0].lr,
            seconds={name: max(r.seconds[name] for r in results) for name in results[0].seconds},
        )

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        """Log-probs, float32 [len(tokens) - prompt_length], of each row's tokens after its prompt."""
        made = [_train_row(row) for row in rows]
        asked = [row for row in made if row.loss_mask.any()]
        found = iter(await self.compute(asked, ("old",)))
        return [next(found)["old"] if row.loss_mask.any() else np.zeros(0, np.float32) for row in made]

    async def compute(self, rows: Sequence[TrainRow], what: Sequence[Computed]) -> list[Scored]:
        """For each row what was asked for, float32 [L] each, under the weights as they are."""
        cut = plan(rows, self.world_size, Budget(self.budget.tokens, self.budget.share_prompts))
        results = await self._all("score", [([[rows[i] for i in micro] for micro in mine], tuple(what)) for mine in cut])
        found: list[Scored] = [{}] * len(rows)
        for mine, result in zip(cut, results, strict=True):
            for micro, scores in zip(mine, result, strict=True):
                for i, score in zip(micro, scores, strict=True):
                    found[i] = score
        return found

    async def stage(self, version: Version, transport: Transport) -> WeightManifest:
        first, *_ = await self._all("stage", [(version, transport), *((version, None) for _ in self._remote)])
        assert isinstance(first, WeightManifest)
        return first

    async def take(self, step: int, *, copy: bool) -> None:
        """Every rank fixes what it will write; see `Learner.take`."""
        await self._same("take", step, copy)

    async def write(self, folder: Path) -> dict[str, str]:
        """Every rank writes what it took, while steps may go on; sha256 by file name."""
        mine = asyncio.to_thread(self._local.write, str(folder))
        written = await asyncio.gather(mine, *(r.aside("write", str(folder)) for r in self._remote))
        return {name: digest for part in written for name, digest in part.items()}

    async def export(self, folder: Path) -> None:
        await self._same("export", str(folder))

    async def load(self, checkpoint: str | Path) -> None:
        """Go on from a committed checkpoint folder (`global_step_N`)."""
        await self._same("load", str(Path(checkpoint) / "trainer"))

    async def aside(self, work: Any, *args: Any) -> Any:
        """Run blocking `work` in the local rank's thread, between collective calls."""
        async with self._turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _same(self, method: str, *args: Any) -> list[Any]:
        return await self._all(method, [args] * self.world_size)

    async def _all(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self._turn:
            local = asyncio.get_running_loop().run_in_executor(self._thread, getattr(self._local, method), *args[0])
            return list(await asyncio.gather(local, *(r.call(method, *a) for r, a in zip(self._remote, args[1:], strict=True))))


def _train_row(row: ScoreRow) -> TrainRow:
    count = len(row.tokens)
    return TrainRow(
        tokens=row.tokens,
        loss_mask=np.arange(count) >= row.prompt_length,
        logprobs=np.zeros(count, np.float32),
        temperatures=np.full(count, row.temperature, np.float32),
    )
