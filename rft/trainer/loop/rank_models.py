"""The models of one rank and their forward passes: losses, log-probs, values.

Depends on rows, micro-batches and algorithms, not on optimizers, files or the training loop.
Invariant: rows are trained in a layout that is proven exact for the loaded models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rft.algorithm.args import Computed
from rft.algorithm.base import Denominators, LossInputs
from rft.algorithm.composition import build
from rft.engine import rounding
from rft.errors import OutOfMemory, RunFailed, is_out_of_memory
from rft.trainer.model import attention, products, row_proof, sharding
from rft.trainer.model import batch as batches
from rft.trainer.model import policy as policies
from rft.trainer.model.balance import RouterBalance
from rft.trainer.model.critic import Critic
from rft.trainer.model.image_rows import ImageReader
from rft.trainer.model.proximal import MovingAverage, ProximalWeights
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings, WeightSet

_IDLE = TrainRow(  # computed without effect by a rank with fewer micro-batches than another
    tokens=np.zeros(2, np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    temperatures=np.ones(2, np.float32),
)

Scored = dict[Computed, np.ndarray]


class RankModels:
    """Policy, reference model and critic of `settings` on rank `rank`."""

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
        self._reader: ImageReader | None = None  # made for the first row with an image
        self._proximal = ProximalWeights(self.policy)
        decay = settings.average_decay
        self._average = None if decay is None else MovingAverage(self.policy, decay)
        self._balance = RouterBalance(settings) if settings.router_aux_loss_coef else None

    def prove_rows(self, configured: LearnerSettings) -> None:
        """Choose a row layout that is proven exact for the loaded models."""
        with self._memory("comparing rows with those of transformers"):
            layout = row_proof.prove(
                self.policy, self.settings, fall_back=configured.row_layout == "auto"
            )
            if layout != self.settings.row_layout and self.reference is not None:
                attention.switch(self.reference.lm, self.policy.lm.config._attn_implementation)
            critic = self.settings.critic
            if self.critic is not None:
                critic_layout = row_proof.prove(
                    self.critic.model,
                    self.critic.settings,
                    fall_back=configured.critic.row_layout == "auto",
                )
                critic, self.critic.settings = (
                    replace(critic, row_layout=critic_layout),
                    replace(self.critic.settings, row_layout=critic_layout),
                )
            self.settings = replace(self.settings, row_layout=layout, critic=critic)
            if ImageReader.reads(self.settings):
                images = row_proof.prove_images(self.policy, self.settings, self._images())
                self.settings = replace(self.settings, image_layout=images)

    def check_rows(self, rows: Sequence[TrainRow]) -> str:
        """Compare the policy's results for `rows` with transformers; see `row_proof.check_rows`."""
        texts = [row for row in rows if not row.images]
        shown = [row for row in rows if row.images]
        check = partial(row_proof.check_rows, self.policy, self.settings)
        with self._memory("comparing the first batch with transformers"):
            messages = [check(texts, None)] if texts else []
            if shown:
                messages.append(check(shown, self._images()))
            return "; ".join(messages)

    def _loss_inputs(
        self, micro: batches.MicroBatch, batch: RankBatch
    ) -> tuple[LossInputs, list[torch.Tensor]]:
        """Return the inputs of the loss for a micro-batch, and the router probabilities if
        `_balance` is set.
        """
        needs = self.algorithm.needs
        reference = (
            self._reference_logprobs(micro) if needs.reference and not batch.ref_given else None
        )
        top = micro.top_ids is not None
        logprobs, entropy, *probabilities = self.policy(
            micro, needs.entropy, balance=self._balance is not None, top=top
        )
        top_logprobs = probabilities.pop(0) if top else None
        # the sampler's, or the trainer's before the step; if neither is computed, the step has one
        # update and the current log-probs are those before it
        old = (
            micro.rollout_logprobs
            if self.settings.algorithm.bypass_old_logprobs
            else micro.token_values.get("old", logprobs.detach())
        )
        x = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=micro.advantages,
            mask=micro.mask,
            row=micro.row,
            num_rows=micro.num_rows,
            denominators=denominators(self.settings, batch),
            ref_logprobs=micro.token_values.get("ref", reference),
            entropy=entropy,
            top_logprobs=top_logprobs,
            teacher_top_logprobs=micro.top_logprobs,
            rollout_logprobs=micro.rollout_logprobs,
            weights=micro.token_values.get("weights"),
            is_expert=micro.is_expert,
            extra=micro.extra,
            run_tokens=micro.token_values.get("run_tokens"),
            group_tokens=micro.token_values.get("group_tokens"),
            step=batch.step,
            factors=batch.factors,
        )
        return x, probabilities

    def row_losses(self, batch: RankBatch) -> list[tuple[float, np.ndarray]]:
        """Return for each row alone its policy loss, with the denominators of the whole step, and
        its log-probs [L].
        """
        with self._memory("losses of rows"), torch.no_grad():
            inputs = [
                self._loss_inputs(self._micro_batch(rows), batch)[0] for rows in batch.micro_batches
            ]
            rows = [_of_row(x, i) for x in inputs for i in range(x.num_rows)]
            return [(float(self.algorithm.loss(x).loss), x.logprobs.cpu().numpy()) for x in rows]

    def _reference_logprobs(self, micro: batches.MicroBatch) -> torch.Tensor:
        """Return log-probs of the reference model: a separate model, or the policy without its
        adapter's training.

        The reference model's routers choose the experts themselves.
        """
        micro = replace(micro, experts=None)
        adapter = self.policy.adapter
        with torch.no_grad(), adapter.reference() if adapter is not None else nullcontext():
            logprobs: torch.Tensor = (self.reference or self.policy)(micro)[0]
        if self.reference is not None:
            # else its embedding and output layer stay unsharded beside the policy's
            self.reference.to_shards()
        return logprobs

    def score(
        self,
        micro_batches: Sequence[Sequence[TrainRow]],
        what: Sequence[Computed] = ("old",),
        weights: WeightSet = "current",
        rounded: str | None = None,
    ) -> list[list[Scored]]:
        """Return the arrays of `what` for each row, float32 [L] each, under `weights`.

        `rounded`: with the roundings of this dtype.  "values" must be requested alone: the
        critic may be another model.
        """
        scored: list[list[Scored]] = []
        critic = self.critic if "values" in what else None
        types = sharding.DTYPES
        dtype = types[self.settings.dtype]
        short = (
            nullcontext()
            if rounded is None
            else rounding.otherwise(self.policy.lm, dtype, types[rounded])
        )
        with self._memory("scoring"), torch.no_grad(), self._under(weights), short:
            for rows in micro_batches:
                scores = self._scores(self._micro_batch(rows, critic), what)
                parts = {name: by_row(values, rows) for name, values in scores.items()}
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

    def _under(self, weights: WeightSet) -> AbstractContextManager[None]:
        if weights == "average":
            assert self._average is not None, "the settings say so"
            return self._average.restored()
        return self._proximal.restored() if weights == "window" else nullcontext()

    def remember(self) -> None:
        """Copy this rank's weights to host memory: the proximal policy until the next call."""
        self._proximal.remember()

    def _scores(
        self, micro: batches.MicroBatch, what: Sequence[Computed]
    ) -> dict[Computed, torch.Tensor]:
        scores: dict[Computed, torch.Tensor] = {}
        if "sum_squares" in what or "discriminator_mean" in what:
            names: tuple[Computed, ...] = ("old", "entropy", "sum_squares", "discriminator_mean")
            statistics = zip(names, self.policy(micro, statistics=True), strict=True)
            scores |= {name: values for name, values in statistics if name in what}
        elif "old" in what or "entropy" in what:
            logprobs, entropy = self.policy(micro, "entropy" in what)
            scores["old"] = logprobs
            if entropy is not None:
                scores["entropy"] = entropy
        if "ref" in what:
            scores["ref"] = self._reference_logprobs(micro)
        if "values" in what:
            assert self.critic is not None, "`needs` says so"
            scores["values"] = self.critic.model(micro)
        if missing := set(what) - set(scores):
            raise RunFailed(f"the trainer does not compute {', '.join(sorted(missing))}")
        return scores

    def _micro_batch(
        self, rows: Sequence[TrainRow], critic: Critic | None = None
    ) -> batches.MicroBatch:
        """Return the rows as a micro-batch for `critic`, or for the policy if it is None."""
        settings = self.settings if critic is None else critic.settings
        shown = any(row.images for row in rows)
        layout = settings.image_layout if shown else settings.row_layout
        counted = critic is None and self._balance is not None
        micro = batches.make(
            rows or [_IDLE],
            layout=layout,
            device=torch.device(self.settings.device),
            counted=counted,
        )
        if shown:
            self._images()
        if self._reader is None:
            return micro
        for model in (self.policy, self.reference) if critic is None else (critic.model,):
            if model is not None:
                policies.lay_out(model, settings, layout)
        return self._reader.placed(rows, micro) if any(row.shown for row in rows) else micro

    def _images(self) -> ImageReader:
        """Return the reader of images, which the first row with one makes."""
        if self._reader is None:
            self._reader = ImageReader(self.policy.lm, self.settings)
        return self._reader


def denominators(s: LearnerSettings, batch: RankBatch) -> Denominators:
    size = s.loss_scale_factor or s.max_response_tokens
    return Denominators(
        batch.tokens,
        batch.rows,
        size,
        expert_tokens=batch.expert_tokens,
        expert_rows=batch.expert_rows,
        num_runs=batch.num_runs,
        expert_runs=batch.expert_runs,
        num_groups=batch.num_groups,
        expert_groups=batch.expert_groups,
    )


def _of_row(x: LossInputs, row: int) -> LossInputs:
    """Return the inputs of one row of a micro-batch."""
    at = x.row == row
    fields: dict[str, Any] = {
        name: values[at] for name, values in vars(x).items() if isinstance(values, torch.Tensor)
    }
    extra = {name: values[at] for name, values in x.extra.items()}
    return replace(
        x, **{**fields, "row": torch.zeros_like(fields["row"]), "num_rows": 1, "extra": extra}
    )


def by_row(values: torch.Tensor, rows: Sequence[TrainRow]) -> list[np.ndarray]:
    """Split [N] of a micro-batch into float32 [L] of each row."""
    ends = np.cumsum([int(np.count_nonzero(r.loss_mask)) for r in rows])[:-1]
    return np.split(values.cpu().numpy(), ends)


@contextmanager
def _memory(settings: LearnerSettings, rank: int, doing: str) -> Iterator[None]:
    """Turn an out-of-memory error into OutOfMemory with the activity and the remedy."""
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
