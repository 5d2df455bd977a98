"""Other values of the policy's weights that the trainer keeps: those of the start of a window, and a
moving average.

Depends on the policy's trained parameters.  Invariant: each rank keeps its own part, and the
trained weights are restored even after an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rft.errors import RunFailed
from rft.trainer.model import tensors
from rft.trainer.model.policy import Policy


class ProximalWeights:
    """A copy of the trained weights of `policy` in host memory.  `current`: unchanged since then."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.current = False
        self._weights: dict[str, torch.Tensor] | None = None

    def remember(self) -> None:
        """Make a new copy in place of the previous one."""
        self._weights, self.current = _copied(self._policy), True

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the policy the remembered weights inside the block."""
        if self.current:
            yield
            return
        if self._weights is None:
            raise RunFailed(
                "the trainer has no weights of the window's start; remember() comes with every "
                "published version"
            )
        with _lent(self._policy, self._weights):
            yield


class MovingAverage:
    """The exponential moving average of the trained weights of `policy`, beside them on its device.

    `weights`: at least float32, since a shorter type would lose the small steps.
    """

    def __init__(self, policy: Policy, decay: float) -> None:
        self._policy = policy
        self._decay = decay
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the current weights."""
        self.weights = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32)).clone()
            for name, p in self._policy.trainable().items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take a train step into account: average = decay x average + (1 - decay) x weights."""
        for name, p in self._policy.trainable().items():
            average = tensors.local(self.weights[name])
            average.lerp_(tensors.local(p).to(average.dtype), 1 - self._decay)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the policy the average as its weights inside the block."""
        with _lent(self._policy, {n: tensors.local(w) for n, w in self.weights.items()}):
            yield


@contextmanager
def _lent(policy: Policy, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    now = _copied(policy)
    _put(policy, weights)
    try:
        yield
    finally:
        policy.to_shards()
        _put(policy, now)


@torch.no_grad()
def _copied(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: tensors.local(p).to("cpu", copy=True) for n, p in policy.trainable().items()}


@torch.no_grad()
def _put(policy: Policy, weights: Mapping[str, torch.Tensor]) -> None:
    for name, p in policy.trainable().items():
        tensors.local(p).copy_(weights[name])
