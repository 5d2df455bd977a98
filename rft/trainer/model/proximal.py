"""The weights of the proximal policy, those at the start of a window of steps, in host memory.

Depends on the policy's trained parameters.  Invariant: each rank keeps its own part, and the
trained weights are restored even after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rft.errors import RunFailed
from rft.trainer.model import tensors
from rft.trainer.model.policy import Policy


class ProximalWeights:
    """A copy of the trained weights of `policy`.  `current`: unchanged since the copy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.current = False
        self._weights: dict[str, torch.Tensor] | None = None

    def remember(self) -> None:
        """Make a new copy in place of the previous one."""
        self._weights, self.current = self._copied(), True

    @contextmanager
    def restored(self, enabled: bool) -> Iterator[None]:
        """Give the policy the remembered weights inside the block, if `enabled`."""
        if not enabled or self.current:
            yield
            return
        if self._weights is None:
            raise RunFailed(
                "the trainer has no weights of the window's start; remember() comes with every "
                "published version"
            )
        now = self._copied()
        self._put(self._weights)
        try:
            yield
        finally:
            self._policy.to_shards()
            self._put(now)

    @torch.no_grad()
    def _copied(self) -> dict[str, torch.Tensor]:
        return {
            name: tensors.local(p).to("cpu", copy=True)
            for name, p in self._policy.trainable().items()
        }

    @torch.no_grad()
    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, p in self._policy.trainable().items():
            tensors.local(p).copy_(weights[name])
