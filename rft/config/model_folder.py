"""A model folder looked at from outside: is it whole, and how does its chat template read?  Neither
torch nor transformers.

Knows the Hugging Face folder layout.  Invariant: no weights are read, only the JSON headers of
safetensors files.
"""

from __future__ import annotations

import importlib.util
import math
import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.errors import ConfigError, ConfigErrors
from rft.files.disk import open_regular, read_regular
from rft.files.strict_json import parse_json
from rft.taskset.chatfiles import KEY, ChatFiles, find_model
from rft.types.experts import sizes_of

_MAX_HEADER = 100 << 20
_MAX_JSON = 256 << 20  # tokenizers of 30 MB are usual
_SIZES = "hidden_size n_embd num_hidden_layers n_layer num_attention_heads n_head vocab_size intermediate_size n_inner".split()
_SIZES += ["max_position_embeddings", "num_key_value_heads"]
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_TEXT_LAYER = re.compile(r"(?:model\.|transformer\.|language_model\.)*(?:layers|h)\.(\d+)\.")
# layers behind the last one, which are not trained
_NEXT_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")
_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(?:gate_up_proj|down_proj)$")
_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True, kw_only=True)
class ModelFiles(ChatFiles):
    """What a whole model folder says about itself.  `folder` is the tokenizer's, which is mostly
    the same as `model_folder`.
    """

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


def look(path: str, tokenizer_path: str | None = None, *, trusted: bool = True) -> ModelFiles:
    """Checks the folders of model and tokenizer.  Raises ConfigErrors naming each file that is
    missing, damaged or does not fit.

    `trusted`: Python code that comes with the model may run.
    """
    model_folder = find_model(path)
    folder = (
        model_folder
        if tokenizer_path is None
        else find_model(tokenizer_path, "model.tokenizer_path")
    )
    errors: list[ConfigError] = []
    warnings: list[str] = []

    def wrong(message: str) -> None:
        errors.append(ConfigError(message, key=KEY, given=path))

    config = _json(model_folder / "config.json", wrong, required=True)
    _sizes(config, model_folder, wrong)
    tensors = _weights(model_folder, wrong)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / n).is_file() for n in names[:3]):
        wrong(
            f"{folder} has no tokenizer (looked for {', '.join(names[:3])}); copy it from the "
            f"original model"
        )
    elif not (folder / "tokenizer.json").is_file():
        warnings.append(f"{folder} has no tokenizer.json: prompts cannot be shown and counted here")
    tokenizer = _json(folder / "tokenizer.json", wrong, required=False)
    if tokenizer and "model" not in tokenizer:
        wrong(f"{folder / 'tokenizer.json'} is no tokenizer: it has no `model`")
    tokenizer_config = _json(folder / "tokenizer_config.json", wrong, required=False)
    _known(config, model_folder, trusted, wrong)
    if config and tensors and not errors:
        _fits(config, tensors, model_folder, wrong, warnings)
    if tokenizer and tokenizer_path is not None and not errors:
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
            f"the tokenizer in {folder} has token {last}, and the model knows {size}; name the "
            f"tokenizer that belongs to the model"
        )


def sizes(path: str) -> tuple[dict[str, Any], None] | None:
    """config.json of a folder whose weights need not be here; None where there is none."""
    file = Path(path) / "config.json"
    return (
        (found, None)
        if file.is_file() and (found := _json(file, lambda message: None, required=False))
        else None
    )


def _json(path: Path, wrong: Any, *, required: bool) -> dict[str, Any]:
    try:
        value = parse_json(read_regular(path, _MAX_JSON).decode("utf-8"))
    except FileNotFoundError:
        if required:
            wrong(f"{path} does not exist; a model folder needs it")
        return {}
    except (OSError, ValueError) as e:
        wrong(f"{path} cannot be read as JSON: {e.strerror if isinstance(e, OSError) else e}")
        return {}
    if not isinstance(value, dict):
        wrong(f"{path} holds a {type(value).__name__}; it must be a mapping")
        return {}
    return value


def _weights(folder: Path, wrong: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    files = sorted(folder.glob("*.safetensors"))
    listed = {}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = _json(index, wrong, required=True).get("weight_map", {})
        if not isinstance(listed, dict) or not all(
            isinstance(n, str) and Path(n).name == n for n in listed.values()
        ):
            wrong(f"{index}: weight_map must give each tensor the name of a file beside it")
            return {}
        files = [folder / name for name in sorted(set(listed.values()))]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    if not files:
        pickles = [
            p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
        ]
        wrong(
            f"{folder} holds its weights only as pickles ({', '.join(pickles[:3])}), which can run "
            f"code when they are read; convert them: "
            "load the model where you trust it and call save_pretrained(folder), which writes "
            "safetensors"
            if pickles
            else f"{folder} has no *.safetensors; a model folder needs its weights"
        )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            header = read_header(file)
        except FileNotFoundError:
            wrong(f"{file} does not exist, but {index.name} names it")
        except OSError as e:
            wrong(f"{file} cannot be read: {e.strerror}")
        except ValueError as e:
            wrong(f"{file} is damaged: {e}; copy it again")
        else:
            tensors |= header
    if all(f.is_file() for f in files) and (lost := sorted(set(listed) - set(tensors))):
        wrong(f"{index.name} names {len(lost)} tensor(s) that no file holds, e.g. {lost[0]}")
    return tensors


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor of a safetensors file.  Raises ValueError when header
    and size contradict each other.
    """
    size = file.stat().st_size
    with open_regular(file) as f:
        head = f.read(8)
        if len(head) < 8:
            raise ValueError(f"it has {size} bytes, too few for a safetensors file")
        if head == b"version ":
            raise ValueError(
                "it is a pointer of Git LFS, not the weights: run `git lfs pull` there"
            )
        (length,) = struct.unpack("<Q", head)
        if length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"its header claims {length:,} bytes in a file of {size:,}")
        try:
            header = parse_json(f.read(length).decode("utf-8"))
        except ValueError as e:
            raise ValueError(f"its header is not JSON ({e})") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    extents = []
    for name, spec in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, stop) = spec["dtype"], tuple(spec["shape"]), spec["data_offsets"]
            if not isinstance(dtype, str) or not all(
                type(n) is int and n >= 0 for n in (*shape, begin, stop)
            ):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"the entry of tensor {name} is unreadable") from None
        wanted = math.prod(shape) * _BYTES.get(dtype, 0)
        if dtype in _BYTES and stop - begin != wanted:
            raise ValueError(
                f"tensor {name} {dtype}{list(shape)} needs {wanted:,} bytes and has "
                f"{stop - begin:,}"
            )
        tensors[name] = (dtype, shape)
        extents.append((begin, stop))
    end = 0
    for begin, stop in sorted(extents):
        if begin < end:
            raise ValueError("two of its tensors lie in the same bytes")
        end = stop
    if 8 + length + end != size:
        raise ValueError(
            f"it has {size:,} bytes, its header speaks of {8 + length + end:,}: it is cut short or "
            f"was not written whole"
        )
    if not tensors:
        raise ValueError("it holds no tensors")
    return tensors


def _known(config: dict[str, Any], folder: Path, trusted: bool, wrong: Any) -> None:
    """Whether transformers can build the model: read in its tables, because importing it takes
    seconds.
    """
    kind = config.get("model_type")
    spec = importlib.util.find_spec("transformers")
    if (
        trusted
        or not config
        or not isinstance(kind, str | None)
        or spec is None
        or spec.origin is None
    ):
        return
    tables = sorted((Path(spec.origin).parent / "models" / "auto").glob("*.py"))
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    registered = () if auto is None else auto.CONFIG_MAPPING  # by model.external_lib
    if (
        not tables
        or kind in registered
        or any(f'"{kind}"' in table.read_text("utf-8") for table in tables)
    ):
        return
    own = (
        ", and its own code (auto_map) is not run unless model.trust_remote_code says so"
        if "auto_map" in config
        else ""
    )
    wrong(
        f"{folder / 'config.json'} has model_type {kind!r}, which the installed transformers does "
        f"not know{own}; name another model"
    )


def _sizes(config: dict[str, Any], folder: Path, wrong: Any) -> None:
    text = config.get("text_config", config)
    if not isinstance(text, dict) or not isinstance(config.get("model_type", ""), str):
        wrong(
            f"{folder / 'config.json'}: text_config must be a mapping and model_type a text; copy "
            f"it again"
        )
        return
    for key in _SIZES:
        value = text.get(key)
        if (
            value is not None
            and not isinstance(value, list)
            and not (type(value) is int and 0 < value < 1 << 31)
        ):
            wrong(
                f"{folder / 'config.json'} says {key} {value!r}; it must be a positive whole "
                f"number below 2³¹"
            )


def _layers(config: dict[str, Any], tensors: dict[str, Any], folder: Path, wrong: Any) -> None:
    text = config.get("text_config", config)
    every = [int(m[1]) for name in tensors if (m := _LAYER.search(name))]
    # not those of images and sounds
    own = [int(m[1]) for name in tensors if (m := _TEXT_LAYER.match(name))]
    beside = max((n for key in _NEXT_TOKENS if isinstance(n := text.get(key), int)), default=0)
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if not isinstance(given := text.get(key), int):
            continue
        if (every and given > (found := max(every) + 1)) or (
            own and given + beside < (found := max(own) + 1)
        ):
            wrong(
                f"{folder / 'config.json'} says {key} {given:,}, but the weights have {found} "
                f"layers; copy both again"
            )


def _experts(config: dict[str, Any], tensors: dict[str, Any], folder: Path, wrong: Any) -> None:
    """Whether every layer with experts has as many as the configuration says."""
    try:
        sizes = sizes_of(config)
    except TypeError:  # models that count them by kind
        return
    if sizes is None:
        return
    layers: dict[str, set[int]] = {}
    for name, (_, shape) in tensors.items():
        if m := _EXPERT.match(name):
            layers.setdefault(m[1], set()).add(int(m[2]))
        elif (m := _ALL_EXPERTS.match(name)) and shape:
            layers[m[1]] = set(range(shape[0]))
    for layer, found in layers.items():
        if found != (said := set(range(sizes.experts))):
            lost = f" (number {min(said - found)} is missing)" if said - found else ""
            wrong(
                f"{folder / 'config.json'} says {len(said)} experts, but the weights have "
                f"{len(found)} in {layer}{lost}; copy both again"
            )
            return


def _fits(
    config: dict[str, Any], tensors: dict[str, Any], folder: Path, wrong: Any, warnings: list[str]
) -> None:
    if "model_type" not in config and "architectures" not in config:
        wrong(
            f"{folder / 'config.json'} names neither model_type nor architectures; it is no model "
            f"configuration"
        )
    _layers(config, tensors, folder, wrong)
    _experts(config, tensors, folder, wrong)
    embeddings = next(
        (v for n, v in tensors.items() if n.endswith(("embed_tokens.weight", "wte.weight"))), None
    )
    if embeddings is not None:
        for what, given in zip(("vocab_size", "hidden_size"), embeddings[1], strict=False):
            if what in config and config[what] != given:
                wrong(
                    f"{folder / 'config.json'} says {what} {config[what]}, but the weights have "
                    f"{given}: they are of different models"
                )
    tied = config.get("tie_word_embeddings")
    head = any(n == "head.weight" or n.endswith("lm_head.weight") for n in tensors)
    if tied is False and embeddings is not None and not head and not gives_scores(config):
        wrong(
            f"{folder / 'config.json'} says tie_word_embeddings: false, but the weights have no "
            f"lm_head.weight; set it to true"
        )
    if tied is True and head:
        warnings.append(
            f"{folder} ties its embeddings, yet holds an own lm_head.weight, which is ignored"
        )


def gives_scores(config: Mapping[str, Any]) -> bool:
    """Whether it is a reward model: one with a classification head, and without an output layer."""
    return any(
        "ForSequenceClassification" in k or "RewardModel" in k
        for k in config.get("architectures") or ()
    )


# two matrices, no gate
_PLAIN_MLP = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"}
# known to rft.trainer.recompute
LEAN = {"exaone4", "granite", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3"}
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes in elements.  `parameters` counts a tied output layer once."""

    parameters: int
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # width that one token computes: of the chosen experts together
    gated: bool = True
    lean: bool = False  # norms and MLPs are Llama's, of which the trainer keeps less
    tied: bool = False
    experts: int = 0  # of a layer

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        return max(0, self.parameters - self.embedding * (1 if self.tied else 2)) // self.layers

    def fullest(self, nbytes: int, shards: int) -> int:
        """Of `nbytes` of the model those of the rank that holds most: experts, of which it mostly
        consists, are not cut.
        """
        return (
            nbytes * -(-self.experts // shards) // self.experts
            if self.experts
            else nbytes // shards
        )

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def cached(self) -> int:
        """Elements that one token keeps in a key/value cache."""
        return 2 * self.layers * self.keys


def shape(config: Mapping[str, Any], tensors: Tensors | None = None) -> ModelShape:
    """Raises ValueError naming the sizes that `config` does not give."""
    text = config.get("text_config")
    c = text if isinstance(text, Mapping) else config
    found = {
        name: next((c[k] for k in keys if isinstance(c.get(k), int) and c[k] > 0), None)
        for name, keys in _NAMES.items()
    }
    if missing := [_NAMES[name][0] for name, value in found.items() if value is None]:
        raise ValueError(f"config.json does not give {', '.join(missing)}")
    hidden, layers, heads, vocab = (
        int(found[n] or 0) for n in ("hidden", "layers", "heads", "vocab")
    )
    kv_heads = int(c.get("num_key_value_heads") or heads)
    head_dim = int(c.get("head_dim") or hidden // heads)
    kind = str(c.get("model_type"))
    gated = kind not in _PLAIN_MLP
    widths = c.get("intermediate_size") or c.get("n_inner") or 4 * hidden
    # of each layer, in some families
    width = max(widths) if isinstance(widths, list) else int(widths)
    experts = next(
        (int(c[k]) for k in ("num_local_experts", "num_experts", "n_routed_experts") if c.get(k)), 0
    )
    expert = int(c.get("moe_intermediate_size") or width)
    tied = bool(c.get("tie_word_embeddings", config.get("tie_word_embeddings", True)))
    held = (
        [t for n, t in tensors.items() if not (tied and n.endswith("lm_head.weight"))]
        if tensors
        else []
    )
    counted = sum(math.prod(dims) for _, dims in held)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if gated else 2) * hidden * (expert * experts if experts else width)
    formula = layers * (attention + mlp + 2 * hidden) + hidden + vocab * hidden * (1 if tied else 2)
    return ModelShape(
        parameters=counted or formula,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=expert * int(c.get("num_experts_per_tok") or 1) if experts else width,
        gated=gated,
        lean=kind in LEAN,
        tied=tied,
        experts=experts,
    )
