"""Write tensors into an open file and describe them: common code of all file-like transports.

Independent of versions' lifetimes. Invariant: a tensor's hash is computed from the trainer's own
memory, not from the written bytes, so damage on the way to an engine is always detected.  What a GPU
writes to its place is hashed where it arrived.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore

import numpy as np
import torch
import xxhash

from rft.errors import WeightSyncFailed
from rft.types.ids import Version
from rft.types.ports import TensorSpec

ALIGN = 64
PIECE = 1 << 20  # a piece and its copy fit into a core's own cache
THREADS = min(4, os.cpu_count() or 1)
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write(
    fd: int,
    version: Version,
    tensors: Iterable[tuple[str, torch.Tensor]],
    tied: dict[str, str],
    mapped: torch.Tensor | None = None,
    pinned: bool = False,
) -> tuple[TensorSpec, ...]:
    """Write every tensor to `fd` from offset 0 on; return their specs.

    `mapped`: mapping of the first bytes of `fd`; bytes beyond it are written through `fd`.
    `pinned`: a GPU copies into it directly, so nothing waits and there is no copy in between. Raises
    WeightSyncFailed for tensors that no engine should load.
    """
    room = np.empty(0, np.uint8) if mapped is None else mapped.numpy()
    names: set[str] = set()
    end = 0
    carried: list[Future[TensorSpec]] = []
    # tensors may be created one by one, and must not all be in memory at once
    room_left = Semaphore(3 * THREADS)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="stage") as pool:
        for name, tensor in tensors:
            if name in names:
                raise WeightSyncFailed(f"version {version}: tensor {name} was given twice")
            names.add(name)
            tensor = tensor.detach()
            if tensor.dtype not in _NAMES:
                raise WeightSyncFailed(
                    f"version {version}: tensor {name} is {tensor.dtype}; a transport carries "
                    f"{', '.join(_NAMES.values())}"
                )
            start = aligned(end)
            end = start + tensor.nbytes
            room_left.acquire()
            if pinned and mapped is not None and end <= len(mapped):
                place = mapped[start:end].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor, non_blocking=True)
                arrived = _copies(tensor.device)
                carried.append(pool.submit(_arrived, version, name, place, start, arrived))
            else:
                host = tensor.to("cpu").contiguous()
                carried.append(pool.submit(_carry, fd, room, version, name, host, start))
            carried[-1].add_done_callback(lambda _: room_left.release())
    _check_tied(version, names, tied)
    return tuple(tensor.result() for tensor in carried)


def _carry(
    fd: int, room: np.ndarray, version: Version, name: str, host: torch.Tensor, start: int
) -> TensorSpec:
    """Write one tensor to its place and return its spec.

    Each piece is checked, hashed and copied while it is in the processor's cache.
    """

    def copied(at: int, piece: np.ndarray) -> None:
        begin = start + at
        if begin + len(piece) <= len(room):
            np.copyto(room[begin : begin + len(piece)], piece)
        else:
            _pwrite(fd, piece.data, begin)

    return _described(version, name, host, start, copied)


def _copies(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the copies which `device` has begun."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _arrived(
    version: Version, name: str, place: torch.Tensor, start: int, arrived: Callable[[], None]
) -> TensorSpec:
    """Return the spec of a tensor that a GPU copies to its place, once it `arrived`."""
    arrived()
    return _described(version, name, place, start, lambda at, piece: None)


def _described(
    version: Version,
    name: str,
    host: torch.Tensor,
    start: int,
    visit: Callable[[int, np.ndarray], None],
) -> TensorSpec:
    """Check and hash a tensor piece by piece; `visit` is called with each piece and its offset."""
    digest = xxhash.xxh3_128()
    flat = host.reshape(-1)
    data = flat.view(torch.uint8).numpy()
    count = PIECE // flat.itemsize
    for i, at in enumerate(range(0, len(data), PIECE)):
        if not _finite(flat[i * count : (i + 1) * count]):
            raise WeightSyncFailed(
                f"version {version}: tensor {name} holds NaN or infinity; it is not published"
            )
        piece = data[at : at + PIECE]
        digest.update(piece)
        visit(at, piece)
    return TensorSpec(
        name, _NAMES[host.dtype], tuple(host.shape), start, host.nbytes, digest.hexdigest()
    )


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def same_layout(
    version: Version, specs: tuple[TensorSpec, ...], before: tuple[TensorSpec, ...]
) -> None:
    """Raise WeightSyncFailed unless both have the same tensors with the same types and shapes."""
    if len(specs) == len(before) and all(
        (a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape)
        for a, b in zip(specs, before, strict=True)
    ):
        return
    old = {s.name: (s.dtype, s.shape) for s in before}
    new = {s.name: (s.dtype, s.shape) for s in specs}
    wrong = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    if not wrong:
        return  # only the order differs
    name = wrong[0]
    raise WeightSyncFailed(
        f"version {version}: {len(wrong)} tensors differ from the version staged before, first "
        f"{name}: "
        f"was {old.get(name, 'absent')}, is {new.get(name, 'absent')}"
    )


def _finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite.

    A sum is one pass at memory speed and preserves NaN and infinity; a sum of huge finite values
    may overflow, so only then each value is checked.
    """
    if not values.is_floating_point():
        return True
    wide = values.float() if values.itemsize == 1 else values  # 8-bit types have no arithmetic
    return math.isfinite(wide.sum().item()) or bool(torch.isfinite(wide).all())


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _check_tied(version: Version, names: set[str], tied: dict[str, str]) -> None:
    if not names:
        raise WeightSyncFailed(f"version {version}: no tensors were given")
    for alias, target in tied.items():
        if alias in names:
            raise WeightSyncFailed(
                f"version {version}: {alias} is given as a tensor and as tied to {target}"
            )
        if target not in names:
            raise WeightSyncFailed(
                f"version {version}: {alias} is tied to {target}, which was not given"
            )
