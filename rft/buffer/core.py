"""What the explorer's and the trainer's side of a buffer share: one ledger on one worker thread,
the order in memory, one condition.

It knows neither side.  The one invariant: calls of the ledger run one after the other, in the order
in which they were made.
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

from rft.buffer.base import make_storage
from rft.buffer.lease_order import LeaseOrder
from rft.buffer.ledger import Ledger
from rft.buffer.mixing import Mix
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed, DiskFull, Fenced
from rft.files.disk import FULL, REMEDY

log = logging.getLogger(__name__)
_FULL_DISK_RETRY_S = 0.5
R = TypeVar("R")


class Limiter:
    """How far explorers may run ahead of the trainer: bounds on what waits to be trained, in groups
    and in bytes.

    While no lease waits, at most `capacity` groups are stored and not trained, and `capacity_bytes`
    plus one group.  A lease that cannot be filled needs the first batch that is still open: its
    groups are admitted beyond the bounds, otherwise the trainer would wait for groups that wait for
    the trainer.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._capacity = settings.capacity
        self._capacity_bytes = settings.capacity_bytes
        self._groups = self._bytes = 0  # admitted, not stored yet
        self._starving = 0  # leases that cannot be filled now

    def room(self, waiting: LeaseOrder, key: tuple[int, int] | None) -> bool:
        """Whether a further group of (batch, explorer) `key` may come; None: of a batch that is not
        known.
        """
        groups = waiting.num_groups + self._groups
        size = waiting.num_bytes + self._bytes
        if groups < self._capacity and size < self._capacity_bytes:
            return True
        return self._starving > 0 and key is not None and key <= waiting.open_batch

    def admit(self, size: int) -> None:
        """A group of `size` bytes is going to be stored."""
        self._groups = self._groups + 1
        self._bytes = self._bytes + size

    def settle(self, size: int) -> None:
        """It is stored, and counted by the order, or it was refused."""
        self._groups = self._groups - 1
        self._bytes = self._bytes - size

    @contextlib.contextmanager
    def starving(self) -> Iterator[None]:
        """A lease waits for groups."""
        self._starving += 1
        try:
            yield
        finally:
            self._starving -= 1


class Reserve:
    """Space on the ledger's disk that is kept for the trainer: when the disk is full, appends wait
    and steps go on for a while.

    A file that holds nothing.  One thread uses it; without a path (a ledger elsewhere) it does
    nothing.
    """

    def __init__(self, path: Path | None, size: int) -> None:
        self._path = path
        self._size = size
        self._whole = path is None

    def fill(self) -> None:
        """Takes the space, if it was given away.  Raises DiskFull, or BufferFailed where the file
        cannot be written at all.
        """
        if self._whole:
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
        self._whole = True

    def spend(self) -> bool:
        """Gives the space away, also what a process that was killed had taken; False if there is
        none.
        """
        if self._path is None:
            return False
        self._whole = False
        try:
            self._path.unlink()
        except OSError:  # spent before, removed by a person in need of space, or the disk cannot be written any more
            return False
        return True


class BufferCore:
    """The state of one open buffer.  `clock`: seconds that only go forward, for the rest between
    two uses.
    """

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
        self._no_append = asyncio.Event()  # no append is with the ledger
        self._no_append.set()

    async def _work(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run on the ledger's thread; ledger calls keep their order."""
        self._check_open()
        return await self._repeat(functools.partial(call, *args, **kwargs))

    async def _fenced(self, lineage: int, work: Callable[[Connection], R], point: str = "") -> R:
        """`work` in one transaction of the ledger, see `Ledger.run_for`."""
        return await self._work(self._ledger.run_for, lineage, work, point)

    async def _repeat(self, call: Callable[[], R], *, appends: bool = False) -> R:
        """Runs on the ledger's thread; again and again while no space is left, which changes
        nothing, for a while.

        What does not append may use the reserve.
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
            # there is no event for free space; closing ends the wait
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
