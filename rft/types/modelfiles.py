"""A model's folder: its place in the hub's cache, its files, vocabulary size and fingerprint.

Torch-free; depends on no layers.  Invariant: the fingerprint does not depend on the split into
files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from rft.errors import CheckpointInvalid, ConfigError
from rft.files.strict_json import parse_json
from rft.types.row_layout import text_config

_BLOCK = 16 << 10  # bytes read at each of _PLACES places of a tensor
_PLACES = 4
_MAX_HEADER = 100 << 20
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_MARKED = re.compile(r"({%[-+]?\s*(?:end)?)generation(\s*[-+]?%})")
_NO_TEXT = re.compile(r"""\bcontent(["']\])? is (?:not )?[nN]one""")


def hub_cache() -> Path:
    """Return the folder of the hub's cache, which may be missing."""
    return Path(
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    )


def snapshot(name: str) -> Path | None:
    """Return the cached snapshot folder of a hub id, or None."""
    repo = hub_cache() / f"models--{name.replace('/', '--')}"
    main = repo / "refs" / "main"
    if not HUB_ID.fullmatch(name) or not main.is_file():
        return None
    folder = repo / "snapshots" / main.read_text(encoding="utf-8").strip()
    return folder if folder.is_dir() else None


def without_generation_tag(template: str) -> str:
    """Replace transformers' `{% generation %}` in a chat template, which marks answers, by `with`."""
    return _MARKED.sub(r"\1with\2", template)


class _CallArguments(dict[str, Any]):
    """Arguments of a tool call: a dict, and its JSON text where a template writes or adds it."""

    def __init__(self, arguments: dict[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def prepare_tool_calls(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Prepare tool calls for any template; arguments may be an object or JSON text (OpenAI's form).

    DeepSeek's templates require that messages with calls have no content.
    """
    if _NO_TEXT.search(template):
        messages = [
            m | {"content": m.get("content") or None} if m.get("tool_calls") else m
            for m in messages
        ]
    return [
        m | {"tool_calls": [*map(_with_object, calls)]}
        if isinstance(calls := m.get("tool_calls"), list)
        else m
        for m in messages
    ]


def _with_object(call: Any) -> Any:
    """Return the call with `_CallArguments`, or unchanged if its arguments are no object."""
    if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
        return call | {"function": _with_object(function)}
    try:
        arguments = call["arguments"] or {}
        parsed, text = (
            (parse_json(arguments), arguments)
            if isinstance(arguments, str)
            else (arguments, json.dumps(arguments, ensure_ascii=False))
        )
    except (KeyError, TypeError, ValueError):
        return call
    if isinstance(parsed, dict):
        return call | {"arguments": _CallArguments(parsed, text)}
    return call


def files(folder: Path) -> list[Path]:
    """Return the weight files of `folder`.

    Raises CheckpointInvalid without any.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        paths = sorted({folder / Path(str(name)).name for name in listed})
    else:
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointInvalid(
            f"{folder}: has no safetensors files; convert the weights (other formats can run code "
            f"when read)"
        )
    return paths


def vocab_size(folder: Path) -> int:
    """Return the vocabulary size of config.json, else the rows of the embedding.

    Raises ConfigError without either.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = text_config(config).get("vocab_size")
    if size is not None:
        return int(size)
    for path in files(folder):
        for name, tensor in header(path)[0].items():
            if name.endswith("embed_tokens.weight"):
                return int(tensor["shape"][0])
    raise ConfigError(
        "config.json does not give its vocab_size; add it",
        key="model.model_path",
        given=str(folder),
    )


def fingerprint(folder: Path) -> str:
    """Hash the weights in a model folder: name, type, shape and up to 64 KiB of each tensor.

    Raises CheckpointInvalid naming a file that cannot be read.
    """
    digests = {}
    for path in files(folder):
        tensors, base = header(path)
        tensors.pop("__metadata__", None)
        with path.open("rb") as file:
            for name, about in tensors.items():
                begin, end = about["data_offsets"]
                digest = hashlib.sha256(json.dumps([name, about["dtype"], about["shape"]]).encode())
                size = min(_BLOCK, end - begin)
                for at in {
                    begin + i * (end - begin - size) // (_PLACES - 1): None for i in range(_PLACES)
                }:
                    file.seek(base + at)
                    digest.update(file.read(size))
                digests[name] = digest.digest()
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(digests[name])
    return total.hexdigest()


def header(path: Path) -> tuple[dict[str, Any], int]:
    """Return (JSON header of a safetensors file, offset of its data)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, path.stat().st_size - 8):
                raise ValueError(f"a header of {length} bytes")
            fields = json.loads(file.read(length))
        if not isinstance(fields, dict):
            raise ValueError("its header is not a mapping")
        return fields, 8 + length
    except (OSError, ValueError) as e:
        raise CheckpointInvalid(f"{path}: cannot be read as safetensors: {e}") from e
