"""Try an algorithm part on a handful of rows, without a model: advantages, weights and gradients of
every trained token, through the trainer's own step from a lease to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from msgspec import structs

from rft.algorithm.args import Computed
from rft.algorithm.base import Denominators, LossInputs
from rft.algorithm.catalog import algorithm_defaults
from rft.algorithm.composition import Algorithm, build
from rft.algorithm.settings import AlgorithmSettings
from rft.plugins import mark_of
from rft.trainer.rows.batch_builder import build_step, decode_lease
from rft.trainer.rows.pack import Budget, TrainRow
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.credit import group_statistics
from rft.types.experience import Experience, scored_members
from rft.types.ids import ExperienceId, GroupId, Version
from rft.types.ports import Lease


@dataclass(frozen=True, kw_only=True)
class AlgorithmRow:
    """One row of a train step with L trained tokens, written by hand.

    Log-probs are in nats: `logprobs` of the policy that sampled, `new` of the policy that is
    trained.  Rows of one `run` of a `group` are its chains.
    """

    reward: float
    logprobs: Sequence[float] = (-1.0, -1.0)
    new: Sequence[float] | None = None  # None: `logprobs`
    group: int = 0
    run: int | None = None  # None: a run of its own
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    teacher: Sequence[float] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    # float [L] each, as the trainer computes them before the step: old, ref, entropy, values, ...
    computed: Mapping[Computed, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TriedRow:
    """Arrays [L] of one row: `advantages`, `weights` of the off-policy correction (0: the token is
    left out), and `gradients`, d loss / d `new`.  Below 0: the step makes the token likelier.
    """

    group: int
    run: int
    reward: float
    advantages: np.ndarray
    weights: np.ndarray
    gradients: np.ndarray


@dataclass(frozen=True)
class Tried:
    """Rows in the order of `try_algorithm`'s, without those that the algorithm leaves out."""

    rows: tuple[TriedRow, ...]
    loss: float
    metrics: Mapping[str, float]

    def __repr__(self) -> str:
        lines = ["group  run  reward  token  advantage  weight  d loss / d logprob"]
        for row in self.rows:
            tokens = zip(row.advantages, row.weights, row.gradients, strict=True)
            for i, (advantage, weight, gradient) in enumerate(tokens):
                push = "likelier" if gradient < 0 else "less likely" if gradient > 0 else ""
                lines.append(
                    f"{row.group:5}{row.run:5}{row.reward:8.3g}{i:7}{advantage:11.4f}"
                    f"{weight:8.3g}{gradient:20.6f}  {push}".rstrip()
                )
        return "\n".join([*lines, f"loss {self.loss:.6f}"])


def try_algorithm(
    rows: Sequence[AlgorithmRow],
    algorithm_type: str = "grpo",
    **parts: str | Callable[..., Any] | Mapping[str, Any] | bool,
) -> Tried:
    """Compute one train step of `algorithm_type` over `rows`.

    `parts` replace its parts and their arguments, as section `algorithm` does: `advantage_fn=median,
    advantage_fn_args={"limit": 0.5}`.  A part is a name or a function that a decorator of
    `rft.register` has registered.  Raises ConfigError for unknown parts and wrong arguments, and
    what a part raises.
    """
    algorithm = build(settings := _settings(algorithm_type, parts))
    experiences = [_experience(i, row) for i, row in enumerate(rows)]
    groups = dict.fromkeys(x.group for x in experiences)
    stats = tuple(
        group_statistics(str(g), scored_members(x for x in experiences if x.group == g))
        for g in groups
    )
    lease = decode_lease(Lease(step=1, frame=encode(experiences), groups=stats))
    computed = [{k: np.asarray(v, np.float32) for k, v in row.computed.items()} for row in rows]
    whole = Budget(1 << 30)  # one micro-batch
    algorithm = replace(algorithm, needs=replace(algorithm.needs, skips_zero=False))
    batch = build_step(lease, algorithm, whole, world_size=1, computed=computed)
    (share,) = batch.shares
    longest = max(len(row.logprobs) for row in rows)
    denominators = Denominators(
        share.tokens, share.rows, longest, num_runs=share.num_runs, num_groups=share.num_groups
    )
    places = iter(batch.order)
    tried: dict[int, TriedRow] = {}
    loss = 0.0
    for micro in share.micro_batches:
        at = [next(places) for _ in micro]
        policy = [rows[i].logprobs if rows[i].new is None else rows[i].new for i in at]
        if settings.bypass_old_logprobs:  # the losses' ratio is against the sampler
            micro = tuple(structs.replace(row, old=None) for row in micro)
        value, parts_of = gradients(algorithm, micro, denominators, policy)
        loss += value
        for i, row, part in zip(at, micro, parts_of, strict=True):
            weights = np.ones(len(part)) if row.weights is None else row.weights
            if row.keep is not None:
                weights = weights * row.keep
            advantages = np.zeros(len(part)) if row.advantages is None else row.advantages
            run = experiences[i].id.run
            tried[i] = TriedRow(rows[i].group, run, rows[i].reward, advantages, weights, part)
    return Tried(tuple(tried[i] for i in sorted(tried)), loss, batch.metrics)


def gradients(
    algorithm: Algorithm,
    micro: Sequence[TrainRow],
    denominators: Denominators,
    policy: Sequence[Any] | None = None,
) -> tuple[float, list[np.ndarray]]:
    """Return the loss of a micro-batch and its gradient [L] by the log-probs of each row's tokens.

    `policy`: log-probs [L] of the trained policy; None: those of the policy that sampled.
    """

    def packed(values: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(v, np.float64) for v in values]))

    sampled = [row.logprobs[row.loss_mask] for row in micro]
    rows = list(zip(micro, sampled, strict=True))
    lengths = [len(values) for values in sampled]
    theta = packed(sampled if policy is None else policy).requires_grad_()
    x = LossInputs(
        logprobs=theta,
        old_logprobs=packed([s if row.old is None else row.old for row, s in rows]),
        ref_logprobs=packed([s if row.ref is None else row.ref for row, s in rows]),
        extra={name: packed([row.extra[name] for row in micro]) for name in micro[0].extra},
        advantages=packed(
            [np.zeros_like(s) if row.advantages is None else row.advantages for row, s in rows]
        ),
        weights=None if micro[0].weights is None else packed([row.weights for row in micro]),
        mask=packed([np.ones_like(s) if row.keep is None else row.keep for row, s in rows]) > 0,
        row=torch.repeat_interleave(torch.arange(len(micro)), torch.tensor(lengths)),
        num_rows=len(micro),
        denominators=denominators,
        run_tokens=packed([np.full_like(s, row.run_tokens) for row, s in rows]),
        group_tokens=packed([np.full_like(s, row.group_tokens) for row, s in rows]),
        rollout_logprobs=packed(sampled),
    )
    loss = algorithm.loss(x).loss
    loss.backward()
    assert theta.grad is not None
    return loss.item(), [0.0 + part.numpy() for part in theta.grad.split(lengths)]


def _settings(algorithm_type: str, parts: Mapping[str, Any]) -> AlgorithmSettings:
    names = AlgorithmSettings.__dataclass_fields__
    defaults = vars(algorithm_defaults(algorithm_type))
    values = {name: value for name, value in defaults.items() if name in names}
    values["entropy_loss_fn"] = "none"  # hand-written rows have no logits
    correction = parts.get("rollout_correction")
    values["bypass_old_logprobs"] = correction is None or correction.bypass_mode
    for name, part in parts.items():
        marked = mark_of(part) if callable(part) else None
        values[name] = part if marked is None else marked.name
        if name.endswith("_fn") and f"{name}_args" not in parts:
            values[f"{name}_args"] = {}
    return AlgorithmSettings(**values)


def _experience(number: int, row: AlgorithmRow) -> Experience:
    length = len(row.logprobs)
    prompt = np.zeros(1, np.float32)
    group = GroupId(1, 0, 0, row.group)
    run = number if row.run is None else row.run
    return Experience(
        id=ExperienceId(group.lineage, group.explorer, group.batch, group.task, run, step=number),
        taskset="rows",
        task_index=row.group,
        workflow="rows",
        status="complete",
        finish_reason="stop",
        tokens=np.arange(1 + length, dtype=np.int32),
        loss_mask=np.arange(1 + length) >= 1,
        logprobs=np.concatenate([prompt, np.asarray(row.logprobs, np.float32)]),
        version_spans=(VersionSpan(Version(1, 0), 1, 1 + length),),
        reward=row.reward,
        reward_parts=dict(row.reward_parts),
        teacher_logprobs=None
        if row.teacher is None
        else np.concatenate([prompt, np.asarray(row.teacher, np.float32)]),
        info=dict(row.info),
    )
