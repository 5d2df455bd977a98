"""Transport through anonymous memory: no file in any folder, nothing left after a kill, not limited
by the size of /dev/shm.

Engines open a file descriptor of the publisher in /proc, which needs the same user on the same
node. If that is refused, from the start or because the publisher later hides its memory from
programs that it judges, the slots are files in /dev/shm (or in the run folder, if /dev/shm has too
little room); `place` says which. Invariant: a slot that may be read is never written; with releases
two slots alternate, without releases three rotate.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from rft.collective import pinned
from rft.errors import WeightSyncFailed
from rft.sync.transport import blob
from rft.types.ids import Version
from rft.types.ports import TensorSpec, WeightManifest

log = logging.getLogger(__name__)
_SHM = Path("/dev/shm")
_KEPT = 2  # versions that stay readable without a release: the served one and its roll-back target
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


@dataclass
class _Slot:
    fd: int
    path: str
    file: Path | None  # file to remove on close; None for anonymous memory
    mapped: torch.Tensor | None = None  # its bytes (uint8), if mapped
    pinned: bool = False  # a GPU copies into `mapped` directly
    version: Version | None = None  # None = free
    order: int = 0  # order of staging


class MemoryTransport:
    """See `rft.sync.base.Transport`.  `place` is "memory", or the folder of the fallback files.

    `shared`: other processes read the bytes; else only this process, through `view`.
    """

    def __init__(self, folder: Path, *, shared: bool = True) -> None:
        self._folder = folder
        self._slots: list[_Slot] = []
        self._staged = 0
        self._layout: tuple[TensorSpec, ...] = ()
        self._closed = False
        self._shared = shared
        # a slot allocated in the background
        self._spare: Future[_Slot] | None = None
        self.place = "memory" if not shared or memory_is_readable() else ""

    def stage(
        self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, str]
    ) -> WeightManifest:
        if self._closed:
            raise WeightSyncFailed(f"version {version}: the transport is closed")
        slot = self._free_slot()
        try:
            specs = blob.write(slot.fd, version, tensors, tied, slot.mapped, slot.pinned)
        except OSError as e:
            raise WeightSyncFailed(
                f"version {version}: writing the weights to {slot.path} failed: {e}"
            ) from e
        if self._layout:
            blob.same_layout(version, specs, self._layout)
        self._layout = specs
        self._staged += 1
        slot.version = version
        slot.order = self._staged
        if slot.mapped is None and slot.file is None:
            _map(slot, os.fstat(slot.fd).st_size)
        if self._staged == 1 and slot.file is None:  # a second version will follow
            pool = ThreadPoolExecutor(1, thread_name_prefix="spare")
            self._spare = pool.submit(_anonymous, sum(blob.aligned(spec.nbytes) for spec in specs))
            pool.shutdown(wait=False)
        return WeightManifest(
            version=version, transport="memory", path=slot.path, tensors=specs, tied=dict(tied)
        )

    @property
    def versions(self) -> tuple[Version, ...]:
        """Return the versions whose bytes are in memory."""
        return tuple(s.version for s in self._slots if s.version is not None)

    def view(self, version: Version) -> mmap.mmap:
        """Return a staged version's bytes; writes stay private.  Raises WeightSyncFailed."""
        slot = next((s for s in self._slots if s.version == version), None)
        if slot is None:
            versions = ", ".join(map(str, self.versions)) or "none"
            raise WeightSyncFailed(
                f"version {version} is not held here any more (held: {versions})"
            )
        return mmap.mmap(slot.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def release(self, version: Version) -> None:
        for slot in self._slots:
            if slot.version == version:
                slot.version = None

    def close(self) -> None:
        self._closed = True
        self._take_spare()
        while self._slots:
            _drop(self._slots.pop())

    def _free_slot(self) -> _Slot:
        if self.place == "memory" and self._shared and _hidden():
            self.place = ""
        self._take_spare()
        free = [s for s in self._slots if s.version is None]
        if not free:
            used = sorted(self._slots, key=lambda s: s.order)
            free = used[: len(used) - _KEPT] if len(used) > _KEPT else [self._new_slot()]
        slot = free[0]
        if slot.file is None and self.place != "memory":  # other processes can no longer open it
            self._slots.remove(slot)
            _drop(slot)
            slot = self._new_slot()
        slot.version = None  # its bytes belong to no version from now on
        return slot

    def _take_spare(self) -> None:
        spare = self._spare
        self._spare = None
        if spare is not None:
            self._slots.append(spare.result())

    def _new_slot(self) -> _Slot:
        slot = _anonymous() if self.place == "memory" else self._file_slot()
        self._slots.append(slot)
        return slot

    def _file_slot(self) -> _Slot:
        need = sum(s.nbytes for s in self._layout) * (_KEPT + 1)
        if not self.place:
            shm = _SHM.is_dir() and os.access(_SHM, os.W_OK) and _room(_SHM) > max(need, 4 << 30)
            self.place = str(_SHM if shm else self._folder)
            log.warning(
                "anonymous memory cannot be read through /proc here: weights go through files in "
                "%s",
                self.place,
            )
        folder = Path(self.place)
        folder.mkdir(parents=True, exist_ok=True)
        # the leftover check reads the owner from the name
        file = folder / f"rft-weights-{os.getpid()}-{id(self):x}-{self._staged}.bin"
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return _Slot(fd, str(file), file)


def memory_is_readable() -> bool:
    """Return whether another process of this user can open this process's anonymous memory."""
    try:
        fd = os.memfd_create("rft-probe", os.MFD_CLOEXEC)
    except OSError as e:
        log.info("memfd_create is not available: %s", e)
        return False
    try:
        path = f"/proc/{os.getpid()}/fd/{fd}"
        return (
            subprocess.run(
                ["/bin/sh", "-c", ': < "$1"', "sh", path], stderr=subprocess.DEVNULL, timeout=30
            ).returncode
            == 0
        )
    finally:
        os.close(fd)


def _anonymous(size: int = 0) -> _Slot:
    """Return a slot of anonymous memory; allocate `size` bytes now, the rest when written."""
    fd = os.memfd_create("rft-weights", os.MFD_CLOEXEC)
    slot = _Slot(fd, f"/proc/{os.getpid()}/fd/{fd}", None)
    if size:
        _map(slot, size)
    return slot


def _map(slot: _Slot, size: int) -> None:
    """Map the memory with all pages allocated, so that writes need no kernel work; pin it for the
    GPU of this process.
    """
    slot.mapped = torch.from_file(slot.path, shared=True, size=size, dtype=torch.uint8)
    # an older kernel refuses, and allocates each page when written
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(slot.mapped.data_ptr()), ctypes.c_size_t(size), _POPULATE_WRITE
    )
    slot.pinned = pinned.pin(slot.mapped)


def _drop(slot: _Slot) -> None:
    if slot.mapped is not None and slot.pinned:
        pinned.unpin(slot.mapped)
    os.close(slot.fd)
    if slot.file is not None:
        slot.file.unlink(missing_ok=True)


def _hidden() -> bool:
    """Return whether other processes of this user cannot read this process: then root owns its part
    of /proc.
    """
    return Path("/proc/self/fd").stat().st_uid != os.geteuid()


def _room(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
