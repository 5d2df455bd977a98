"""The value model of PPO: a language model's transformer body with a scalar output, and its
optimizer.

Depends on micro-batches and the value loss, not on advantages, buffers or the policy.  Loading,
sharding and saving are those of a policy, because a critic is a policy with another output layer.
Invariant: V of a token is read at the position that predicts the token, so it depends on everything
before the token and not on the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rft.algorithm.args import AggMode
from rft.algorithm.base import Denominators, LossOutput
from rft.algorithm.value import ValueInputs, value_loss
from rft.engine.forwards import body_of
from rft.trainer.model import loading, optim, tensors
from rft.trainer.model import policy as policies
from rft.trainer.model.batch import MicroBatch
from rft.trainer.model.policy import Policy
from rft.trainer.rows.pack import TrainRow
from rft.trainer.settings import LearnerSettings

HEAD = "value_head"


class ValueModel(Policy):
    """A Hugging Face causal model with a value head in place of its output layer."""

    exact = (HEAD,)
    outermost = ("reference_outputs", "numbers")

    def __init__(self, lm: Any, chunk_tokens: int) -> None:
        super().__init__(lm, chunk_tokens)
        old = lm.get_output_embeddings()
        (name,) = [n for n, module in lm.named_children() if module is old]
        # the output layer is unused, and may be tied to the embeddings
        setattr(lm, name, nn.Identity())
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, device="meta")

    def forward(self, batch: MicroBatch) -> torch.Tensor:  # type: ignore[override]
        """Return values float32 [N] of `batch`'s trained tokens, each before the token."""
        share = None if self.sequence is None else self.sequence.share(batch)
        hidden = self.hidden(batch if share is None else share.batch)
        values: torch.Tensor = self.value_head(hidden.float())[:, 0]
        return values if share is None else share.gather(values)

    def numbers(self, batch: MicroBatch) -> torch.Tensor:
        """Return a projection of each hidden state for comparisons, since the initial head gives 0."""
        share = None if self.sequence is None else self.sequence.share(batch)
        projected = _projected(self.hidden(batch if share is None else share.batch))
        return projected if share is None else share.gather(projected)

    def reference_outputs(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        body = body_of(self.lm)
        return [body(**names, use_cache=False).last_hidden_state for names in inputs]

    @staticmethod
    def read(out: torch.Tensor, row: TrainRow) -> torch.Tensor:
        return _projected(out[torch.from_numpy(row.loss_mask.nonzero()[0] - 1).to(out.device)])


def _projected(hidden: torch.Tensor) -> torch.Tensor:
    """Project unit-length hidden states [N, H] on a fixed direction: float32 (or float64) [N].

    The results are about as large as log-probs.
    """
    floats = hidden if hidden.dtype == torch.float64 else hidden.float()
    direction = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0)).to(floats)
    return torch.nn.functional.normalize(floats, dim=-1) @ direction


def load(settings: LearnerSettings) -> ValueModel:
    """Return the critic; its head starts at 0 unless the files contain a "value_head"."""
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
            grad_clip=c.grad_clip,
            lora=None,  # the critic is fully fine-tuned
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
        """Return the value loss of one micro-batch.

        `idle`: compute without effect, because other ranks compute.
        """
        values = self.model(micro)
        if idle:
            return LossOutput(loss=(values * 0).sum())
        x = ValueInputs(
            values=values,
            old_values=micro.token_values["values"],
            returns=micro.token_values["returns"],
            mask=micro.mask,
            row=micro.row,
            num_rows=micro.num_rows,
            denominators=denominators,
            loss_agg_mode=agg_mode,
            run_tokens=micro.token_values.get("run_tokens"),
            group_tokens=micro.token_values.get("group_tokens"),
        )
        return value_loss(x, self._cliprange)

    def update(self, lr: float) -> float:
        """Clip and apply the gradient; return its norm.  A non-finite gradient is not applied."""
        return apply(self.model, self.optimizer, self.settings.grad_clip, lr)


def apply(model: nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float, lr: float) -> float:
    """Clip the gradients of `model` and make one update; return the gradient norm.

    A non-finite gradient is not applied.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        # no row had a loss: momentum still changes the parameter
        if p.grad is None and optim.updated(optimizer, p):
            p.grad = torch.zeros_like(p)
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = tensors.full(torch.nn.utils.get_total_norm(grads, foreach=True))
    value = norm.item()
    if np.isfinite(value):
        # else the factor is 1, and multiplying takes two passes over all gradients
        if value + 1e-6 > grad_clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(value)
