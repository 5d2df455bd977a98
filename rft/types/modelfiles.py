"""A model's folder: where the hub's cache keeps it, its files, how many tokens it knows, and a hash
that tells base models apart.

Torch-free; knows no layers.  Invariant: the same weights have the same fingerprint, whatever files
they are cut into.
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
    """The folder of the hub's cache, which need not be there."""
    return Path(
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    )


def snapshot(name: str) -> Path | None:
    """The folder in the hub's cache of the model that has this id there; None for one that is not
    in it, and for what is no id.
    """
    repo = hub_cache() / f"models--{name.replace('/', '--')}"
    main = repo / "refs" / "main"
    if not HUB_ID.fullmatch(name) or not main.is_file():
        return None
    found = repo / "snapshots" / main.read_text(encoding="utf-8").strip()
    return found if found.is_dir() else None


def plain_jinja(template: str) -> str:
    """A chat template without transformers' own tag: `{% generation %}`, which marks answers, opens
    a scope and no more.
    """
    return _MARKED.sub(r"\1with\2", template)


class _CallArguments(dict[str, Any]):
    """What a call passes: an object, and where a template adds it to a text or writes it as it is,
    the object's JSON text.
    """

    def __init__(self, made: dict[str, Any], text: str) -> None:
        super().__init__(made)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def as_read(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Calls of tools as any template reads them, their arguments given as an object or as its JSON
    text, which is OpenAI's form.

    DeepSeek's show them only in messages whose content is none, or write an empty answer behind
    them where it is not.
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
    """A call whose arguments are an object and its JSON text at once; unchanged where they are
    neither.
    """
    if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
        return call | {"function": _with_object(function)}
    try:
        given = call["arguments"] or {}
        made, text = (
            (parse_json(given), given)
            if isinstance(given, str)
            else (given, json.dumps(given, ensure_ascii=False))
        )
    except (KeyError, TypeError, ValueError):
        return call
    return call | {"arguments": _CallArguments(made, text)} if isinstance(made, dict) else call


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
        raise CheckpointInvalid(
            f"{folder}: has no safetensors files; convert the weights (other formats can run code "
            f"when read)"
        )
    return paths


def vocab_size(folder: Path) -> int:
    """How many token ids a model has: as config.json says, or, where that leaves it to a default,
    as its embedding has.

    Raises ConfigError where neither tells.
    """
    if (
        said := text_config(json.loads((folder / "config.json").read_text(encoding="utf-8"))).get(
            "vocab_size"
        )
    ) is not None:
        return int(said)
    tensors = (tensor for path in files(folder) for tensor in header(path)[0].items())
    if (
        rows := next(
            (about["shape"][0] for name, about in tensors if name.endswith("embed_tokens.weight")),
            None,
        )
    ) is None:
        raise ConfigError(
            "config.json does not give its vocab_size; add it",
            key="model.model_path",
            given=str(folder),
        )
    return int(rows)


def fingerprint(folder: Path) -> str:
    """A hash of the weights in a model folder, whatever files they are cut into: names, types,
    shapes and samples of every tensor.

    Of each tensor up to 64 KiB are read.  Raises CheckpointInvalid naming a file that cannot be
    read.
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
                for at in {
                    begin + i * (end - begin - size) // (_PLACES - 1): None for i in range(_PLACES)
                }:
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
