"""Names of an adapter's tensors, as peft writes them, and its description for engines.  Torch-free.

Depends on neither files nor layers.  Invariant: `split` undoes `key`.
"""

from __future__ import annotations

import re

from msgspec import Struct

SIDES = ("A", "B")
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterSpec(Struct, frozen=True, kw_only=True):
    """W + scale x B A for each layer with published A [rank, in] and B [out, rank]."""

    rank: int
    scale: float
    base: str  # `rft.types.modelfiles.fingerprint` of the model's folder


def key(module: str, side: str) -> str:
    """Return the tensor name of A or B of the layer `module`."""
    return f"{_PREFIX}{module}.lora_{side}.weight"


def split(name: str) -> tuple[str, str] | None:
    """Return (layer, "A" or "B"), or None for a name of no adapter tensor."""
    match = _TENSOR.fullmatch(name)
    if match is None:
        return None
    return (match["module"], match["side"])
