"""Attention over a prefix tree: every slot sees its ancestors and itself.  Registered with transformers as "rft_tree".

The tree's branches are gathered into a few padded rectangles.  A branch from the root is plain causal attention, which needs no mask
(padding is at the right end).  Other branches attend with their own slots to their whole path under an additive mask; grouped
query heads are folded into the query length, so keys and values are never repeated.
Invariant: padding changes no result; its outputs are dropped and get no gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rft.errors import ConfigError
from rft.trainer.prefix import MAX_MASK, Branch, Tree

NAME = "rft_tree"
_WASTE = 0.6  # a rectangle takes branches down to this share of its longest


@dataclass(frozen=True)
class Rectangle:
    """B branches padded to R own slots and L path slots.  `mask` None: the branches begin at the root (R = L, causal)."""

    height: int  # R
    keys: torch.Tensor  # int64 [B, L], slots; padding repeats slot 0
    mask: torch.Tensor | None  # [B, 1, G * R, L] additive; G query heads share a key head


@dataclass(frozen=True)
class Layout:
    """How T slots become N padded queries of all rectangles, and come back."""

    rectangles: tuple[Rectangle, ...]
    queries: torch.Tensor  # int64 [N], the slot of each query; padding repeats slot 0
    back: torch.Tensor  # int64 [T], the query of each slot


def layout(tree: Tree, *, heads_per_key: int, dtype: torch.dtype, device: torch.device) -> Layout:
    """Rectangles for `tree` on `device`; `dtype` is the one attention computes in."""
    rectangles, queries, offset = [], [], 0
    back = np.zeros(len(tree.tokens), np.int64)
    for branches in _buckets(tree.branches):
        height, width = max(len(b.own) for b in branches), max(len(b.path) for b in branches)
        own, keys = np.zeros((len(branches), height), np.int64), np.zeros((len(branches), width), np.int64)
        for row, b in enumerate(branches):
            own[row, : len(b.own)] = b.own
            keys[row, : len(b.path)] = b.path
            back[b.own] = offset + row * height + np.arange(len(b.own))
        mask = _mask(branches, height, width, heads_per_key, dtype, device) if branches[0].start else None
        rectangles.append(Rectangle(height, torch.from_numpy(keys).to(device), mask))
        queries.append(own.ravel())
        offset += own.size
    return Layout(tuple(rectangles), torch.from_numpy(np.concatenate(queries)).to(device), torch.from_numpy(back).to(device))


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
    height, width = len(first.own), max(len(b.path) for b in [*bucket, branch])
    small = height * width * (len(bucket) + 1) <= 1 << 16  # tiny rectangles cost more to launch than to pad
    if branch.start and height * width * (len(bucket) + 1) > MAX_MASK:
        return False
    return small or (len(branch.own) >= _WASTE * height and len(branch.path) >= _WASTE * width)


def _mask(branches: list[Branch], height: int, width: int, fold: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    starts = torch.tensor([b.start for b in branches], device=device)
    seen = torch.arange(width, device=device) <= (starts[:, None] + torch.arange(height, device=device))[:, :, None]
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return mask.repeat(1, fold, 1)[:, None]


class _Spread(torch.autograd.Function):
    """x[queries]: slots to padded queries.  Padding has no gradient, so the gradient comes back without adding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, queries: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
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
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, ctx.saved_tensors[0], grad), None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, K, T, D] over T slots → [1, T, H, D].

    Raises ConfigError for attention that this layout cannot express (sliding windows, sinks, soft caps).
    """
    unknown = [k for k in ("softcap", "s_aux", "position_bias") if others.get(k) is not None]
    if sliding_window is not None or unknown:
        raise ConfigError(
            f"{type(module).__name__} uses {', '.join(unknown) or 'a sliding window'}, "
            "which shared prompts do not support; set it to false",
            key="trainer.share_prompts",
            given=True,
        )
    heads, dim, kv = query.shape[1], query.shape[3], key.shape[1]
    q, k, v = (x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value))
    spread = _Spread.apply(q, tree.queries, tree.back).split([r.keys.shape[0] * r.height for r in tree.rectangles])
    outs = [_rectangle(r, mine, k, v, (heads, kv, dim), scaling) for r, mine in zip(tree.rectangles, spread, strict=True)]
    return _Collect.apply(torch.cat(outs), tree.back).view(1, -1, heads, dim), None


def _rectangle(
    r: Rectangle, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: tuple[int, int, int], scaling: float | None
) -> torch.Tensor:
    heads, kv, dim = shape
    (count, width), height, fold = r.keys.shape, r.height, heads // kv
    keys, values = (F.embedding(r.keys, x).view(count, width, kv, dim).transpose(1, 2) for x in (k, v))
    if r.mask is None:
        queries = q.view(count, height, heads, dim).transpose(1, 2)
        if fold > 1:
            keys, values = keys.repeat_interleave(fold, 1), values.repeat_interleave(fold, 1)
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
        return out.transpose(1, 2).reshape(count * height, heads * dim)
    queries = q.view(count, height, kv, fold, dim).permute(0, 2, 3, 1, 4).reshape(count, kv, fold * height, dim)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=r.mask, scale=scaling)
    return out.view(count, kv, fold, height, dim).permute(0, 3, 1, 2, 4).reshape(count * height, heads * dim)


def installed(name: str, device: str, dtype: str) -> str:
    """The implementation of transformers that `name` means here; auto takes flash attention where it is installed and can be used.

    Raises ConfigError for flash attention that is asked for and not there.
    """
    there = importlib.util.find_spec("flash_attn") is not None and device == "cuda" and dtype != "float32"
    if name == "auto":
        return "flash_attention_2" if there else "sdpa"
    if name == "flash_attention_2" and not there:
        why = (
            "flash_attn is not installed"
            if device == "cuda" and dtype != "float32"
            else f"it does not compute {dtype} on {device}"
        )
        raise ConfigError(f"{why}; write sdpa, or auto", key="trainer.attn_implementation", given=name)
    return name


def register(name: str = NAME, function: Any = attend, *, compiled: bool = False) -> None:
    """Make "rft_tree" known to transformers.  It has no mask function there, so models build no mask of their own.

    `compiled`: layers around it are; its shapes change with every micro-batch, so it stays as it is.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, torch.compiler.disable(function) if compiled else function)
