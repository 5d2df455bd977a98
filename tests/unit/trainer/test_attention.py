"""Attention over a prefix tree gives each slot what plain attention gives it in its row, for every
kind of layer and both kernels.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rft.errors import ConfigError
from rft.trainer.model import attention
from rft.trainer.rows import prefix

HEADS = 4
KV = 2
SIZE = 8
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 5},
    "long window": {"sliding_window": 90},
    "chunk": {"chunk": 7},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True, "sliding_window": 6},
    "soft cap and window": {"softcap": 1.5, "sliding_window": 3},
}
Given = tuple[torch.Tensor, ...]


def rows() -> list[np.ndarray]:
    """A prompt of 20 with three answers, one of which is longer than a piece of a window, and a row
    of its own.
    """
    draw = np.random.default_rng(0)
    prompt = draw.integers(9, size=20)
    answers = [np.concatenate([prompt, draw.integers(9, size=n)]) for n in (3, 140, 11)]
    return [r.astype(np.int32) for r in (*answers, draw.integers(9, size=70))]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: dict[str, Any], sinks: torch.Tensor
) -> torch.Tensor:
    """Of one row: q [L, H, D], k and v [L, K, D] → [L, H, D], as the papers write it."""
    at = torch.arange(len(q))
    seen = at[:, None] >= at
    if "sliding_window" in kind:
        seen &= at > at[:, None] - kind["sliding_window"]
    if "chunk" in kind:
        seen &= at // kind["chunk"] == at[:, None] // kind["chunk"]
    k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    if "softcap" in kind:
        scores = kind["softcap"] * torch.tanh(scores / kind["softcap"])
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True) + (sinks.exp()[:, None, None] if "sinks" in kind else 0)
    return torch.einsum("hqk,khd->qhd", weights / total, v)


def module(kind: dict[str, Any]) -> Any:
    types = ["chunked_attention" if "chunk" in kind else "full_attention"]
    made = torch.nn.Module()
    made.config = SimpleNamespace(layer_types=types, attention_chunk_size=kind.get("chunk"))  # type: ignore[assignment]
    made.layer_idx = 0
    return made


def compared(attend: Callable[..., Any], kind: dict[str, Any], layout: str) -> None:
    """Outputs and gradients of `attend` over the tree against `plain` of every row, whose shared
    slots add up.
    """
    torch.manual_seed(0)
    tree = prefix.build(rows(), max_mask=prefix.NOTHING if layout == "packed" else prefix.MAX_MASK)
    shapes = [(len(tree.tokens), n, SIZE) for n in (HEADS, KV, KV)]
    given: Given = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(shapes[0], dtype=torch.float64)
    q, k, v = (x.transpose(0, 1)[None] for x in given)
    more = {name: kind[name] for name in ("sliding_window", "softcap") if name in kind}
    how = {"scaling": 0.3, "s_aux": sinks if "sinks" in kind else None, **more}
    out = attend(
        module(kind), q, k, v, None, tree=attention.Layout(tree, torch.device("cpu")), **how
    )[0][0]
    right = torch.zeros_like(out)
    for b in tree.branches:
        of_row = plain(*(x[torch.from_numpy(b.path)] for x in given), kind, sinks)
        right = right.index_copy(0, torch.from_numpy(b.new_slots), of_row[b.start :])
    torch.testing.assert_close(out, right, atol=1e-12, rtol=0)
    wanted = [*given, *([sinks] if "sinks" in kind else [])]
    for mine, theirs in zip(
        torch.autograd.grad((out * pull).sum(), wanted),
        torch.autograd.grad((right * pull).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=0)


@pytest.mark.parametrize("layout", ["shared", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_exact(kind: str, layout: str) -> None:
    compared(attention.attend, KINDS[kind], layout)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn's function by its own description: the causal mask and the window are aligned at
    the lower right corner.
    """
    assert causal and q.shape[0] == cu_seqlens_q[-1] and k.shape[0] == cu_seqlens_k[-1]
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    lengths = [cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k)]
    assert [max_seqlen_q, max_seqlen_k] == [max(each) for each in lengths]
    outs = []
    for mine, keys, values in zip(
        q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True
    ):
        at = torch.arange(len(mine))[:, None] + len(keys) - len(mine)
        column = torch.arange(len(keys))
        seen = column <= at
        if window_size[0] >= 0:
            assert window_size[1] == 0  # so the kernel is causal
            seen &= column >= at - window_size[0]
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", mine, keys) * (
            q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        )
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        outs.append(
            torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values
            )
        )
    return torch.cat(outs)


@pytest.mark.parametrize("layout", ["shared", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_flash_attn_takes_trees_as_they_are(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in of its signature; the kernel needs a GPU."""
    calls = []
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = lambda *given, **more: (
        calls.append(1) or flash_attn_varlen_func(*given, **more)
    )  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    compared(attention.TREES["flash_attention_2"][1], KINDS[kind], layout)
    assert bool(calls) == ("sinks" not in KINDS[kind])  # which its kernel does not know


@pytest.mark.parametrize("layout", ["shared", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_varlen_takes_trees_as_they_are(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in behind its signature; the kernel needs a GPU."""
    from torch.nn.attention import varlen

    contract = inspect.signature(varlen.varlen_attn)
    calls = []

    def varlen_attn(*args: Any, **more: Any) -> torch.Tensor:
        x = contract.bind(*args, **more).arguments
        q, k, v, own, paths, longest, longest_path = list(x.values())[:7]
        assert x["enable_gqa"] == (q.shape[1] != k.shape[1])
        calls.append(1)
        lengths = (own, paths, longest, longest_path)
        return flash_attn_varlen_func(
            q, k, v, *lengths, 0.0, x["scale"], causal=True, window_size=x["window_size"]
        )

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    compared(attention.TREES["varlen"][1], KINDS[kind], layout)
    assert bool(calls) == (not {"sinks", "softcap"} & KINDS[kind].keys())


@pytest.mark.parametrize(
    ("capability", "size", "takes"),
    [
        ((8, 0), 128, True),
        ((8, 9), 256, False),  # torch has no backward pass of it there
        ((9, 0), 256, True),
        ((9, 0), 100, False),
        ((9, 0), 576, False),
    ],
)
def test_torch_varlen_takes_the_heads_that_its_kernel_has(
    capability: tuple[int, int], size: int, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    query = SimpleNamespace(shape=(1, 4, 9, size), device=torch.device("cuda"))
    assert attention._of_a_size(query) == takes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "package", "dtype", "kernel"),
    [
        ((8, 0), False, "bfloat16", "varlen"),
        ((12, 0), False, "float16", "varlen"),
        ((9, 0), True, "bfloat16", "flash_attention_2"),
        ((7, 5), False, "float16", "sdpa"),
        ((9, 0), False, "float32", "sdpa"),
    ],
)
def test_auto_takes_a_flash_attention_that_the_gpu_has(
    capability: tuple[int, int],
    package: bool,
    dtype: str,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    if package:
        made = ModuleType("flash_attn")
        made.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
        monkeypatch.setitem(sys.modules, "flash_attn", made)
    assert attention.installed("auto", "cuda", dtype) == kernel
    if kernel == "sdpa":
        with pytest.raises(ConfigError, match="write sdpa, or auto"):
            attention.installed("varlen", "cuda", dtype)
    else:
        assert attention.installed("varlen", "cuda", dtype) == "varlen"


def test_what_is_made_for_a_kind_of_layer_is_made_once() -> None:
    made = attention.Layout(prefix.build(rows()), torch.device("cpu"))
    assert made.pieces(5, None) is made.pieces(5, None) is not made.pieces(None, None)
    windows = made.pieces(5, None).rectangles
    assert (
        max(r.keys.shape[1] for r in windows)
        <= 64 + 4
        < max(r.keys.shape[1] for r in made.pieces(None, None).rectangles)
    )
    (first, *_) = windows
    assert first.mask(2, torch.float32) is first.mask(2, torch.float32)


def test_rows_of_masks_are_aligned_for_the_gpu_kernel() -> None:
    """U5: torch copies a mask whose strides are no multiples of 8 in every layer, and keeps each
    copy for the backward pass.
    """
    made = attention.Layout(prefix.build(rows()), torch.device("cpu"))
    masked = [
        r for window in (None, 5) for r in made.pieces(window, None).rectangles if not r.causal
    ]
    assert any(r.keys.shape[1] % 8 for r in masked)
    for r in masked:
        mask = r.mask(2, torch.bfloat16)
        assert mask.shape == (len(r.keys), 1, 2 * r.height, r.keys.shape[1])
        assert [stride % 8 for stride in mask.stride()] == [0, 0, 0, 1]


def test_attention_that_trees_do_not_express_is_refused() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(
        ConfigError, match=r"trainer.row_layout: Module is not told where rows begin"
    ):
        attention.attend(torch.nn.Module(), x, x, x, None)
    tree = attention.Layout(prefix.build([np.arange(2, dtype=np.int32)]), torch.device("cpu"))
    for mask, more in ((None, {"position_bias": x}), (x, {})):
        with pytest.raises(
            ConfigError, match=r"trainer.row_layout: Module has a mask or bias of its own"
        ):
            attention.attend(torch.nn.Module(), x, x, x, mask, tree=tree, **more)
