"""How far explorers may run ahead of the trainer: bounds on what waits to be trained, in groups and in bytes.

It holds no payload and waits for nothing itself.  The one invariant: while nobody waits for a lease, what is stored and not trained
is at most `capacity` groups, and at most `capacity_bytes` plus one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rft.buffer.settings import BufferSettings


class Waiting(Protocol):
    """What the limiter asks of the order."""

    num_groups: int  # accepted, and not yet trained
    num_bytes: int  # of their payload

    @property
    def open_batch(self) -> tuple[int, int]: ...  # (batch, explorer): no lease goes past it


class Limiter:
    """Admits groups while there is room.

    A lease that cannot be filled needs the first batch that is still open: its groups are admitted beyond the bounds, otherwise the
    trainer would wait for groups that wait for the trainer.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._capacity, self._capacity_bytes = settings.capacity, settings.capacity_bytes
        self._groups = self._bytes = 0  # admitted, not stored yet
        self._starving = 0  # leases that cannot be filled now

    def room(self, waiting: Waiting, key: tuple[int, int] | None) -> bool:
        """Whether a further group of (batch, explorer) `key` may come; None: of a batch that is not known."""
        groups, size = waiting.num_groups + self._groups, waiting.num_bytes + self._bytes
        if groups < self._capacity and size < self._capacity_bytes:
            return True
        return self._starving > 0 and key is not None and key <= waiting.open_batch

    def admit(self, size: int) -> None:
        """A group of so many bytes is going to be stored."""
        self._groups, self._bytes = self._groups + 1, self._bytes + size

    def settle(self, size: int) -> None:
        """It is stored, and counts in the order, or it never will be."""
        self._groups, self._bytes = self._groups - 1, self._bytes - size

    @contextmanager
    def starving(self) -> Iterator[None]:
        """A lease waits for groups."""
        self._starving += 1
        try:
            yield
        finally:
            self._starving -= 1
