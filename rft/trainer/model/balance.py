"""The auxiliary loss that balances the load of experts (Switch Transformer, arXiv:2101.03961 (4) to
(6); as transformers computes it).

    loss = E sum_e f_e P_e      f_e: choices of expert e per token and layer; P_e: mean router probability of e

Both means are over all layers and all positions of a step's rows, each row with its full input.  f
has no gradient, so it is counted first, in a forward pass without the output layer; then every
micro-batch adds its part of P.  The gradient does not depend on micro-batches.

Depends on routers and micro-batches, not on other losses.
Shapes: N positions of the input, L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rft.engine.routers import Routers
from rft.errors import ConfigError
from rft.trainer.model.batch import MicroBatch
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings

Sums = dict[str, torch.Tensor]
KEY = "trainer.router_aux_loss_coef"


class RouterLogits:
    """Records the router logits of `lm`, layer by layer, in the last forward pass."""

    def __init__(self, lm: Any) -> None:
        """Raises ConfigError if transformers does not record the model's router logits."""
        from transformers.utils.output_capturing import OutputRecorder

        recorder = (lm._can_record_outputs or {}).get("router_logits")
        kind = recorder.target_class if isinstance(recorder, OutputRecorder) else recorder
        routers = [m for m in lm.modules() if kind is not None and type(m) is kind]
        if not routers:
            raise ConfigError(
                f"transformers does not tell the router logits of {type(lm).__name__}.  Write 0",
                key=KEY,
            )
        self._index = recorder.index if isinstance(recorder, OutputRecorder) else 0
        self._logits: list[torch.Tensor] | None = None
        for module in routers:
            module.register_forward_hook(self._after)

    def begin(self) -> None:
        self._logits = []

    def take(self) -> list[torch.Tensor]:
        """Return the logits [N, E] of every layer, without those that a backward pass recomputes."""
        logits = self._logits
        self._logits = None
        assert logits is not None, "begin comes first"
        return logits

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        if self._logits is not None:
            self._logits.append(out[self._index] if isinstance(out, tuple) else out)


def probabilities(logits: list[torch.Tensor], counts: torch.Tensor | None) -> torch.Tensor:
    """Return router probabilities of each expert, float32 [E], summed over layers and positions.

    `counts` [N]: number of rows that share a position.
    """
    assert counts is not None, "micro-batches are made with counts"
    return torch.stack(
        [(counts[:, None] * x.flatten(0, -2).float().softmax(-1)).sum(0) for x in logits]
    ).sum(0)


class RouterBalance:
    """The balance loss on one rank; each update calls `count`, then `added` for every micro-batch."""

    def __init__(self, settings: LearnerSettings) -> None:
        self._coef = settings.router_aux_loss_coef
        self._device = torch.device(settings.device)
        self._shares = torch.zeros(0)  # f, float32 [E]
        self._scale = self._tokens = 0.0

    def count(
        self, policy: Any, batch: RankBatch, build: Callable[[Sequence[TrainRow]], MicroBatch]
    ) -> None:
        """Count the choices of each expert under the current weights, over all rows of the step.

        Collective.
        """
        routers: Routers = policy.routers
        chosen = torch.zeros(routers.sizes.experts, device=self._device)
        with torch.no_grad():
            for rows in batch.micro_batches:
                counts = policy.choices(build(rows))
                # a rank without rows only takes part in the collectives
                chosen += counts if rows else 0
        policy.to_shards()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(chosen)
        each = batch.positions * routers.layers
        self._shares = chosen / each
        self._scale = len(chosen) / each
        self._tokens = batch.tokens

    def added(
        self, loss: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, Sums, Sums]:
        """Return `loss` plus the micro-batch's balance loss, and metric sums and maxima."""
        aux = self._scale * (self._shares * probabilities).sum()
        largest = self._shares.max() * len(self._shares) / self._shares.sum()
        # metrics are divided by the tokens of the step
        sums = {"router_aux_loss": aux.detach() * self._tokens}
        return loss + self._coef * aux, sums, {"router_max_load": largest}
