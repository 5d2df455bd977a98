"""Attention over a prefix tree: every slot sees its ancestors and itself, all of them or those in
its window or chunk.  Registered with transformers as "rft_tree".

The tree's branches are gathered into a few padded rectangles.  A branch from the root is plain
causal attention, which needs no mask (padding is at the right end).  Other branches attend with
their own slots to their whole path under an additive mask; grouped query heads are folded into the
query length, so keys and values are never repeated.  For windows and chunks each branch is cut into
pieces that read only the part of the path which their slots can see.  Where flash-attn is used, its
varlen kernel takes the pieces as they are, because its causal mask is aligned at the end of the
keys, as a branch's own slots and its path are. Invariant: padding changes no result; its outputs
are dropped and get no gradient.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rft.errors import ConfigError
from rft.trainer.prefix import MAX_MASK, Branch, Tree
from rft.types.row_layout import KEY

_WASTE = 0.6  # a rectangle takes branches down to this share of its longest
_PIECE = 64  # slots of a piece at least, where a window is shorter
_ALIGNED = 8  # entries of a mask that CUDA's memory-efficient kernel reads together
# scores of a rectangle, up to which plain float32 products are faster on CPUs than the fused kernel
_SMALL = 1 << 20


@dataclass(frozen=True)
class Rectangle:
    """B branches padded to R own slots and L path slots."""

    height: int  # R
    keys: torch.Tensor  # int64 [B, L], slots; padding repeats slot 0
    starts: torch.Tensor  # int64 [B], where in its path each branch's own slots begin
    window: int | None  # how many slots of its path a slot sees; None = all
    # the branches begin at the root and no window is shorter than they are (R = L): no mask is
    # needed
    causal: bool
    masks: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def mask(self, fold: int, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, fold * R, L] additive, for `fold` query heads that share a key head.

        Its rows are `_ALIGNED` entries apart, or torch would copy it in every layer and keep each
        copy for the backward pass.
        """
        if (fold, dtype) not in self.masks:
            width = self.keys.shape[1]
            device = self.keys.device
            slots = torch.arange(-(-width // _ALIGNED) * _ALIGNED, device=device)
            mine = (self.starts[:, None] + torch.arange(self.height, device=device)).clamp(
                max=width - 1
            )[:, :, None]
            hidden = slots > mine
            if self.window is not None:
                hidden |= slots <= mine - self.window
            made = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(
                hidden, float("-inf")
            )
            self.masks[fold, dtype] = made.repeat(1, fold, 1)[:, None, :, :width]
        return self.masks[fold, dtype]


@dataclass(frozen=True)
class Pieces:
    """How T slots become N padded queries of all rectangles, and come back."""

    rectangles: tuple[Rectangle, ...]
    queries: torch.Tensor  # int64 [N], the slot of each query; padding repeats slot 0
    back: torch.Tensor  # int64 [T], the query of each slot


@dataclass(frozen=True)
class Ragged:
    """The same without padding: the own slots of all branches one behind the other, and their
    paths.
    """

    own: torch.Tensor  # int64 [T], slots
    back: torch.Tensor  # int64 [T], where each slot is in `own`
    paths: torch.Tensor  # int64 [P], slots
    own_ends: torch.Tensor  # int32 [B + 1], from 0
    path_ends: torch.Tensor  # int32 [B + 1], from 0
    longest_own: int
    longest_path: int


class Layout:
    """A tree on `device`, as each kind of layer reads it; what a kind needs is made when its first
    layer asks.
    """

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self._tree = tree
        self._device = device
        self._pieces: dict[tuple[int | None, int | None], Pieces] = {}
        self._ragged: dict[int | None, Ragged] = {}

    def pieces(self, window: int | None, chunk: int | None) -> Pieces:
        """For layers that see `window` slots back, themselves included, or those of their chunk of
        `chunk` positions.
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
    """Pieces of `branches`, each with the part of its path that it can see."""
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
    back = np.zeros(sum(len(b.own) for b in branches), np.int64)
    for same in _buckets(branches):
        height = max(len(b.own) for b in same)
        width = max(len(b.path) for b in same)
        own = np.zeros((len(same), height), np.int64)
        keys = np.zeros((len(same), width), np.int64)
        for row, b in enumerate(same):
            own[row, : len(b.own)] = b.own
            keys[row, : len(b.path)] = b.path
            back[b.own] = offset + row * height + np.arange(len(b.own))
        starts = torch.tensor([b.start for b in same], device=device)
        causal = not same[0].start and (window is None or window >= width)
        rectangles.append(
            Rectangle(height, torch.from_numpy(keys).to(device), starts, window, causal)
        )
        queries.append(own.ravel())
        offset += own.size
    return Pieces(
        tuple(rectangles),
        torch.from_numpy(np.concatenate(queries)).to(device),
        torch.from_numpy(back).to(device),
    )


def _one_behind_the_other(branches: Sequence[Branch], device: torch.device) -> Ragged:
    own = np.concatenate([b.own for b in branches])
    lengths = [[len(b.own) for b in branches], [len(b.path) for b in branches]]
    ends = [
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in lengths
    ]
    return Ragged(
        own=torch.from_numpy(own).to(device),
        back=torch.from_numpy(np.argsort(own)).to(device),
        paths=torch.from_numpy(np.concatenate([b.path for b in branches])).to(device),
        own_ends=ends[0],
        path_ends=ends[1],
        longest_own=max(lengths[0]),
        longest_path=max(lengths[1]),
    )


def _buckets(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Branches of like size together; roots apart from the others, which need a mask."""
    found: list[list[Branch]] = []
    for branch in sorted(branches, key=lambda b: (b.start > 0, -len(b.own), -len(b.path))):
        last = found[-1] if found else None
        if last is not None and _joins(last, branch):
            last.append(branch)
        else:
            found.append([branch])
    return found


def _joins(bucket: list[Branch], branch: Branch) -> bool:
    first = bucket[0]
    if (first.start > 0) != (branch.start > 0):
        return False
    height = len(first.own)
    width = max(len(b.path) for b in [*bucket, branch])
    # tiny rectangles cost more to launch than to pad
    small = height * width * (len(bucket) + 1) <= 1 << 16
    if branch.start and height * width * (len(bucket) + 1) > MAX_MASK:
        return False
    return small or (len(branch.own) >= _WASTE * height and len(branch.path) >= _WASTE * width)


class _Spread(torch.autograd.Function):
    """x[queries]: slots to padded queries.  Padding has no gradient, so the gradient comes back
    without adding.
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
    """x[back]: padded queries to slots.  The gradient of padding is 0."""

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
    flash: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key [1, K, T, D] and value [1, K, T, E] over T slots → [1, T, H, E].

    `softcap`: scores become softcap * tanh(score / softcap).  `s_aux` [H]: sinks, scores that take
    their share of softmax and give nothing.  Raises ConfigError for attention that this layout
    cannot express, or that is not told of it.
    """
    if tree is None or attention_mask is not None or others.get("position_bias") is not None:
        why = "is not told where rows begin" if tree is None else "has a mask or bias of its own"
        raise ConfigError(f"{type(module).__name__} {why}, so its rows have to be padded", key=KEY)
    window, chunk = _reach(module, sliding_window)
    q, k, v = (x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value))
    if flash and s_aux is None and query.shape[3] == value.shape[3]:
        heads = (query.shape[1], key.shape[1])
        return _varlen(tree.ragged(chunk), q, k, v, heads, scaling, window, softcap)[None], None
    scores = _Scores(
        query.shape[1],
        key.shape[1],
        query.shape[3] ** -0.5 if scaling is None else scaling,
        softcap,
        s_aux,
    )
    pieces = tree.pieces(window, chunk)
    spread = _Spread.apply(q, pieces.queries, pieces.back).split(
        [r.keys.shape[0] * r.height for r in pieces.rectangles]
    )
    outs = [
        _rectangle(r, mine, k, v, scores) for r, mine in zip(pieces.rectangles, spread, strict=True)
    ]
    return _Collect.apply(torch.cat(outs), pieces.back).view(
        1, -1, query.shape[1], value.shape[3]
    ), None


def flash_attend(*given: Any, **more: Any) -> tuple[torch.Tensor, None]:
    """`attend` with flash-attn's kernel where it computes what the layer asks for."""
    return attend(*given, flash=True, **more)


# kernel: transformers' name for the attention over trees that takes it, and its function
TREES: dict[str, tuple[str, Any]] = {
    "sdpa": ("rft_tree", attend),
    # transformers asks more of names with "flash" in them
    "flash_attention_2": ("rft_tree_varlen", flash_attend),
}


def _reach(module: Any, window: int | None) -> tuple[int | None, int | None]:
    """(window, chunk) of a layer.  Chunks are given by its configuration alone, because
    transformers puts them into the mask.
    """
    own = vars(module)
    types, at = (
        (vars(own["config"]).get("layer_types"), own.get("layer_idx"))
        if "config" in own
        else (None, None)
    )
    if types and at is not None and types[at] == "chunked_attention":
        return None, own["config"].attention_chunk_size
    return window or None, None


@dataclass(frozen=True)
class _Scores:
    """How scores are made of queries and keys."""

    heads: int
    kv: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]

    @property
    def plain(self) -> bool:
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
    fused = how.plain and not small
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
    """Weights of the values, [B, K, fold * R, L] as `products`; computed in float32 at least."""
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


def _varlen(
    r: Ragged,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: tuple[int, int],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[T, H, D] by flash-attn: each branch's own slots attend to its path."""
    keys, values = (F.embedding(r.paths, x).view(len(r.paths), heads[1], -1) for x in (k, v))
    out: torch.Tensor = importlib.import_module("flash_attn").flash_attn_varlen_func(
        _Spread.apply(q, r.own, r.back).view(len(q), heads[0], -1),
        keys,
        values,
        r.own_ends,
        r.path_ends,
        r.longest_own,
        r.longest_path,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out.index_select(0, r.back)


def installed(name: str, device: str, dtype: str) -> str:
    """The implementation of transformers that `name` means here; auto takes flash attention where
    it is installed and can be used.

    Raises ConfigError for flash attention that is asked for and not there.
    """
    there = (
        importlib.util.find_spec("flash_attn") is not None
        and device == "cuda"
        and dtype != "float32"
    )
    if name == "auto":
        return "flash_attention_2" if there else "sdpa"
    if name == "flash_attention_2" and not there:
        why = (
            "flash_attn is not installed"
            if device == "cuda" and dtype != "float32"
            else f"it does not compute {dtype} on {device}"
        )
        raise ConfigError(
            f"{why}; write sdpa, or auto", key="trainer.attn_implementation", given=name
        )
    return name


def register(name: str, function: Any, *, compiled: bool = False) -> str:
    """Make `function` known to transformers as `name`.  It has no mask function there, so models
    build no mask.

    `compiled`: layers around it are; its shapes change with every micro-batch, so it stays as it
    is.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, torch.compiler.disable(function) if compiled else function)
    return name


def exchangeable(config: Any) -> bool:
    """Whether the causal model of `config` takes its attention from transformers' table of
    functions; unknown classes may.
    """
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)  # type: ignore[attr-defined]
    return kind is None or "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[kind.__module__])


def switch(lm: torch.nn.Module, name: str) -> None:
    """Let all layers of `lm` compute attention by transformers' implementation `name`."""
    from transformers import PreTrainedConfig

    for module in lm.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name
