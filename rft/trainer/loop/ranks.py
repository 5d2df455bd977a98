"""All ranks of the trainer as one object: a call goes to every rank, and the first failure fails
the call.

The local rank works in its own thread, so the event loop stays free (the canary requests scores
while weights are published). Depends on neither Ray nor buffers.  Invariant: collective calls reach
every rank in the same order.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec.structs import replace

from rft.algorithm.args import Computed
from rft.algorithm.needs import controllers
from rft.errors import CheckpointInvalid, ConfigError
from rft.trainer.loop.step_result import StepResult, combined
from rft.trainer.rows.pack import Budget, RankBatch, RowImage, TrainRow, plan
from rft.trainer.settings import CriticSettings, LearnerSettings, WeightSet
from rft.types.ids import Version
from rft.types.ports import ScoreRow, WeightManifest
from rft.types.row_layout import AskedLayout

if TYPE_CHECKING:
    from rft.sync.base import Transport
    from rft.trainer.loop.learner import Learner
    from rft.trainer.loop.rank_models import Scored
    from rft.trainer.rows.batch_builder import StepBatch


_FIRST_ROWS = 4  # rows of a run's first batch that are compared with transformers


class RankPort(Protocol):
    """A rank in another process."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call the learner's method `method`; return its result."""
        ...

    async def aside(self, method: str, *args: Any) -> Any:
        """Call a method that no other rank waits for, concurrently with running calls."""
        ...


class Ranks:
    """All ranks: `local` is rank 0; `remote` are ranks 1, 2, ... in order."""

    def __init__(self, local: Learner, remote: Sequence[RankPort] = ()) -> None:
        self.settings = local.settings
        self.algorithm = local.algorithm
        self.controllers = controllers(self.settings.algorithm)
        self._local = local
        self._remote = tuple(remote)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._checked = False  # whether the first batch of a run without engines was compared
        self._lock = asyncio.Lock()
        if (count := 1 + len(self._remote)) != self.settings.world_size:
            raise ValueError(
                f"{count} ranks, but the learner was made for a world of {self.settings.world_size}"
            )

    @property
    def world_size(self) -> int:
        """Return the number of data-parallel ranks; ranks that share a sequence count once."""
        return self.settings.world_size // self.settings.sequence_parallel

    @property
    def budget(self) -> Budget:
        return self._step_budget(self.settings, "trainer")

    @property
    def critic_budget(self) -> Budget | None:
        """Return the budget of the critic's training; None without a critic."""
        return (
            self._step_budget(self.settings.critic, "trainer.critic")
            if self.algorithm.needs.critic
            else None
        )

    def _step_budget(self, model: LearnerSettings | CriticSettings, section: str) -> Budget:
        if not model.use_dynamic_bsz and model.micro_batch_size is None:
            raise ConfigError(
                "is needed with use_dynamic_bsz: false", key=f"{section}.micro_batch_size_per_gpu"
            )
        rows = None if model.use_dynamic_bsz else model.micro_batch_size
        images = model.image_layout if isinstance(model, LearnerSettings) else "padded"
        return self._budget(model.max_token_len_per_gpu, rows, model.row_layout, images)

    def _budget(
        self, tokens: int, rows: int | None, layout: AskedLayout, images: AskedLayout = "padded"
    ) -> Budget:
        s = self.settings
        return Budget(tokens * s.sequence_parallel, layout, rows, images, s.balance_batch)

    def forward_budget(self, what: Computed) -> Budget:
        """Return the budget of a forward pass that computes `what`."""
        s = self.settings
        c = self.settings.critic
        if what == "values":
            rows = None if c.use_dynamic_bsz else c.forward_micro_batch_size
            return self._budget(c.forward_max_token_len_per_gpu, rows, c.row_layout)
        limits = (s.ref or s.log_prob) if what == "ref" else s.log_prob
        if limits is None:
            return self.budget
        rows = limits.micro_batch_size
        return self._budget(limits.max_token_len_per_gpu, rows, s.row_layout, s.image_layout)

    @property
    def before(self) -> frozenset[Computed]:
        """Return the names of arrays computed for all rows before a step.

        These are the arrays that the algorithm reads, and those that must not change between the
        updates of a step.
        """
        s = self.settings
        needs = self.algorithm.needs
        names = needs.before
        if not s.algorithm.bypass_old_logprobs and (
            s.ppo_epochs > 1 or s.algorithm.proximal_window
        ):
            names |= {"old"}
        if needs.reference and (s.ppo_epochs > 1 or s.ref is not None):
            names |= {"ref"}
        return names

    @property
    def factors(self) -> dict[str, float]:
        """Return the factors of the loss terms in the next step."""
        return {name: controller.factor for name, controller in self.controllers.items()}

    async def step(
        self, shares: Sequence[RankBatch], critic: Sequence[RankBatch] | None = None
    ) -> StepResult:
        """Run one train step; `shares[r]` is the batch of rank r, `critic[r]` that of its critic."""
        learnt: Sequence[RankBatch | None] = critic or [None] * len(shares)
        return combined(await self._dealt("step", list(zip(shares, learnt, strict=True))))

    def learns(self, batch: StepBatch) -> bool:
        """Return whether the step computes the policy, not the critic alone."""
        return batch.critic is None or batch.shares[0].step > self.settings.critic.warmup

    def update_controllers(
        self, kl_penalty: float | None, report: StepResult, rows: int, tokens: int
    ) -> None:
        """Update the controllers after a step that changed the weights.

        `kl_penalty`: KL of the reward's penalty; what the losses measure comes from `report`.
        """
        measured = {"kl_penalty": kl_penalty}
        for name in ("kl", "entropy"):
            measured[f"{name}_loss"] = report.sums[name] / tokens if name in report.sums else None
        for name, controller in self.controllers.items():
            if (value := measured[name]) is not None:
                controller.update(value, rows)

    async def check_rows(self, rows: Sequence[TrainRow]) -> tuple[str, ...]:
        """On the first call compare the shortest rows with transformers; return the messages.

        Raises RunFailed if they differ.
        """
        if self._checked:
            return ()
        messages = await self._same(
            "check_rows", sorted(rows, key=lambda row: len(row.tokens))[:_FIRST_ROWS]
        )
        self._checked = True
        return (messages[0],)

    async def remember(self) -> None:
        """Keep the current weights as the proximal policy, if the algorithm has one."""
        if self.settings.algorithm.proximal_window:
            await self._same("remember")

    async def score(
        self, rows: Sequence[ScoreRow], weights: WeightSet = "current"
    ) -> list[np.ndarray]:
        """Return log-probs of each row after its prompt, float32 [len(tokens) - prompt_length].

        All rows must have the same `rounded`.
        """
        (rounded,) = {row.rounded for row in rows}
        train_rows = [_train_row(row) for row in rows]
        scored_rows = [row for row in train_rows if row.loss_mask.any()]
        scores = iter(await self.compute(scored_rows, ("old",), weights, rounded))
        return [
            next(scores)["old"] if row.loss_mask.any() else np.zeros(0, np.float32)
            for row in train_rows
        ]

    async def prepare(self, rows: Sequence[TrainRow]) -> list[Scored]:
        """Return the arrays named in `before` for each row, under the proximal policy if the
        algorithm has one.
        """
        window = self.settings.algorithm.proximal_window
        return await self.compute(rows, sorted(self.before), "window" if window else "current")

    async def compute(
        self,
        rows: Sequence[TrainRow],
        what: Sequence[Computed],
        weights: WeightSet = "current",
        rounded: str | None = None,
    ) -> list[Scored]:
        """Return the arrays of `what` for each row, float32 [L] each, under `weights`.

        `rounded`: see `ScoreRow`.
        """
        together: dict[tuple[Budget, bool], list[Computed]] = defaultdict(list)
        for name in what:  # the critic may be another model
            together[self.forward_budget(name), name == "values"].append(name)
        scored: list[Scored] = [{} for _ in rows]
        for (budget, _), names in together.items():
            cut = plan(rows, self.world_size, budget)
            args = [
                ([[rows[i] for i in micro] for micro in share], tuple(names), weights, rounded)
                for share in cut
            ]
            for share, result in zip(cut, await self._dealt("score", args), strict=True):
                for micro, scores in zip(share, result, strict=True):
                    for i, score in zip(micro, scores, strict=True):
                        scored[i].update(score)
        return scored

    async def stage(
        self, version: Version, transport: Transport, *, average: bool = False
    ) -> WeightManifest:
        began = time.perf_counter()
        args = [(version, to, average) for to in (transport, *[None] * len(self._remote))]
        first, *_ = await self._all("stage", args)
        assert isinstance(first, WeightManifest)
        return replace(first, stage_s=time.perf_counter() - began)

    async def take(self, step: int, *, copy: bool) -> None:
        """Let every rank fix the state that it will write; see `Learner.take`."""
        states = {name: controller.state for name, controller in self.controllers.items()}
        await self._same("take", step, copy, states)

    async def write(self, folder: Path) -> dict[str, str]:
        """Let every rank write its fixed state while steps may go on; return hashes by file name."""
        local = asyncio.to_thread(self._local.write, str(folder))
        written = await asyncio.gather(
            local, *(r.aside("write", str(folder)) for r in self._remote)
        )
        return {name: digest for part in written for name, digest in part.items()}

    async def export(self, folder: Path) -> None:
        await self._same("export", str(folder))

    async def load(self, checkpoint: str | Path) -> None:
        """Load a committed checkpoint folder (`global_step_N`).

        Adaptive factors are restored; constant ones keep their configured value.
        """
        states, *_ = await self._same("load", str(Path(checkpoint) / "trainer"))
        if "extra" not in (self.settings.load_contents or ("extra",)):
            return
        for name, controller in (
            (n, c) for n, c in self.controllers.items() if c.target is not None
        ):
            if name not in states:
                raise CheckpointInvalid(
                    f"{checkpoint}: has no factor of the adaptive {name}; it was written without "
                    f"one"
                )
            controller.restore(states[name])

    async def aside(self, work: Any, *args: Any) -> Any:
        """Run blocking `work` in the local rank's thread, between collective calls."""
        async with self._lock:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _same(self, method: str, *args: Any) -> list[Any]:
        return await self._all(method, [args] * self.settings.world_size)

    async def _dealt(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` with `args[i]` on each of the ranks that share sequence i; return one
        result per i, since theirs are equal.
        """
        each = self.settings.sequence_parallel
        return (await self._all(method, [a for a in args for _ in range(each)]))[::each]

    async def _all(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self._lock:
            local = asyncio.get_running_loop().run_in_executor(
                self._thread, getattr(self._local, method), *args[0]
            )
            return list(
                await asyncio.gather(
                    local,
                    *(r.call(method, *a) for r, a in zip(self._remote, args[1:], strict=True)),
                )
            )


def _train_row(row: ScoreRow) -> TrainRow:
    count = len(row.tokens)
    files = {image.sha256: image.data for image in row.images}
    return TrainRow(
        tokens=row.tokens,
        loss_mask=np.arange(count) >= row.prompt_length,
        logprobs=np.zeros(count, np.float32),
        temperatures=row.temperature,
        experts=row.routed_experts,
        images=tuple(RowImage(place, files[place.sha256]) for place in row.places),
    )
