"""One train step of a run once more: from its nearest checkpoint, on the rows that it used, with
the loss of every row.

Knows the trainer and the run's ledger; no engine.  Runs in this process, on one rank.  Invariant:
the run's folder stays as it is.
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
from rft.config.verify import load_plan
from rft.errors import ConfigError, RunFailed
from rft.launch import parts
from rft.launch.stages import began_with
from rft.launch.start import origin, windows
from rft.monitor.read import read
from rft.trainer import manifest as manifests
from rft.trainer.manifest import Manifest
from rft.types.ports import Lease

Tell = Callable[[str], None]
COMPARED = ("actor/loss", "actor/grad_norm", "experience/reward/mean", "experience/rows")


@dataclass(frozen=True)
class RowLoss:
    """One row of the step.  `loss` is its share of the step's: they add up.  `apart`: mean of new −
    sampler's log-prob, nats.
    """

    id: str
    reward: float | None
    advantage: float
    tokens: int
    loss: float
    apart: float


@dataclass(frozen=True)
class StepAgain:
    """The step, its rows in the order of the lease, and its numbers beside those that the run
    wrote.
    """

    step: int
    begun_from: str
    rows: list[RowLoss]
    numbers: dict[str, tuple[float, float | None]]  # now, then


def again(
    run_dir: Path, step: int, overrides: Sequence[str] = (), tell: Tell = lambda text: None
) -> StepAgain:
    """Steps between the checkpoint and `step` are trained again too.

    Raises ConfigError where the run has no such step, PayloadDamaged where its rows are gone.
    """
    with ReplayReader(run_dir) as reader, tempfile.TemporaryDirectory(prefix="rft-step-") as aside:
        if not 1 <= step <= reader.last:
            raise ConfigError(f"the run trained steps 1 to {reader.last}", key="STEP", given=step)
        plan, other = _plan(run_dir, Path(aside), overrides)
        found = _before(run_dir, step, plan) or origin(other)
        if found is not None and found.version.step >= step:
            raise ConfigError(
                f"the run began with step {found.version.step} of another one",
                key="STEP",
                given=step,
            )
        rows, values = asyncio.run(_train(plan, reader, found, step, tell))
    then = {
        k: v
        for r in read(run_dir / "metrics.jsonl")
        if r.role == "trainer" and r.step == step
        for k, v in r.values.items()
    }
    name = found.folder.name if found else "the model that the run began with"
    return StepAgain(
        step, name, rows, {k: (values[k], then.get(k)) for k in COMPARED if k in values}
    )


async def _train(
    plan: Plan, reader: ReplayReader, found: Manifest | None, step: int, tell: Tell
) -> tuple[list[RowLoss], dict[str, float]]:
    """From the checkpoint `found` to `step`; the rows and the numbers of that one."""
    from rft.trainer.ranks import Ranks

    tell(f"loading {found.folder if found else plan.learner.model_path}")
    part = await parts.trainer(plan, 0, None)
    try:
        ranks = Ranks(part.learner, [])
        begun = 0 if found is None else found.version.step
        begins = windows(plan)
        if found is not None:
            await ranks.load(str(found.folder))
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
    """The newest whole checkpoint from before `step`, where a window begins if the loss reads its
    first weights; None: the run's own beginning.
    """
    there = manifests.committed(run_dir / "checkpoints")
    begins = windows(plan)
    folders = [f for f in there if (at := manifests.step_of(f)) < step and begins(at)]
    best = max(folders, key=manifests.step_of, default=None)
    return None if best is None else manifests.read(best)


def _plan(run_dir: Path, aside: Path, overrides: Sequence[str]) -> tuple[Plan, Path | None]:
    """The run's plan for one rank that trains on the run's own rows; the other run that it began
    with, if any.
    """
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
    _, whole = load_plan(
        file, ["monitor.monitor_type=[]", "monitor.monitor_args=null", *overrides], model_path=model
    )
    length = f"trainer.total_steps={whole.trainer.total_steps}"
    _, plan = load_plan(
        file, [*changes, length, *overrides, "trainer.world_size=1"], model_path=model
    )
    return plan, whole.resume_from_path


async def _step(
    ranks: Any, learner: Any, lease: Lease, *, with_rows: bool
) -> tuple[list[RowLoss], dict[str, float]]:
    """As `Trainer` does it; the rows are looked at before the update."""
    from rft.trainer import batch_builder
    from rft.trainer.numbers import numbers

    needs = ranks.algorithm.needs
    if needs.pairs:
        raise ConfigError(
            "trains on pairs, whose rows have no loss each", key="algorithm", given="pairs"
        )
    given = batch_builder.read(lease, samples=needs.samples, any_sampling=needs.any_sampling)
    computed = await ranks.prepare(given.rows)
    batch = batch_builder.make(
        given,
        ranks.algorithm,
        ranks.budget,
        world_size=1,
        computed=computed,
        seed=ranks.settings.seed,
        critic_budget=ranks.critic_budget,
        kl_coefs=ranks.kl_coefs,
    )
    rows = await _losses(ranks, learner, given, batch) if with_rows else []
    coefs = dict(ranks.kl_coefs)
    if not batch.tokens:
        return rows, dict(batch.metrics)
    report = await ranks.step(batch.shares, batch.critic)
    if report.finite:
        ranks.steer(batch.kl, report, batch.rows, batch.tokens)
    return rows, {**batch.metrics, **numbers(batch, report, coefs)}


async def _losses(ranks: Any, learner: Any, given: Any, batch: Any) -> list[RowLoss]:
    """Of every row of the lease, as often as it was drawn; one that the step leaves out, because
    its loss is exactly 0, has 0.
    """
    share = batch.shares[0]
    losses = dict.fromkeys(range(len(given.rows)), 0.0)
    kept = {}
    for i, (loss, logprobs) in zip(
        batch.order, await ranks.aside(learner.row_losses, share), strict=True
    ):
        losses[i] += loss
        kept[i] = logprobs
    found = []
    for i, x in enumerate(given.experiences):
        loss = losses[i]
        logprobs = kept.get(i)
        advantages = batch.advantages.get(i)
        if not math.isfinite(loss):
            raise RunFailed(
                "the loss of a row is not finite; look at its log-probs with rft buffer sample "
                "--tokens"
            )
        own = 0.0 if advantages is None else float(advantages.mean())
        apart = 0.0 if logprobs is None else float((logprobs - x.logprobs[x.loss_mask]).mean())
        found.append(RowLoss(str(x.id), x.reward, own, x.num_response_tokens, loss, apart))
    return found
