"""State shared by the explorer side and the trainer side of a buffer: a ledger on one worker
thread, the order in memory, a condition.

Depends on neither side.  Invariant: calls of the ledger run one after the other, in call order.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection

from rft.buffer.lease_order import LeaseOrder
from rft.buffer.ledger import Ledger
from rft.buffer.mixing import Mix
from rft.buffer.settings import BufferSettings
from rft.buffer.storage_choice import make_storage
from rft.errors import BufferFailed, DiskFull, Fenced
from rft.files.disk import FULL, REMEDY

log = logging.getLogger(__name__)
_FULL_DISK_RETRY_S = 0.5
R = TypeVar("R")


class Limiter:
    """Limits how far explorers run ahead of the trainer: bounds untrained groups and bytes.

    While no lease waits, at most `capacity` groups, and `capacity_bytes` plus one group, are stored
    and untrained.  A lease that cannot be filled needs the first open batch: groups of that batch
    are admitted beyond the bounds, or trainer and explorers would wait for each other.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._capacity = settings.capacity
        self._capacity_bytes = settings.capacity_bytes
        self._groups = self._bytes = 0  # admitted, not stored yet
        self._starving = 0  # leases that cannot be filled now

    def room(self, order: LeaseOrder, key: tuple[int, int] | None) -> bool:
        """Return whether a group of (batch, explorer) `key` may be stored; None: batch unknown."""
        groups = order.num_groups + self._groups
        size = order.num_bytes + self._bytes
        if groups < self._capacity and size < self._capacity_bytes:
            return True
        return self._starving > 0 and key is not None and key <= order.open_batch

    def admit(self, size: int) -> None:
        """Count a group of `size` bytes that is about to be stored."""
        self._groups = self._groups + 1
        self._bytes = self._bytes + size

    def settle(self, size: int) -> None:
        """Remove an admitted group: it was stored or refused."""
        self._groups = self._groups - 1
        self._bytes = self._bytes - size

    @contextlib.contextmanager
    def starving(self) -> Iterator[None]:
        """Mark a lease as waiting for groups inside the block."""
        self._starving += 1
        try:
            yield
        finally:
            self._starving -= 1


class Reserve:
    """Disk space reserved for the trainer: when the disk is full, appends wait while steps go on.

    The reserve is a preallocated file.  One thread uses it; without a path (a ledger elsewhere) it
    has no effect.
    """

    def __init__(self, path: Path | None, size: int) -> None:
        self._path = path
        self._size = size
        self._filled = path is None

    def fill(self) -> None:
        """Allocate the space again.  Raises DiskFull, or BufferFailed if the file cannot be written."""
        if self._filled:
            return
        assert self._path is not None
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, self._size)
            finally:
                os.close(fd)
        except OSError as e:
            nothing = f"{e.strerror}. Nothing of the last call is stored."
            if e.errno not in FULL:
                raise BufferFailed(f"{self._path} cannot be written: {nothing}") from e
            self._path.unlink(missing_ok=True)
            raise DiskFull(
                f"{self._path.parent} has not {self._size} bytes free for the trainer: {nothing}  "
                f"{REMEDY}"
            ) from None
        self._filled = True

    def spend(self) -> bool:
        """Free the reserve, also that of a killed process; return False if there is none."""
        if self._path is None:
            return False
        self._filled = False
        try:
            self._path.unlink()
        except OSError:  # already removed, or the disk is not writable
            return False
        return True


class BufferCore:
    """State of an open buffer.  `clock`: monotonic seconds, for the rest of rows between two uses."""

    def __init__(
        self,
        settings: BufferSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        mix: Mix | None = None,
    ) -> None:
        """`mix`: rows of another source for each lease."""
        self._settings = settings
        self._clock = clock
        self._mix = mix
        self._storage = make_storage(settings)
        self._ledger = Ledger(settings, self._storage)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rft-buffer")
        self._changed = asyncio.Condition()
        self._order = LeaseOrder(settings, 0, [], clock)
        self._limiter = Limiter(settings)
        path = self._ledger.location.path
        self._reserve = Reserve(
            path and path.with_name(f"{settings.name}.reserve"), settings.full_disk_reserve_bytes
        )
        self._lineage = 0
        self._closed = False
        self._closing = asyncio.Event()
        self._no_append = asyncio.Event()  # set while the ledger has no append
        self._no_append.set()

    async def _run(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run `call` on the ledger's thread, in call order."""
        self._check_open()
        return await self._retry_while_full(functools.partial(call, *args, **kwargs))

    async def _run_fenced(
        self, lineage: int, work: Callable[[Connection], R], point: str = ""
    ) -> R:
        """Run `work` in one transaction of the ledger, see `Ledger.run_for`."""
        return await self._run(self._ledger.run_for, lineage, work, point)

    async def _retry_while_full(self, call: Callable[[], R], *, appends: bool = False) -> R:
        """Run `call` on the ledger's thread; retry for `full_disk_wait_s` while the disk is full.

        Calls other than appends may use the reserve.
        """
        idle = self._no_append if appends else asyncio.Event()
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while True:
            try:
                return await loop.run_in_executor(self._thread, call)
            except DiskFull as e:
                if not appends and await loop.run_in_executor(self._thread, self._reserve.spend):
                    log.warning("%s.  The space reserved for the trainer is in use now.", e)
                    continue
                wait_s = self._settings.full_disk_wait_s
                if deadline is None:
                    deadline = loop.time() + wait_s
                    log.error("%s.  Retrying for %g s, then the run stops.", e, wait_s)
                if loop.time() >= deadline or self._closed:
                    raise
            idle.set()
            # no event signals free space; closing ends the wait
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FULL_DISK_RETRY_S):
                    await self._closing.wait()
            idle.clear()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _fence(self, lineage: int) -> None:
        self._check_open()
        if lineage != self._lineage:
            raise Fenced(
                f"lineage {lineage} no longer owns the buffer: lineage {self._lineage} has taken "
                f"over"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise BufferFailed(f"the buffer {self._ledger.location} is closed")
