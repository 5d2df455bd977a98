"""The value model of PPO: the transformer body of a language model with one number as output, and
its own optimizer.

Knows micro-batches and the value loss; not advantages, buffers or the policy.  What a policy needs
to be loaded, sharded and saved holds here too, because a critic is one with another output layer.
Invariant: V of a token is read where the token is predicted, so it has seen everything before the
token and nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rft.algorithm.args import AggMode
from rft.algorithm.base import Denominators, LossOutput
from rft.algorithm.value import ValueInputs, value_loss
from rft.engine.forwards import body_of
from rft.trainer import loading, optim, tensors
from rft.trainer import policy as policies
from rft.trainer.batch import MicroBatch
from rft.trainer.pack import TrainRow
from rft.trainer.policy import Policy
from rft.trainer.settings import LearnerSettings

HEAD = "value_head"


class ValueModel(Policy):
    """A Hugging Face causal model without its output layer, whose output are values."""

    exact = (HEAD,)
    outermost = ("plain", "numbers")

    def __init__(self, lm: Any, chunk_tokens: int) -> None:
        super().__init__(lm, chunk_tokens)
        old = lm.get_output_embeddings()
        (name,) = [n for n, module in lm.named_children() if module is old]
        # the vocabulary's layer is of no use, and a tied one is the embeddings' own weight
        setattr(lm, name, nn.Identity())
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, device="meta")

    def forward(self, batch: MicroBatch) -> torch.Tensor:  # type: ignore[override]
        """Values float32 [N] of `batch`'s trained tokens, each before the token."""
        share = None if self.sequence is None else self.sequence.share(batch)
        hidden = self.hidden(batch if share is None else share.batch)
        values: torch.Tensor = self.value_head(hidden.float())[:, 0]
        return values if share is None else share.gather(values)

    def numbers(self, batch: MicroBatch) -> torch.Tensor:
        """The head gives 0 at first, so one number of each hidden state is compared."""
        share = None if self.sequence is None else self.sequence.share(batch)
        found = _projected(self.hidden(batch if share is None else share.batch))
        return found if share is None else share.gather(found)

    def plain(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [body_of(self.lm)(input_ids=ids, use_cache=False).last_hidden_state for ids in rows]

    @staticmethod
    def read(out: torch.Tensor, row: TrainRow) -> torch.Tensor:
        return _projected(out[torch.from_numpy(row.loss_mask.nonzero()[0] - 1).to(out.device)])


def _projected(hidden: torch.Tensor) -> torch.Tensor:
    """[N, H] → float32 [N] (float64 as it is), about as large as log-probs: of unit length, on a
    fixed direction.
    """
    kept = hidden if hidden.dtype == torch.float64 else hidden.float()
    direction = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0)).to(kept)
    return torch.nn.functional.normalize(kept, dim=-1) @ direction


def load(settings: LearnerSettings) -> ValueModel:
    """The critic of `settings`, whose head gives 0 at first, unless the files have a "value_head"."""
    model, fill = policies.built(ValueModel, settings, fresh=HEAD)
    policies.place(model, settings, trained=True, fill=fill, fresh=_zero_head)
    if fill is None:
        for name, p in model.names().items():
            _zero_head(name, p)
    return model


def _zero_head(name: str, parameter: torch.Tensor) -> bool:
    if not name.startswith(HEAD):
        return False
    with torch.no_grad():
        tensors.local(parameter).zero_()
    return True


class Critic:
    """The value model of `settings.critic` with its optimizer, on one rank."""

    def __init__(self, settings: LearnerSettings) -> None:
        c = settings.critic
        self.settings = replace(
            settings,
            model_path=(path := c.model_path or settings.model_path),
            override_config=loading.override_of(settings, path),
            optim=c.optim,
            lora=None,  # the critic is trained whole
            row_layout=c.row_layout,
            gradient_checkpointing=c.gradient_checkpointing,
            offload_policy=c.offload_policy,
        )
        self._cliprange = c.cliprange_value
        self.model = load(self.settings)
        self.optimizer = optim.make(self.model.trainable(), c.optim)

    def loss(
        self, micro: MicroBatch, denominators: Denominators, agg_mode: AggMode, *, idle: bool
    ) -> LossOutput:
        """The value loss of one micro-batch.  `idle`: computed because other ranks compute, without
        effect.
        """
        values = self.model(micro)
        if idle:
            return LossOutput(loss=(values * 0).sum())
        x = ValueInputs(
            values=values,
            old_values=micro.given["values"],
            returns=micro.given["returns"],
            mask=micro.mask,
            row=micro.row,
            num_rows=micro.num_rows,
            denominators=denominators,
            loss_agg_mode=agg_mode,
            run_tokens=micro.given.get("run_tokens"),
        )
        return value_loss(x, self._cliprange)

    def update(self, lr: float) -> float:
        """Clip and apply the gradient; returns its norm.  A norm that is not finite applies
        nothing.
        """
        return apply(self.model, self.optimizer, self.settings.optim.clip_grad, lr)


def apply(model: nn.Module, optimizer: torch.optim.Optimizer, clip_grad: float, lr: float) -> float:
    """Clip the gradients of `model` and make one update; returns their norm.  A norm that is not
    finite applies nothing.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        # no row had a loss: the optimizer still moves by its momentum
        if p.grad is None and optim.updated(optimizer, p):
            p.grad = torch.zeros_like(p)
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = tensors.full(torch.nn.utils.get_total_norm(grads, foreach=True))
    value = norm.item()
    if np.isfinite(value):
        # else the factor is 1, and multiplying by it takes two passes over all gradients
        if value + 1e-6 > clip_grad:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad, norm, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(value)
