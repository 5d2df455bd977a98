"""Log-probs of given tokens from hidden states, without keeping the logits of a whole batch.

Knows hidden states, the output layer's weight and temperatures; not models or losses.
Invariant: at most two chunks of logits exist at once, in the forward pass as in the backward pass.  The last chunk's are kept,
because the backward pass begins with it; earlier ones are computed again.
"""

from __future__ import annotations

from typing import Any

import torch


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_tokens: int,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log_softmax(z / temperature)[target] with z = hidden @ weight.T (+ bias), and the entropy of that distribution if asked.

    hidden [N, H], weight [V, H], targets int64 [N], temperatures float32 [N]  ->  float32 [N] (and float32 [N]), both with gradient.
    Natural logarithms.  Softmax is taken in float32 whatever the weights' type.
    """
    scaled = hidden / temperatures[:, None].to(hidden.dtype)
    inverse = None if bias is None else 1.0 / temperatures
    logprobs, entropies = _TokenLogprobs.apply(scaled, weight, bias, inverse, targets, chunk_tokens, entropy)
    return logprobs, entropies if entropy else None


@torch.no_grad()
def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `token_logprobs` gives, and of the same distribution p over the vocabulary sum p^2 and sum p^2 (H + log p).

    Arguments as there  ->  log-probs, entropies H, sum p^2, sum p^2 (H + log p): float32 [N] each, without gradient.
    """
    scaled = hidden / temperatures[:, None].to(hidden.dtype)
    inverse = None if bias is None else 1.0 / temperatures
    found = hidden.new_empty(4, hidden.shape[0], dtype=torch.float32)
    for at in range(0, hidden.shape[0], chunk_tokens):
        part = slice(at, min(at + chunk_tokens, hidden.shape[0]))
        logp = _log_softmax(scaled, weight, bias, inverse, part)
        p = logp.exp()
        entropy = -(p * logp).sum(-1)
        squares = p.square_()
        found[0, part] = logp.gather(1, targets[part, None])[:, 0]
        found[1, part] = entropy
        found[2, part] = squares.sum(-1)
        found[3, part] = (squares * (logp + entropy[:, None])).sum(-1)
    logprobs, entropies, sums, means = found
    return logprobs, entropies, sums, means


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        inverse: torch.Tensor | None,
        targets: torch.Tensor,
        chunk: int,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden.shape[0]
        logprobs = hidden.new_empty(count, dtype=torch.float32)
        entropies = hidden.new_empty(count if entropy else 0, dtype=torch.float32)
        kept = None
        for at in range(0, count, chunk):
            part = slice(at, min(at + chunk, count))
            kept = _log_softmax(hidden, weight, bias, inverse, part)
            logprobs[part] = kept.gather(1, targets[part, None])[:, 0]
            if entropy:
                entropies[part] = _entropy(kept)
        saved = kept if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, bias, inverse, targets, saved, entropies)
        ctx.chunk, ctx.entropy = chunk, entropy
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, bias, inverse, targets, kept, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = grad_bias = None
        for at in reversed(range(0, hidden.shape[0], ctx.chunk)):
            part = slice(at, min(at + ctx.chunk, hidden.shape[0]))
            logp = kept if kept is not None else _log_softmax(hidden, weight, bias, inverse, part)
            kept = None
            # d logp[target] / dz = [target] - p;   d entropy / dz = -p (logp + entropy)
            if ctx.entropy:
                pull = grad_entropy[part, None] * (logp + entropies[part, None]) + grad_logprobs[part, None]
                dz = logp.exp_().mul_(pull).neg_()
            else:
                dz = logp.exp_().mul_(-grad_logprobs[part, None])
            dz.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            dz = dz.to(hidden.dtype)
            torch.mm(dz, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = dz.t() @ hidden[part] if grad_weight is None else grad_weight.addmm_(dz.t(), hidden[part])
            if bias is not None:
                summed = (dz * inverse[part, None].to(dz.dtype)).sum(0)
                grad_bias = summed if grad_bias is None else grad_bias + summed
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inverse: torch.Tensor | None, part: slice
) -> torch.Tensor:
    logits = hidden[part] @ weight.t()
    if bias is not None and inverse is not None:
        logits += bias * inverse[part, None].to(bias.dtype)
    return torch.log_softmax(logits.float(), -1)


def _entropy(logp: torch.Tensor) -> torch.Tensor:
    return -(logp.exp() * logp).sum(-1)
