"""Pin memory that several processes map, so that a GPU reads and writes it directly.

A driver copies other memory through a small buffer of its own, at a fraction of the bus's rate.
Depends on torch's binding of the CUDA runtime.  Invariant: copies are right in either case; memory
that cannot be pinned is only slower.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import torch

log = logging.getLogger(__name__)


def pin(memory: torch.Tensor) -> bool:
    """Pin `memory` (uint8) until `unpin`; return whether the GPU of this process uses it directly.

    False in a process that uses no GPU.
    """
    if not torch.cuda.is_initialized():
        return False
    runtime: Any = torch.cuda.cudart()
    if not (failed := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))):
        return True
    log.warning(
        "%d bytes of shared memory could not be pinned (CUDA error %d); weights cross the bus at a "
        "lower rate",
        memory.nbytes,
        failed,
    )
    with suppress(RuntimeError):  # the next kernel would report the error as its own
        torch.zeros(1, device="cuda")
    return False


def unpin(memory: torch.Tensor) -> None:
    """End what `pin` began; call it before the memory is unmapped."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())
