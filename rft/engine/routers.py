"""Record the expert choices of a transformers model's routers in an engine, and replay them in the
trainer.

In every supported model a router ranks the experts of each token with one `topk` over all experts.
This call is recorded, or its result is replaced; the weights of the experts come from the router,
so its gradient stays.  Depends on modules with experts, not on requests or rows.
Invariant: a layer whose choice was not intercepted is an error, never a silent default.

Shapes: N tokens (positions of the input, flattened), L layers with experts, K experts of a token, E
experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rft.errors import ConfigError
from rft.types.experts import Sizes, sizes_of

KEY = "explorer.rollout_model.router_replay"
_TOPK = (torch.topk, torch.Tensor.topk)


class Routers:
    """The routers of `lm`.  While `recording`, `chosen` holds their last choice; `prescribe`
    replaces the choice.
    """

    def __init__(self, lm: Any) -> None:
        """Raises ConfigError if the model has no experts or chooses them in another way."""
        sizes = sizes_of(lm.config.to_dict())
        blocks = list(_blocks(lm))
        if sizes is None or not blocks:
            raise ConfigError(
                f"{type(lm).__name__} has no experts whose choice could be replayed.  Write off",
                key=KEY,
                given="on",
            )
        self.sizes: Sizes = sizes
        self.recording = False
        self._prescribed: torch.Tensor | None = None  # int64 [N, L, K]; -1 = router's choice
        self._chosen: dict[int, torch.Tensor] = {}
        for number, block in enumerate(blocks):
            block.forward = partial(self._forward, number, block.forward)
        self.layers = len(blocks)

    def prescribe(self, experts: torch.Tensor | None) -> None:
        """Set the experts of the following forwards, int64 [N, L, K]; None = the routers' own
        choice.

        The choice stays set after a forward, because activation checkpointing runs the forward
        again.
        """
        if experts is not None and experts.shape[1:] != (self.layers, self.sizes.chosen):
            raise ConfigError(
                f"the experts of a row are {experts.shape[1]} layers x {experts.shape[2]}, the trained "
                f"model has {self.layers} x "
                f"{self.sizes.chosen}: engine and trainer need the same model",
                key=KEY,
                given="on",
            )
        self._prescribed = experts

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the routers' choices inside the block."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    @property
    def chosen(self) -> torch.Tensor:
        """Experts of the last forward while `recording`, int64 [N, L, K]."""
        return torch.stack([self._chosen[i] for i in range(self.layers)], 1)

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._prescribed is None and not self.recording:
            return forward(*args, **kwargs)
        with _Choice(
            self.sizes, None if self._prescribed is None else self._prescribed[:, number]
        ) as choice:
            out = forward(*args, **kwargs)
        if choice.experts is None:
            raise ConfigError(
                "the model's routers choose experts in a way that cannot be replayed.  Write off",
                key=KEY,
                given="on",
            )
        if self.recording:
            self._chosen[number] = choice.experts
        return out


class _Choice(TorchFunctionMode):
    """Intercepts the `topk` over all experts and replaces its result by the prescribed experts."""

    def __init__(self, sizes: Sizes, prescribed: torch.Tensor | None) -> None:
        super().__init__()
        self._sizes = sizes
        self._prescribed = prescribed
        self.experts: torch.Tensor | None = None  # int64 [N, K]

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        if (
            scores.dim() != 2
            or scores.shape[1] != self._sizes.experts
            or out.indices.shape[1] != self._sizes.chosen
        ):
            return out  # another topk, over groups of experts
        self.experts = out.indices
        if self._prescribed is None:
            return out
        if len(self._prescribed) != len(scores):
            raise ValueError(
                f"experts of {len(self._prescribed)} tokens are given, and {len(scores)} are computed"
            )
        prescribed = self._prescribed.long()
        self.experts = torch.where(prescribed >= 0, prescribed, out.indices)
        return torch.return_types.topk((scores.gather(1, self.experts), self.experts))


def _blocks(lm: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have experts and choose among them."""
    for module in lm.modules():
        if any(holds_experts(child) for child in module.children()):
            yield module


def holds_experts(module: nn.Module) -> bool:
    """Return whether `module` holds the weights of all experts of a layer."""
    parameters = dict(module.named_parameters(recurse=False))
    return all(
        name in parameters and parameters[name].dim() == 3 for name in ("gate_up_proj", "down_proj")
    )
