"""Log-probs of given tokens from hidden states, without ever holding the logits of a whole row.

Knows hidden states, the output layer's weight and temperatures; not models or losses.  Logits are
computed a tile at a time, some tokens by some of the vocabulary; the forward pass carries running
sums of softmax from tile to tile (arXiv:1805.02867), the backward pass computes most tiles again.
Tiles are small enough for a processor's cache, where the passes over them cost little. Invariant:
beside inputs, outputs and gradients there are at most two tiles of logits, and `KEPT_BYTES` of them
for the backward pass, unless a caller asks for more memory (`whole`, `keep_all`).
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
KEPT_BYTES = 160 << 20  # logits that the backward pass need not compute again
PLAIN = Head()  # logits are left as they are
LEAST_WIDTH = 512  # entries of the vocabulary in a tile, whatever the tokens


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    chunk_tokens: int,
    entropy: bool = False,
    fused: bool = False,
    whole: bool = False,
    keep_all: bool = False,
    head: Head = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log_softmax(z / temperature)[target] with z = hidden @ weight.T (+ bias), and the entropy of
    that distribution if asked.

    hidden [N, H], weight [V, H], targets int64 [N], temperatures float32 [N]  ->  float32 [N] (and
    float32 [N]), both with gradient. Natural logarithms.  Logits are divided by the temperature,
    and softmax is taken, in float32 whatever the weights' type (in float64 where hidden states
    are), as engines do.  `temperatures` None: all are 1. `chunk_tokens`: tokens of a tile.
    `fused`: what is done with a tile is compiled into few kernels (on GPUs Triton's). `whole`: all
    logits are one tile.  `keep_all`: the backward pass computes none of them again. `head`: how the
    model changes z before it is divided by the temperature.
    """
    cut = _Cut(chunk_tokens, head, fused, whole, keep_all)
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, weight, bias, temperatures, targets, cut, entropy
    )
    return logprobs, entropies if entropy else None


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
    """What `token_logprobs` gives, and of the same distribution p over the vocabulary sum p^2 and
    sum p^2 (H + log p).

    Arguments as there  ->  log-probs, entropies H, sum p^2, sum p^2 (H + log p): float32 [N] each,
    without gradient.
    """
    sums = _Given(
        hidden, weight, bias, temperatures, targets, _Cut(chunk_tokens, head, fused)
    ).sums(order=2)
    log_total = sums.total.log()
    entropy = log_total - sums.mean / sums.total
    squares = sums.squares / sums.total.square()
    pulled = squares * (entropy - log_total) + sums.square_mean / sums.total.square()
    return sums.picked - sums.top - log_total, entropy, squares, pulled


@dataclass(frozen=True)
class _Sums:
    """Of each token, over the logits z seen so far, with z' = z - top.  All [N]; those that are not
    asked for stay 0.
    """

    top: torch.Tensor  # the largest
    total: torch.Tensor  # sum exp z'
    picked: torch.Tensor  # z of the target, 0 before it was seen
    mean: torch.Tensor  # sum z' exp z'
    squares: torch.Tensor  # sum exp 2z'
    square_mean: torch.Tensor  # sum z' exp 2z'


class _Tile(NamedTuple):
    """What the logits of C tokens and W entries are made of."""

    hidden: torch.Tensor  # [C, H]
    weight: torch.Tensor  # [W, H]
    bias: torch.Tensor | None  # [W]
    temperatures: torch.Tensor | None  # [C]
    # int64 [C], the target counted from the first entry; not in the tile if < 0 or >= W
    at: torch.Tensor
    head: Head
    known: torch.Tensor | None = None  # [C, W], the logits, where they were kept

    def logits(self, dtype: torch.dtype) -> torch.Tensor:
        """[C, W] as the model gives them, divided by the temperature; the caller's to change."""
        if self.known is not None:
            return self.known.clone()
        made = self.hidden @ self.weight.t()
        if self.bias is not None:
            made += self.bias
        made = made.to(dtype)
        if self.head.scale != 1:
            made *= self.head.scale
        if self.head.cap is not None:
            made.div_(self.head.cap).tanh_().mul_(self.head.cap)
        return self._tempered(made)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """[C, W], how `logits` follow those of the output layer, temperature and scale apart; None:
        in all places as they are.
        """
        if self.head.cap is None:
            return None
        t = 1.0 if self.temperatures is None else self.temperatures[:, None].to(logits.dtype)
        return 1 - (logits * (t / self.head.cap)).square_()

    def pulled(self, dz: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
        """The gradient of what the output layer gives, from `dz` [C, W] of `logits`, which is
        changed in place.
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
    """How logits are cut into tiles, and what becomes of them."""

    chunk: int  # tokens
    head: Head = PLAIN
    fused: bool = False
    whole: bool = False
    keep_all: bool = False


@dataclass(frozen=True)
class _Given:
    """The arguments, and how they are cut."""

    hidden: torch.Tensor  # [N, H]
    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]
    temperatures: torch.Tensor | None  # [N]; None = all 1
    targets: torch.Tensor  # [N]
    cut: _Cut

    @property
    def dtype(self) -> torch.dtype:
        """Of sums and gradients while they are added."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def tokens(self) -> Iterator[slice]:
        return _slices(
            len(self.hidden), max(1, len(self.hidden)) if self.cut.whole else self.cut.chunk
        )

    def entries(self) -> Iterator[slice]:
        tile = CPU_TILE if self.hidden.device.type == "cpu" else GPU_TILE
        width = max(LEAST_WIDTH, tile // min(self.cut.chunk, max(1, len(self.hidden))))
        return _slices(len(self.weight), len(self.weight) if self.cut.whole else width)

    def tile(self, tokens: slice, entries: slice) -> _Tile:
        return _Tile(
            self.hidden[tokens],
            self.weight[entries],
            None if self.bias is None else self.bias[entries],
            None if self.temperatures is None else self.temperatures[tokens],
            self.targets[tokens] - entries.start,
            self.cut.head,
        )

    def kept(self) -> torch.Tensor:
        """Room for the logits of all tokens and the first entries of the vocabulary, whole tiles of
        them.
        """
        width = 0
        for entries in self.entries():
            if (
                self.cut.keep_all
                or entries.stop * len(self.hidden) * self.dtype.itemsize <= KEPT_BYTES
            ):
                width = entries.stop
        return self.hidden.new_empty((len(self.hidden), width), dtype=self.dtype)

    def sums(self, order: int, kept: torch.Tensor | None = None) -> _Sums:
        """`order` 0: what log-probs need; 1: also for entropies; 2: all.  `kept`: takes the logits
        that it has room for.
        """
        see = _compiled(_see) if self.cut.fused else _see
        found = _Sums(
            *(self.hidden.new_zeros(len(self.hidden), dtype=self.dtype) for _ in range(6))
        )
        found.top.fill_(torch.finfo(self.dtype).min)
        fields = (
            found.top,
            found.total,
            found.picked,
            found.mean,
            found.squares,
            found.square_mean,
        )
        for tokens in self.tokens():
            seen = tuple(f[tokens] for f in fields)
            for entries in self.entries():
                tile = self.tile(tokens, entries)
                if kept is not None and entries.stop <= kept.shape[1]:
                    kept[tokens, entries] = tile.logits(self.dtype)
                    tile = tile._replace(known=kept[tokens, entries])
                seen = see(tile, seen, order)
            for into, value in zip(fields, seen, strict=True):
                into[tokens] = value
        return found


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = _Given(hidden, weight, bias, temperatures, targets, cut)
        kept = given.kept() if any(ctx.needs_input_grad) else None
        sums = given.sums(int(entropy), kept)
        log_total = sums.total.log()
        norm = sums.top + log_total
        entropies = log_total - sums.mean / sums.total if entropy else norm[:0]
        ctx.save_for_backward(hidden, weight, bias, temperatures, targets, norm, entropies, kept)
        ctx.cut = cut
        ctx.entropy = entropy
        return sums.picked - norm, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, temperatures, targets, norm, entropies, kept = ctx.saved_tensors
        given = _Given(hidden, weight, bias, temperatures, targets, ctx.cut)
        pull = _compiled(_pull) if ctx.cut.fused else _pull
        grad_hidden = torch.zeros_like(hidden, dtype=given.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        # the outer loop, so that a part of the weight's gradient is complete when it is left
        for entries in given.entries():
            of_weight = grad_weight[entries] if grad_weight is not None else None
            if of_weight is not None and of_weight.dtype != given.dtype:
                of_weight = torch.zeros_like(of_weight, dtype=given.dtype)
            of_bias = (
                torch.zeros_like(bias[entries], dtype=given.dtype)
                if grad_bias is not None
                else None
            )
            for tokens in given.tokens():
                more = (entropies[tokens], grads[1][tokens]) if ctx.entropy else None
                tile = given.tile(tokens, entries)
                if entries.stop <= kept.shape[1]:
                    tile = tile._replace(known=kept[tokens, entries])
                dz = pull(tile, norm[tokens], grads[0][tokens], more)
                _add_product(grad_hidden[tokens], dz, weight[entries])
                if of_weight is not None:
                    _add_product(of_weight, dz.t(), hidden[tokens], first=tokens.start == 0)
                if of_bias is not None:
                    of_bias += dz.sum(0, dtype=given.dtype)
            if (
                grad_weight is not None
                and of_weight is not None
                and of_weight.dtype != grad_weight.dtype
            ):
                grad_weight[entries] = of_weight
            if grad_bias is not None and of_bias is not None:
                grad_bias[entries] = of_bias
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None


def _see(tile: _Tile, seen: tuple[torch.Tensor, ...], order: int) -> tuple[torch.Tensor, ...]:
    """The fields of `_Sums` with this tile's logits added."""
    before, total, picked, mean, squares, square_mean = seen
    z = tile.logits(before.dtype)
    at, inside = _where(tile.at, z.shape[1])
    picked = torch.where(inside, z.gather(1, at[:, None])[:, 0], picked)
    top = torch.maximum(before, z.amax(-1))
    lower = before - top
    fade = lower.exp()
    z.sub_(top[:, None])
    if order == 0:
        return top, total * fade + z.exp_().sum(-1), picked, mean, squares, square_mean
    e = z.exp()
    new_total = total * fade + e.sum(-1)
    if order == 1:
        return (
            top,
            new_total,
            picked,
            (mean + total * lower) * fade + e.mul_(z).sum(-1),
            squares,
            square_mean,
        )
    new_mean = (mean + total * lower) * fade + (e * z).sum(-1)
    e.square_()
    new_square_mean = (square_mean + squares * lower) * fade.square() + (e * z).sum(-1)
    return top, new_total, picked, new_mean, squares * fade.square() + e.sum(-1), new_square_mean


def _pull(
    tile: _Tile,
    norm: torch.Tensor,
    grad: torch.Tensor,
    more: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """The gradient of what a tile's hidden states and weights give, in the hidden states' type.
    `more`: entropies and their gradient.
    """
    z = tile.logits(norm.dtype)
    slope = tile.slope(z)
    z.sub_(norm[:, None])
    # d logp[target] / dz = [target] - p;   d entropy / dz = -p (logp + entropy)
    if more is None:
        dz = z.exp_().mul_(-grad[:, None])
    else:
        entropy, grad_entropy = more
        p = z.exp()
        dz = z.mul_(-grad_entropy[:, None]).sub_((grad + grad_entropy * entropy)[:, None]).mul_(p)
    at, inside = _where(tile.at, z.shape[1])
    dz.scatter_add_(1, at[:, None], torch.where(inside, grad, 0.0)[:, None])
    return tile.pulled(dz, slope).to(tile.hidden.dtype)


def _where(target: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target, whether it is in this tile at all)."""
    return target.clamp(0, width - 1), (target >= 0) & (target < width)


def _add_product(
    into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, first: bool = False
) -> None:
    """into += a @ b; sums of products of a shorter type are added in the type of `into`.  `first`:
    nothing was added to it yet.
    """
    if into.dtype == a.dtype:
        into.addmm_(a, b, beta=0 if first else 1)  # with 0 what stands there is not read
    else:
        into.add_(a @ b)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, count)) for at in range(0, count, size))


@functools.cache
def _compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(work, dynamic=True)
