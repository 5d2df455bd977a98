"""Metric sums and maxima of one step on one rank, kept on the device until they are read once.

Knows rows and micro-batches; not models or losses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from rft.algorithm.correction import LIMIT, NEAR
from rft.trainer.batch import MicroBatch
from rft.trainer.pack import TrainRow
from rft.trainer.step_result import MISMATCH


def mismatch(
    apart: torch.Tensor, mask: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sums and maxima from which `mismatch/*` is made.  `apart`: log-prob here less the sampler's,
    [N], before the first update.
    """
    apart = apart[mask].clamp(-LIMIT, LIMIT)
    ratio = apart.exp()
    sums = {
        "tokens": torch.ones_like(ratio).sum(),
        "ratio": ratio.sum(),
        "squares": ratio.square().sum(),
        "outside": ((ratio < NEAR[0]) | (ratio > NEAR[1])).float().sum(),
        "abs_diff": apart.abs().sum(),
    }
    largest = {"ratio": ratio, "abs_diff": apart.abs()} if ratio.numel() else {}
    return {MISMATCH + n: t for n, t in sums.items()}, {
        MISMATCH + n: t.max() for n, t in largest.items()
    }


class StepTotals:
    """What micro-batches add up to."""

    def __init__(self) -> None:
        self.sums: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.maxima: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.tokens = 0
        self.positions = 0

    def add(
        self,
        sums: dict[str, torch.Tensor],
        maxima: dict[str, torch.Tensor],
        rows: Sequence[TrainRow],
        micro: MicroBatch,
    ) -> None:
        for name, value in sums.items():
            self.sums[name].append(value)
        for name, value in maxima.items():
            self.maxima[name].append(value)
        # known on the host: reading the mask would wait for the device
        self.tokens += sum(row.counted for row in rows)
        self.positions += micro.computed

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        return (
            {name: torch.stack(v).double().sum().item() for name, v in self.sums.items()},
            {name: torch.stack(v).max().item() for name, v in self.maxima.items()},
        )


def over_passes(
    passes: Sequence[tuple[dict[str, float], dict[str, float]]],
) -> tuple[dict[str, float], dict[str, float]]:
    """`numbers` of several passes as those of a step: means and maxima; of a mismatch those of the
    first, before any update.
    """
    sums: dict[str, float] = defaultdict(float)
    maxima: dict[str, float] = {}
    for number, (added, largest) in enumerate(passes):
        for name, value in added.items():
            if not name.startswith(MISMATCH):
                sums[name] += value / len(passes)
            elif number == 0:
                sums[name] = value
        for name, value in largest.items():
            if number == 0 or not name.startswith(MISMATCH):
                maxima[name] = max(maxima.get(name, value), value)
    return dict(sums), maxima
