"""The trainer's log-prob of every trained token before a step, and its advantage, for the ledger
(monitor.keep_trainer_logprobs).

What a step computes comes with its result.  Rows that it leaves out, because nothing is learnt from
them, are scored beforehand. Knows ranks and leases; not tables.  Invariant: all numbers are of the
weights before the step, in the order of each row's own tokens.
"""

from __future__ import annotations

from rft.trainer.batch_builder import DecodedLease, StepBatch
from rft.trainer.ranks import Ranks
from rft.trainer.step_result import StepResult
from rft.types import token_logprobs


async def step(
    ranks: Ranks, given: DecodedLease, batch: StepBatch
) -> tuple[StepResult, bytes | None]:
    """The train step, and what `BufferReader.use` gets: a frame for all rows of the lease, or None
    where nothing is kept.
    """
    if not ranks.settings.keep_trainer_logprobs:
        return await ranks.step(batch.shares, batch.critic), None
    order = batch.order if ranks.learns(batch) else []
    left = sorted(set(range(len(given.rows))) - set(order))
    scores = await ranks.compute([given.rows[i] for i in left], ("old",)) if left else []
    found = {i: score["old"] for i, score in zip(left, scores, strict=True)}
    report = await ranks.step(batch.shares, batch.critic)
    # of a row that was drawn several times one is as good as another
    found |= zip(order, report.logprobs, strict=True)
    rows = given.experiences
    made = [
        token_logprobs.beside(rows[i], p, batch.advantages.get(i)) for i, p in sorted(found.items())
    ]
    return report, token_logprobs.encode(made)
