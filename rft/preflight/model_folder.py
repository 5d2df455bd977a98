"""Check a model folder for completeness and read its chat template, without torch or transformers.

Depends on the Hugging Face folder layout.  Invariant: no weights are read, only the headers of
safetensors files.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rft.errors import ConfigError, ConfigErrors
from rft.files.disk import open_regular, read_regular
from rft.files.strict_json import parse_json
from rft.images.processor import FAMILIES
from rft.taskset.chatfiles import KEY, ChatFiles, find_model
from rft.types.experts import sizes_of

_MAX_JSON = 256 << 20  # tokenizers of 30 MB are usual
_SIZES = "hidden_size n_embd num_hidden_layers n_layer num_attention_heads n_head vocab_size intermediate_size n_inner".split()
_SIZES += ["max_position_embeddings", "num_key_value_heads", "head_dim"]
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_TEXT_LAYER = re.compile(r"(?:model\.|transformer\.|language_model\.)*(?:layers|h)\.(\d+)\.")
# extra layers after the last, which are not trained
_NEXT_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")
_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(?:gate_up_proj|down_proj)$")


@dataclass(frozen=True, kw_only=True)
class ModelFiles(ChatFiles):
    """The content of a complete model folder.

    `folder` is the tokenizer's, mostly equal to `model_folder`.
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
        """Return the type in which most parameters are stored."""
        sizes: dict[str, int] = {}
        for dtype, shape in self.tensors.values():
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
        return max(sizes, key=sizes.__getitem__)


def look(path: str, tokenizer_path: str | None = None, *, trusted: bool = True) -> ModelFiles:
    """Check the folders of model and tokenizer.

    `trusted`: Python code that comes with the model may run. Raises ConfigErrors naming each file
    that is missing, damaged or does not fit.
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
    kind = config.get("model_type")
    text = config.get("text_config", config)
    if not errors and kind in FAMILIES and "max_position_embeddings" not in text:
        text.update(_defaults(kind) | text)
    tensors = _weights(model_folder, wrong)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / n).is_file() for n in names):
        wrong(
            f"{folder} has no tokenizer (looked for {', '.join(names)}); copy it from the "
            f"original model"
        )
    elif not (folder / "tokenizer.json").is_file():
        warnings.append(f"{folder} has no tokenizer.json: prompts cannot be shown and counted here")
    tokenizer = _json(folder / "tokenizer.json", wrong, required=False)
    if tokenizer and "model" not in tokenizer:
        wrong(f"{folder / 'tokenizer.json'} is no tokenizer: it has no `model`")
    tokenizer_config = _json(folder / "tokenizer_config.json", wrong, required=False)
    _check_model_type(config, model_folder, trusted, wrong)
    if config and tensors and not errors:
        _fits(config, tensors, model_folder, wrong, warnings)
    if tokenizer and not errors and (text := _unknown_tokens(tokenizer, config, tensors, folder)):
        if tokenizer_path is not None:
            wrong(f"{text}; name the tokenizer that belongs to the model")
        else:
            warnings.append(
                f"{text}: a prompt with a token from there on fails the run; resize the "
                f"embedding (resize_token_embeddings), or remove these tokens"
            )
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


def _unknown_tokens(
    tokenizer: dict[str, Any], config: dict[str, Any], tensors: dict[str, Any], folder: Path
) -> str:
    """Return which ids of the tokenizer have no embedding in the model, or ""."""
    rows = [v[1][0] for n, v in tensors.items() if n.endswith("embed_tokens.weight") and v[1]]
    size = max(rows, default=config.get("text_config", config).get("vocab_size"))
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    if isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    added = tokenizer.get("added_tokens")
    ids += [t.get("id") for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    last = max((i for i in ids if isinstance(i, int)), default=-1)
    if not isinstance(size, int) or last < size:
        return ""
    return f"the tokenizer in {folder} has token {last}, and the model knows {size}"


def sizes(path: str) -> tuple[dict[str, Any], None] | None:
    """Return config.json of a folder, which may lack weights; None without the file."""
    config = _json(Path(path) / "config.json", lambda message: None, required=False)
    return (config, None) if config else None


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
    """Return dtype and shape of every tensor of a safetensors file, by name.

    Raises ValueError if the file is damaged.
    """
    with open_regular(file) as f:
        if f.read(8) == b"version ":
            raise ValueError(
                "it is a pointer of Git LFS, not the weights: run `git lfs pull` there"
            )
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            tensors = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as e:
        reason = str(e).removeprefix("Error while deserializing header: ")
        size = file.stat().st_size
        raise ValueError(
            f"it has {size:,} bytes, cut short or not safetensors ({reason})"
        ) from None
    if not tensors:
        raise ValueError("it holds no tensors")
    return tensors


def _check_model_type(config: dict[str, Any], folder: Path, trusted: bool, wrong: Any) -> None:
    """Check that transformers can build the model, by reading its tables, because importing it
    takes seconds.
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
    hint = (
        ", and its own code (auto_map) is not run unless model.trust_remote_code says so"
        if "auto_map" in config
        else ""
    )
    wrong(
        f"{folder / 'config.json'} has model_type {kind!r}, which the installed transformers does "
        f"not know{hint}; name another model"
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


def _defaults(model_type: str) -> dict[str, int]:
    """Return the sizes that transformers, loaded for this, gives a model without them."""
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(model_type).get_text_config().to_dict()
    return {name: defaults[name] for name in _SIZES if name in defaults}


def _layers(config: dict[str, Any], tensors: dict[str, Any], folder: Path, wrong: Any) -> None:
    text = config.get("text_config", config)
    every = [int(m[1]) for name in tensors if (m := _LAYER.search(name))]
    # without layers for images and sounds
    text_layers = [int(m[1]) for name in tensors if (m := _TEXT_LAYER.match(name))]
    extra_layers = max(
        (n for key in _NEXT_TOKENS if isinstance(n := text.get(key), int)), default=0
    )
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if not isinstance(num_layers := text.get(key), int):
            continue
        if (every and num_layers > (in_weights := max(every) + 1)) or (
            text_layers and num_layers + extra_layers < (in_weights := max(text_layers) + 1)
        ):
            wrong(
                f"{folder / 'config.json'} says {key} {num_layers:,}, but the weights have {in_weights} "
                f"layers; copy both again"
            )


def _experts(config: dict[str, Any], tensors: dict[str, Any], folder: Path, wrong: Any) -> None:
    """Check that every layer with experts has as many as the configuration says."""
    try:
        sizes = sizes_of(config)
    except TypeError:  # models that count experts by kind
        return
    if sizes is None:
        return
    layers: dict[str, set[int]] = {}
    for name, (_, shape) in tensors.items():
        if m := _EXPERT.match(name):
            layers.setdefault(m[1], set()).add(int(m[2]))
        elif (m := _ALL_EXPERTS.match(name)) and shape:
            layers[m[1]] = set(range(shape[0]))
    for layer, in_weights in layers.items():
        if in_weights != (in_config := set(range(sizes.experts))):
            lost = (
                f" (number {min(in_config - in_weights)} is missing)"
                if in_config - in_weights
                else ""
            )
            wrong(
                f"{folder / 'config.json'} says {len(in_config)} experts, but the weights have "
                f"{len(in_weights)} in {layer}{lost}; copy both again"
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
        for what, size in zip(("vocab_size", "hidden_size"), embeddings[1], strict=False):
            if config.get(what, size) != size:
                wrong(
                    f"{folder / 'config.json'} says {what} {config[what]}, but the weights have "
                    f"{size}: they are of different models"
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
    """Return whether the model is a reward model: a classification head, no output layer."""
    return any(
        "ForSequenceClassification" in k or "RewardModel" in k
        for k in config.get("architectures") or ()
    )


# two matrices, no gate
_PLAIN_MLP = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"}
# Model types whose norms and MLPs, or norms only, rft.trainer.model.recompute supports; types with
# norms of queries and keys; types with four norms per layer instead of two.
LEAN = {"exaone4", "granite", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3"}
LEAN |= {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
LEAN_NORMS = LEAN | {"glm4_moe", "mixtral", "olmoe", "phi3", "qwen2_moe", "qwen3_moe", "seed_oss"}
HEAD_NORMS = {"exaone4", "gemma3_text", "olmo2", "olmo3", "olmoe", "qwen3", "qwen3_moe"}
HEAD_NORMS |= {"qwen3_vl_text"}
FOUR_NORMS = {"gemma2", "gemma3_text", "glm4"}
_NAMES = (  # of hidden size, layers, heads, vocabulary
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "n_layers"),
    ("num_attention_heads", "n_head", "n_heads"),
    ("vocab_size",),
)

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """Sizes of a tower for images in elements; `parameters` with its projection."""

    parameters: int
    layers: int
    hidden: int
    mlp: int
    gated: bool
    rotary: bool  # positions turn queries and keys
    deep: int  # layers whose features are added to hidden states of the language model
    patch: int  # of one patch of pixels
    patches: int  # that become one token of a prompt


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes in elements.  `parameters` counts a tied output layer once, and the tower."""

    parameters: int
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # width computed per token: of all chosen experts together
    gated: bool = True
    experts_per_token: int = 0
    lean: bool = False  # MLPs are Llama's, for which the trainer stores less
    lean_norms: bool = False  # the trainer stores only input and output of norms
    float_norms: bool = False  # norms are Gemma's, which multiply in float32
    norms: int = 2  # of a layer
    head_norms: bool = False  # queries and keys have norms
    # layers whose attention has sinks or a softcap, which no fused kernel computes
    unfused_layers: int = 0
    tied: bool = False
    experts: int = 0  # of a layer
    tower: TowerShape | None = None

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def block(self) -> int:
        """Return the parameters of one layer."""
        tower = 0 if self.tower is None else self.tower.parameters
        rest = self.parameters - tower - self.embedding * (1 if self.tied else 2)
        return max(0, rest) // self.layers

    def fullest(self, nbytes: int, shards: int) -> int:
        """Return the share of `nbytes` on the fullest rank.

        Experts, most of such a model, are not split.
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
        """Return the elements per token in a key/value cache."""
        return 2 * self.layers * self.keys


_OF_TOWER = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|multi_modal_projector)\.")


def _tower(config: Mapping[str, Any], tensors: Tensors | None) -> TowerShape | None:
    """Return the sizes of the tower of a model that is offered with images."""
    kind = config.get("model_type")
    c = config.get("vision_config")
    if kind not in FAMILIES or not isinstance(c, Mapping):
        return None
    hidden = int(c.get("embed_dim") or c["hidden_size"])
    mlp = int(c.get("intermediate_size") or hidden * c.get("mlp_ratio", 4))
    layers = int(c.get("depth") or c["num_hidden_layers"])
    size = int(c.get("patch_size", 14))
    gated = kind == "qwen2_5_vl"
    patch = 3 * int(c.get("temporal_patch_size", 1)) * size**2
    patches = int(c.get("spatial_merge_size", 2)) ** 2
    if "image_size" in c and "mm_tokens_per_image" in config:
        patches = (int(c["image_size"]) // size) ** 2 // int(config["mm_tokens_per_image"])
    counted = sum(
        math.prod(dims) for n, (_, dims) in (tensors or {}).items() if _OF_TOWER.search(n)
    )
    formula = layers * hidden * (4 * hidden + (3 if gated else 2) * mlp) + patch * hidden
    return TowerShape(
        parameters=counted or formula,
        layers=layers,
        hidden=hidden,
        mlp=mlp,
        gated=gated,
        rotary="image_size" not in c,
        deep=len(c.get("deepstack_visual_indexes") or ()),
        patch=patch,
        patches=patches,
    )


def shape(config: Mapping[str, Any], tensors: Tensors | None = None) -> ModelShape:
    """Return the sizes of a model.  Raises ValueError naming sizes that `config` lacks."""
    text = config.get("text_config")
    c = text if isinstance(text, Mapping) else config
    sizes_given = [
        next((c[k] for k in keys if isinstance(c.get(k), int) and c[k] > 0), 0) for keys in _NAMES
    ]
    if missing := [keys[0] for keys, size in zip(_NAMES, sizes_given, strict=True) if not size]:
        raise ValueError(f"config.json does not give {', '.join(missing)}")
    hidden, layers, heads, vocab = sizes_given
    kv_heads = int(c.get("num_key_value_heads") or heads)
    head_dim = int(c.get("head_dim") or hidden // heads)
    kind = str(c.get("model_type"))
    gated = kind not in _PLAIN_MLP
    widths = c.get("intermediate_size") or c.get("n_inner") or 4 * hidden
    # per layer, in some families
    width = max(widths) if isinstance(widths, list) else int(widths)
    experts = next(
        (int(c[k]) for k in ("num_local_experts", "num_experts", "n_routed_experts") if c.get(k)), 0
    )
    expert = int(c.get("moe_intermediate_size") or width)
    tied = bool(c.get("tie_word_embeddings", config.get("tie_word_embeddings", True)))
    counted = sum(
        math.prod(dims)
        for n, (_, dims) in (tensors or {}).items()
        if not (tied and n.endswith("lm_head.weight"))
    )
    per_token = int(c.get("num_experts_per_tok") or 1) if experts else 0
    layer_types = c.get("layer_types") or ["full_attention"] * layers
    unfused = kind == "gpt_oss" or c.get("attn_logit_softcapping")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if gated else 2) * hidden * (expert * experts if experts else width)
    formula = layers * (attention + mlp + 2 * hidden) + hidden + vocab * hidden * (1 if tied else 2)
    tower = _tower(config, tensors)
    return ModelShape(
        parameters=counted or formula + (0 if tower is None else tower.parameters),
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=expert * per_token if experts else width,
        gated=gated,
        experts_per_token=per_token,
        lean=kind in LEAN,
        lean_norms=kind in LEAN_NORMS,
        float_norms=kind.startswith("gemma"),
        norms=4 if kind in FOUR_NORMS else 2,
        head_norms=kind in HEAD_NORMS,
        unfused_layers=layer_types.count("full_attention") if unfused else 0,
        tied=tied,
        experts=experts,
        tower=tower,
    )
