"""The safetensors files of a model's folder: their headers, and a hash that tells one base model from another.  Torch-free.

Knows no layers.  Invariant: the same weights have the same fingerprint, whatever files they are cut into.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rft.errors import CheckpointInvalid

_BLOCK = 16 << 10  # bytes read at each of _PLACES places of a tensor
_PLACES = 4
_MAX_HEADER = 100 << 20


def files(folder: Path) -> list[Path]:
    """The files that hold the model of `folder`.  Raises CheckpointInvalid where there are none."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        paths = sorted({folder / Path(str(name)).name for name in listed})
    else:
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointInvalid(f"{folder}: has no safetensors files; convert the weights (other formats can run code when read)")
    return paths


def fingerprint(folder: Path) -> str:
    """A hash of the weights in a model folder, whatever files they are cut into: names, types, shapes and samples of every tensor.

    Of each tensor up to 64 KiB are read.  Raises CheckpointInvalid naming a file that cannot be read.
    """
    found = {}
    for path in files(folder):
        tensors, base = header(path)
        tensors.pop("__metadata__", None)
        with path.open("rb") as file:
            for name, about in tensors.items():
                begin, end = about["data_offsets"]
                digest = hashlib.sha256(json.dumps([name, about["dtype"], about["shape"]]).encode())
                size = min(_BLOCK, end - begin)
                for at in {begin + i * (end - begin - size) // (_PLACES - 1): None for i in range(_PLACES)}:
                    file.seek(base + at)
                    digest.update(file.read(size))
                found[name] = digest.digest()
    whole = hashlib.sha256()
    for name in sorted(found):
        whole.update(found[name])
    return whole.hexdigest()


def header(path: Path) -> tuple[dict[str, Any], int]:
    """(the JSON header of a safetensors file, where its data begins)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, path.stat().st_size - 8):
                raise ValueError(f"a header of {length} bytes")
            found = json.loads(file.read(length))
        if not isinstance(found, dict):
            raise ValueError("its header is not a mapping")
        return found, 8 + length
    except (OSError, ValueError) as e:
        raise CheckpointInvalid(f"{path}: cannot be read as safetensors: {e}") from e
