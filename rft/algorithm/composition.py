"""Compose named parts into one object that prepares a step and computes its loss.

Independent of batches and processes.
Invariant: a part whose coefficient is 0 is not called, so its inputs may be missing.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from rft.algorithm.args import AGG_MODES, AggMode, declared
from rft.algorithm.base import (
    KEEP,
    Advantages,
    BufferStrategy,
    LossInputs,
    LossOutput,
    PreparedStep,
    StepInputs,
    StepRow,
)
from rft.algorithm.catalog import part_args
from rft.algorithm.correction import Corrected, correct, diagnostics
from rft.algorithm.needs import Needs, needs
from rft.algorithm.penalty import penalised
from rft.algorithm.runs import apart, joined, split
from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.errors import ConfigError, RunFailed
from rft.plugins import REGISTRY, mark_of
from rft.worker.threads import contained

log = logging.getLogger(__name__)
LONE_RUNS = "experience/lone_runs"
Loss = Callable[[LossInputs], LossOutput]
Extra = Callable[[StepInputs, Sequence[np.ndarray]], Mapping[str, Sequence[np.ndarray]]]


@dataclass(frozen=True)
class Algorithm:
    """The parts of one algorithm with their arguments bound."""

    needs: Needs
    loss_agg_mode: AggMode
    _advantage: Callable[[StepInputs], Advantages]
    _select: Callable[[StepInputs], Sequence[int]] | None  # sample strategy: indexes of runs
    _extra: Extra | None  # further inputs of the policy loss
    _losses: tuple[Loss, ...]  # the policy loss first
    _penalty: Callable[[StepInputs], Sequence[np.ndarray]] | None = None  # KL penalty
    _penalty_coef: float = 0.0
    correction: CorrectionConfig | None = None
    compares_rows: bool = False  # advantages are of rows, not of runs
    in_groups: bool = True  # advantages compare the runs of a task

    def prepare(self, x: StepInputs, *, kl_coef: float | None = None) -> PreparedStep:
        """Compute the inputs of the losses that depend on the whole step: advantages, weights, masks
        and the policy loss's further inputs.  `kl_coef`: factor of the KL penalty in this step.

        1. Select runs, by their rewards without penalty.  2. Weigh and reject tokens of rows
        (off-policy correction).  3. Subtract the KL penalty and compute the advantages of all runs.
        4. Keep the selected rows.  5. Compute the further inputs of the policy loss for these rows.

        Rejected tokens are in no statistic of the step; the statistics of groups come with the
        lease.  Rows are sorted by id first, so that draws and ties do not depend on the order of the
        lease.  Raises ValueError if a part returns wrong shapes.
        """
        order = sorted(range(len(x.rows)), key=lambda i: _sort_key(x.rows[i]))
        prepared = self._prepare(replace(x, rows=[x.rows[i] for i in order]), kl_coef)
        if prepared.selected is not None:
            return replace(prepared, selected=[order[i] for i in prepared.selected])
        return _in_order(prepared, np.argsort(order))

    def _prepare(self, x: StepInputs, kl_coef: float | None) -> PreparedStep:
        selected = self._selected_rows(x) if self._select is not None else None
        metrics = diagnostics(x)
        correction = Corrected() if self.correction is None else correct(x, self.correction)
        corrected = _corrected(x, correction)
        runs = apart(corrected) if self.compares_rows else joined(corrected)  # rows, or whole runs
        inputs = runs.x
        kl = None
        if self._penalty is not None:
            estimates = self._penalty(inputs)
            coef = self._penalty_coef if kl_coef is None else kl_coef
            inputs, kl = penalised(inputs, estimates, coef)
        advantages = split(self._advantages(inputs), runs)
        arrays: list[Any] = [advantages.values, advantages.returns, correction.weights]
        arrays.append(_and(advantages.keep, correction.keep))
        if selected is not None:
            x = replace(x, rows=[x.rows[i] for i in selected])
            arrays = [a and [a[i] for i in selected] for a in arrays]
        values, returns, weights, keep = arrays
        num_tokens = len(x.rows) if keep is None else sum(map(np.count_nonzero, keep))
        extra: dict[str, Sequence[np.ndarray]] = {}
        if self._extra is not None and num_tokens:
            extra = dict(self._extra(replace(x, keep=keep), values))
            if (kept := extra.pop(KEEP, None)) is not None:
                keep = _and(keep, [array != 0 for array in kept])
        return PreparedStep(
            advantages=values,
            selected=selected,
            returns=returns,
            weights=weights,
            keep=keep,
            extra=extra,
            metrics={**metrics, **advantages.metrics, **correction.metrics},
            rewards=[row.rewards for row in inputs.rows] if kl is not None else None,
            kl=kl,
        )

    def _selected_rows(self, x: StepInputs) -> list[int]:
        """Return the rows of the runs that the sample strategy chooses."""
        assert self._select is not None, "called only with a sample strategy"
        runs = joined(x)
        return [i for run in self._select(runs.x) for i in runs.rows[run]]

    def _advantages(self, x: StepInputs) -> Advantages:
        """Compute advantages among the policy's own rows; demonstrations (`is_expert`) get 0."""
        of_policy = [i for i, row in enumerate(x.rows) if not row.is_expert]
        policy_rows = [x.rows[i] for i in of_policy]
        keep = None if x.keep is None else [x.keep[i] for i in of_policy]
        inputs = replace(x, rows=policy_rows, keep=keep)
        advantages: Advantages = self._advantage(inputs)
        if self.in_groups:
            metrics = {**advantages.metrics, LONE_RUNS: _lone_runs(x, policy_rows)}
            advantages = replace(advantages, metrics=metrics)
        if len(policy_rows) == len(x.rows):
            return advantages

        def filled(part: Sequence[np.ndarray] | None, what: np.ndarray) -> list[np.ndarray] | None:
            if part is None:
                return None
            arrays = iter(part)
            return [np.full(row.length, what) if row.is_expert else next(arrays) for row in x.rows]

        zero = np.zeros((), np.float32)
        ones = np.ones((), np.bool_)
        return replace(
            advantages,
            values=filled(advantages.values, zero) or [],
            returns=filled(advantages.returns, zero),
            keep=filled(advantages.keep, ones),
        )

    def loss(self, x: LossInputs) -> LossOutput:
        """Return the sum of policy, KL and entropy loss of one micro-batch; summed over
        micro-batches and ranks, it is the loss of the step.

        `sums`: the metrics of each part, pg_loss and loss, to be divided by
        `x.denominators.tokens`.
        """
        x = replace(x, loss_agg_mode=self.loss_agg_mode)
        policy, *terms = [loss(x) for loss in self._losses]
        total = policy.loss
        sums = dict(policy.sums)
        maxima = dict(policy.maxima)
        sums["pg_loss"] = policy.loss.detach() * x.denominators.tokens
        for out in terms:
            total = total + out.loss
            sums |= out.sums
            maxima |= out.maxima
        sums["loss"] = total.detach() * x.denominators.tokens
        return LossOutput(loss=total, sums=sums, maxima=maxima)


def build(settings: AlgorithmSettings) -> Algorithm:
    """Return the algorithm that `settings` name.  Raises ConfigError for unknown parts and wrong
    arguments.
    """
    REGISTRY.scan_package("rft.algorithm")
    if settings.loss_agg_mode not in AGG_MODES:
        raise ConfigError(
            f"{settings.loss_agg_mode!r} is not one of {', '.join(AGG_MODES)}",
            key="algorithm.loss_agg_mode",
        )
    needed = needs(settings)
    losses = [_bind("policy_loss_fn", settings)]
    if needed.kl_loss:
        losses.append(_bind("kl_loss_fn", settings))
    if needed.entropy:
        losses.append(_bind("entropy_loss_fn", settings))
    compares = declared(part_args(settings, "advantage_fn"))
    part = REGISTRY.get("sample_strategy", settings.sample_strategy).obj
    by_buffer = inspect.isclass(part) and issubclass(part, BufferStrategy)
    penalty = None
    coef = 0.0
    if needed.kl_penalty:
        penalty = _bind("kl_penalty_fn", settings)
        args = part_args(settings, "kl_penalty_fn")
        coef = float(args.model_dump().get("kl_coef", 1.0))
    return Algorithm(
        needed,
        cast(AggMode, settings.loss_agg_mode),
        _bind("advantage_fn", settings),
        None if by_buffer else _bind("sample_strategy", settings),
        _extra(settings),
        tuple(losses),
        penalty,
        coef,
        settings.rollout_correction,
        compares_rows=compares.compares_rows,
        in_groups=compares.in_groups,
    )


def _sort_key(row: StepRow) -> tuple[str, str, int, int]:
    """Order rows by group without lineage, lineage, run, step: a resumed run draws as the first."""
    return row.group.partition(".")[2], row.group, row.run, row.step


def _in_order(prepared: PreparedStep, numbers: np.ndarray) -> PreparedStep:
    """Return `prepared` with its rows in the order `numbers`."""

    def of(arrays: Sequence[np.ndarray] | None) -> Any:
        return arrays and [arrays[i] for i in numbers]

    return replace(
        prepared,
        advantages=of(prepared.advantages),
        returns=of(prepared.returns),
        weights=of(prepared.weights),
        keep=of(prepared.keep),
        extra={name: of(arrays) for name, arrays in prepared.extra.items()},
    )


def _corrected(x: StepInputs, corrected: Corrected) -> StepInputs:
    """Return `x` with the weights of the off-policy correction, and without what it rejects."""
    rows = x.rows
    if corrected.weights is not None:
        rows = [replace(r, weights=w) for r, w in zip(rows, corrected.weights, strict=True)]
    return replace(x, rows=rows, keep=corrected.keep)


def _and(
    first: Sequence[np.ndarray] | None, second: Sequence[np.ndarray] | None
) -> Sequence[np.ndarray] | None:
    """Return the tokens that both keep; None: all."""
    if first is None or second is None:
        return first or second
    return [a & b for a, b in zip(first, second, strict=True)]


def _lone_runs(x: StepInputs, rows: Sequence[StepRow]) -> float:
    """Count the runs that have no other run of their task to compare with; log the first."""
    lone = {
        (row.group, row.run): row
        for row in rows
        if len(set(x.stats(row).runs) or x.stats(row).rewards) == 1
    }
    for group, run in list(lone)[:1]:
        text = (
            "step %d: run %d of group %s has no other run of its task left to be compared with "
            "(%d such runs)"
        )
        log.warning(text, x.step, run, group, len(lone))
    return float(len(lone))


def as_advantages(values: Any, rows: Sequence[StepRow]) -> Advantages:
    """Return as `Advantages` what an advantage part returned: one number per row, an array per row,
    or `Advantages`.

    Raises ValueError naming the row whose length is wrong.  Numbers that are not finite pass: the
    trainer skips their step and says so.
    """
    advantages = (
        values
        if isinstance(values, Advantages)
        else Advantages(
            values=[
                np.full(r.length, float(a), np.float32)
                if np.ndim(a) == 0
                else np.asarray(a, np.float32)
                for a, r in zip(values, rows, strict=True)
            ]
        )
    )
    for arrays in (advantages.values, advantages.returns, advantages.keep):
        if arrays is not None:
            _shaped(arrays, rows)
    return advantages


def _shaped(arrays: Sequence[np.ndarray], rows: Sequence[StepRow]) -> Sequence[np.ndarray]:
    for row, array in zip(rows, arrays, strict=True):
        if array.shape != (row.length,):
            raise ValueError(
                f"group {row.group}, run {row.run}: shape {array.shape} for {row.length} trained "
                f"tokens"
            )
    return arrays


# by kind: check of the value that a part returned (it raises, or returns what is used), and what
# the value may be
_RESULTS: Any = {
    "advantage_fn": (
        lambda value, x: as_advantages(value, x.rows),
        "a number for each run, an array of its trained tokens for each, or Advantages",
    ),
    "kl_penalty_fn": (
        lambda value, x: _shaped(value, x.rows),
        "an array of its trained tokens for each run",
    ),
    # as numpy selects: an unknown number is an IndexError, booleans are a mask
    "sample_strategy": (
        lambda value, x: np.arange(len(x.rows))[list(value)].tolist(),
        "a list of numbers of runs",
    ),
}
# for every other kind; `view` raises unless the loss is one number
_LOSS = (
    lambda value, _: replace(value, loss=value.loss.view(())),
    "a LossOutput, as rft.algorithm.ratio.output makes it",
)


def _extra(settings: AlgorithmSettings) -> Extra | None:
    name = settings.policy_loss_fn
    if ":" in name:  # a path: its extra has the name that the decorator gives
        marked = mark_of(REGISTRY.get("policy_loss_fn", name).obj)
        name = name if marked is None else marked.name
    if name not in REGISTRY.names("policy_extra"):
        return None
    args = part_args(settings, "policy_loss_fn")
    part = REGISTRY.get("policy_extra", name).obj
    bypass = settings.bypass_old_logprobs
    return lambda x, advantages: cast(
        Mapping[str, Sequence[np.ndarray]], part(replace(x, bypass=bypass), advantages, args)
    )


def _bind(kind: str, settings: AlgorithmSettings) -> Callable[..., Any]:
    name = getattr(settings, kind)
    args = part_args(settings, kind)
    part = REGISTRY.get(kind, name).obj
    check, allowed = _RESULTS.get(kind, _LOSS)

    def call(*inputs: Any) -> Any:
        with contained(f"{kind} {name}"):
            value = part(*inputs, args)
        try:
            return check(value, inputs[0])
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as e:
            text = f"{name} returned {value!r:.80}: {e}"
            raise RunFailed(f"algorithm.{kind}: {text}; allowed is {allowed}") from None

    return call
