"""A model folder looked at from outside: is it whole, and how does its chat template read?  Neither torch nor transformers.

Knows the Hugging Face folder layout.  Invariant: no weights are read, only the JSON headers of safetensors files.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.errors import ConfigError, ConfigErrors
from rft.taskset.chatfiles import KEY, ChatFiles, find_model

_MAX_HEADER = 100 << 20
_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, kw_only=True)
class ModelFiles(ChatFiles):
    """What a whole model folder says about itself.  `folder` is the tokenizer's, which is mostly the same as `model_folder`."""

    model_folder: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)
    warnings: tuple[str, ...] = field(default=())

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors.values())

    @property
    def dtype(self) -> str:
        """The type most parameters are stored in."""
        sizes: dict[str, int] = {}
        for dtype, shape in self.tensors.values():
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
        return max(sizes, key=lambda d: sizes[d])


def look(path: str, tokenizer_path: str | None = None) -> ModelFiles:
    """Checks the folders of model and tokenizer.  Raises ConfigErrors naming each file that is missing, damaged or does not fit."""
    model_folder = find_model(path)
    folder = model_folder if tokenizer_path is None else find_model(tokenizer_path)
    errors: list[ConfigError] = []
    warnings: list[str] = []

    def wrong(message: str) -> None:
        errors.append(ConfigError(message, key=KEY, given=path))

    config = _json(model_folder / "config.json", wrong, required=True)
    tensors = _weights(model_folder, wrong)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / n).is_file() for n in names[:3]):
        wrong(f"{folder} has no tokenizer (looked for {', '.join(names[:3])}); copy it from the original model")
    elif not (folder / "tokenizer.json").is_file():
        warnings.append(f"{folder} has no tokenizer.json: prompts cannot be shown and counted here")
    tokenizer = _json(folder / "tokenizer.json", wrong, required=False)
    if tokenizer and "model" not in tokenizer:
        wrong(f"{folder / 'tokenizer.json'} is no tokenizer: it has no `model`")
    tokenizer_config = _json(folder / "tokenizer_config.json", wrong, required=False)
    if config and tensors:
        _fits(config, tensors, model_folder, wrong, warnings)
    if tokenizer and tokenizer_path is not None:
        _speaks(tokenizer, config, folder, wrong)
    if errors:
        raise ConfigErrors(errors)
    return ModelFiles(
        folder=folder,
        model_folder=model_folder,
        config=config,
        tensors=tensors,
        tokenizer_config=tokenizer_config,
        warnings=tuple(warnings),
    )


def _speaks(tokenizer: dict[str, Any], config: dict[str, Any], folder: Path, wrong: Any) -> None:
    """A tokenizer from elsewhere must not give ids that the model has no embedding for."""
    size = config.get("text_config", config).get("vocab_size")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else range(len(vocabulary))
    last = max((*ids, *(t.get("id", 0) for t in tokenizer.get("added_tokens", ()))), default=-1)
    if isinstance(size, int) and last >= size:
        wrong(
            f"the tokenizer in {folder} has token {last}, and the model knows {size}; name the tokenizer that belongs to the model"
        )


def sizes(path: str) -> tuple[dict[str, Any], None] | None:
    """config.json of a folder whose weights need not be here; None where there is none."""
    file = Path(path) / "config.json"
    return (found, None) if file.is_file() and (found := _json(file, lambda message: None, required=False)) else None


def _json(path: Path, wrong: Any, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            wrong(f"{path} does not exist; a model folder needs it")
        return {}
    except (OSError, ValueError) as e:
        wrong(f"{path} cannot be read as JSON: {e}")
        return {}
    if not isinstance(value, dict):
        wrong(f"{path} holds a {type(value).__name__}; it must be a mapping")
        return {}
    return value


def _weights(folder: Path, wrong: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    files, listed = sorted(folder.glob("*.safetensors")), {}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = _json(index, wrong, required=True).get("weight_map", {})
        files = [folder / name for name in sorted(set(listed.values()))]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    if not files:
        pickles = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        wrong(
            f"{folder} holds its weights only as pickles ({', '.join(pickles[:3])}), which can run code when they are read; convert them: "
            "load the model where you trust it and call save_pretrained(folder), which writes safetensors"
            if pickles
            else f"{folder} has no *.safetensors; a model folder needs its weights"
        )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            header = read_header(file)
        except FileNotFoundError:
            wrong(f"{file} does not exist, but {index.name} names it")
        except ValueError as e:
            wrong(f"{file} is damaged: {e}; copy it again")
        else:
            tensors |= header
    if listed and not (missing := [f for f in files if not f.is_file()]):
        lost = sorted(set(listed) - set(tensors))
        if lost and not missing:
            wrong(f"{index.name} names {len(lost)} tensor(s) that no file holds, e.g. {lost[0]}")
    return tensors


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor of a safetensors file.  Raises ValueError when header and size contradict each other."""
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(8)
        if len(head) < 8:
            raise ValueError(f"it has {size} bytes, too few for a safetensors file")
        (length,) = struct.unpack("<Q", head)
        if length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"its header claims {length:,} bytes in a file of {size:,}")
        try:
            header = json.loads(f.read(length))
        except ValueError as e:
            raise ValueError(f"its header is not JSON ({e})") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    tensors, end = {}, 0
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, stop) = spec["dtype"], tuple(spec["shape"]), spec["data_offsets"]
            wanted = math.prod(shape) * _BYTES.get(dtype, 0)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"the entry of tensor {name} is unreadable") from None
        if dtype in _BYTES and stop - begin != wanted:
            raise ValueError(f"tensor {name} {dtype}{list(shape)} needs {wanted:,} bytes and has {stop - begin:,}")
        tensors[name] = (dtype, shape)
        end = max(end, stop)
    if 8 + length + end != size:
        raise ValueError(
            f"it has {size:,} bytes, its header speaks of {8 + length + end:,}: it is cut short or was not written whole"
        )
    if not tensors:
        raise ValueError("it holds no tensors")
    return tensors


def _fits(config: dict[str, Any], tensors: dict[str, Any], folder: Path, wrong: Any, warnings: list[str]) -> None:
    if "model_type" not in config and "architectures" not in config:
        wrong(f"{folder / 'config.json'} names neither model_type nor architectures; it is no model configuration")
    embeddings = next((v for n, v in tensors.items() if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if embeddings is not None:
        for what, given in zip(("vocab_size", "hidden_size"), embeddings[1], strict=False):
            if what in config and config[what] != given:
                wrong(
                    f"{folder / 'config.json'} says {what} {config[what]}, but the weights have {given}: they are of different models"
                )
    tied, head = config.get("tie_word_embeddings"), any(n.endswith("lm_head.weight") for n in tensors)
    if tied is False and embeddings is not None and not head:
        wrong(f"{folder / 'config.json'} says tie_word_embeddings: false, but the weights have no lm_head.weight; set it to true")
    if tied is True and head:
        warnings.append(f"{folder} ties its embeddings, yet holds an own lm_head.weight, which is ignored")
