"""All ranks of the trainer as one: a call goes to every rank together, and the first failure is
everyone's.

The local rank works in one thread of its own, so the event loop stays free (the canary asks for
scores while weights are published). Knows neither Ray nor buffers.  Invariant: collective calls
reach every rank in the same order.
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
from rft.trainer.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import CriticSettings, LearnerSettings
from rft.trainer.step_result import StepResult, combined
from rft.types.ids import Version
from rft.types.ports import ScoreRow, WeightManifest

if TYPE_CHECKING:
    from rft.sync.base import Transport
    from rft.trainer.batch_builder import StepBatch
    from rft.trainer.learner import Learner, Scored


_FIRST_ROWS = 4  # of a run's first batch that are compared


class RankPort(Protocol):
    """A rank in another process."""

    async def call(self, method: str, *args: Any) -> Any:
        """The result of the learner's method `method`."""
        ...

    async def aside(self, method: str, *args: Any) -> Any:
        """The same, beside the calls that are at work: for methods that no other rank waits for."""
        ...


class Ranks:
    """`local` is rank 0; `remote` are ranks 1, 2, ... in order."""

    def __init__(self, local: Learner, remote: Sequence[RankPort] = ()) -> None:
        self.settings = local.settings
        self.algorithm = local.algorithm
        self.controllers = controllers(self.settings.algorithm)
        self._local = local
        self._remote = tuple(remote)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._checked = False  # the first batch of a run without engines
        self._turn = asyncio.Lock()
        if (count := 1 + len(self._remote)) != self.settings.world_size:
            raise ValueError(
                f"{count} ranks, but the learner was made for a world of {self.settings.world_size}"
            )

    @property
    def world_size(self) -> int:
        """Data-parallel ranks; those that share a sequence count once."""
        return self.settings.world_size // self.settings.sequence_parallel

    @property
    def budget(self) -> Budget:
        return self._budget(self.settings, "trainer")

    @property
    def critic_budget(self) -> Budget | None:
        """Of what the critic learns; None where there is none."""
        return (
            self._budget(self.settings.critic, "trainer.critic")
            if self.algorithm.needs.critic
            else None
        )

    def _budget(self, model: LearnerSettings | CriticSettings, section: str) -> Budget:
        s = self.settings
        if not model.use_dynamic_bsz and model.micro_batch_size is None:
            raise ConfigError(
                "is needed with use_dynamic_bsz: false", key=f"{section}.micro_batch_size_per_gpu"
            )
        rows = None if model.use_dynamic_bsz else model.micro_batch_size
        return Budget(
            model.max_token_len_per_gpu * s.sequence_parallel,
            model.row_layout,
            rows,
            s.balance_batch,
        )

    def forward_budget(self, what: Computed) -> Budget:
        """Of a forward pass that computes `what`, of any number of rows."""
        s = self.settings
        c = self.settings.critic
        if what == "values":
            rows = None if c.use_dynamic_bsz else c.forward_micro_batch_size
            return Budget(
                c.forward_max_token_len_per_gpu * s.sequence_parallel,
                c.row_layout,
                rows,
                s.balance_batch,
            )
        own = (s.ref or s.log_prob) if what == "ref" else s.log_prob
        if own is None:
            return self.budget
        return Budget(
            own.max_token_len_per_gpu * s.sequence_parallel,
            s.row_layout,
            own.micro_batch_size,
            s.balance_batch,
        )

    @property
    def before(self) -> frozenset[Computed]:
        """What is computed for all rows before a step: what the algorithm reads, and what must not
        change between its updates.
        """
        s = self.settings
        needs = self.algorithm.needs
        found = needs.before
        if not s.algorithm.bypass_old_logprobs and (
            s.ppo_epochs > 1 or s.algorithm.proximal_window
        ):
            found |= {"old"}
        if needs.reference and (s.ppo_epochs > 1 or s.ref is not None):
            found |= {"ref"}
        return found

    @property
    def kl_coefs(self) -> dict[str, float]:
        """The factors of the KL terms in the next step."""
        return {name: controller.coef for name, controller in self.controllers.items()}

    async def step(
        self, shares: Sequence[RankBatch], critic: Sequence[RankBatch] | None = None
    ) -> StepResult:
        """One train step; `shares[r]` is rank r's, `critic[r]` what its critic learns."""
        learnt: Sequence[RankBatch | None] = critic or [None] * len(shares)
        return combined(await self._dealt("step", list(zip(shares, learnt, strict=True))))

    def learns(self, batch: StepBatch) -> bool:
        """Whether the policy is computed in this step, and not the critic alone."""
        return batch.critic is None or batch.shares[0].step > self.settings.critic.warmup

    def steer(self, kl_penalty: float | None, report: StepResult, rows: int, tokens: int) -> None:
        """Let the controllers see the KL of a step that changed the weights: of the reward's, and
        of the loss's by `report`.
        """
        seen = {
            "kl_penalty": kl_penalty,
            "kl_loss": report.sums["kl"] / tokens if "kl" in report.sums else None,
        }
        for name, controller in self.controllers.items():
            if (kl := seen[name]) is not None:
                controller.update(kl, rows)

    async def check_rows(self, rows: Sequence[TrainRow]) -> tuple[str, ...]:
        """The first time: compare the shortest of these rows with transformers, and say so.  Raises
        RunFailed.
        """
        if self._checked:
            return ()
        said = await self._same(
            "check_rows", sorted(rows, key=lambda row: len(row.tokens))[:_FIRST_ROWS]
        )
        self._checked = True
        return (said[0],)

    async def remember(self) -> None:
        """Keep the weights as they are as the proximal policy, where the algorithm has one."""
        if self.settings.algorithm.proximal_window:
            await self._same("remember")

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        """Log-probs, float32 [len(tokens) - prompt_length], of each row's tokens after its prompt;
        all are `rounded` alike.
        """
        (rounded,) = {row.rounded for row in rows}
        made = [_train_row(row) for row in rows]
        asked = [row for row in made if row.loss_mask.any()]
        found = iter(await self.compute(asked, ("old",), rounded=rounded))
        return [
            next(found)["old"] if row.loss_mask.any() else np.zeros(0, np.float32) for row in made
        ]

    async def prepare(self, rows: Sequence[TrainRow]) -> list[Scored]:
        """What is computed `before` a step, for each row; the policy is the proximal one where the
        algorithm has one.
        """
        return await self.compute(
            rows, sorted(self.before), proximal=self.settings.algorithm.proximal_window
        )

    async def compute(
        self,
        rows: Sequence[TrainRow],
        what: Sequence[Computed],
        *,
        proximal: bool = False,
        rounded: str | None = None,
    ) -> list[Scored]:
        """For each row what was asked for, float32 [L] each, under the weights as they are.

        `proximal`: see `remember`.  `rounded`: see `ScoreRow`.
        """
        together: dict[tuple[Budget, bool], list[Computed]] = defaultdict(list)
        for name in what:  # the critic may be another model
            together[self.forward_budget(name), name == "values"].append(name)
        found: list[Scored] = [{} for _ in rows]
        for (budget, _), names in together.items():
            cut = plan(rows, self.world_size, budget)
            asked = [
                ([[rows[i] for i in micro] for micro in mine], tuple(names), proximal, rounded)
                for mine in cut
            ]
            for mine, result in zip(cut, await self._dealt("score", asked), strict=True):
                for micro, scores in zip(mine, result, strict=True):
                    for i, score in zip(micro, scores, strict=True):
                        found[i].update(score)
        return found

    async def stage(self, version: Version, transport: Transport) -> WeightManifest:
        began = time.perf_counter()
        first, *_ = await self._all(
            "stage", [(version, transport), *((version, None) for _ in self._remote)]
        )
        assert isinstance(first, WeightManifest)
        return replace(first, stage_s=time.perf_counter() - began)

    async def take(self, step: int, *, copy: bool) -> None:
        """Every rank fixes what it will write; see `Learner.take`."""
        await self._same("take", step, copy, self.kl_coefs)

    async def write(self, folder: Path) -> dict[str, str]:
        """Every rank writes what it took, while steps may go on; hashes by file name."""
        mine = asyncio.to_thread(self._local.write, str(folder))
        written = await asyncio.gather(mine, *(r.aside("write", str(folder)) for r in self._remote))
        return {name: digest for part in written for name, digest in part.items()}

    async def export(self, folder: Path) -> None:
        await self._same("export", str(folder))

    async def load(self, checkpoint: str | Path) -> None:
        """Go on from a committed checkpoint folder (`global_step_N`).  Factors that are constant
        stay as they are written.
        """
        coefs, *_ = await self._same("load", str(Path(checkpoint) / "trainer"))
        if "extra" not in (self.settings.load_contents or ("extra",)):
            return
        for name, controller in (
            (n, c) for n, c in self.controllers.items() if c.target is not None
        ):
            if name not in coefs:
                raise CheckpointInvalid(
                    f"{checkpoint}: has no factor of the adaptive {name}; it was written without "
                    f"one"
                )
            controller.coef = coefs[name]

    async def aside(self, work: Any, *args: Any) -> Any:
        """Run blocking `work` in the local rank's thread, between collective calls."""
        async with self._turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _same(self, method: str, *args: Any) -> list[Any]:
        return await self._all(method, [args] * self.settings.world_size)

    async def _dealt(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """A call with `args[i]` to each of the ranks that share i; one answer for each, as theirs
        are the same.
        """
        each = self.settings.sequence_parallel
        return (await self._all(method, [a for a in args for _ in range(each)]))[::each]

    async def _all(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self._turn:
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
    return TrainRow(
        tokens=row.tokens,
        loss_mask=np.arange(count) >= row.prompt_length,
        logprobs=np.zeros(count, np.float32),
        temperatures=row.temperature,
        experts=row.routed_experts,
    )
