"""One rank of the trainer: models, optimizers, train steps and checkpoints.

Depends on rows, micro-batches and algorithms, not on buffers, tasks or the training loop.  Public
methods are collective, unless they say otherwise: all ranks call them together, each with its own
batch.
Invariant: a step with a non-finite gradient changes neither weights nor optimizer state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rft.algorithm.controller import Steered
from rft.fault_injection import fault
from rft.trainer.checkpoint import saving, shards
from rft.trainer.loop import profiling
from rft.trainer.loop.lr_schedule import learning_rate
from rft.trainer.loop.rank_models import RankModels, by_row, denominators
from rft.trainer.loop.step_result import StepResult
from rft.trainer.loop.step_totals import StepTotals, mismatch, over_passes
from rft.trainer.model import optim, sharding, tensors
from rft.trainer.model.critic import apply
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings, OptimizerConfig
from rft.types.ids import Version
from rft.types.ports import WeightManifest

if TYPE_CHECKING:
    from rft.sync.base import Transport

log = logging.getLogger(__name__)
AVERAGE = "average"  # names the files of the moving average in a checkpoint
# returns the policy's log-probs of N trained tokens, [N]
Accumulate = Callable[[Sequence[TrainRow], RankBatch, StepTotals], torch.Tensor | None]
Update = Callable[[float], float]


class Learner(RankModels):
    """Trains the models of a rank, hands out their weights, saves and loads them."""

    def __init__(
        self, settings: LearnerSettings, rank: int = 0, rendezvous: str | None = None
    ) -> None:
        """Build the models.  Several ranks need the file `rendezvous` to meet."""
        super().__init__(settings, rank, rendezvous)
        self.optimizer = optim.make(self.policy.trainable(), settings.optim)
        self._snapshot: saving.CheckpointState | None = None
        self.prove_rows(settings)

    # ------------------------------------------------------------ training

    def step(self, batch: RankBatch, critic: RankBatch | None = None) -> StepResult:
        """Run forward, backward and update of train step `batch.step` on this rank's micro-batches,
        `ppo_epochs` times.

        `critic`: the critic's batch in this step; during the critic's warm-up the policy is not
        updated.
        """
        s = self.settings
        traced = partial(
            profiling.traced,
            self.settings.profiler,
            self.settings.profile_folder,
            self.rank,
            batch.step,
        )
        with self._memory(f"train step {batch.step}"), traced():
            # each step has its own seed, so no generator state is saved
            torch.manual_seed(s.seed * 1_000_003 + batch.step)
            critic_result = None
            if critic is not None:
                assert self.critic is not None, "a critic's batch without a critic"
                with traced("critic"):
                    critic_result = self._passes(
                        critic,
                        s.critic.ppo_epochs,
                        s.critic.optim,
                        self._accumulate_critic,
                        self.critic.update,
                    )
            in_warmup = critic_result is not None and batch.step <= s.critic.warmup
            epochs = 0 if in_warmup else s.ppo_epochs
            with traced("policy"):
                result = self._passes(batch, epochs, s.optim, self._accumulate, self._update)
            if result.updates:
                self._proximal.current = False  # the remembered weights are older now
                if self._average is not None:
                    self._average.update()
        return msgspec.structs.replace(result, critic=critic_result)

    def _passes(
        self,
        batch: RankBatch,
        epochs: int,
        optim: OptimizerConfig,
        accumulate: Accumulate,
        update: Update,
    ) -> StepResult:
        """Run `epochs` passes over all micro-batches; each ends with one update if its gradient is
        finite.
        """
        s = self.settings
        lr = learning_rate(optim, batch.step, s.total_steps)
        counted: list[tuple[dict[str, float], dict[str, float]]] = []
        norms: list[float] = []
        # log-probs before the step, by micro-batch
        logprobs_by_micro: dict[int, torch.Tensor] = {}
        seconds = {"forward_backward": 0.0, "update": 0.0}
        tokens = positions = 0
        for epoch in range(epochs):
            began = time.perf_counter()
            totals = StepTotals()
            order: Sequence[int] = range(len(batch.micro_batches))
            if (
                s.shuffle_minibatches
            ):  # of micro-batches, whatever the key's name; same on all ranks
                order = (
                    np.random.default_rng((s.data_seed, batch.step, epoch))
                    .permutation(len(batch.micro_batches))
                    .tolist()
                )
            if accumulate == self._accumulate and self._balance is not None and batch.positions:
                self._balance.count(self.policy, batch, self._micro_batch)
            for i in order:
                logprobs = accumulate(batch.micro_batches[i], batch, totals)
                if s.keep_trainer_logprobs and epoch == 0 and logprobs is not None:
                    logprobs_by_micro[i] = logprobs
            counted.append(totals.numbers())  # waits until the GPU is done
            computed = time.perf_counter()
            fault("trainer.update.before")
            norms.append(update(lr))
            fault("trainer.update.after")
            seconds["forward_backward"] += computed - began
            seconds["update"] += time.perf_counter() - computed
            tokens = totals.tokens  # of one pass; positions: of all
            positions = positions + totals.positions
        finite = int(np.isfinite(norms).sum())
        sums, maxima = over_passes(counted)
        return StepResult(
            sums=sums,
            maxima=maxima,
            trained_tokens=tokens,
            computed_positions=positions,
            updates=finite,
            skipped=epochs - finite,
            grad_norm=float(np.mean(norms or [0])),
            lr=lr,
            seconds=seconds,
            logprobs=[
                row
                for i in sorted(logprobs_by_micro)
                for row in by_row(logprobs_by_micro[i], batch.micro_batches[i])
            ],
        )

    def _accumulate_critic(
        self, rows: Sequence[TrainRow], batch: RankBatch, totals: StepTotals
    ) -> None:
        """Add the critic's gradient of one micro-batch."""
        assert self.critic is not None
        micro = self._micro_batch(rows, self.critic)
        out = self.critic.loss(
            micro, denominators(self.settings, batch), self.algorithm.loss_agg_mode, idle=not rows
        )
        out.loss.backward()
        if rows:
            totals.add(out.sums, out.maxima, rows, micro)

    def _accumulate(
        self, rows: Sequence[TrainRow], batch: RankBatch, totals: StepTotals
    ) -> torch.Tensor | None:
        """Add the gradient of one micro-batch; return its log-probs [N], None without rows."""
        micro = self._micro_batch(rows)
        x, probabilities = self._loss_inputs(micro, batch)
        if not rows:  # no gradient, but the rank takes part in the collectives of the backward
            (x.logprobs * 0).sum().backward()
            return None
        out = self.algorithm.loss(x)
        loss, aux_sums, aux_maxima = (
            (out.loss, {}, {})
            if self._balance is None
            else self._balance.added(out.loss, probabilities[0])
        )
        loss.backward()
        needs_samples = self.algorithm.needs.samples != "none"
        sampled = micro.mask & ~micro.is_expert if needs_samples else torch.zeros_like(micro.mask)
        logprobs: torch.Tensor = x.logprobs.detach()
        sums, maxima = mismatch(logprobs - micro.rollout_logprobs, sampled)
        totals.add(
            {**out.sums, **aux_sums, **sums}, {**out.maxima, **aux_maxima, **maxima}, rows, micro
        )
        return logprobs

    def gradient(self, batch: RankBatch) -> dict[str, torch.Tensor]:
        """Return the gradient of train step `batch` by parameter name; weights stay unchanged.

        Works on a single rank.
        """
        for rows in batch.micro_batches:
            self._accumulate(rows, batch, StepTotals())
        gradients = {
            name: p.grad for name, p in self.policy.trainable().items() if p.grad is not None
        }
        self.optimizer.zero_grad(set_to_none=True)
        return gradients

    def _update(self, lr: float) -> float:
        """Clip and apply the gradient; return its norm."""
        return apply(self.policy, self.optimizer, self.settings.grad_clip, lr)

    # ------------------------------------------------------------ weights out

    def stage(
        self, version: Version, transport: Transport | None, average: bool = False
    ) -> WeightManifest | None:
        """Hand the weights, or the adapter alone, to `transport`; `average`: their moving average.

        Rank 0 has the transport; other ranks take part in gathering.
        """
        lora = self.settings.lora
        adapter = self.policy.adapter if lora is not None and not lora.merge else None
        dtype = sharding.DTYPES[self.settings.dtype]
        converted = (
            self._gathered(dtype, average)
            if adapter is None
            else ((n, tensor.to(dtype)) for n, tensor in adapter.gathered().items())
        )
        manifest = None
        if transport is None:
            for _ in converted:
                pass
        elif adapter is None:
            manifest = transport.stage(version, converted, self.policy.tied())
        else:
            manifest = transport.stage(version, converted, {})
            manifest = msgspec.structs.replace(manifest, adapter=adapter.spec())
        # the engines wake next and need the memory of the step and of gathering
        if self.settings.shares_device:
            torch.accelerator.memory.empty_cache()
        return manifest

    def _gathered(
        self, dtype: torch.dtype | None = None, average: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather every tensor of the policy that is published: parameters as `dtype`, buffers as
        they are.
        """
        device = None if dtype is None else self.settings.device
        weights: Mapping[str, torch.Tensor] = self.policy.names()
        if average:
            assert self._average is not None, "the settings say so"
            weights = self._average.weights
        for name, p in weights.items():
            yield name, self.policy.gathered(name, p, dtype, device)
        yield from self.policy.saved_buffers().items()

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder that transformers and vLLM load: weights in the base model's
        dtype, config and tokenizer.
        """
        saving.export(self.policy, self._gathered(), self.settings, Path(folder), self.rank)

    # ------------------------------------------------------------ checkpoints

    def save(self, folder: str, step: int) -> dict[str, str]:
        """Write this rank's state after `step` into `folder`; return hashes by file name."""
        self.take(step, copy=False)
        return self.write(folder)

    def take(
        self, step: int, copy: bool = True, steered: Mapping[str, Steered] | None = None
    ) -> None:
        """Fix the state that `write` will write.  `copy`: allow training before it is written.

        `steered`: see `StatePage`.
        """
        with self._memory("copying a checkpoint to the host"):
            self._snapshot = saving.take(
                self._trained(), self.settings, step, copy=copy, steered=steered or {}
            )
            if self._average is not None:
                pieces = shards.local_pieces(self._average.weights, copy=copy)
                self._snapshot.pieces[AVERAGE] = pieces

    def write(self, folder: str) -> dict[str, str]:
        """Write the state that `take` fixed.  Not collective: may run in a thread during steps."""
        taken = self._snapshot
        self._snapshot = None
        assert taken is not None, "take() comes first"
        return saving.write(taken, Path(folder), self.settings, self.rank)

    def load(self, folder: str) -> dict[str, Steered]:
        """Load a folder that any number of ranks wrote; return its factors of loss terms.

        Raises CheckpointInvalid naming the file that does not fit.
        """
        saving.load(self._trained(), self.settings, Path(folder))
        self._proximal.current = False
        if self._average is not None:
            if AVERAGE in shards.kinds(Path(folder)):
                tensors.fill(shards.find(Path(folder), AVERAGE), self._average.weights)
            else:
                log.warning("%s has no moving average, which begins with its weights", folder)
                self._average.begin()
        return saving.read_page(Path(folder)).steered

    def _trained(self) -> list[saving.Trained]:
        critic = (
            [saving.Trained(self.critic.model, self.critic.optimizer, "critic_")]
            if self.critic is not None
            else []
        )
        return [saving.Trained(self.policy, self.optimizer), *critic]

    def close(self) -> None:
        """Leave the process group."""
        if self._grouped and dist.is_initialized():
            dist.destroy_process_group()
