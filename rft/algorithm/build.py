"""From the names of parts to one object that gives advantages and a loss.

Knows neither batches nor processes.
Invariant: a part whose coefficient is 0 is not called, so what it would need may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from pydantic import BaseModel

from rft.algorithm.args import AGG_MODES, AggMode, check_args
from rft.algorithm.base import LossInputs, LossOutput
from rft.algorithm.catalog import Needs, PartSettings, needs
from rft.errors import ConfigError
from rft.plugins import REGISTRY
from rft.types.ports import GroupStats

Loss = Callable[[LossInputs], LossOutput]


@dataclass(frozen=True)
class Algorithm:
    """The parts of one algorithm with their arguments bound."""

    needs: Needs
    loss_agg_mode: AggMode
    _advantage: Callable[[Sequence[float], Sequence[GroupStats]], np.ndarray]
    _losses: tuple[Loss, ...]  # the policy loss first

    def advantages(self, rewards: Sequence[float], groups: Sequence[GroupStats]) -> np.ndarray:
        """float32 [S] from S rewards and, for each of the S rows, the statistics of its group."""
        return self._advantage(rewards, groups)

    def loss(self, x: LossInputs) -> LossOutput:
        """Policy, KL and entropy loss of one micro-batch.  Adding `loss` over micro-batches and ranks gives the loss of the step.

        Metric sums: the parts' own, and pg_loss and loss, all to be divided by `x.denominators.tokens`.
        """
        x = replace(x, loss_agg_mode=self.loss_agg_mode)
        policy, *others = [loss(x) for loss in self._losses]
        total, sums, maxima = policy.loss, dict(policy.sums), dict(policy.maxima)
        sums["pg_loss"] = policy.loss.detach() * x.denominators.tokens
        for out in others:
            total = total + out.loss
            sums |= out.sums
            maxima |= out.maxima
        sums["loss"] = total.detach() * x.denominators.tokens
        return LossOutput(loss=total, sums=sums, maxima=maxima)


def build(settings: PartSettings) -> Algorithm:
    """The algorithm that `settings` name.  Raises ConfigError for unknown parts and wrong arguments."""
    REGISTRY.scan_package("rft.algorithm")
    if settings.loss_agg_mode not in AGG_MODES:
        raise ConfigError(f"{settings.loss_agg_mode!r} is not one of {', '.join(AGG_MODES)}", key="algorithm.loss_agg_mode")
    needed = needs(settings)
    losses = [_bind("policy_loss_fn", settings.policy_loss_fn, settings.policy_loss_fn_args)]
    if needed.reference:
        losses.append(_bind("kl_loss_fn", settings.kl_loss_fn, settings.kl_loss_fn_args))
    if needed.entropy:
        losses.append(_bind("entropy_loss_fn", settings.entropy_loss_fn, settings.entropy_loss_fn_args))
    advantage = _bind("advantage_fn", settings.advantage_fn, settings.advantage_fn_args)
    return Algorithm(needed, cast(AggMode, settings.loss_agg_mode), advantage, tuple(losses))


def _bind(kind: str, name: str, given: Any) -> Callable[..., Any]:
    args: BaseModel = check_args(kind, name, given)
    part = REGISTRY.get(kind, name).obj
    return lambda *inputs: part(*inputs, args)
