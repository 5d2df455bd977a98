"""From a lease to what each rank computes: rows checked, advantages taken, left-out rows counted, micro-batches planned.

The one place where advantages are computed.  Knows experiences and the algorithm; not models.
Invariant: denominators count every trained token of the lease, also of rows whose loss is known to be zero and is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rft.algorithm.build import Algorithm
from rft.errors import RunFailed
from rft.trainer.pack import Budget, RankBatch, TrainRow, plan
from rft.types.block import decode
from rft.types.experience import Experience
from rft.types.ports import GroupStats, Lease

# Policy losses that are exactly 0, with zero gradient, where the advantage is 0.
ZERO_WITHOUT_ADVANTAGE = frozenset({"ppo"})


@dataclass(frozen=True)
class Feed:
    """One train step, ready for the ranks, and what there is to say about it."""

    shares: list[RankBatch]
    tokens: int  # trained tokens, those of skipped rows included
    rows: int
    skipped_rows: int  # their loss is exactly 0
    staleness: list[int]  # of each row, in train steps
    metrics: dict[str, float]


def make(lease: Lease, algorithm: Algorithm, budget: Budget, *, world_size: int, policy_loss: str) -> Feed:
    """The shares of all ranks.  Raises RunFailed for rows that an on-policy loss cannot use, ConfigError where they do not fit."""
    rows = decode(lease.frame)
    for row in rows:
        check(row)
    stats = {g.group: g for g in lease.groups}
    groups = [_stats(row, stats) for row in rows]
    advantages = algorithm.advantages([float(r.reward) for r in rows if r.reward is not None], groups)
    made = [_train_row(row, float(a)) for row, a in zip(rows, advantages, strict=True)]
    needs = algorithm.needs
    skippable = policy_loss in ZERO_WITHOUT_ADVANTAGE and not needs.reference and not needs.entropy and budget.rows is None
    kept = [row for row in made if not (skippable and row.advantage == 0.0)]
    tokens = sum(int(row.loss_mask.sum()) for row in made)
    cut = plan(kept, world_size, budget)
    shares = [
        RankBatch(
            step=lease.step,
            micro_batches=tuple(tuple(kept[i] for i in m) for m in mine),
            tokens=float(tokens),
            rows=float(len(made)),
        )
        for mine in cut
    ]
    staleness = [lease.step - 1 - v.step for row in rows if (v := row.oldest_version) is not None]
    zero = [not g.rewards or min(g.rewards) == max(g.rewards) for g in lease.groups]
    lengths = [r.num_response_tokens for r in rows]
    metrics = {
        "frac_reward_zero_std": float(np.mean(zero)) if zero else 0.0,
        "experience/staleness/mean": float(np.mean(staleness)) if staleness else 0.0,
        "experience/staleness/max": float(max(staleness, default=0)),
        "experience/rows": float(len(rows)),
        "experience/groups": float(len(lease.groups)),
        "experience/response_tokens": float(tokens),
        "experience/response_length/mean": float(np.mean(lengths)) if lengths else 0.0,
        "experience/response_length/max": float(max(lengths, default=0)),
        "experience/reward/mean": float(np.mean([r.reward for r in rows])) if rows else 0.0,
        "experience/advantage/abs_mean": float(np.mean(np.abs(advantages))) if len(advantages) else 0.0,
        "experience/skipped_rows": float(len(made) - len(kept)),
    }
    return Feed(shares, tokens, len(made), len(made) - len(kept), staleness, metrics)


def check(row: Experience) -> None:
    """Raises RunFailed for a row that cannot be trained on: the ratio of a clipped loss needs the sampler's exact log-probs."""
    where = f"experience {row.id} of taskset {row.taskset!r}"
    if not row.trainable:
        raise RunFailed(
            f"{where} was leased but is {row.status} with reward {row.reward}; only scored rows with a response can be trained on"
        )
    if row.loss_mask[0]:
        raise RunFailed(f"{where}: its first token is trained, but nothing comes before it to predict it")
    if row.is_expert or not row.has_logprobs:
        raise RunFailed(f"{where} has no log-probs of a sampling policy; this loss needs them")
    for record in row.sampling:
        if not record.sampling.reproducible:
            s = record.sampling
            raise RunFailed(
                f"{where} was sampled with temperature {s.temperature}, top_p {s.top_p}, top_k {s.top_k}, min_p {s.min_p}, min_tokens "
                f"{s.min_tokens} and penalties {s.presence_penalty}/{s.frequency_penalty}/{s.repetition_penalty}.  An on-policy loss can "
                "only use temperature > 0, top_p 1, top_k -1, min_p 0, min_tokens 0 and no penalties: change the taskset's rollout_args"
            )
        if record.logprob_mode != "processed":
            raise RunFailed(f"{where} has {record.logprob_mode} log-probs; training needs those of the processed distribution")


def _stats(row: Experience, stats: dict[str, GroupStats]) -> GroupStats:
    try:
        return stats[str(row.group)]
    except KeyError:
        raise RunFailed(f"the lease has experience {row.id} but no statistics of its group {row.group}") from None


def _train_row(row: Experience, advantage: float) -> TrainRow:
    temperatures = np.full(len(row.tokens), row.temperature, np.float32)
    for record in row.sampling:
        temperatures[record.start : record.end] = record.sampling.temperature
    return TrainRow(
        tokens=row.tokens,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        temperatures=temperatures,
        advantage=advantage,
        group=str(row.group),
    )
