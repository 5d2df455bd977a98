"""Names of an adapter's tensors, as peft writes them, and what engines must know of an adapter that
they are sent.  Torch-free.

Knows neither files nor layers.  Invariant: `split` undoes `key`.
"""

from __future__ import annotations

import re

from msgspec import Struct

SIDES = ("A", "B")
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterSpec(Struct, frozen=True, kw_only=True):
    """W + scale x B A for each layer of which A [rank, in] and B [out, rank] are published; `base`
    tells whose W is meant.
    """

    rank: int
    scale: float
    base: str  # `rft.types.modelfiles.fingerprint` of the model's folder


def key(module: str, side: str) -> str:
    """Name of A or B of the layer `module`."""
    return f"{_PREFIX}{module}.lora_{side}.weight"


def split(name: str) -> tuple[str, str] | None:
    """(layer, "A" or "B"); None for a name that is no adapter tensor's."""
    found = _TENSOR.fullmatch(name)
    return None if found is None else (found["module"], found["side"])
