"""The weights of the proximal policy: those at the start of a window of steps, kept in host memory.

Knows the policy's trained parameters.  Invariant: each rank keeps its own part, and what is trained
is restored whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rft.errors import RunFailed
from rft.trainer import tensors
from rft.trainer.policy import Policy


class ProximalWeights:
    """A copy of the trained weights of `policy`.  `current`: they have not changed since it was
    made.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.current = False
        self._kept: dict[str, torch.Tensor] | None = None

    def remember(self) -> None:
        """Make the copy, in place of the one before."""
        self._kept, self.current = self._copied(), True

    @contextmanager
    def restored(self, wanted: bool) -> Iterator[None]:
        """The policy has the remembered weights, if `wanted`."""
        if not wanted or self.current:
            yield
            return
        if self._kept is None:
            raise RunFailed(
                "the trainer has no weights of the window's start; remember() comes with every "
                "published version"
            )
        now = self._copied()
        self._put(self._kept)
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
