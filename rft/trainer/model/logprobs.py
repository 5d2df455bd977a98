"""Compute log-probs of given tokens from hidden states without materialising the logits of a full
row.

Depends on hidden states, the output layer's weight and temperatures, not on models or losses.
Logits are computed tile by tile, some tokens by a part of the vocabulary; the forward pass carries
running sums of softmax from tile to tile (arXiv:1805.02867), the backward pass recomputes most
tiles. Tiles fit into a processor's cache, where passes over them are cheap. Invariant: besides
inputs, outputs and gradients, memory holds at most three tiles of logits, and `KEPT_BYTES` of them
for the backward pass, unless a caller allows more (`one_tile`, `keep_all`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rft.types.row_layout import Head

CPU_TILE = 1 << 20  # logits of a tile: 4 MiB in float32 stay in the cache
GPU_TILE = 1 << 26
KEPT_BYTES = 160 << 20  # logits stored for the backward pass
PLAIN = Head()  # no scaling or capping of logits
LEAST_WIDTH = 512  # least vocabulary entries of a tile
LEAST_TAIL = -60.0  # log-prob of the other tokens; below it has no gradient


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    *,
    ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    chunk_tokens: int,
    entropy: bool = False,
    fused: bool = False,
    one_tile: bool = False,
    keep_all: bool = False,
    head: Head = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return log_softmax(z / temperature)[target] with z = hidden @ weight.T (+ bias), the entropy
    of that distribution if `entropy`, and its log-probs at `ids`, followed by that of all other
    tokens together.

    hidden [N, H], weight [V, H], targets int64 [N], temperatures float32 [N], ids int64 [N, k], k
    different ones of each token  ->  float32 [N] (and float32 [N], float32 [N, k + 1]), with
    gradient.  Natural logarithms; the last column is at least -60.  The division by the temperature and the
    softmax are in float32 for every dtype of the weights (in float64 for float64 hidden states), as
    in engines.  `temperatures` None: all are 1. `chunk_tokens`: tokens of a tile. `fused`: compile
    the work on a tile into few kernels (Triton's on GPUs). `one_tile`: all logits are one tile.
    `keep_all`: the backward pass recomputes no logits. `head`: the model's changes to z before the
    division by the temperature.
    """
    cut = _Cut(chunk_tokens, head, fused, one_tile, keep_all)
    targets = targets[:, None] if ids is None else torch.cat([targets[:, None], ids], 1)
    logprobs, entropies, of_ids = _TokenLogprobs.apply(
        hidden, weight, bias, temperatures, targets, cut, entropy
    )
    return logprobs, entropies if entropy else None, None if ids is None else of_ids


@torch.no_grad()
def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    chunk_tokens: int,
    fused: bool = False,
    head: Head = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs, entropies H, sum p^2, sum p^2 (H + log p): float32 [N], without gradient.

    p is the distribution of `token_logprobs` over the vocabulary; arguments as there.
    """
    sums = _Inputs(
        hidden, weight, bias, temperatures, targets[:, None], _Cut(chunk_tokens, head, fused)
    ).sums(order=2)
    log_total = sums.total.log()
    entropy = log_total - sums.mean / sums.total
    squares = sums.squares / sums.total.square()
    pulled = squares * (entropy - log_total) + sums.square_mean / sums.total.square()
    return sums.picked[:, 0] - sums.top - log_total, entropy, squares, pulled


@dataclass(frozen=True)
class _Sums:
    """Running sums of each token over the logits z so far, with z' = z - top.

    All [N] but `picked`; unrequested sums stay 0.
    """

    top: torch.Tensor  # largest z
    total: torch.Tensor  # sum exp z'
    picked: torch.Tensor  # [N, J], z of the targets, 0 until their tiles are processed
    mean: torch.Tensor  # sum z' exp z'
    squares: torch.Tensor  # sum exp 2z'
    square_mean: torch.Tensor  # sum z' exp 2z'
    rest: torch.Tensor  # sum exp z' without the targets but the first, if there are any


class _Tile(NamedTuple):
    """The inputs of the logits of C tokens and W vocabulary entries."""

    hidden: torch.Tensor  # [C, H]
    weight: torch.Tensor  # [W, H]
    bias: torch.Tensor | None  # [W]
    temperatures: torch.Tensor | None  # [C]
    # int64 [C, J], targets relative to the first entry; outside the tile if < 0 or >= W
    at: torch.Tensor
    head: Head
    cached: torch.Tensor | None = None  # [C, W], the stored logits, if any

    def logits(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the logits [C, W] divided by the temperature; the caller may change them."""
        if self.cached is not None:
            return self.cached.clone()
        logits = self.hidden @ self.weight.t()
        if self.bias is not None:
            logits += self.bias
        logits = logits.to(dtype)
        if self.head.scale != 1:
            logits *= self.head.scale
        if self.head.cap is not None:
            logits.div_(self.head.cap).tanh_().mul_(self.head.cap)
        return self._tempered(logits)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the derivative [C, W] of `logits` by the output layer's, without temperature and
        scale; None: 1 everywhere.
        """
        if self.head.cap is None:
            return None
        t = 1.0 if self.temperatures is None else self.temperatures[:, None].to(logits.dtype)
        return 1 - (logits * (t / self.head.cap)).square_()

    def pulled(self, dz: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the output layer's logits from `dz` [C, W] of `logits`, changing
        `dz` in place.
        """
        if slope is not None:
            dz *= slope
        if self.head.scale != 1:
            dz *= self.head.scale
        return self._tempered(dz)

    def _tempered(self, values: torch.Tensor) -> torch.Tensor:
        return (
            values
            if self.temperatures is None
            else values.div_(self.temperatures[:, None].to(values.dtype))
        )


class _Cut(NamedTuple):
    """How logits are cut into tiles and processed."""

    chunk: int  # tokens
    head: Head = PLAIN
    fused: bool = False
    one_tile: bool = False
    keep_all: bool = False


@dataclass(frozen=True)
class _Inputs:
    """The arguments of `token_logprobs` and their cut into tiles."""

    hidden: torch.Tensor  # [N, H]
    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]
    temperatures: torch.Tensor | None  # [N]; None = all 1
    targets: torch.Tensor  # [N, J]
    cut: _Cut

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which sums and gradients are accumulated."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def tokens(self) -> Iterator[slice]:
        return _slices(
            len(self.hidden), max(1, len(self.hidden)) if self.cut.one_tile else self.cut.chunk
        )

    def entries(self) -> Iterator[slice]:
        tile = CPU_TILE if self.hidden.device.type == "cpu" else GPU_TILE
        width = max(LEAST_WIDTH, tile // min(self.cut.chunk, max(1, len(self.hidden))))
        return _slices(len(self.weight), len(self.weight) if self.cut.one_tile else width)

    def tile(self, tokens: slice, entries: slice) -> _Tile:
        return _Tile(
            self.hidden[tokens],
            self.weight[entries],
            None if self.bias is None else self.bias[entries],
            None if self.temperatures is None else self.temperatures[tokens],
            self.targets[tokens] - entries.start,
            self.cut.head,
        )

    def new_cache(self) -> torch.Tensor:
        """Allocate storage for the logits of all tokens and the vocabulary's first entries, in
        whole tiles.
        """
        width = 0
        for entries in self.entries():
            if (
                self.cut.keep_all
                or entries.stop * len(self.hidden) * self.dtype.itemsize <= KEPT_BYTES
            ):
                width = entries.stop
        return self.hidden.new_empty((len(self.hidden), width), dtype=self.dtype)

    def sums(self, order: int, stored: torch.Tensor | None = None) -> _Sums:
        """Return the sums; `order` 0: for log-probs, 1: also for entropies, 2: all.

        `stored`: receives the logits that fit into it.
        """
        see = _compiled(_see) if self.cut.fused else _see
        top, total, mean, squares, square_mean, rest = self.hidden.new_zeros(
            (6, len(self.hidden)), dtype=self.dtype
        )
        top.fill_(torch.finfo(self.dtype).min)
        picked = self.hidden.new_zeros(self.targets.shape, dtype=self.dtype)
        fields = (top, total, picked, mean, squares, square_mean, rest)
        for tokens in self.tokens():
            state = tuple(f[tokens] for f in fields)
            for entries in self.entries():
                tile = self.tile(tokens, entries)
                if stored is not None and entries.stop <= stored.shape[1]:
                    stored[tokens, entries] = tile.logits(self.dtype)
                    tile = tile._replace(cached=stored[tokens, entries])
                state = see(tile, state, order)
            for into, value in zip(fields, state, strict=True):
                into[tokens] = value
        return _Sums(*fields)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        temperatures: torch.Tensor | None,
        targets: torch.Tensor,
        cut: _Cut,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs = _Inputs(hidden, weight, bias, temperatures, targets, cut)
        stored = inputs.new_cache() if any(ctx.needs_input_grad) else None
        sums = inputs.sums(int(entropy), stored)
        log_total = sums.total.log()
        norm = sums.top + log_total
        entropies = log_total - sums.mean / sums.total if entropy else norm[:0]
        rest = of_ids = norm[:0]
        if targets.shape[1] > 1:
            rest = (sums.rest.log() - log_total).clamp_(min=LEAST_TAIL)
            of_ids = torch.cat([sums.picked[:, 1:] - norm[:, None], rest[:, None]], 1)
        ctx.save_for_backward(
            hidden, weight, bias, temperatures, targets, norm, entropies, rest, stored
        )
        ctx.cut = cut
        ctx.entropy = entropy
        return sums.picked[:, 0] - norm, entropies, of_ids

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, temperatures, targets, norm, entropies, rest, stored = (
            ctx.saved_tensors
        )
        grad, grad_rest = grads[0][:, None], rest
        if len(rest):
            grad = torch.cat([grad, grads[2][:, :-1]], 1)
            grad_rest = grads[2][:, -1].masked_fill(rest <= LEAST_TAIL, 0)
        inputs = _Inputs(hidden, weight, bias, temperatures, targets, ctx.cut)
        pull = _compiled(_pull) if ctx.cut.fused else _pull
        grad_hidden = torch.zeros_like(hidden, dtype=inputs.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        # the outer loop, so that each part of the weight's gradient is completed before the next
        for entries in inputs.entries():
            of_weight = grad_weight[entries] if grad_weight is not None else None
            if of_weight is not None and of_weight.dtype != inputs.dtype:
                of_weight = torch.zeros_like(of_weight, dtype=inputs.dtype)
            of_bias = (
                torch.zeros_like(bias[entries], dtype=inputs.dtype)
                if grad_bias is not None
                else None
            )
            for tokens in inputs.tokens():
                more = (entropies[tokens], grads[1][tokens]) if ctx.entropy else None
                others = (rest[tokens], grad_rest[tokens]) if len(rest) else None
                tile = inputs.tile(tokens, entries)
                if entries.stop <= stored.shape[1]:
                    tile = tile._replace(cached=stored[tokens, entries])
                dz = pull(tile, norm[tokens], grad[tokens], more, others)
                _add_product(grad_hidden[tokens], dz, weight[entries])
                if of_weight is not None:
                    _add_product(of_weight, dz.t(), hidden[tokens], first=tokens.start == 0)
                if of_bias is not None:
                    of_bias += dz.sum(0, dtype=inputs.dtype)
            if (
                grad_weight is not None
                and of_weight is not None
                and of_weight.dtype != grad_weight.dtype
            ):
                grad_weight[entries] = of_weight
            if grad_bias is not None and of_bias is not None:
                grad_bias[entries] = of_bias
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None


def _see(tile: _Tile, state: tuple[torch.Tensor, ...], order: int) -> tuple[torch.Tensor, ...]:
    """Return the fields of `_Sums` with this tile's logits added."""
    before, total, picked, mean, squares, square_mean, rest = state
    z = tile.logits(before.dtype)
    at, inside = _where(tile.at, z.shape[1])
    picked = torch.where(inside, z.gather(1, at), picked)
    top = torch.maximum(before, z.amax(-1))
    lower = before - top
    fade = lower.exp()
    z.sub_(top[:, None])
    e = z.exp() if order else z.exp_()
    new_total = total * fade + e.sum(-1)
    several = at.shape[1] > 1
    if order:  # in place where nothing reads e again
        mean = (mean + total * lower) * fade + (e * z if several or order == 2 else e.mul_(z)).sum(
            -1
        )
    if order == 2:
        square = e.square()
        square_mean = (square_mean + squares * lower) * fade.square() + (square * z).sum(-1)
        squares = squares * fade.square() + square.sum(-1)
    if several:
        rest = rest * fade + _cleared(e, at[:, 1:], inside[:, 1:]).sum(-1)
    return top, new_total, picked, mean, squares, square_mean, rest


def _pull(
    tile: _Tile,
    norm: torch.Tensor,
    grad: torch.Tensor,
    more: tuple[torch.Tensor, torch.Tensor] | None,
    others: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the gradient of the tile's logits, in the hidden states' dtype.

    `more`: entropies and their gradient.  `others`: the log-prob r of all tokens but those of the
    targets after the first, and its gradient.
    """
    z = tile.logits(norm.dtype)
    slope = tile.slope(z)
    z.sub_(norm[:, None])
    at, inside = _where(tile.at, z.shape[1])
    total = grad.sum(-1)
    of_rest = None
    # d logp[target] / dz = [target] - p;   d entropy / dz = -p (logp + entropy)
    # d r / dz = p / exp(r) [not a target] - p
    if others is not None:
        r, grad_rest = others
        total = total + grad_rest
        of_rest = (z - r[:, None]).exp_().mul_(grad_rest[:, None])
        of_rest = _cleared(of_rest, at[:, 1:], inside[:, 1:])
    if more is None:
        dz = z.exp_().mul_(-total[:, None])
    else:
        entropy, grad_entropy = more
        p = z.exp()
        dz = z.mul_(-grad_entropy[:, None]).sub_((total + grad_entropy * entropy)[:, None]).mul_(p)
    if of_rest is not None:
        dz += of_rest
    dz.scatter_add_(1, at, torch.where(inside, grad, 0.0))
    return tile.pulled(dz, slope).to(tile.hidden.dtype)


def _cleared(values: torch.Tensor, at: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Set `values` [C, W] to 0 at the columns `at` [C, k] that are `inside`, in place; adding the
    negative is exact, and columns outside, which are clamped to those of others, add 0.
    """
    return values.scatter_add_(1, at, torch.where(inside, -values.gather(1, at), 0.0))


def _where(target: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (column of each target, whether the target is in this tile): both [C, J]."""
    return target.clamp(0, width - 1), (target >= 0) & (target < width)


def _add_product(
    into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, first: bool = False
) -> None:
    """Add a @ b to `into`; products of a shorter dtype are summed in the dtype of `into`.

    `first`: overwrite `into` instead, if the dtypes are equal.
    """
    if into.dtype == a.dtype:
        into.addmm_(a, b, beta=0 if first else 1)  # with 0 the old values are not read
    else:
        into.add_(a @ b)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, count)) for at in range(0, count, size))


@functools.cache
def _compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(work, dynamic=True)
