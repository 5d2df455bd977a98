"""Multiply float32 matrices with oneDNN, which is faster than MKL on AMD's processors.  torch has
both and prefers MKL.

Depends on torch's operators, not on models.  Invariant: matrices that oneDNN cannot multiply, and
all other dtypes, are multiplied as before.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import torch


def by_onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b of matrices [M, K] and [K, N] on a CPU, like `torch.mm`."""
    if a.dtype == b.dtype == torch.float32 and 0 < a.shape[1] == b.shape[0]:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    else:
        product = torch.ops.aten.mm.out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
    return product


@functools.cache
def prefer_onednn(cpuinfo: Path = Path("/proc/cpuinfo")) -> torch.library.Library | None:
    """On AMD processors replace `torch.mm`, hence linear layers and their gradients, by `by_onednn`
    for the rest of the process.
    """
    if (
        not torch.backends.mkldnn.is_available()
        or not cpuinfo.exists()
        or "AuthenticAMD" not in cpuinfo.read_text()
    ):
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl("mm", by_onednn, "CPU")
    return library
