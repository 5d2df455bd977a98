"""Attention over a prefix tree: every slot sees itself and its ancestors, all of them or those in
its window or chunk.  Registered with transformers as "rft_tree".

The tree's branches are gathered into a few padded rectangles.  A branch from the root is plain
causal attention, which needs no mask (padding is at the right end).  Other branches attend with
their own slots to their whole path under an additive mask; grouped query heads are folded into the
query length, so keys and values are never repeated.  For windows and chunks each branch is cut into
pieces that read only the visible part of the path.  flash-attn's varlen kernel takes the pieces
unpadded, because its causal mask is aligned at the end of the keys, like a branch's own slots and
its path; so does torch's own.  Invariant: padding changes no result; outputs of padding are dropped and
get no gradient.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from rft.engine.auto_class import auto_class
from rft.errors import ConfigError
from rft.trainer.model.upload import upload
from rft.trainer.rows.prefix import MAX_MASK, Branch, Tree
from rft.types.row_layout import KEY

_WASTE = 0.6  # smallest branch of a rectangle, as a share of its longest
_PIECE = 64  # least slots of a piece if the window is shorter
_ALIGNED = 8  # mask entries that CUDA's memory-efficient kernel reads together
# scores of a rectangle up to which plain float32 products are faster on CPUs than the fused kernel
_SMALL = 1 << 20


@dataclass(frozen=True)
class Rectangle:
    """B branches padded to R own slots and L path slots."""

    height: int  # R
    keys: torch.Tensor  # int64 [B, L], slots; padding repeats slot 0
    starts: torch.Tensor  # int64 [B], index in its path of each branch's first own slot
    window: int | None  # number of path slots that a slot sees; None = all
    # the branches begin at the root and no window is shorter than they are (R = L), so no mask is
    # needed
    causal: bool
    masks: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def mask(self, fold: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask [B, 1, fold * R, L] for `fold` query heads per key head.

        Rows are padded in memory to a multiple of `_ALIGNED` entries, or torch would copy the mask
        in every layer and keep each copy for the backward pass.
        """
        if (fold, dtype) not in self.masks:
            width = self.keys.shape[1]
            device = self.keys.device
            slots = torch.arange(-(-width // _ALIGNED) * _ALIGNED, device=device)
            position = (self.starts[:, None] + torch.arange(self.height, device=device)).clamp(
                max=width - 1
            )[:, :, None]
            hidden = slots > position
            if self.window is not None:
                hidden |= slots <= position - self.window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(
                hidden, float("-inf")
            )
            self.masks[fold, dtype] = mask.repeat(1, fold, 1)[:, None, :, :width]
        return self.masks[fold, dtype]


@dataclass(frozen=True)
class Pieces:
    """Mapping between T slots and the N padded queries of all rectangles."""

    rectangles: tuple[Rectangle, ...]
    queries: torch.Tensor  # int64 [N], the slot of each query; padding repeats slot 0
    back: torch.Tensor  # int64 [T], the query of each slot


@dataclass(frozen=True)
class Ragged:
    """Unpadded form for varlen kernels: all branches' own slots, and their paths, concatenated."""

    new_slots: torch.Tensor  # int64 [T], slots
    back: torch.Tensor  # int64 [T], index of each slot in `new_slots`
    paths: torch.Tensor  # int64 [P], slots
    own_ends: torch.Tensor  # int32 [B + 1], from 0
    path_ends: torch.Tensor  # int32 [B + 1], from 0
    longest_own: int
    longest_path: int


class Layout:
    """A tree on `device`, with a form for each kind of attention layer, built when first requested."""

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self._tree = tree
        self._device = device
        self._pieces: dict[tuple[int | None, int | None], Pieces] = {}
        self._ragged: dict[int | None, Ragged] = {}

    def pieces(self, window: int | None, chunk: int | None) -> Pieces:
        """Return the rectangles for layers with a window or chunks.

        `window`: slots that a slot sees back, including itself; `chunk`: positions of a chunk.
        """
        if (window, chunk) not in self._pieces:
            self._pieces[window, chunk] = _rectangles(
                list(_cut(self._tree.branches, window, chunk)), window, self._device
            )
        return self._pieces[window, chunk]

    def ragged(self, chunk: int | None) -> Ragged:
        if chunk not in self._ragged:
            self._ragged[chunk] = _one_behind_the_other(
                list(_cut(self._tree.branches, None, chunk)), self._device
            )
        return self._ragged[chunk]


def _cut(branches: Sequence[Branch], window: int | None, chunk: int | None) -> Iterator[Branch]:
    """Yield pieces of `branches`, each with the visible part of its path."""
    for b in branches:
        if chunk is not None:
            for begin in range(b.start // chunk * chunk, len(b.path), chunk):
                yield Branch(b.path[begin : begin + chunk], max(b.start - begin, 0))
        elif window is not None and window < len(b.path):
            size = max(1, min(max(window, _PIECE), MAX_MASK // (2 * window)))
            for at in range(b.start, len(b.path), size):
                begin = max(0, at - window + 1)
                yield Branch(b.path[begin : at + size], at - begin)
        else:
            yield b


def _rectangles(branches: Sequence[Branch], window: int | None, device: torch.device) -> Pieces:
    rectangles = []
    queries = []
    offset = 0
    back = np.zeros(sum(len(b.new_slots) for b in branches), np.int64)
    for same in _buckets(branches):
        height = max(len(b.new_slots) for b in same)
        width = max(len(b.path) for b in same)
        slots = np.zeros((len(same), height), np.int64)
        keys = np.zeros((len(same), width), np.int64)
        for row, b in enumerate(same):
            slots[row, : len(b.new_slots)] = b.new_slots
            keys[row, : len(b.path)] = b.path
            back[b.new_slots] = offset + row * height + np.arange(len(b.new_slots))
        starts = upload(np.array([b.start for b in same]), device)
        causal = not same[0].start and (window is None or window >= width)
        rectangles.append(Rectangle(height, upload(keys, device), starts, window, causal))
        queries.append(slots.ravel())
        offset += slots.size
    return Pieces(
        tuple(rectangles),
        upload(np.concatenate(queries), device),
        upload(back, device),
    )


def _one_behind_the_other(branches: Sequence[Branch], device: torch.device) -> Ragged:
    slots = np.concatenate([b.new_slots for b in branches])
    lengths = [[len(b.new_slots) for b in branches], [len(b.path) for b in branches]]
    ends = [upload(np.cumsum([0, *each], dtype=np.int32), device) for each in lengths]
    return Ragged(
        new_slots=upload(slots, device),
        back=upload(np.argsort(slots), device),
        paths=upload(np.concatenate([b.path for b in branches]), device),
        own_ends=ends[0],
        path_ends=ends[1],
        longest_own=max(lengths[0]),
        longest_path=max(lengths[1]),
    )


def _buckets(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Group branches of similar size; branches from the root separately, as only they need no mask."""
    buckets: list[list[Branch]] = []
    for branch in sorted(branches, key=lambda b: (b.start > 0, -len(b.new_slots), -len(b.path))):
        last = buckets[-1] if buckets else None
        if last is not None and _joins(last, branch):
            last.append(branch)
        else:
            buckets.append([branch])
    return buckets


def _joins(bucket: list[Branch], branch: Branch) -> bool:
    first = bucket[0]
    if (first.start > 0) != (branch.start > 0):
        return False
    height = len(first.new_slots)
    width = max(len(b.path) for b in [*bucket, branch])
    # launching a tiny rectangle costs more than padding
    small = height * width * (len(bucket) + 1) <= 1 << 16
    if branch.start and height * width * (len(bucket) + 1) > MAX_MASK:
        return False
    return small or (
        len(branch.new_slots) >= _WASTE * height and len(branch.path) >= _WASTE * width
    )


class _Spread(torch.autograd.Function):
    """Gather slots into padded queries: x[queries].

    Padding has no gradient, so the backward pass only gathers and adds nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, queries: torch.Tensor, back: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, queries)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """Gather padded queries back into slots: x[back].  The gradient of padding is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.rows = x.shape[0]
        return x.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(
            0, ctx.saved_tensors[0], grad
        ), None


def spread(x: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Return the padded queries of all rectangles, [N, ...], from slots x [T, ...]."""
    out: torch.Tensor = _Spread.apply(x, pieces.queries, pieces.back)
    return out


def collect(x: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Return slots [T, F] from the padded queries x [N, F] of all rectangles."""
    out: torch.Tensor = _Collect.apply(x, pieces.back)
    return out


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    ragged: Kernel | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, H, E] from query [1, H, T, D], key [1, K, T, D] and value [1, K, T, E].

    `softcap`: scores become softcap * tanh(score / softcap).  `s_aux` [H]: sinks, scores that take
    their share of softmax and contribute no value.  Raises ConfigError for attention that a tree
    cannot express, or without `tree`.
    """
    if tree is None or attention_mask is not None or options.get("position_bias") is not None:
        reason = "is not told where rows begin" if tree is None else "has a mask or bias of its own"
        raise ConfigError(
            f"{type(module).__name__} {reason}, so its rows have to be padded", key=KEY
        )
    window, chunk = _reach(module, sliding_window)
    q, k, v = (x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value))
    unknown = s_aux is not None or (
        ragged is torch_varlen and (bool(softcap) or not _of_a_size(query))
    )
    if ragged is not None and not unknown and query.shape[3] == value.shape[3]:
        heads = (query.shape[1], key.shape[1])
        r = tree.ragged(chunk)
        return _ragged(ragged, r, q, k, v, heads, scaling, window, softcap)[None], None
    scores = _Scores(
        query.shape[1],
        key.shape[1],
        query.shape[3] ** -0.5 if scaling is None else scaling,
        softcap,
        s_aux,
    )
    pieces = tree.pieces(window, chunk)
    parts = spread(q, pieces).split([r.keys.shape[0] * r.height for r in pieces.rectangles])
    outs = [
        _rectangle(r, part, k, v, scores) for r, part in zip(pieces.rectangles, parts, strict=True)
    ]
    joined = collect(torch.cat(outs), pieces)
    return joined.view(1, -1, query.shape[1], value.shape[3]), None


class RaggedCall(NamedTuple):
    """Branches one behind the other, for a kernel that takes rows of unequal length."""

    queries: torch.Tensor  # [T, H, D], own slots
    keys: torch.Tensor  # [P, K, D], paths
    values: torch.Tensor  # [P, K, D]
    ragged: Ragged
    scaling: float | None
    window: tuple[int, int]  # slots seen to the left and to the right; -1: all
    softcap: float | None


Kernel = Callable[[RaggedCall], torch.Tensor]  # -> [T, H, D]


def flash_attn(x: RaggedCall) -> torch.Tensor:
    """Run the kernel of the package flash-attn."""
    r = x.ragged
    out: torch.Tensor = importlib.import_module("flash_attn").flash_attn_varlen_func(
        *x[:3],
        *(r.own_ends, r.path_ends, r.longest_own, r.longest_path),
        softmax_scale=x.scaling,
        causal=True,
        window_size=x.window,
        softcap=x.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def torch_varlen(x: RaggedCall) -> torch.Tensor:
    """Run torch's own flash attention over rows of unequal length, which knows no softcap."""
    from torch.nn.attention import varlen

    assert not x.softcap
    r = x.ragged
    out = varlen.varlen_attn(
        x.queries,
        x.keys,
        x.values,
        r.own_ends,
        r.path_ends,
        r.longest_own,
        r.longest_path,
        scale=x.scaling,
        window_size=(x.window[0], 0),
        enable_gqa=x.queries.shape[1] != x.keys.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out


def _of_a_size(query: torch.Tensor) -> bool:
    """Return whether torch's kernel computes heads of this size, also backward, on this GPU."""
    size = query.shape[-1]
    if size % 8 or size > 256:
        return False
    if size <= 192 or query.device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(query.device) in ((8, 0), (9, 0))


def _has_varlen() -> bool:
    """Return whether torch's kernel takes what `torch_varlen` gives, on this GPU (Ampere or later)."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention import varlen

    parameters = inspect.signature(varlen.varlen_attn).parameters
    return (
        {"scale", "window_size", "enable_gqa"} <= parameters.keys()
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 0)
    )


# attn_implementation -> (name of the tree attention that uses it, function)
TREES: dict[str, tuple[str, Any]] = {
    "sdpa": ("rft_tree", attend),
    # transformers has extra requirements for names that contain "flash"
    "flash_attention_2": ("rft_tree_varlen", partial(attend, ragged=flash_attn)),
    "varlen": ("rft_tree_torch", partial(attend, ragged=torch_varlen)),
}


def _reach(module: Any, window: int | None) -> tuple[int | None, int | None]:
    """Return (window, chunk) of a layer.

    Chunks come from the layer's configuration, because transformers puts them into the mask.
    """
    fields = vars(module)
    types, at = (
        (vars(fields["config"]).get("layer_types"), fields.get("layer_idx"))
        if "config" in fields
        else (None, None)
    )
    if types and at is not None and types[at] == "chunked_attention":
        return None, fields["config"].attention_chunk_size
    return window or None, None


@dataclass(frozen=True)
class _Scores:
    """How attention scores are computed from queries and keys."""

    heads: int
    kv: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]

    @property
    def standard(self) -> bool:
        return self.softcap is None and self.sinks is None


def _rectangle(
    r: Rectangle, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _Scores
) -> torch.Tensor:
    (count, width), height, kv, fold = r.keys.shape, r.height, how.kv, how.heads // how.kv
    keys, values = (
        F.embedding(r.keys, x).view(count, width, kv, -1).transpose(1, 2) for x in (k, v)
    )
    small = (
        q.device.type == "cpu"
        and q.dtype.itemsize > 2
        and count * height * width * how.heads <= _SMALL
    )
    fused = how.standard and not small
    if r.causal and fused:
        queries = q.view(count, height, how.heads, -1).transpose(1, 2)
        if fold > 1:
            keys = keys.repeat_interleave(fold, 1)
            values = values.repeat_interleave(fold, 1)
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=how.scaling
        )
        return out.transpose(1, 2).reshape(count * height, -1)
    queries = (
        q.view(count, height, kv, fold, -1)
        .permute(0, 2, 3, 1, 4)
        .reshape(count, kv, fold * height, -1)
    )
    mask = r.mask(fold, q.dtype)
    if fused:
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=how.scaling
        )
    else:
        out = _softmax(queries @ keys.transpose(2, 3), mask, how, height) @ values
    return out.view(count, kv, fold, height, -1).permute(0, 3, 1, 2, 4).reshape(count * height, -1)


def _softmax(products: torch.Tensor, mask: torch.Tensor, how: _Scores, height: int) -> torch.Tensor:
    """Return the values' weights, [B, K, fold * R, L] like `products`; at least float32 inside."""
    scores = products.to(torch.promote_types(products.dtype, torch.float32)) * how.scaling
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores + mask
    if how.sinks is None:
        return scores.softmax(-1).to(products.dtype)
    sinks = (
        how.sinks.to(scores.dtype)
        .view(1, how.kv, -1, 1)
        .repeat_interleave(height, 2)
        .expand(len(scores), -1, -1, -1)
    )
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(products.dtype)


def _ragged(
    kernel: Kernel,
    r: Ragged,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: tuple[int, int],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return [T, H, D]: each branch's own slots attend to its path."""
    keys, values = (F.embedding(r.paths, x).view(len(r.paths), heads[1], -1) for x in (k, v))
    queries = _Spread.apply(q, r.new_slots, r.back).view(len(q), heads[0], -1)
    sees = (-1, -1) if window is None else (window - 1, 0)
    call = RaggedCall(queries, keys, values, r, scaling, sees, softcap)
    return kernel(call).index_select(0, r.back)


def installed(name: str, device: str, dtype: str) -> str:
    """Return the attention of `TREES` or transformers for `name`; auto: flash-attn where it is
    installed, else torch's own flash attention, else sdpa.

    Raises ConfigError if flash attention is requested and cannot be used.
    """
    fits = device == "cuda" and dtype != "float32"
    lacks = {}
    if importlib.util.find_spec("flash_attn") is None:
        lacks["flash_attention_2"] = "flash_attn is not installed"
    if fits and not _has_varlen():
        lacks["varlen"] = f"torch {torch.__version__} has no such kernel for this GPU"
    usable = [kernel for kernel in ("flash_attention_2", "varlen") if fits and kernel not in lacks]
    if name == "auto":
        return next(iter(usable), "sdpa")
    if name in ("flash_attention_2", "varlen") and name not in usable:
        reason = lacks[name] if fits else f"it does not compute {dtype} on {device}"
        raise ConfigError(
            f"{reason}; write sdpa, or auto", key="trainer.attn_implementation", given=name
        )
    return name


def register(name: str, function: Any, *, compiled: bool = False) -> str:
    """Register `function` with transformers without a mask function, so models build no mask.

    `compiled`: the layers around it are compiled; the function is not, because its shapes change
    with every micro-batch.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, torch.compiler.disable(function) if compiled else function)
    return name


def exchangeable(config: Any) -> bool:
    """Return whether the model of `config` uses transformers' attention registry; True for unknown
    classes.
    """
    kind = auto_class(config)._model_mapping.get(type(config), None)
    return kind is None or "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[kind.__module__])


def switch(lm: torch.nn.Module, name: str) -> None:
    """Set the attention implementation of the text layers of `lm` to transformers' `name`.

    A tower for images keeps transformers' own: its rows are images.
    """
    from transformers import PreTrainedConfig

    every = (vars(module).get("config") for module in lm.modules())
    configs = [config for config in every if isinstance(config, PreTrainedConfig)]
    for config in configs:
        config._attn_implementation = name
    # setting that of the whole model sets that of its parts
    tower = type(getattr(lm.config, "vision_config", None)).__name__
    for config in configs:
        if type(config).__name__ == tower:
            config._attn_implementation = "eager" if name == "eager" else "sdpa"
