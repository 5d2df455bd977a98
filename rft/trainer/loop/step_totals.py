"""Add up metric sums and maxima of one step on one rank, on the device until they are read once.

Depends on rows and micro-batches, not on models or losses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from rft.algorithm.correction import LIMIT, NEAR
from rft.trainer.loop.step_result import MISMATCH
from rft.trainer.model.batch import MicroBatch
from rft.trainer.rows.pack import TrainRow


def mismatch(
    apart: torch.Tensor, mask: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the sums and maxima from which `mismatch/*` is computed.

    `apart`: trainer's log-prob minus the sampler's, [N], before the first update.
    """
    # a boolean index would wait for the device
    size = torch.where(mask, apart, 0).clamp(-LIMIT, LIMIT)
    ratio = torch.where(mask, size.exp(), 0)
    outside = mask & ((ratio < NEAR[0]) | (ratio > NEAR[1]))
    sums = {
        "tokens": mask.float().sum(),
        "ratio": ratio.sum(),
        "squares": ratio.square().sum(),
        "outside": outside.float().sum(),
        "abs_diff": size.abs().sum(),
    }
    largest = {"ratio": ratio, "abs_diff": size.abs()} if mask.numel() else {}
    return {MISMATCH + n: t for n, t in sums.items()}, {
        MISMATCH + n: t.max() for n, t in largest.items()
    }


class StepTotals:
    """Totals over micro-batches."""

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
        # counted on the host: reading the mask would wait for the device
        self.tokens += sum(row.counted for row in rows)
        self.positions += micro.computed

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the sums and maxima, read from the device at once."""
        totals = [torch.stack(v).double().sum() for v in self.sums.values()]
        totals += [torch.stack(v).double().max() for v in self.maxima.values()]
        values = torch.stack(totals).tolist() if totals else []
        sums = dict(zip(self.sums, values, strict=False))
        return sums, dict(zip(self.maxima, values[len(sums) :], strict=True))


def over_passes(
    passes: Sequence[tuple[dict[str, float], dict[str, float]]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Combine the `numbers` of several passes into those of a step: means and maxima.

    For a mismatch the first pass counts alone, before any update.
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
