"""A train step that also collects the trainer's log-prob and advantage of every trained token, for
the ledger (monitor.keep_trainer_logprobs).

Depends on ranks and leases, not on tables.  Invariant: all numbers belong to the weights before the
step, in the order of each row's trained tokens.
"""

from __future__ import annotations

from rft.trainer.loop.ranks import Ranks
from rft.trainer.loop.step_result import StepResult
from rft.trainer.rows.batch_builder import DecodedLease, StepBatch
from rft.types import token_logprobs


async def train_step(
    ranks: Ranks, decoded: DecodedLease, batch: StepBatch
) -> tuple[StepResult, bytes | None]:
    """Train a step; return its result and the encoded numbers of all rows, None if not kept.

    For rows that the step leaves out, the log-probs are computed before it.
    """
    if not ranks.settings.keep_trainer_logprobs:
        return await ranks.step(batch.shares, batch.critic), None
    order = batch.order if ranks.learns(batch) else []
    untrained = sorted(set(range(len(decoded.rows))) - set(order))
    rows = [decoded.rows[i] for i in untrained]
    scores = await ranks.compute(rows, ("old",)) if rows else []
    logprobs = {i: score["old"] for i, score in zip(untrained, scores, strict=True)}
    report = await ranks.step(batch.shares, batch.critic)
    # copies of a row selected several times have equal numbers
    logprobs |= zip(order, report.logprobs, strict=True)
    records = [
        token_logprobs.of_row(decoded.experiences[i], array, batch.advantages.get(i))
        for i, array in sorted(logprobs.items())
    ]
    return report, token_logprobs.encode(records)
