"""The trainer's log-prob of every trained token before a step, for the ledger (monitor.keep_trainer_logprobs).

What a step computes comes with its result.  Rows that it leaves out, because nothing is learnt from them, are scored beforehand.
Knows ranks and leases; not tables.  Invariant: all numbers are of the weights before the step, in the order of each row's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rft.trainer.batch_builder import DecodedLease, StepBatch
from rft.trainer.ranks import Ranks
from rft.trainer.step_result import StepResult
from rft.types import token_logprobs


@dataclass(frozen=True)
class KeptLogprobs:
    """Of one lease: `order`, the rows that the step computes; `others`, by row, those of the rest."""

    given: DecodedLease
    order: list[int]
    others: dict[int, np.ndarray]

    def frame(self, report: StepResult) -> bytes:
        """For `BufferReader.use`.  Of a row that was drawn several times any is as good as another."""
        found = {**self.others, **dict(zip(self.order, report.logprobs, strict=True))}
        rows = self.given.experiences
        return token_logprobs.encode([token_logprobs.beside(rows[i], found[i]) for i in sorted(found)])


async def before(ranks: Ranks, given: DecodedLease, batch: StepBatch) -> KeptLogprobs | None:
    """What the step will not compute; None where nothing is kept."""
    if not ranks.settings.keep_trainer_logprobs:
        return None
    order = batch.order if ranks.learns(batch) else []
    left = sorted(set(range(len(given.rows))) - set(order))
    scores = await ranks.compute([given.rows[i] for i in left], ("old",)) if left else []
    return KeptLogprobs(given, order, {i: found["old"] for i, found in zip(left, scores, strict=True)})
