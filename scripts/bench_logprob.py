"""`logprob_kernel`: log-probs and entropies of tokens from hidden states, and their gradients,
against plain PyTorch.

The output layer of SmolLM2: hidden size 576, vocabulary 49,152, float32, all cores, random numbers
of a model's size.  "plain" makes all logits, log_softmax, gather and entropy, and leaves the
gradient to autograd; "chunked" does so for 1,024 tokens at a time and computes them again in the
backward pass (torch.utils.checkpoint).  All run in turn in one process with the allocator that
trainer ranks have.  Peak memory is that of a fresh process for each way: the kernel's high-water
mark of resident memory, set back when the inputs are there, less what was resident then; the
gradients of hidden states and weight count.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from typing import Any

import bench_harness as harness

from rft.engine.environment import trainer_environment

HIDDEN = 576
VOCAB = 49_152
TOKENS = 2048
MORE_TOKENS = 4096
NEAR = 1e-5
SIDES = ("ours", "plain", "chunked")
DEADLINE_S = 900.0


class Unequal(Exception):
    """The ways did not compute the same; no ratio is worth anything."""


def _child() -> harness.Child:
    """`logprob_sides.py`."""
    threads = os.cpu_count() or 1
    spec = {"hidden": HIDDEN, "vocab": VOCAB, "threads": threads}
    return harness.Child(
        "logprob_sides.py",
        [sys.executable, harness.ROOT / "scripts" / "logprob_sides.py", json.dumps(spec)],
        answer_s=DEADLINE_S,
        env={**trainer_environment(threads), "PYTHONPATH": str(harness.ROOT)},
    )


def logprob_kernel(quick: bool) -> harness.Result:
    """Seconds of plain PyTorch / ours, of the forward pass (at least 1.0) and with the backward
    pass (at least 0.8: the logits are computed twice), and its peak memory / ours with the backward
    pass (at least 6.67, that is at most 0.15 of it).  Chunked PyTorch is published beside it.
    `entropy`: with entropies and their gradients.  Log-probs alone are published: there plain
    PyTorch makes fewer passes over its logits, and four products against its three leave at most
    0.75 to 0.9 of its speed.
    """
    before = harness.probes()
    checks: list[harness.Check] = []
    ours: dict[str, Any] = {}
    peer: dict[str, Any] = {}
    with _child() as child:
        apart: dict[str, float] = {}
        for entropy in (True, False):
            apart |= {
                f"{name}{' entropy' * entropy}": v
                for name, v in child.ask(compare=TOKENS, entropy=entropy).items()
            }
        if not max(apart.values()) <= NEAR:
            raise Unequal(f"results differ by {apart}; allowed are {NEAR}")
        for tokens, entropy in ((TOKENS, True), (TOKENS, False), (MORE_TOKENS, True)):
            for backward in (False, True):
                name = (
                    f"{'forward_backward' if backward else 'forward'} "
                    f"{tokens}{' entropy' * entropy}"
                )
                order = {"tokens": tokens, "entropy": entropy, "backward": backward}
                harness.note(name)
                # short ones vary more
                rounds = (5 if quick else 7) if backward else (9 if quick else 15)
                took = harness.all_in_turn(
                    {s: _timed(child, s, order) for s in SIDES}, rounds, discard=3
                )
                checks += [
                    harness.speed_ratio(
                        name,
                        took["ours"],
                        took["plain"],
                        (0.8 if backward else 1.0) if entropy else None,
                    ),
                    harness.speed_ratio(f"{name}, chunked", took["ours"], took["chunked"], None),
                ]
                ours[name] = harness.summary(
                    took["ours"], gflops=_gflops(tokens, backward, took["ours"])
                )
                peer[name] = {s: round(statistics.median(took[s]), 3) for s in SIDES if s != "ours"}
    for tokens, entropy in ((TOKENS, True), (TOKENS, False), (MORE_TOKENS, True)):
        name = f"peak_memory {tokens}{' entropy' * entropy}"
        found = {side: [_peak(side, tokens, entropy) for _ in range(2)] for side in SIDES}
        checks += [_memory(name, found["plain"], found["ours"], 1 / 0.15 if entropy else None)]
        checks += [_memory(f"{name}, chunked", found["chunked"], found["ours"], None)]
        ours[name] = _mib(found["ours"])
        peer[name] = {s: _mib(found[s]) for s in SIDES if s != "ours"}
    return harness.Result(
        "logprob_kernel",
        checks,
        {**ours, "apart": {name: float(f"{v:.1e}") for name, v in apart.items()}},
        peer,
        before,
        versions=harness.versions("torch"),
    )


def _timed(child: harness.Child, side: str, order: dict[str, Any]) -> Any:
    return lambda: child.ask(side=side, **order)["seconds"]


def _peak(side: str, tokens: int, entropy: bool) -> float:
    """Bytes, in a process that does nothing else."""
    with _child() as child:
        return float(
            child.ask(side=side, tokens=tokens, entropy=entropy, backward=True)["peak_bytes"]
        )


def _memory(name: str, peer: list[float], ours: list[float], goal: float | None) -> harness.Check:
    """Median of the runs, and the least and most that any two give."""
    ratios = [b / a for a in ours for b in peer]
    return harness.Check(
        name,
        round(statistics.median(ratios), 3),
        round(min(ratios), 3),
        round(max(ratios), 3),
        None if goal is None else round(goal, 3),
    )


def _gflops(tokens: int, backward: bool, seconds: list[float]) -> float:
    """Multiplications that the result needs, 2 or 6 for each number of hidden state and weight, per
    second.
    """
    return round(
        (6 if backward else 2) * tokens * HIDDEN * VOCAB / statistics.median(seconds) / 1e9, 1
    )


def _mib(found: list[float]) -> float:
    return round(statistics.median(found) / 2**20, 1)
