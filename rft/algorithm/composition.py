"""From the names of parts to one object that prepares a step and gives its loss.

Knows neither batches nor processes.
Invariant: a part whose coefficient is 0 is not called, so what it would need may be missing.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from pydantic import BaseModel

from rft.algorithm.args import AGG_MODES, AggMode, declared
from rft.algorithm.base import (
    Advantages,
    BufferStrategy,
    LossInputs,
    LossOutput,
    PreparedStep,
    StepInputs,
    StepRow,
)
from rft.algorithm.catalog import check_args
from rft.algorithm.correction import Corrected, CorrectionArgs, correct, diagnostics
from rft.algorithm.needs import Needs, correction_args, needs
from rft.algorithm.penalty import penalised
from rft.algorithm.runs import apart, joined, split
from rft.algorithm.settings import AlgorithmSettings
from rft.errors import ConfigError
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
    _advantage: Callable[[StepInputs], Any]
    _draw: Callable[[StepInputs], Sequence[int]] | None
    _extra: Extra | None
    _losses: tuple[Loss, ...]  # the policy loss first
    _penalty: Callable[[StepInputs], Sequence[np.ndarray]] | None = None
    _penalty_coef: float = 0.0
    correction: CorrectionArgs | None = None
    compares_rows: bool = False  # see `Args`
    in_groups: bool = True

    def prepare(self, x: StepInputs, *, kl_coef: float | None = None) -> PreparedStep:
        """What the losses of a step read that depends on all of its rows.  `kl_coef`: factor of the
        KL in the reward in this step.

        In this order: KL penalty, advantages, choice of the rows (by their rewards without
        penalty), off-policy correction, extras of the policy loss.  The first three see runs, the
        others rows.  Raises ValueError for a part that gives other shapes.
        """
        drawn = self._drawn_rows(x) if self._draw is not None else None
        metrics = dict(diagnostics(x))
        kl = None
        corrected = (
            correct(x, c, None) if (c := self.correction) is not None and c.weighted else None
        )
        weighed = x if corrected is None else _weighed(x, corrected.weights)
        runs = apart(weighed) if self.compares_rows else joined(weighed)
        seen = runs.x
        if self._penalty is not None:
            estimates = self._penalty(seen)
            _check_shapes("the KL penalty", estimates, seen.rows)
            seen, kl = penalised(
                seen, estimates, self._penalty_coef if kl_coef is None else kl_coef
            )
        made = split(self._advantages(seen), runs)
        if drawn is not None:
            x, made = _drawn(x, made, drawn)
        # it is not that of all tokens
        if corrected is None or drawn is not None or made.keep is not None:
            corrected = Corrected() if c is None else correct(x, c, made.keep)
        keep = made.keep if corrected.keep is None else corrected.keep
        left = len(x.rows) if keep is None else sum(map(np.count_nonzero, keep))
        extra = (
            self._extra(replace(x, keep=keep), made.values)
            if self._extra is not None and left
            else {}
        )
        return PreparedStep(
            advantages=made.values,
            drawn=drawn,
            returns=made.returns,
            weights=corrected.weights,
            keep=keep,
            extra=extra,
            metrics={**metrics, **made.metrics, **corrected.metrics},
            rewards=[row.rewards for row in seen.rows] if kl is not None else None,
            kl=kl,
        )

    def _drawn_rows(self, x: StepInputs) -> list[int]:
        """The rows of the drawn runs."""
        assert self._draw is not None, "asked only where there is a choice"
        runs = joined(x)
        return [i for run in self._draw(runs.x) for i in runs.rows[run]]

    def _advantages(self, x: StepInputs) -> Advantages:
        """Of the policy's own rows, compared with each other alone; an expert's have advantage 0."""
        own = [row for row in x.rows if not row.is_expert]
        made = spread(self._advantage(replace(x, rows=own)), own)
        if self.in_groups:
            made = replace(made, metrics={**made.metrics, LONE_RUNS: _lone(x, own)})
        if len(own) == len(x.rows):
            return made

        def filled(given: Sequence[np.ndarray] | None, what: np.ndarray) -> list[np.ndarray] | None:
            if given is None:
                return None
            arrays = iter(given)
            return [np.full(row.length, what) if row.is_expert else next(arrays) for row in x.rows]

        zero = np.zeros((), np.float32)
        one = np.ones((), np.bool_)
        return replace(
            made,
            values=filled(made.values, zero) or [],
            returns=filled(made.returns, zero),
            keep=filled(made.keep, one),
        )

    def loss(self, x: LossInputs) -> LossOutput:
        """Policy, KL and entropy loss of one micro-batch.  Adding `loss` over micro-batches and
        ranks gives the loss of the step.

        Metric sums: the parts' own, and pg_loss and loss, all to be divided by
        `x.denominators.tokens`.
        """
        x = replace(x, loss_agg_mode=self.loss_agg_mode)
        policy, *others = [loss(x) for loss in self._losses]
        total = policy.loss
        sums = dict(policy.sums)
        maxima = dict(policy.maxima)
        sums["pg_loss"] = policy.loss.detach() * x.denominators.tokens
        for out in others:
            total = total + out.loss
            sums |= out.sums
            maxima |= out.maxima
        sums["loss"] = total.detach() * x.denominators.tokens
        return LossOutput(loss=total, sums=sums, maxima=maxima)


def build(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm that `settings` name.  Raises ConfigError for unknown parts and wrong
    arguments.
    """
    REGISTRY.scan_package("rft.algorithm")
    if settings.loss_agg_mode not in AGG_MODES:
        raise ConfigError(
            f"{settings.loss_agg_mode!r} is not one of {', '.join(AGG_MODES)}",
            key="algorithm.loss_agg_mode",
        )
    needed = needs(settings)
    losses = [_bind("policy_loss_fn", settings.policy_loss_fn, settings.policy_loss_fn_args)]
    if needed.kl_loss:
        losses.append(_bind("kl_loss_fn", settings.kl_loss_fn, settings.kl_loss_fn_args))
    if needed.entropy:
        losses.append(
            _bind("entropy_loss_fn", settings.entropy_loss_fn, settings.entropy_loss_fn_args)
        )
    advantage = _bind("advantage_fn", settings.advantage_fn, settings.advantage_fn_args)
    compares = declared(
        check_args("advantage_fn", settings.advantage_fn, settings.advantage_fn_args)
    )
    draw = _bind("sample_strategy", settings.sample_strategy, settings.sample_strategy_args)
    part = REGISTRY.get("sample_strategy", settings.sample_strategy).obj
    by_buffer = inspect.isclass(part) and issubclass(part, BufferStrategy)
    penalty = None
    coef = 0.0
    if needed.kl_penalty:
        penalty = _bind("kl_penalty_fn", settings.kl_penalty_fn, settings.kl_penalty_fn_args)
        args = check_args("kl_penalty_fn", settings.kl_penalty_fn, settings.kl_penalty_fn_args)
        coef = float(args.model_dump().get("kl_coef", 1.0))
    return Algorithm(
        needed,
        cast(AggMode, settings.loss_agg_mode),
        advantage,
        None if by_buffer else draw,
        _extra(settings),
        tuple(losses),
        penalty,
        coef,
        correction_args(settings),
        compares_rows=compares.compares_rows,
        in_groups=compares.in_groups,
    )


def _weighed(x: StepInputs, weights: Sequence[np.ndarray] | None) -> StepInputs:
    """`x` with the weights of the off-policy correction, where there are some."""
    return (
        x
        if weights is None
        else replace(x, rows=[replace(r, weights=w) for r, w in zip(x.rows, weights, strict=True)])
    )


def _lone(x: StepInputs, rows: Sequence[StepRow]) -> float:
    """The number of runs that have none left to be compared with; the first is named."""
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


def _drawn(x: StepInputs, made: Advantages, drawn: Sequence[int]) -> tuple[StepInputs, Advantages]:
    def of(given: Sequence[np.ndarray] | None) -> list[np.ndarray] | None:
        return None if given is None else [given[i] for i in drawn]

    chosen = replace(
        made, values=of(made.values) or [], returns=of(made.returns), keep=of(made.keep)
    )
    return replace(x, rows=[x.rows[i] for i in drawn]), chosen


def spread(given: Any, rows: Sequence[StepRow]) -> Advantages:
    """What an advantage part gave as `Advantages`: it may be one number per row, an array per row,
    or the whole.

    Raises ValueError naming the row whose length is wrong.  Numbers that are not finite pass: their
    step is skipped and named.
    """
    made = given if isinstance(given, Advantages) else Advantages(values=_per_token(given, rows))
    for name, arrays in (
        ("advantages", made.values),
        ("returns", made.returns),
        ("keep", made.keep),
    ):
        if arrays is not None:
            _check_shapes(name, arrays, rows)
    return made


def _check_shapes(name: str, arrays: Sequence[np.ndarray], rows: Sequence[StepRow]) -> None:
    if len(arrays) != len(rows):
        raise ValueError(f"{name} of {len(arrays)} rows were given for {len(rows)} rows")
    for row, array in zip(rows, arrays, strict=True):
        if array.shape != (row.length,):
            raise ValueError(
                f"group {row.group}, run {row.run}: {name} of shape {array.shape} for {row.length} "
                f"trained tokens"
            )


def _per_token(given: Any, rows: Sequence[StepRow]) -> list[np.ndarray]:
    if len(given) != len(rows):
        raise ValueError(f"{len(given)} advantages were given for {len(rows)} rows")
    return [
        np.full(r.length, a, np.float32) if np.ndim(a) == 0 else np.asarray(a, np.float32)
        for a, r in zip(given, rows, strict=True)
    ]


def _extra(settings: AlgorithmSettings) -> Extra | None:
    name = settings.policy_loss_fn
    if ":" in name:  # named by its place: its extra goes by the name that its decorator gives it
        marked = mark_of(REGISTRY.get("policy_loss_fn", name).obj)
        name = name if marked is None else marked.name
    if name not in REGISTRY.names("policy_extra"):
        return None
    args = check_args("policy_loss_fn", settings.policy_loss_fn, settings.policy_loss_fn_args)
    part = REGISTRY.get("policy_extra", name).obj
    bypass = settings.bypass_old_logprobs
    return lambda x, advantages: cast(
        Mapping[str, Sequence[np.ndarray]], part(replace(x, bypass=bypass), advantages, args)
    )


def _bind(kind: str, name: str, given: Any) -> Callable[..., Any]:
    args: BaseModel = check_args(kind, name, given)
    part = REGISTRY.get(kind, name).obj

    def call(*inputs: Any) -> Any:
        with contained(f"{kind} {name}"):
            return part(*inputs, args)

    return call
