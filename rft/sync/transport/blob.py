"""Writes tensors into an open file and describes them: the part that all file-like transports share.

Knows nothing of versions' lifetimes. The one invariant: the hash of a tensor is taken from the trainer's own memory,
not from what was written, so damage on the way to an engine is always seen.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import xxhash

from rft.errors import WeightSyncFailed
from rft.types.ids import Version
from rft.types.ports import TensorSpec

ALIGN = 64
PIECE = 1 << 19  # a piece and its copy fit into a core's own cache
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
) -> tuple[TensorSpec, ...]:
    """Write every tensor to `fd` from offset 0 on.  Raises WeightSyncFailed on what no engine should ever load.

    `mapped`: the bytes of `fd` from its beginning; what lies beyond is written through `fd`.
    """
    room = np.empty(0, np.uint8) if mapped is None else mapped.numpy()
    specs: list[TensorSpec] = []
    names: set[str] = set()
    end = 0
    under_way: deque[Future[TensorSpec]] = deque()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="stage") as pool:
        for name, tensor in tensors:
            if name in names:
                raise WeightSyncFailed(f"version {version}: tensor {name} was given twice")
            names.add(name)
            host = tensor.detach().to("cpu").contiguous()
            if host.dtype not in _NAMES:
                raise WeightSyncFailed(
                    f"version {version}: tensor {name} is {host.dtype}; a transport carries {', '.join(_NAMES.values())}"
                )
            start = aligned(end)
            end = start + host.nbytes
            under_way.append(pool.submit(_carry, fd, room, version, name, host, start))
            while len(under_way) > 2 * THREADS:  # the tensors may be made one by one, and are not to be in memory all at once
                specs.append(under_way.popleft().result())
        specs.extend(carried.result() for carried in under_way)
    _check_tied(version, names, tied)
    return tuple(specs)


def _carry(fd: int, room: np.ndarray, version: Version, name: str, host: torch.Tensor, start: int) -> TensorSpec:
    """Write one tensor to its place and describe it; each piece is looked at, hashed and copied while it is in the processor's cache."""
    digest, flat, end = xxhash.xxh3_128(), host.reshape(-1), start
    for part in flat.split(PIECE // flat.itemsize):
        if not _finite(part):
            raise WeightSyncFailed(f"version {version}: tensor {name} holds NaN or infinity; it is not published")
        data = part.view(torch.uint8).numpy()
        digest.update(data)
        if end + len(data) <= len(room):
            np.copyto(room[end : end + len(data)], data)
        else:
            _pwrite(fd, data.data, end)
        end += len(data)
    return TensorSpec(name, _NAMES[host.dtype], tuple(host.shape), start, host.nbytes, digest.hexdigest())


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def same_layout(version: Version, specs: tuple[TensorSpec, ...], before: tuple[TensorSpec, ...]) -> None:
    """Raises WeightSyncFailed unless both name the same tensors with the same types and shapes."""
    if len(specs) == len(before) and all(
        (a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape) for a, b in zip(specs, before, strict=True)
    ):
        return
    old = {s.name: (s.dtype, s.shape) for s in before}
    new = {s.name: (s.dtype, s.shape) for s in specs}
    wrong = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    if not wrong:
        return  # another order only
    name = wrong[0]
    raise WeightSyncFailed(
        f"version {version}: {len(wrong)} tensors differ from the version staged before, first {name}: "
        f"was {old.get(name, 'absent')}, is {new.get(name, 'absent')}"
    )


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.element_size() == 1:
        return True
    if tensor.dtype in (torch.float32, torch.float64):
        flat = tensor.reshape(-1).numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):  # one pass at memory speed; huge but finite values overflow and get the slow look
                return True
    return bool(torch.isfinite(tensor).all())


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _check_tied(version: Version, names: set[str], tied: dict[str, str]) -> None:
    if not names:
        raise WeightSyncFailed(f"version {version}: no tensors were given")
    for alias, target in tied.items():
        if alias in names:
            raise WeightSyncFailed(f"version {version}: {alias} is given as a tensor and as tied to {target}")
        if target not in names:
            raise WeightSyncFailed(f"version {version}: {alias} is tied to {target}, which was not given")
