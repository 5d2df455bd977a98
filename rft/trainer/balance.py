"""The auxiliary loss that keeps experts equally busy (Switch Transformer, arXiv:2101.03961 (4) to
(6); as transformers computes it).

    loss = E sum_e f_e P_e      f_e: choices of expert e per token and layer; P_e: mean probability that routers give it

Both means are over all layers and all positions of the rows of a step, each row counted with its
whole input.  f has no gradient, so it is counted first, in a forward pass without the output layer,
and then every micro-batch adds its part of P: the gradient does not depend on the cut.
Knows routers and micro-batches; not other losses.

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
from rft.trainer.batch import MicroBatch
from rft.trainer.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings

Sums = dict[str, torch.Tensor]
KEY = "trainer.router_aux_loss_coef"


class RouterLogits:
    """What the routers of `lm` say of the experts, layer by layer, in the last forward."""

    def __init__(self, lm: Any) -> None:
        """Raises ConfigError where transformers does not know the model's routers."""
        from transformers.utils.output_capturing import OutputRecorder

        recorder = (lm._can_record_outputs or {}).get("router_logits")
        kind = recorder.target_class if isinstance(recorder, OutputRecorder) else recorder
        found = [m for m in lm.modules() if kind is not None and type(m) is kind]
        if not found:
            raise ConfigError(
                f"transformers does not tell the router logits of {type(lm).__name__}.  Write 0",
                key=KEY,
            )
        self._index = recorder.index if isinstance(recorder, OutputRecorder) else 0
        self._found: list[torch.Tensor] | None = None
        for module in found:
            module.register_forward_hook(self._after)

    def begin(self) -> None:
        self._found = []

    def take(self) -> list[torch.Tensor]:
        """[N, E] of every layer; what a backward computes again is not kept."""
        found = self._found
        self._found = None
        assert found is not None, "begin comes first"
        return found

    def _after(self, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        if self._found is not None:
            self._found.append(out[self._index] if isinstance(out, tuple) else out)


def probabilities(logits: list[torch.Tensor], counts: torch.Tensor | None) -> torch.Tensor:
    """float32 [E]: what routers give each expert, added over layers and positions; `counts` [N]:
    how many rows have a position.
    """
    assert counts is not None, "micro-batches are made with counts"
    return torch.stack(
        [(counts[:, None] * x.flatten(0, -2).float().softmax(-1)).sum(0) for x in logits]
    ).sum(0)


class RouterBalance:
    """The loss in the steps of one rank; for each update first `count`, then `added` for every
    micro-batch.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        self._coef = settings.router_aux_loss_coef
        self._device = torch.device(settings.device)
        self._shares = torch.zeros(0)  # f, float32 [E]
        self._scale = self._tokens = 0.0

    def count(
        self, policy: Any, batch: RankBatch, made: Callable[[Sequence[TrainRow]], MicroBatch]
    ) -> None:
        """How often each expert is chosen under the weights as they are, in all rows of the step.
        Collective.
        """
        routers: Routers = policy.routers
        chosen = torch.zeros(routers.sizes.experts, device=self._device)
        with torch.no_grad():
            for rows in batch.micro_batches:
                found = policy.choices(made(rows))
                # without rows it is computed for the other ranks alone
                chosen += found if rows else 0
        policy.to_shards()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(chosen)
        each = batch.positions * routers.layers
        self._shares = chosen / each
        self._scale = len(chosen) / each
        self._tokens = batch.tokens

    def added(self, loss: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, Sums, Sums]:
        """`loss` of a micro-batch with its part of this one, and what to tell; `given`: its
        `probabilities`.
        """
        aux = self._scale * (self._shares * given).sum()
        largest = self._shares.max() * len(self._shares) / self._shares.sum()
        # it is divided by the tokens of the step
        told = {"router_aux_loss": aux.detach() * self._tokens}
        return loss + self._coef * aux, told, {"router_max_load": largest}
