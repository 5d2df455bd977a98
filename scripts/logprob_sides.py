"""A process that computes log-probs and entropies of tokens in one way or another; `bench_logprob`
starts it.

    python scripts/logprob_sides.py SPEC      SPEC: {hidden, vocab, threads}

Orders come as lines of JSON, {side, tokens, backward, entropy}; each answer is {seconds,
peak_bytes}, the peak above the inputs.  The order {compare, entropy} answers with how far the other
sides are from "plain".
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rft.trainer.model.logprobs import token_logprobs
from rft.trainer.settings import LearnerSettings

# of chunked PyTorch; 2048 is what entropy_from_logits_with_chunking takes, without the output layer
# in it
CHUNK = 1024
Pair = tuple[torch.Tensor, torch.Tensor | None]
Side = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Pair]


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> Pair:
    """All logits, float32, and autograd."""
    logp = torch.log_softmax(hidden @ weight.t(), -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1) if entropy else None


def chunked(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool
) -> Pair:
    """The same for some tokens at a time, computed again in the backward pass."""
    made = [
        checkpoint(plain, h, weight, t, entropy, use_reentrant=False)
        for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return torch.cat([logp for logp, _ in made]), torch.cat(
        [e for _, e in made]
    ) if entropy else None


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, entropy: bool) -> Pair:
    """As the learner asks for them where all temperatures are 1."""
    chunk = LearnerSettings(model_path="").logprob_chunk_tokens
    return token_logprobs(hidden, weight, targets, None, chunk_tokens=chunk, entropy=entropy)[:2]


SIDES: dict[str, Side] = {"ours": ours, "plain": plain, "chunked": chunked}


class Inputs:
    """Of the first `tokens` tokens: what a model of that size has before its output layer."""

    def __init__(self, spec: dict[str, Any], tokens: int) -> None:
        made = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, spec["hidden"], generator=made)
        self.weight = torch.randn(spec["vocab"], spec["hidden"], generator=made) * (
            2.0 / spec["hidden"] ** 0.5
        )
        self.targets = torch.randint(0, spec["vocab"], (tokens,), generator=made)
        self.pull = torch.randn(2, tokens, generator=made) / tokens

    def run(self, side: Side, *, backward: bool, entropy: bool) -> list[torch.Tensor]:
        """Log-probs, entropies, and gradients of hidden states and weight, as far as they are asked
        for.
        """
        hidden = self.hidden.detach()
        weight = self.weight.detach()
        if not backward:
            with torch.no_grad():
                return [t for t in side(hidden, weight, self.targets, entropy) if t is not None]
        hidden.requires_grad_(), weight.requires_grad_()
        logp, entropies = side(hidden, weight, self.targets, entropy)
        loss = (logp * self.pull[0]).sum()
        if entropies is not None:
            loss = loss + (entropies * self.pull[1]).sum()
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return [t.detach() for t in (logp, entropies, hidden.grad, weight.grad) if t is not None]


def peaks() -> tuple[int, int]:
    """(resident bytes now, the most there were)."""
    text = Path("/proc/self/status").read_text()
    now, most = (
        int(re.findall(rf"{name}:\s+(\d+) kB", text)[0]) * 1024 for name in ("VmRSS", "VmHWM")
    )
    return now, most


def measured(inputs: Inputs, order: dict[str, Any]) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the most there were is what there is now
    before, _ = peaks()
    began = time.perf_counter()
    inputs.run(SIDES[order["side"]], backward=order["backward"], entropy=order["entropy"])
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_bytes": peaks()[1] - before}


def apart(inputs: Inputs, entropy: bool) -> dict[str, float]:
    """Largest difference from "plain" over the largest number there, of each side and result."""
    wanted = inputs.run(plain, backward=True, entropy=entropy)
    found = {}
    for name in ("ours", "chunked"):
        made = inputs.run(SIDES[name], backward=True, entropy=entropy)
        found[name] = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(made, wanted, strict=True)
        )
    return found


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    small = Inputs({**spec, "vocab": 64}, 64)
    for side in SIDES.values():  # libraries and threads are there
        small.run(side, backward=True, entropy=True)
    inputs: dict[int, Inputs] = {}
    for line in sys.stdin:
        order = json.loads(line)
        tokens = order.get("tokens") or order["compare"]
        if tokens not in inputs:
            inputs = {tokens: Inputs(spec, tokens)}
        answer = (
            apart(inputs[tokens], order["entropy"])
            if "compare" in order
            else measured(inputs[tokens], order)
        )
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
