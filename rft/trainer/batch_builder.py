"""From a lease to what each rank computes: rows checked, advantages taken, left-out rows counted,
micro-batches planned.

The one place where advantages are computed.  Knows experiences and the algorithm; not models.
Invariant: denominators count every trained token of the lease, also of rows whose loss is known to
be zero and is not computed.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rft.algorithm.args import Computed, Sampled
from rft.algorithm.base import PreparedStep, StepInputs, StepRow
from rft.algorithm.composition import Algorithm
from rft.algorithm.value import explained_variance
from rft.errors import RunFailed
from rft.trainer.pack import Budget, RankBatch, TrainRow, plan
from rft.types.block import decode
from rft.types.credit import compared, run_rewards
from rft.types.experience import Experience, scored_members
from rft.types.ids import ExperienceId, GroupId
from rft.types.ports import Lease

log = logging.getLogger(__name__)
_SUMMARY: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max, "min": np.min}


@dataclass(frozen=True)
class DecodedLease:
    """A lease, decoded and checked: its experiences and, in the same order, what the learner sees
    of them.
    """

    lease: Lease
    experiences: list[Experience]
    rows: list[TrainRow]


@dataclass(frozen=True)
class StepBatch:
    """One train step, ready for the ranks, and what there is to say about it."""

    shares: list[RankBatch]
    tokens: int  # trained tokens, those of skipped rows included
    rows: int
    staleness: list[int]  # of each row, in train steps
    critic: list[RankBatch] | None = None  # what the critic learns
    kl: float | None = None  # of the KL in the reward, before this step
    # rows of the lease in `shares`, micro-batch by micro-batch, rank by rank
    order: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    # float32 [L] by row of the lease, of those that were drawn
    advantages: dict[int, np.ndarray] = field(default_factory=dict)


def read(
    lease: Lease, *, samples: Sampled = "all", pairs: bool = False, any_sampling: bool = False
) -> DecodedLease:
    """The others are those of `Needs`.  Raises RunFailed for rows that the policy loss cannot use."""
    experiences = decode(lease.frame, checked=True)
    known = {g.group for g in lease.groups}
    rows = [train_row(x, pairs) for x in experiences]
    for x, row in zip(experiences, rows, strict=True):
        check(x, samples, any_sampling)
        if not x.is_expert and row.group not in known:
            raise RunFailed(
                f"the lease has experience {x.id} but no statistics of its group {row.group}"
            )
    if samples != "none":
        _say_if_certain(lease.step, experiences)
    if pairs:
        _check_pairs(experiences)
    return DecodedLease(lease, experiences, rows)


def make(
    given: DecodedLease,
    algorithm: Algorithm,
    budget: Budget,
    *,
    world_size: int,
    computed: Sequence[Mapping[Computed, np.ndarray]] = (),
    seed: int = 0,
    critic_budget: Budget | None = None,
    kl_coefs: Mapping[str, float] | None = None,
) -> StepBatch:
    """The shares of all ranks.  `computed`: for each row what `algorithm.needs.before` asks for.
    `kl_coefs`: factors of the KL terms in this step, by the names of `needs.controllers`.
    """
    kl_coefs = kl_coefs or {}
    lease = given.lease
    experiences = given.experiences
    stats = {g.group: g for g in lease.groups}
    computed = computed or [{}] * len(experiences)
    rows = [
        _step_row(x, row.group, more)
        for x, row, more in zip(experiences, given.rows, computed, strict=True)
    ]
    x = StepInputs(rows=rows, groups=stats, step=lease.step, seed=seed)
    prepared = algorithm.prepare(x, kl_coef=kl_coefs.get("kl_penalty"))
    drawn = range(len(given.rows)) if prepared.drawn is None else prepared.drawn
    ids = [experiences[i].id for i in drawn]
    made = _with_runs(
        [_completed(given.rows[row], i, prepared, computed[row]) for i, row in enumerate(drawn)],
        ids,
    )
    left = [
        i
        for i, row in enumerate(made)
        if not (
            algorithm.needs.skips_zero
            and row.advantages is not None
            and not np.count_nonzero(row.advantages)
        )
        and (row.keep is None or row.keep.any())
    ]
    kept = [made[i] for i in left]
    cut = plan(kept, world_size, budget)
    shares = _shares(made, cut, kept, lease.step, kl_coefs.get("kl_loss"))
    critic = None
    if critic_budget is not None:
        taught = [row for row in made if not row.is_expert and (row.keep is None or row.keep.any())]
        critic = _shares(taught, plan(taught, world_size, critic_budget), taught, lease.step, None)
    tokens = sum(row.counted for row in made)
    staleness = [
        lease.step - 1 - v.step for x in experiences if (v := x.oldest_version) is not None
    ]
    metrics = _metrics(given, prepared, staleness, tokens) | {
        "experience/skipped_rows": float(len(made) - len(kept))
    }
    metrics |= _masked_runs(lease.step, made, ids)
    metrics |= _values(made, prepared, critic is not None)
    loads = [
        sum(len(row.tokens) for micro in share.micro_batches for row in micro) for share in shares
    ]
    metrics |= {
        "perf/rank_tokens/max": float(max(loads)),
        "perf/rank_tokens/min": float(min(loads)),
    }
    order = [drawn[left[i]] for mine in cut for micro in mine for i in micro]
    advantages = dict(zip(drawn, prepared.advantages, strict=True))
    return StepBatch(
        shares, tokens, len(made), staleness, critic, prepared.kl, order, metrics, advantages
    )


def _with_runs(rows: Sequence[TrainRow], ids: Sequence[ExperienceId]) -> list[TrainRow]:
    """The rows with the number of their run and its tokens.  A run that was drawn several times is
    as many runs.
    """
    seen: Counter[ExperienceId] = Counter()
    numbers: dict[tuple[GroupId, int, int], int] = {}
    of = []
    for id in ids:
        of.append(numbers.setdefault((id.group, id.run, seen[id]), len(numbers)))
        seen[id] += 1
    tokens = np.bincount(of, weights=[row.counted for row in rows], minlength=len(numbers))
    return [
        msgspec.structs.replace(row, run=n, run_tokens=int(tokens[n]))
        for row, n in zip(rows, of, strict=True)
    ]


def _masked_runs(
    step: int, rows: Sequence[TrainRow], ids: Sequence[ExperienceId]
) -> dict[str, float]:
    """How many runs have no token that counts; the first is named."""
    masked = {row.run: id for row, id in zip(rows, ids, strict=True) if not row.run_tokens}
    for id in list(masked.values())[:1]:
        log.info(
            "step %d: no token of run %d of group %s counts (%d such runs)",
            step,
            id.run,
            id.group,
            len(masked),
        )
    return {"experience/masked_runs": float(len(masked))}


def _shares(
    every: Sequence[TrainRow],
    cut: list[list[list[int]]],
    rows: Sequence[TrainRow],
    step: int,
    kl_coef: float | None,
) -> list[RankBatch]:
    """What each rank computes of `rows`; denominators are those of `every` row."""
    counted = [(row.counted, row.is_expert, row.run) for row in every]
    runs = {(run, expert) for n, expert, run in counted if n}
    return [
        RankBatch(
            step=step,
            micro_batches=tuple(tuple(rows[i] for i in m) for m in mine),
            tokens=float(sum(n for n, *_ in counted)),
            rows=float(sum(n > 0 for n, *_ in counted)),
            positions=float(sum(len(row.inputs) for row in rows)),
            expert_tokens=float(sum(n for n, expert, _ in counted if expert)),
            expert_rows=float(sum(n > 0 and expert for n, expert, _ in counted)),
            num_runs=float(len(runs)),
            expert_runs=float(sum(expert for _, expert in runs)),
            kl_coef=kl_coef,
            ref_given=any(row.ref is not None for row in rows),
        )
        for mine in cut
    ]


def _values(rows: Sequence[TrainRow], prepared: PreparedStep, critic: bool) -> dict[str, float]:
    """Of all tokens that count: advantages, and with a critic its values and what they should have
    been.
    """

    def told(name: str) -> np.ndarray:
        arrays = [(getattr(row, name), row.keep) for row in rows if not row.is_expert]
        return np.concatenate(
            [np.zeros(0), *(a if keep is None else a[keep] for a, keep in arrays if a is not None)]
        )

    found = {"advantages": told("advantages")}
    if prepared.rewards is not None:
        found["rewards"] = np.array([r.sum() for r in prepared.rewards])
    if critic:
        found |= {"returns": told("returns"), "values": told("values")}
    with np.errstate(invalid="ignore"):  # a step with infinite advantages is skipped and named
        made = {
            f"critic/{name}/{kind}": float(how(v))
            for name, v in found.items()
            if v.size
            for kind, how in _SUMMARY.items()
        }
    if critic and found["returns"].size:
        made["critic/vf_explained_var"] = explained_variance(found["values"], found["returns"])
    return made


def _metrics(
    given: DecodedLease, prepared: PreparedStep, staleness: list[int], tokens: int
) -> dict[str, float]:
    rows = given.experiences
    groups = given.lease.groups
    zero = [len(set(compared(g).rewards)) < 2 for g in groups]
    runs: dict[tuple[GroupId, int], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        runs[row.group, row.id.run].append(i)
    totals = [r.num_tokens for r in rows]
    lengths = [r.num_response_tokens for r in rows]
    responses = [sum(lengths[i] for i in mine) for mine in runs.values()]
    found = {
        "experience/rows": float(len(rows)),
        "experience/runs": float(len(runs)),
        "experience/groups": float(len(groups)),
        "experience/response_tokens": float(tokens),
        "experience/response_length/mean": float(np.mean(responses)) if responses else 0.0,
        "experience/response_length/max": float(max(responses, default=0)),
        "experience/response_length/min": float(min(responses, default=0)),
        "experience/prompt_length/mean": float(np.mean(np.subtract(totals, lengths)))
        if rows
        else 0.0,
        "experience/prompt_length/max": float(max(map(operator.sub, totals, lengths), default=0)),
        "experience/truncated_ratio": float(
            np.mean([any(rows[i].status == "truncated" for i in mine) for mine in runs.values()])
        )
        if rows
        else 0.0,
        "experience/tokens": float(sum(totals)),
    }
    routed = [r.routed_experts.nbytes for r in rows if r.routed_experts is not None]
    if routed:
        found |= {
            "experience/routed_rows": len(routed) / len(rows),
            "experience/routed_experts_bytes": float(sum(routed)),
        }
    if staleness:  # some rows were sampled, not given
        found |= {
            "experience/staleness/mean": float(np.mean(staleness)),
            "experience/staleness/max": float(max(staleness)),
        }
    of_runs = [
        r
        for mine in runs.values()
        for r in run_rewards(scored_members(rows[i] for i in mine)).values()
    ]
    if of_runs:
        found |= {
            "frac_reward_zero_std": float(np.mean(zero)),
            "experience/reward/mean": float(np.mean(of_runs)),
            "experience/advantage/abs_mean": _advantage_size(given, prepared),
            **{f"critic/score/{name}": float(how(of_runs)) for name, how in _SUMMARY.items()},
        }
    return found | dict(prepared.metrics)


def _advantage_size(given: DecodedLease, prepared: PreparedStep) -> float:
    """Mean over the policy's own runs of the mean size of their tokens' advantages."""
    rows = given.experiences
    which = range(len(rows)) if prepared.drawn is None else prepared.drawn
    sizes: dict[tuple[GroupId, int], list[np.ndarray]] = defaultdict(list)
    for i, advantages in zip(which, prepared.advantages, strict=True):
        if not rows[i].is_expert:
            sizes[rows[i].group, rows[i].id.run].append(np.abs(advantages))
    return (
        float(np.mean([np.concatenate(mine).mean() for mine in sizes.values()])) if sizes else 0.0
    )


def check(row: Experience, samples: Sampled, any_sampling: bool) -> None:
    """Raises RunFailed for a row that cannot be trained on: the ratio of a clipped loss needs the
    sampler's exact log-probs.

    `samples`: which rows have to have these; `any_sampling`: also those of a distribution that the
    trainer cannot compute.
    """
    # an expert's row has no reward, and none is read
    scored = row.reward is not None or row.is_expert
    if row.status == "failed" or not scored or not row.num_response_tokens:
        raise RunFailed(
            f"{_where(row)} was leased but is {row.status} with reward {row.reward}; only scored "
            f"rows with a response can be trained on"
        )
    if row.loss_mask.item(0):
        raise RunFailed(
            f"{_where(row)}: its first token is trained, but nothing comes before it to predict it"
        )
    if samples == "none" or (samples == "own" and row.is_expert):
        return
    if row.is_expert or not row.has_logprobs:
        raise RunFailed(
            f"{_where(row)} has no log-probs of a sampling policy; this loss needs them"
        )
    for record in row.sampling:
        s = record.sampling
        if not (s.reproducible or (any_sampling and s.temperature > 0)):
            raise RunFailed(
                f"{_where(row)} was sampled with temperature {s.temperature}, top_p {s.top_p}, "
                f"top_k {s.top_k}, min_p {s.min_p}, "
                f"min_tokens {s.min_tokens} and penalties "
                f"{s.presence_penalty}/{s.frequency_penalty}/{s.repetition_penalty}.  An "
                "on-policy loss can only use temperature > 0, top_p 1, top_k -1, min_p 0, "
                "min_tokens 0 and no penalties: change the "
                "taskset's rollout_args"
            )
        if record.logprob_mode != "processed":
            raise RunFailed(
                f"{_where(row)} has {record.logprob_mode} log-probs; training needs those of the "
                f"processed distribution"
            )


def _where(row: Experience) -> str:
    return f"experience {row.id} of taskset {row.taskset!r}"


def _say_if_certain(step: int, rows: Sequence[Experience]) -> None:
    """A sampler may have been certain of every token of a step, but hardly ever is; then log-probs
    were not reported.
    """
    sampled = [row for row in rows if row.has_logprobs and not row.is_expert]
    if sampled and not any(row.logprobs.any() for row in sampled):
        log.warning(
            "step %d: every log-prob of the policy that sampled its %d rows is 0, as if it had "
            "been certain of each token.  If it was not, "
            "what made the rows does not report log-probs: it has to write has_logprobs false, and "
            "only losses that need none can use them",
            step,
            len(sampled),
        )


def _check_pairs(rows: Sequence[Experience]) -> None:
    """Raises RunFailed unless each group is two rows that follow each other, the chosen one first."""
    for chosen, rejected in zip(rows[0::2], rows[1::2], strict=False):
        if chosen.group != rejected.group or chosen.id.run == rejected.id.run:
            raise RunFailed(
                f"experience {chosen.id} is not followed by the other one of its pair, but by "
                f"{rejected.id}"
            )
        if (chosen.reward or 0.0) < (rejected.reward or 0.0):
            raise RunFailed(
                f"experience {chosen.id} comes first in its pair, as the chosen one, but has the "
                f"lower reward"
            )
    if len(rows) % 2:
        raise RunFailed(
            f"experience {rows[-1].id} is alone; a preference loss needs pairs: a chosen row, then "
            f"a rejected one"
        )


def train_row(row: Experience, pairs: bool = False) -> TrainRow:
    """What the learner sees of an experience; `pairs`: the rows of its group are a pair."""
    temperatures: np.ndarray | float = row.temperature
    if any(record.sampling.temperature != temperatures for record in row.sampling):
        temperatures = np.full(len(row.tokens), row.temperature, np.float32)
        for record in row.sampling:
            temperatures[record.start : record.end] = record.sampling.temperature
    return TrainRow(
        tokens=row.tokens,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        temperatures=temperatures,
        experts=row.routed_experts,
        is_expert=row.is_expert,
        group=(group := str(row.group)),
        pair=group if pairs else "",
    )


def _step_row(row: Experience, group: str, computed: Mapping[Computed, np.ndarray]) -> StepRow:
    mask = row.loss_mask
    return StepRow(
        group=group,
        run=row.id.run,
        step=row.id.step,
        reward=float(row.reward or 0.0),  # of an expert's row never read
        credit=row.credit,
        logprobs=row.logprobs[mask],
        token_rewards=None if row.token_rewards is None else _earned(row.token_rewards, mask),
        teacher=None if row.teacher_logprobs is None else row.teacher_logprobs[mask],
        is_expert=row.is_expert,
        info=row.info,
        **{str(name): values for name, values in computed.items()},
    )


def _earned(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float32 [L]: rewards of the trained tokens; what stands on a tool's or a user's token was
    earned by the one trained before it.
    """
    trained = np.flatnonzero(mask)
    owner = np.maximum(np.searchsorted(trained, np.arange(len(mask)), side="right") - 1, 0)
    return np.bincount(owner, weights=rewards, minlength=len(trained)).astype(np.float32)


def _completed(
    row: TrainRow, i: int, prepared: PreparedStep, computed: Mapping[Computed, np.ndarray]
) -> TrainRow:
    """The row with what was computed for its step."""

    def of(given: Sequence[np.ndarray] | None) -> np.ndarray | None:
        return None if given is None else given[i]

    return msgspec.structs.replace(
        row,
        advantages=prepared.advantages[i],
        old=computed.get("old"),
        ref=computed.get("ref"),
        values=computed.get("values"),
        returns=of(prepared.returns),
        weights=of(prepared.weights),
        keep=of(prepared.keep),
        extra={name: arrays[i] for name, arrays in prepared.extra.items()},
    )
