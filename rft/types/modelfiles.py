"""A model's folder: where the hub's cache keeps it, its safetensors files, and a hash that tells one base model from another.

Torch-free; knows no layers.  Invariant: the same weights have the same fingerprint, whatever files they are cut into.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from rft.errors import CheckpointInvalid
from rft.strictjson import parse_json

_BLOCK = 16 << 10  # bytes read at each of _PLACES places of a tensor
_PLACES = 4
_MAX_HEADER = 100 << 20
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_MARKED = re.compile(r"({%[-+]?\s*(?:end)?)generation(\s*[-+]?%})")
_NO_TEXT = re.compile(r"""\bcontent(["']\])? is none""")
_OBJECTS = re.compile(r"""\barguments(["']\])? *(\| *(tojson|items|dictsort)|is mapping)""")


def hub_cache() -> Path:
    """The folder of the hub's cache, which need not be there."""
    return Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub")


def snapshot(name: str) -> Path | None:
    """The folder in the hub's cache of the model that has this id there; None for one that is not in it, and for what is no id."""
    repo = hub_cache() / f"models--{name.replace('/', '--')}"
    main = repo / "refs" / "main"
    if not HUB_ID.fullmatch(name) or not main.is_file():
        return None
    found = repo / "snapshots" / main.read_text(encoding="utf-8").strip()
    return found if found.is_dir() else None


def plain_jinja(template: str) -> str:
    """A chat template without transformers' own tag: `{% generation %}`, which marks answers, opens a scope and no more."""
    return _MARKED.sub(r"\1with\2", template)


def as_read(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Calls of tools as `template` reads them.

    DeepSeek's shows them only in messages whose content is none; most write their arguments as JSON, which OpenAI's form has them in
    already.
    """
    if _NO_TEXT.search(template):
        messages = [m | {"content": m.get("content") or None} if m.get("tool_calls") else m for m in messages]
    if not _OBJECTS.search(template):
        return messages
    return [
        m | {"tool_calls": [*map(_with_object, calls)]} if isinstance(calls := m.get("tool_calls"), list) else m for m in messages
    ]


def _with_object(call: Any) -> Any:
    """A call whose arguments are the object that their JSON text is."""
    if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
        return call | {"function": _with_object(function)}
    try:
        made = parse_json(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return call | {"arguments": made} if isinstance(made, dict) else call


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
