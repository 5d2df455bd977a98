"""Repeat one train step of a run from its nearest checkpoint and rows, with the loss of each row.

Depends on the trainer and the run's ledger, on no engine.  Runs in this process, on one rank.
Invariant: the run's folder is not changed.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.buffer.replay_reader import ReplayReader
from rft.config.plan import Plan
from rft.errors import ConfigError, RunFailed
from rft.launch import parts
from rft.launch.stages import began_with
from rft.launch.start import origin, windows
from rft.monitor.read import read
from rft.preflight.check import load_plan
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.manifest import Manifest
from rft.types.ports import Lease

Tell = Callable[[str], None]
COMPARED = ("actor/loss", "actor/grad_norm", "experience/reward/mean", "experience/rows")


@dataclass(frozen=True)
class RowLoss:
    """One row of the step.

    `loss`: its share of the step's loss.  `apart`: mean of new − sampler's log-prob, nats.
    """

    id: str
    reward: float | None
    advantage: float
    tokens: int
    loss: float
    apart: float


@dataclass(frozen=True)
class StepAgain:
    """The step, its rows in the order of the lease, and its metrics (now, in the run)."""

    step: int
    begun_from: str
    rows: list[RowLoss]
    numbers: dict[str, tuple[float, float | None]]


def again(
    run_dir: Path, step: int, overrides: Sequence[str] = (), tell: Tell = lambda text: None
) -> StepAgain:
    """Repeat `step`, and the steps between the checkpoint and it.

    Raises ConfigError for a step that the run does not have, PayloadDamaged for lost rows.
    """
    with ReplayReader(run_dir) as reader, tempfile.TemporaryDirectory(prefix="rft-step-") as aside:
        if not 1 <= step <= reader.last:
            raise ConfigError(f"the run trained steps 1 to {reader.last}", key="STEP", given=step)
        plan, other = _plan(run_dir, Path(aside), overrides)
        checkpoint = _before(run_dir, step, plan) or origin(other)
        if checkpoint is not None and checkpoint.version.step >= step:
            raise ConfigError(
                f"the run began with step {checkpoint.version.step} of another one",
                key="STEP",
                given=step,
            )
        rows, values = asyncio.run(_train(plan, reader, checkpoint, step, tell))
    then = {
        k: v
        for r in read(run_dir / "metrics.jsonl")
        if r.role == "trainer" and r.step == step
        for k, v in r.values.items()
    }
    name = checkpoint.folder.name if checkpoint else "the model that the run began with"
    return StepAgain(
        step, name, rows, {k: (values[k], then.get(k)) for k in COMPARED if k in values}
    )


async def _train(
    plan: Plan, reader: ReplayReader, checkpoint: Manifest | None, step: int, tell: Tell
) -> tuple[list[RowLoss], dict[str, float]]:
    """Train from `checkpoint` to `step`; return the rows and metrics of `step`."""
    from rft.trainer.loop.ranks import Ranks

    tell(f"loading {checkpoint.folder if checkpoint else plan.learner.model_path}")
    part = await parts.trainer(plan, 0, None)
    try:
        ranks = Ranks(part.learner, [])
        begun = 0 if checkpoint is None else checkpoint.version.step
        begins = windows(plan)
        if checkpoint is not None:
            await ranks.load(str(checkpoint.folder))
        await ranks.remember()
        for number in range(begun + 1, step + 1):
            tell(f"step {number} of {step}")
            lease = await reader.lease(
                number, groups=None, rows=None, deadline_s=0.0, max_staleness=None
            )
            result = await _step(ranks, part.learner, lease, with_rows=number == step)
            if begins(number):
                await ranks.remember()
        return result
    finally:
        await part.close()


def _before(run_dir: Path, step: int, plan: Plan) -> Manifest | None:
    """Read the newest checkpoint before `step` that replay can start from; None: the run's start."""
    committed = manifests.committed(run_dir / "checkpoints")
    begins = windows(plan)
    folders = [f for f in committed if (at := manifests.step_of(f)) < step and begins(at)]
    best = max(folders, key=manifests.step_of, default=None)
    if best is None:
        return None
    return manifests.read(best)


def _plan(run_dir: Path, aside: Path, overrides: Sequence[str]) -> tuple[Plan, Path | None]:
    """Return the run's plan for one rank on its stored rows, and the run that it started from."""
    file = run_dir / "config.resolved.yaml"
    if not file.is_file():
        raise ConfigError("has no config.resolved.yaml", key="RUN", given=str(run_dir))
    changes = [
        "mode=train",
        f"buffer.trainer_input.replay_run={run_dir.resolve()}",
        f"checkpoint_root_dir={aside}",
        "monitor.monitor_type=[]",
        "monitor.monitor_args=null",
        "monitor.keep_trainer_logprobs=false",
        "resume_from_path=null",
    ]
    model = began_with(run_dir.resolve())
    _, original = load_plan(
        file, ["monitor.monitor_type=[]", "monitor.monitor_args=null", *overrides], model_path=model
    )
    length = f"trainer.total_steps={original.trainer.total_steps}"
    _, plan = load_plan(
        file, [*changes, length, *overrides, "trainer.world_size=1"], model_path=model
    )
    return plan, original.resume_from_path


async def _step(
    ranks: Any, learner: Any, lease: Lease, *, with_rows: bool
) -> tuple[list[RowLoss], dict[str, float]]:
    """Train one step like the trainer's loop; row losses are computed before the update."""
    from rft.trainer.loop.numbers import numbers
    from rft.trainer.rows import batch_builder

    needs = ranks.algorithm.needs
    if needs.pairs:
        raise ConfigError(
            "trains on pairs, whose rows have no loss each", key="algorithm", given="pairs"
        )
    leased = batch_builder.decode_lease(
        lease,
        samples=needs.samples,
        any_sampling=needs.any_sampling,
        teacher_top=needs.teacher_top,
    )
    computed = await ranks.prepare(leased.rows)
    batch = batch_builder.build_step(
        leased,
        ranks.algorithm,
        ranks.budget,
        world_size=1,
        computed=computed,
        seed=ranks.settings.seed,
        critic_budget=ranks.critic_budget,
        factors=ranks.factors,
    )
    rows = await _losses(ranks, learner, leased, batch) if with_rows else []
    factors = ranks.factors
    if not batch.tokens:
        return rows, dict(batch.metrics)
    report = await ranks.step(batch.shares, batch.critic)
    if report.finite:
        ranks.update_controllers(batch.kl, report, batch.rows, batch.tokens)
    return rows, {**batch.metrics, **numbers(batch, report, factors)}


async def _losses(ranks: Any, learner: Any, leased: Any, batch: Any) -> list[RowLoss]:
    """Return the loss of every row of the lease; 0 for a row that the step omits."""
    share = batch.shares[0]
    losses = dict.fromkeys(range(len(leased.rows)), 0.0)
    logprobs_of = {}
    for i, (loss, logprobs) in zip(
        batch.order, await ranks.aside(learner.row_losses, share), strict=True
    ):
        losses[i] += loss
        logprobs_of[i] = logprobs
    rows = []
    for i, x in enumerate(leased.experiences):
        loss = losses[i]
        logprobs = logprobs_of.get(i)
        advantages = batch.advantages.get(i)
        if not math.isfinite(loss):
            raise RunFailed(
                "the loss of a row is not finite; look at its log-probs with rft buffer sample "
                "--tokens"
            )
        advantage = 0.0 if advantages is None else float(advantages.mean())
        apart = 0.0 if logprobs is None else float((logprobs - x.logprobs[x.loss_mask]).mean())
        rows.append(RowLoss(str(x.id), x.reward, advantage, x.num_response_tokens, loss, apart))
    return rows
