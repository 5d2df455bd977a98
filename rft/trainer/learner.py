"""One rank of the trainer: the model, its optimizer, and what is done with them.

Knows rows, micro-batches and algorithms; not buffers, tasks or the training loop.  Every public
method is collective: all ranks call it together, each with its own share, in a thread of their own.
Invariant: a step whose gradient is not finite changes neither weights nor optimizer state.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rft.algorithm.args import Computed
from rft.algorithm.base import Denominators, LossInputs
from rft.algorithm.composition import build
from rft.engine import rounding
from rft.errors import OutOfMemory, RunFailed, is_out_of_memory
from rft.fault_injection import fault
from rft.trainer import attention, optim, products, profiling, row_proof, saving, sharding
from rft.trainer import batch as batches
from rft.trainer import policy as policies
from rft.trainer.balance import RouterBalance
from rft.trainer.critic import Critic, apply
from rft.trainer.lr_schedule import learning_rate
from rft.trainer.pack import RankBatch, TrainRow
from rft.trainer.proximal import ProximalWeights
from rft.trainer.settings import LearnerSettings, OptimSettings
from rft.trainer.step_result import StepResult
from rft.trainer.step_totals import StepTotals, mismatch, over_passes
from rft.types.ids import Version
from rft.types.ports import WeightManifest

if TYPE_CHECKING:
    from rft.sync.base import Transport
    from rft.trainer.policy import Policy

log = logging.getLogger(__name__)

_IDLE = TrainRow(  # what a rank computes, without effect, where others have one micro-batch more
    tokens=np.zeros(2, np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    temperatures=np.ones(2, np.float32),
)


Scored = dict[Computed, np.ndarray]
# the policy's log-probs, [N]
Accumulate = Callable[[Sequence[TrainRow], RankBatch, StepTotals], torch.Tensor | None]
Update = Callable[[float], float]


class Learner:
    """The model of `settings` on rank `rank`; ranks meet at the file `rendezvous` (needed with more
    than one).
    """

    def __init__(
        self, settings: LearnerSettings, rank: int = 0, rendezvous: str | None = None
    ) -> None:
        self.rank = rank
        if settings.device == "cpu":
            torch.set_num_threads(settings.cpu_threads)
            products.prefer_onednn()
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(settings.seed)
        asked = settings
        settings = row_proof.decided(settings)
        self.settings = settings
        self._memory = partial(_memory, settings, rank)
        self.algorithm = build(settings.algorithm)
        self._grouped = settings.sharded
        if self._grouped:
            sharding.join(settings, rank, rendezvous)
        with self._memory("loading the model"):
            refers = self.algorithm.needs.reference
            lora = settings.lora
            self.policy = policies.load(
                settings, anchored=refers and lora is not None and lora.path is not None
            )
            self.reference = (
                policies.load(settings, trained=False) if refers and lora is None else None
            )
            self.critic = Critic(settings) if self.algorithm.needs.critic else None
        self._proximal = ProximalWeights(self.policy)
        self.optimizer = optim.make(self.policy.trainable(), settings.optim)
        self._taken: saving.CheckpointState | None = None
        self._balance = RouterBalance(settings) if settings.router_aux_loss_coef else None
        self._prove_rows(asked)

    def _prove_rows(self, asked: LearnerSettings) -> None:
        """Train only with a layout of rows that is exact for the models as they were loaded."""
        with self._memory("comparing rows with those of transformers"):
            layout = row_proof.prove(
                self.policy, self.settings, fall_back=asked.row_layout == "auto"
            )
            if layout != self.settings.row_layout and self.reference is not None:
                attention.switch(self.reference.lm, self.policy.lm.config._attn_implementation)
            critic = self.settings.critic
            if self.critic is not None:
                own = row_proof.prove(
                    self.critic.model,
                    self.critic.settings,
                    fall_back=asked.critic.row_layout == "auto",
                )
                critic, self.critic.settings = (
                    replace(critic, row_layout=own),
                    replace(self.critic.settings, row_layout=own),
                )
            self.settings = replace(self.settings, row_layout=layout, critic=critic)

    def check_rows(self, rows: Sequence[TrainRow]) -> str:
        """See `row_proof.check_rows`."""
        with self._memory("comparing the first batch with transformers"):
            return row_proof.check_rows(self.policy, self.settings, rows)

    # ------------------------------------------------------------ training

    def step(self, batch: RankBatch, critic: RankBatch | None = None) -> StepResult:
        """Forward, backward and update of train step `batch.step`, on this rank's micro-batches,
        `ppo_epochs` times.

        `critic`: what the critic learns in this step; during its warm-up it learns alone.
        """
        s = self.settings
        trace = partial(profiling.traced, self.settings.profiler, self.rank, batch.step)
        with self._memory(f"train step {batch.step}"), trace():
            # no generator state to save: a step has its own seed
            torch.manual_seed(s.seed * 1_000_003 + batch.step)
            learnt = None
            if critic is not None:
                assert self.critic is not None, "`needs` says so"
                with trace("critic"):
                    learnt = self._passes(
                        critic,
                        s.critic.ppo_epochs,
                        s.critic.optim,
                        self._criticise,
                        self.critic.update,
                    )
            warming = learnt is not None and batch.step <= s.critic.warmup
            with trace("policy"):
                result = self._passes(
                    batch, 0 if warming else s.ppo_epochs, s.optim, self._accumulate, self._update
                )
            if result.updates:
                self._proximal.current = False
        return msgspec.structs.replace(result, critic=learnt)

    def _passes(
        self,
        batch: RankBatch,
        epochs: int,
        optim: OptimSettings,
        accumulate: Accumulate,
        update: Update,
    ) -> StepResult:
        """`epochs` times all micro-batches and one update.  One that is not finite is left out
        alone.
        """
        s = self.settings
        lr = learning_rate(optim, batch.step, s.total_steps)
        counted: list[tuple[dict[str, float], dict[str, float]]] = []
        norms: list[float] = []
        kept: dict[int, torch.Tensor] = {}  # of the weights before the step, by micro-batch
        seconds = {"forward_backward": 0.0, "update": 0.0}
        tokens = positions = 0
        for epoch in range(epochs):
            began = time.perf_counter()
            totals = StepTotals()
            order: Sequence[int] = range(len(batch.micro_batches))
            if s.shuffle_minibatches:  # the same on all ranks
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
                    kept[i] = logprobs
            counted.append(totals.numbers())  # waits for the device
            computed = time.perf_counter()
            fault("trainer.update.before")
            norms.append(update(lr))
            fault("trainer.update.after")
            seconds["forward_backward"] += computed - began
            seconds["update"] += time.perf_counter() - computed
            tokens = totals.tokens
            positions = positions + totals.positions
        finite = sum(bool(np.isfinite(norm)) for norm in norms)
        sums, maxima = over_passes(counted)
        return StepResult(
            sums=sums,
            maxima=maxima,
            trained_tokens=tokens,
            computed_positions=positions,
            updates=finite,
            skipped=epochs - finite,
            grad_norm=float(np.mean(norms)) if norms else 0.0,
            lr=lr,
            seconds=seconds,
            logprobs=[
                row for i in sorted(kept) for row in _by_row(kept[i], batch.micro_batches[i])
            ],
        )

    def _criticise(self, rows: Sequence[TrainRow], batch: RankBatch, totals: StepTotals) -> None:
        """Add the critic's gradient of one micro-batch."""
        assert self.critic is not None
        micro = self._micro_batch(rows, self.critic)
        out = self.critic.loss(
            micro, _denominators(self.settings, batch), self.algorithm.loss_agg_mode, idle=not rows
        )
        out.loss.backward()
        if rows:
            totals.add(out.sums, out.maxima, rows, micro)

    def _accumulate(
        self, rows: Sequence[TrainRow], batch: RankBatch, totals: StepTotals
    ) -> torch.Tensor | None:
        """Add the gradient of one micro-batch; its log-probs [N]."""
        micro = self._micro_batch(rows)
        x, given = self._loss_inputs(micro, batch)
        if not rows:
            (x.logprobs * 0).sum().backward()
            return None
        out = self.algorithm.loss(x)
        loss, aux_sums, aux_maxima = (
            (out.loss, {}, {}) if self._balance is None else self._balance.added(out.loss, given[0])
        )
        loss.backward()
        needs_samples = self.algorithm.needs.samples != "none"
        sampled = micro.mask & ~micro.is_expert if needs_samples else torch.zeros_like(micro.mask)
        found: torch.Tensor = x.logprobs.detach()
        sums, maxima = mismatch(found - micro.rollout_logprobs, sampled)
        totals.add(
            {**out.sums, **aux_sums, **sums}, {**out.maxima, **aux_maxima, **maxima}, rows, micro
        )
        return found

    def _loss_inputs(
        self, micro: batches.MicroBatch, batch: RankBatch
    ) -> tuple[LossInputs, list[torch.Tensor]]:
        """What the loss reads of a micro-batch, and what a model with experts gives for their
        balance.
        """
        needs = self.algorithm.needs
        reference = (
            self._reference_logprobs(micro) if needs.reference and not batch.ref_given else None
        )
        logprobs, entropy, *given = self.policy(
            micro, needs.entropy, balance=self._balance is not None
        )
        # the sampler's, or the trainer's before the step; without that there is one update, and
        # these are the policy's before it
        old = (
            micro.rollout_logprobs
            if self.settings.algorithm.bypass_old_logprobs
            else micro.given.get("old", logprobs.detach())
        )
        x = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=micro.advantages,
            mask=micro.mask,
            row=micro.row,
            num_rows=micro.num_rows,
            denominators=_denominators(self.settings, batch),
            ref_logprobs=micro.given.get("ref", reference),
            entropy=entropy,
            rollout_logprobs=micro.rollout_logprobs,
            weights=micro.given.get("weights"),
            is_expert=micro.is_expert,
            extra=micro.extra,
            run_tokens=micro.given.get("run_tokens"),
            step=batch.step,
            kl_coef=batch.kl_coef,
        )
        return x, given

    def row_losses(self, batch: RankBatch) -> list[tuple[float, np.ndarray]]:
        """Of each row alone its policy loss, with the denominators of the whole step, and its
        log-probs [L].
        """
        with self._memory("losses of rows"), torch.no_grad():
            inputs = [
                self._loss_inputs(self._micro_batch(rows), batch)[0] for rows in batch.micro_batches
            ]
            rows = [_of_row(x, i) for x in inputs for i in range(x.num_rows)]
            return [(float(self.algorithm.loss(x).loss), x.logprobs.cpu().numpy()) for x in rows]

    def _reference_logprobs(self, micro: batches.MicroBatch) -> torch.Tensor:
        """Of the reference model: another one, or the policy without what its adapter has learnt.
        Its routers choose themselves.
        """
        micro = replace(micro, experts=None)
        adapter = self.policy.adapter
        with torch.no_grad(), adapter.reference() if adapter is not None else nullcontext():
            logprobs: torch.Tensor = (self.reference or self.policy)(micro)[0]
        return logprobs

    def gradient(self, batch: RankBatch) -> dict[str, torch.Tensor]:
        """That of train step `batch`, by the names of what is trained; weights stay as they are.
        Of one rank.
        """
        for rows in batch.micro_batches:
            self._accumulate(rows, batch, StepTotals())
        found = {name: p.grad for name, p in self.policy.trainable().items() if p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _update(self, lr: float) -> float:
        """Clip and apply the gradient; returns its norm."""
        return apply(self.policy, self.optimizer, self.settings.optim.clip_grad, lr)

    def score(
        self,
        micro_batches: Sequence[Sequence[TrainRow]],
        what: Sequence[Computed] = ("old",),
        proximal: bool = False,
        rounded: str | None = None,
    ) -> list[list[Scored]]:
        """For each row what was asked for, float32 [L] each, under the weights as they are;
        `proximal`: under those of `remember`.

        `rounded`: with other roundings, of this type.  "values" are asked for alone: the critic may
        be another model.
        """
        scored: list[list[Scored]] = []
        critic = self.critic if "values" in what else None
        types = sharding.DTYPES
        own = types[self.settings.dtype]
        short = (
            nullcontext()
            if rounded is None
            else rounding.otherwise(self.policy.lm, own, types[rounded])
        )
        with self._memory("scoring"), torch.no_grad(), self._proximal.restored(proximal), short:
            for rows in micro_batches:
                made = self._scores(self._micro_batch(rows, critic), what)
                parts = {name: _by_row(values, rows) for name, values in made.items()}
                scored.append(
                    [{name: part[i] for name, part in parts.items()} for i in range(len(rows))]
                )
            for model in (
                self.policy,
                self.reference,
                self.critic.model if self.critic is not None else None,
            ):
                if model is not None:
                    model.to_shards()
        return scored

    def remember(self) -> None:
        """Keep a copy of the weights in host memory: the proximal policy until this is called
        again.  This rank's part of them.
        """
        self._proximal.remember()

    def _scores(
        self, micro: batches.MicroBatch, what: Sequence[Computed]
    ) -> dict[Computed, torch.Tensor]:
        found: dict[Computed, torch.Tensor] = {}
        if "sum_squares" in what or "discriminator_mean" in what:
            names: tuple[Computed, ...] = ("old", "entropy", "sum_squares", "discriminator_mean")
            given = zip(names, self.policy(micro, statistics=True), strict=True)
            found |= {name: values for name, values in given if name in what}
        elif "old" in what or "entropy" in what:
            logprobs, entropy = self.policy(micro, "entropy" in what)
            found["old"] = logprobs
            if entropy is not None:
                found["entropy"] = entropy
        if "ref" in what:
            found["ref"] = self._reference_logprobs(micro)
        if "values" in what:
            assert self.critic is not None, "`needs` says so"
            found["values"] = self.critic.model(micro)
        if missing := set(what) - set(found):
            raise RunFailed(f"the trainer does not compute {', '.join(sorted(missing))}")
        return found

    def _micro_batch(
        self, rows: Sequence[TrainRow], critic: Critic | None = None
    ) -> batches.MicroBatch:
        """What `critic` reads; without one the policy."""
        layout = (self.settings if critic is None else critic.settings).row_layout
        counted = critic is None and self._balance is not None
        return batches.make(
            rows or [_IDLE],
            layout=layout,
            device=torch.device(self.settings.device),
            counted=counted,
        )

    # ------------------------------------------------------------ weights out

    def stage(self, version: Version, transport: Transport | None) -> WeightManifest | None:
        """Hand the weights to `transport` (rank 0; the others give None and help to gather): all of
        them, or the adapter alone.
        """
        made = _staged(self.policy, self.settings, version, transport)
        # the engines wake next, and need what the step and gathering took
        if self.settings.shares_device:
            torch.accelerator.memory.empty_cache()
        return made

    def export(self, folder: str) -> None:
        """A Hugging Face folder that `from_pretrained` and vLLM load: weights in the base model's
        own dtype, config, tokenizer.
        """
        saving.export(self.policy, _gathered(self.policy), self.settings, Path(folder), self.rank)

    # ------------------------------------------------------------ checkpoints

    def save(self, folder: str, step: int) -> dict[str, str]:
        """Write the state after `step`, this rank's part of it, into `folder`; returns hashes by
        file name.
        """
        self.take(step, copy=False)
        return self.write(folder)

    def take(
        self, step: int, copy: bool = True, kl_coefs: Mapping[str, float] | None = None
    ) -> None:
        """Fix what `write` will write.  `copy`: training may go on before it is written.
        `kl_coefs`: see `Ranks.kl_coefs`.
        """
        with self._memory("copying a checkpoint to the host"):
            self._taken = saving.take(
                self._trained(), self.settings, step, copy=copy, kl_coefs=kl_coefs or {}
            )

    def write(self, folder: str) -> dict[str, str]:
        """Write what was taken.  Not collective: it may run in another thread while steps go on."""
        taken = self._taken
        self._taken = None
        assert taken is not None, "take() comes first"
        return saving.write(taken, Path(folder), self.settings, self.rank)

    def load(self, folder: str) -> dict[str, float]:
        """Go on from a folder that `save` wrote with any number of ranks; returns its factors of
        the KL terms.

        Raises CheckpointInvalid naming the file that does not fit.
        """
        saving.load(self._trained(), self.settings, Path(folder))
        self._proximal.current = False
        return {
            name: float(value)
            for name, value in saving.read_page(Path(folder)).get("kl_coefs", {}).items()
        }

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


def _staged(
    policy: Policy, s: LearnerSettings, version: Version, transport: Transport | None
) -> WeightManifest | None:
    alone = policy.adapter if s.lora is not None and not s.lora.merge else None
    weights = _gathered(policy) if alone is None else iter(alone.whole().items())
    exact = policy.saved_buffers()
    dtype = sharding.DTYPES[s.dtype]
    given = ((name, tensor if name in exact else tensor.to(dtype)) for name, tensor in weights)
    if transport is None:
        for _ in given:
            pass
        return None
    if alone is None:
        return transport.stage(version, given, policy.tied())
    return msgspec.structs.replace(transport.stage(version, given, {}), adapter=alone.spec())


def _gathered(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the policy that is published, whole."""
    for name, p in policy.names().items():
        yield name, policy.whole(name, p)
    yield from policy.saved_buffers().items()


def _denominators(s: LearnerSettings, batch: RankBatch) -> Denominators:
    size = s.loss_scale_factor or s.max_response_tokens
    return Denominators(
        batch.tokens,
        batch.rows,
        size,
        expert_tokens=batch.expert_tokens,
        expert_rows=batch.expert_rows,
        num_runs=batch.num_runs,
        expert_runs=batch.expert_runs,
    )


def _of_row(x: LossInputs, row: int) -> LossInputs:
    """What one row of a micro-batch has in it."""
    at = x.row == row
    own: dict[str, Any] = {
        name: values[at] for name, values in vars(x).items() if isinstance(values, torch.Tensor)
    }
    extra = {name: values[at] for name, values in x.extra.items()}
    return replace(x, **{**own, "row": torch.zeros_like(own["row"]), "num_rows": 1, "extra": extra})


def _by_row(values: torch.Tensor, rows: Sequence[TrainRow]) -> list[np.ndarray]:
    """[N] of a micro-batch as float32 [L] of each of its rows."""
    ends = np.cumsum([int(np.count_nonzero(r.loss_mask)) for r in rows])[:-1]
    return np.split(values.cpu().numpy(), ends)


@contextmanager
def _memory(settings: LearnerSettings, rank: int, doing: str) -> Iterator[None]:
    """Name what ran out of memory, and the remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        tokens = settings.max_token_len_per_gpu
        rows = settings.micro_batch_size
        budget = (
            f"max_token_len_per_gpu (now {tokens})"
            if settings.use_dynamic_bsz
            else f"micro_batch_size_per_gpu (now {rows})"
        )
        raise OutOfMemory(
            f"trainer rank {rank} ran out of {settings.device} memory while {doing}.  Lower "
            f"trainer.{budget}, set "
            "trainer.enable_gradient_checkpointing: true, or use more ranks."
        ) from e
