"""Turn a lease into one batch per rank (its share): check rows, compute advantages, plan
micro-batches.

The one place where advantages are computed.  Depends on experiences and the algorithm, not on
models.  Invariant: denominators include the tokens of rows that are skipped because their loss is
zero.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rft.algorithm.args import Computed, Sampled
from rft.algorithm.base import PreparedStep, StepInputs, StepRow
from rft.algorithm.composition import Algorithm
from rft.algorithm.value import explained_variance
from rft.errors import RunFailed
from rft.trainer.rows.pack import Budget, RankBatch, RowImage, TrainRow, plan
from rft.types.block import decode
from rft.types.credit import compared, run_rewards
from rft.types.experience import Experience, scored_members
from rft.types.ids import ExperienceId, GroupId
from rft.types.ports import NO_IMAGES, Lease

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodedLease:
    """A lease, decoded and checked; `rows[i]` is the learner's view of `experiences[i]`."""

    lease: Lease
    experiences: list[Experience]
    rows: list[TrainRow]


@dataclass(frozen=True)
class StepBatch:
    """One train step, ready for the ranks, and its metrics."""

    shares: list[RankBatch]
    tokens: int  # trained tokens, including those of skipped rows
    rows: int
    staleness: list[int]  # one entry per row with a version, in train steps
    critic: list[RankBatch] | None = None  # the critic's batches
    kl: float | None = None  # KL of the reward's KL penalty, before this step
    # indexes of the lease's rows in `shares`, micro-batch by micro-batch, rank by rank
    order: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    # float32 [L] by index into the lease's rows; selected rows only
    advantages: dict[int, np.ndarray] = field(default_factory=dict)


def decode_lease(
    lease: Lease,
    *,
    samples: Sampled = "all",
    pairs: bool = False,
    any_sampling: bool = False,
    teacher_top: int = 0,
) -> DecodedLease:
    """Decode the rows of a lease and check them for the needs of the policy loss.

    As in the algorithm's `needs`: `samples`: which rows need the sampler's log-probs; `pairs`: rows
    are (chosen, rejected) pairs; `any_sampling`: accept sampling that the trainer cannot recompute;
    `teacher_top`: how many of a teacher's likeliest tokens rows must have.  Raises RunFailed for
    rows that the loss cannot use.
    """
    experiences = decode(lease.frame, checked=True)
    groups = {stats.group for stats in lease.groups}
    for experience in experiences:
        check(experience, samples, any_sampling)
        _check_top(experience, teacher_top)
        if not experience.is_expert and str(experience.group) not in groups:
            raise RunFailed(
                f"the lease has experience {experience.id} but no statistics of its group "
                f"{experience.group}"
            )
    if samples != "none":
        _warn_if_certain(lease.step, experiences)
    if pairs:
        _check_pairs(experiences)
    rows = [train_row(x, pairs, teacher_top, lease.images) for x in experiences]
    return DecodedLease(lease, experiences, rows)


def build_step(
    decoded: DecodedLease,
    algorithm: Algorithm,
    budget: Budget,
    *,
    world_size: int,
    computed: Sequence[Mapping[Computed, np.ndarray]] = (),
    seed: int = 0,
    critic_budget: Budget | None = None,
    factors: Mapping[str, float] | None = None,
) -> StepBatch:
    """Compute advantages and plan the shares of all ranks.

    `computed`: for each row the log-probs and values that `algorithm.needs.before` names.
    `factors`: current coefficients of KL and entropy terms, by the names of `needs.controllers`.
    """
    factors = dict(factors or {})
    step = decoded.lease.step
    computed = computed or [{}] * len(decoded.rows)
    inputs = StepInputs(
        rows=[step_row(x, c) for x, c in zip(decoded.experiences, computed, strict=True)],
        groups={stats.group: stats for stats in decoded.lease.groups},
        step=step,
        seed=seed,
    )
    prepared = algorithm.prepare(inputs, kl_coef=factors.get("kl_penalty"))
    selected = range(len(decoded.rows)) if prepared.selected is None else prepared.selected
    ids = [decoded.experiences[i].id for i in selected]
    rows = [_with_arrays(decoded.rows[i], n, prepared, computed[i]) for n, i in enumerate(selected)]
    rows = _with_run_numbers(rows, ids)
    to_train = [n for n, row in enumerate(rows) if _has_loss(row, algorithm.needs.skips_zero)]
    trained_rows = [rows[n] for n in to_train]
    micro_batches = plan(trained_rows, world_size, budget)
    shares = _shares(rows, trained_rows, micro_batches, step, factors)
    critic = None
    if critic_budget is not None:
        own_rows = [row for row in rows if not row.is_expert and _has_loss(row, False)]
        critic = _shares(own_rows, own_rows, plan(own_rows, world_size, critic_budget), step, {})
    tokens = sum(row.counted for row in rows)
    versions = [x.oldest_version for x in decoded.experiences]
    staleness = [step - 1 - version.step for version in versions if version is not None]
    metrics = _metrics(decoded, prepared, staleness, tokens)
    metrics["experience/skipped_rows"] = float(len(rows) - len(to_train))
    metrics |= _masked_runs(step, rows, ids)
    metrics |= _value_metrics(rows, prepared, critic is not None)
    metrics |= _rank_tokens(shares)
    return StepBatch(
        shares=shares,
        tokens=tokens,
        rows=len(rows),
        staleness=staleness,
        critic=critic,
        kl=prepared.kl,
        order=[selected[to_train[i]] for rank in micro_batches for micro in rank for i in micro],
        metrics=metrics,
        advantages=dict(zip(selected, prepared.advantages, strict=True)),
    )


def _has_loss(row: TrainRow, skips_zero: bool) -> bool:
    """Return whether the loss has a token of the row, with an advantage other than 0 if `skips_zero`."""
    if row.keep is not None and not row.keep.any():
        return False
    return not skips_zero or row.advantages is None or bool(np.count_nonzero(row.advantages))


def _with_run_numbers(rows: Sequence[TrainRow], ids: Sequence[ExperienceId]) -> list[TrainRow]:
    """Number the runs of the rows; count the tokens of runs and groups.  A run selected twice is two
    runs.
    """
    copies: Counter[ExperienceId] = Counter()
    numbers: dict[tuple[GroupId, int, int], int] = {}
    runs = []
    for id in ids:
        runs.append(numbers.setdefault((id.group, id.run, copies[id]), len(numbers)))
        copies[id] += 1
    tokens = np.bincount(runs, weights=[row.counted for row in rows], minlength=len(numbers))
    of_group: Counter[tuple[str, bool]] = Counter()
    for row in rows:
        of_group[row.group, row.is_expert] += row.counted
    return [
        msgspec.structs.replace(
            row,
            run=run,
            run_tokens=int(tokens[run]),
            group_tokens=of_group[row.group, row.is_expert],
        )
        for row, run in zip(rows, runs, strict=True)
    ]


def _masked_runs(
    step: int, rows: Sequence[TrainRow], ids: Sequence[ExperienceId]
) -> dict[str, float]:
    """Count the runs without a token in the loss, and log the first."""
    masked = {
        row.run: id
        for row, id in zip(rows, ids, strict=True)
        if not (row.run_tokens or row.is_expert)
    }
    for id in list(masked.values())[:1]:
        log.info(
            "step %d: no token of run %d of group %s is in the loss (%d such runs)",
            step,
            id.run,
            id.group,
            len(masked),
        )
    return {"experience/masked_runs": float(len(masked))}


def _rank_tokens(shares: Sequence[RankBatch]) -> dict[str, float]:
    tokens = [
        sum(len(row.tokens) for micro in share.micro_batches for row in micro) for share in shares
    ]
    return _summary("perf/rank_tokens", tokens, ("max", "min"))


def _shares(
    rows: Sequence[TrainRow],
    trained: Sequence[TrainRow],
    micro_batches: list[list[list[int]]],
    step: int,
    factors: dict[str, float],
) -> list[RankBatch]:
    """Make the share of each rank from the `trained` rows; denominators are of all `rows`."""
    counted = [row for row in rows if row.counted]
    expert = [row for row in counted if row.is_expert]
    return [
        RankBatch(
            step=step,
            micro_batches=tuple(tuple(trained[i] for i in micro) for micro in rank),
            tokens=float(sum(row.counted for row in counted)),
            rows=float(len(counted)),
            positions=float(sum(len(row.inputs) for row in trained)),
            expert_tokens=float(sum(row.counted for row in expert)),
            expert_rows=float(len(expert)),
            num_runs=float(len({(row.run, row.is_expert) for row in counted})),
            expert_runs=float(len({row.run for row in expert})),
            num_groups=float(len({(row.group, row.is_expert) for row in counted})),
            expert_groups=float(len({row.group for row in expert})),
            factors=factors,
            ref_given=any(row.ref is not None for row in trained),
        )
        for rank in micro_batches
    ]


def _summary(
    name: str, values: Any, statistics: Sequence[str] = ("mean", "max", "min")
) -> dict[str, float]:
    """Return NAME/mean, NAME/max, NAME/min of `values`, or given `statistics`; 0 if empty."""
    values = np.asarray(values) if len(values) else np.zeros(1)
    with np.errstate(invalid="ignore"):  # the trainer skips infinite advantages
        return {f"{name}/{kind}": float(getattr(np, kind)(values)) for kind in statistics}


def _value_metrics(
    rows: Sequence[TrainRow], prepared: PreparedStep, critic: bool
) -> dict[str, float]:
    """Summarise advantages, rewards and, with a critic, values and returns of tokens in the loss."""

    def counted(name: str) -> np.ndarray:
        arrays = [(getattr(row, name), row.keep) for row in rows if not row.is_expert]
        return np.concatenate(
            [np.zeros(0), *(a if keep is None else a[keep] for a, keep in arrays if a is not None)]
        )

    arrays = {"advantages": counted("advantages")}
    if prepared.rewards is not None:
        arrays["rewards"] = np.array([r.sum() for r in prepared.rewards])
    if critic:
        arrays |= {"returns": counted("returns"), "values": counted("values")}
    metrics: dict[str, float] = {}
    for name, array in arrays.items():
        if array.size:
            metrics |= _summary(f"critic/{name}", array)
    if critic and arrays["returns"].size:
        metrics["critic/vf_explained_var"] = explained_variance(arrays["values"], arrays["returns"])
    return metrics


def _metrics(
    decoded: DecodedLease, prepared: PreparedStep, staleness: list[int], tokens: int
) -> dict[str, float]:
    experiences = decoded.experiences
    groups = decoded.lease.groups
    runs: dict[tuple[GroupId, int], list[Experience]] = defaultdict(list)
    for x in experiences:
        runs[x.group, x.id.run].append(x)
    prompts = [x.num_tokens - x.num_response_tokens for x in experiences]
    responses = [sum(x.num_response_tokens for x in run) for run in runs.values()]
    truncated = [any(x.status == "truncated" for x in run) for run in runs.values()]
    metrics = {
        "experience/rows": float(len(experiences)),
        "experience/runs": float(len(runs)),
        "experience/groups": float(len(groups)),
        "experience/response_tokens": float(tokens),
        "experience/truncated_ratio": float(np.mean(truncated or [False])),
        "experience/tokens": float(sum(x.num_tokens for x in experiences)),
        **_summary("experience/response_length", responses),
        **_summary("experience/prompt_length", prompts, ("mean", "max")),
    }
    routed = [x.routed_experts.nbytes for x in experiences if x.routed_experts is not None]
    if routed:
        metrics |= {
            "experience/routed_rows": len(routed) / len(experiences),
            "experience/routed_experts_bytes": float(sum(routed)),
        }
    top = [
        x.teacher_top_ids.nbytes + x.teacher_top_logprobs.nbytes
        for x in experiences
        if x.teacher_top_ids is not None and x.teacher_top_logprobs is not None
    ]
    if top:
        metrics["experience/teacher_top_bytes"] = float(sum(top))
    if staleness:  # empty if no row was sampled by a policy
        metrics |= _summary("experience/staleness", staleness, ("mean", "max"))
    rewards = [
        reward for run in runs.values() for reward in run_rewards(scored_members(run)).values()
    ]
    if rewards:
        equal = [len(set(compared(stats).rewards)) < 2 for stats in groups]
        metrics |= {
            "frac_reward_zero_std": float(np.mean(equal)),
            "experience/reward/mean": float(np.mean(rewards)),
            "experience/advantage/abs_mean": _advantage_size(experiences, prepared),
            **_summary("critic/score", rewards),
        }
    return metrics | dict(prepared.metrics)


def _advantage_size(experiences: Sequence[Experience], prepared: PreparedStep) -> float:
    """Return the mean absolute token advantage, averaged over the policy's runs."""
    selected = range(len(experiences)) if prepared.selected is None else prepared.selected
    sizes: dict[tuple[GroupId, int], list[np.ndarray]] = defaultdict(list)
    for i, advantages in zip(selected, prepared.advantages, strict=True):
        if not (x := experiences[i]).is_expert:
            sizes[x.group, x.id.run].append(np.abs(advantages))
    means = [np.concatenate(run).mean() for run in sizes.values()]
    return float(np.mean(means)) if means else 0.0


def check(row: Experience, samples: Sampled, any_sampling: bool) -> None:
    """Raise RunFailed for a row that cannot be trained on.

    `samples`: which rows need the sampler's exact log-probs (the ratio of a clipped loss does);
    `any_sampling`: accept a distribution that the trainer cannot compute.
    """
    # demonstrations have no reward and need none
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


def _check_top(row: Experience, teacher_top: int) -> None:
    k = 0 if row.teacher_top_ids is None else row.teacher_top_ids.shape[1]
    if teacher_top and k != teacher_top:
        raise RunFailed(
            f"{_where(row)} has {k or 'no'} most likely tokens of a teacher, and the loss reads "
            f"{teacher_top}: take rows that a workflow with ctx.teach wrote under the same "
            f"algorithm.policy_loss_fn_args.k"
        )
    if teacher_top and (row.loss_mask > row.teacher_mask).any():
        raise RunFailed(f"{_where(row)} has trained tokens that no teacher scored")


def _where(row: Experience) -> str:
    return f"experience {row.id} of taskset {row.taskset!r}"


def _warn_if_certain(step: int, rows: Sequence[Experience]) -> None:
    """Warn if all sampled log-probs are 0: the engine probably did not report them."""
    sampled = [row for row in rows if row.has_logprobs and not row.is_expert]
    if sampled and not any(row.logprobs.any() for row in sampled):
        log.warning(
            "step %d: every log-prob of the policy that sampled its %d rows is 0, as if it had "
            "been certain of each token.  If the source of the rows does not report log-probs, it "
            "has to write has_logprobs false; only losses that need none can use such rows",
            step,
            len(sampled),
        )


def _check_pairs(rows: Sequence[Experience]) -> None:
    """Raise RunFailed unless each group is a chosen row followed by a rejected one."""
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


def train_row(
    row: Experience,
    pairs: bool = False,
    teacher_top: int = 0,
    files: Mapping[str, bytes] = NO_IMAGES,
) -> TrainRow:
    """Return the learner's view of an experience.

    `pairs`: the rows of each group form a pair.  `teacher_top`: see the algorithm's `needs`.
    `files`: of images, by name.  Raises RunFailed if one is missing.
    """
    if lost := next((place.sha256 for place in row.images if place.sha256 not in files), None):
        raise RunFailed(f"{_where(row)} shows image {lost}, whose file did not come with the row")
    temperatures: np.ndarray | float = row.temperature
    if any(record.sampling.temperature != temperatures for record in row.sampling):
        temperatures = np.full(len(row.tokens), row.temperature, np.float32)
        for record in row.sampling:
            temperatures[record.start : record.end] = record.sampling.temperature
    trained = row.loss_mask[row.teacher_mask] if teacher_top else None
    return TrainRow(
        tokens=row.tokens,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        temperatures=temperatures,
        experts=row.routed_experts,
        images=tuple(RowImage(place, files[place.sha256]) for place in row.images),
        top_ids=_at(row.teacher_top_ids, trained),
        top_logprobs=_at(row.teacher_top_logprobs, trained),
        is_expert=row.is_expert,
        group=(group := str(row.group)),
        pair=group if pairs else "",
    )


def _at(values: np.ndarray | None, trained: np.ndarray | None) -> np.ndarray | None:
    return None if values is None or trained is None else values[trained]


def step_row(row: Experience, computed: Mapping[Computed, np.ndarray]) -> StepRow:
    """Return the algorithm's view of an experience."""
    mask = row.loss_mask
    rewards = row.token_rewards
    teacher = row.teacher_logprobs
    return StepRow(
        group=str(row.group),
        run=row.id.run,
        step=row.id.step,
        reward=float(row.reward or 0.0),  # never read for demonstrations
        credit=row.credit,
        reward_parts=row.reward_parts,
        logprobs=row.logprobs[mask],
        token_rewards=None if rewards is None else _shift_to_trained_tokens(rewards, mask),
        teacher=None if teacher is None else teacher[mask],
        is_expert=row.is_expert,
        info=row.info,
        **{str(name): values for name, values in computed.items()},
    )


def _shift_to_trained_tokens(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return float32 [trained tokens]: a reward on another token goes to the trained one before."""
    trained = np.flatnonzero(mask)
    owner = np.maximum(np.searchsorted(trained, np.arange(len(mask)), side="right") - 1, 0)
    return np.bincount(owner, weights=rewards, minlength=len(trained)).astype(np.float32)


def _with_arrays(
    row: TrainRow, i: int, prepared: PreparedStep, computed: Mapping[Computed, np.ndarray]
) -> TrainRow:
    """Return the row with the arrays computed for its step; `i` is its index in `prepared`."""
    arrays = {
        name: values[i]
        for name in ("advantages", "returns", "weights", "keep")
        if (values := getattr(prepared, name)) is not None
    }
    scores = {name: computed[name] for name in ("old", "ref", "values") if name in computed}
    extra = {name: values[i] for name, values in prepared.extra.items()}
    return msgspec.structs.replace(row, **arrays, **scores, extra=extra)
