"""`mode: bench`: choose weights, evaluate them, and print a table.

Invariant: a checkpoint that does not match its manifest is refused by name, never evaluated.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rft.config.plan import Plan
from rft.errors import ConfigError
from rft.launch.rundir import RunDir
from rft.launch.runtime import Parts, PartSpec, Runtime, engine_specs, explorer_specs
from rft.launch.signals import Signals
from rft.launch.start import checkpoints
from rft.trainer.checkpoint import manifest as manifests
from rft.types.ids import Version
from rft.worker.waiting import works

BASE = Version(1, 0)  # the model of model.model_path
Results = list[tuple[Version, dict[str, float]]]


@dataclass(frozen=True)
class Target:
    """Weights to evaluate: a checkpoint folder; None: the base model."""

    version: Version
    checkpoint: Path | None = None


def targets(plan: Plan) -> list[Target]:
    """Return the base model (explorer.eval_on_startup), then checkpoints by step: all or the newest.

    Checkpoints are those of this run's folder or of resume_from_path.  Raises ConfigError without
    any target, CheckpointInvalid for a damaged checkpoint.
    """
    if plan.engines[0].external is not None:
        return [Target(BASE)]
    source = plan.resume_from_path
    folder = plan.run_dir / "checkpoints"
    saved = [
        manifests.read(folder)
        for folder in (manifests.committed(folder) if source is None else checkpoints(source))
    ]
    if plan.explorer.bench_latest:
        saved = sorted(saved, key=lambda m: m.version)[-1:]
    result = [Target(BASE)] if plan.explorer.eval_on_startup else []
    result += [Target(m.version, m.folder) for m in sorted(saved, key=lambda m: m.version.step)]
    if not result:
        raise ConfigError(
            f"there is no checkpoint in {folder}; write explorer.eval_on_startup: true to evaluate "
            f"the base "
            "model, name the run whose checkpoints are meant (project, group, name), or write "
            "resume_from_path",
            key="mode",
            given="bench",
        )
    return result


@contextmanager
def plan_for(plan: Plan, target: Target) -> Iterator[Plan]:
    """Yield the plan with engines that serve `target`, whose missing model folder is assembled."""
    checkpoint = target.checkpoint
    adapter = None if plan.learner.lora is None else plan.learner.lora.path
    if checkpoint is None and adapter is None:
        yield _serving(plan, None)
        return
    if checkpoint is not None and any((checkpoint / "huggingface").glob("*.safetensors")):
        yield _serving(plan, checkpoint / "huggingface")
        return
    from rft.trainer.checkpoint.hf_folder import assemble, assemble_first

    folder = plan.run_dir / "bench" / ("base" if checkpoint is None else checkpoint.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if checkpoint is not None:
            assemble(checkpoint / "trainer", folder)
        elif adapter is not None:  # the base model of a run that starts from it
            assemble_first(plan.learner, Path(adapter), folder)
        yield _serving(plan, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serving(plan: Plan, folder: Path | None) -> Plan:
    """Return the plan with engines that serve complete weights, adapters merged."""
    engines = tuple(
        replace(
            e,
            model_path=e.model_path if folder is None else str(folder),
            fixed_weights=True,
            lora_rank=None,
        )
        for e in plan.engines
    )
    return replace(plan, engines=engines)


async def evaluate(plan: Plan, rundir: RunDir, runtime: Runtime) -> Results:
    """Evaluate all targets on the evaluation tasksets, each with new engines on the same seats.

    Raises as `modes.run`.
    """
    with Signals() as signals:
        weights = targets(plan)
        async with runtime.open(plan, rundir, signals) as parts:
            try:
                return await signals.guard(parts.supervised(_evaluate(plan, parts, weights)))
            finally:
                with works("ending the parts of the run"):
                    await parts.end(graceful=False)


async def _evaluate(plan: Plan, parts: Parts, weights: Sequence[Target]) -> Results:
    results: Results = []
    await parts.reserve(engines=True, trainer=False)
    await parts.start([PartSpec("coordinator", "monitor", (plan,)), *explorer_specs(plan)])
    for target in weights:
        with plan_for(plan, target) as served:
            engines = engine_specs(served)
            await parts.start(engines)
            explorer = parts.by_name["explorer"]
            monitor = parts.by_name["coordinator"]
            results.append(
                (
                    target.version,
                    await explorer.bench(parts.engines, parts.auxiliary, monitor, target.version),
                )
            )
            await parts.stop([e.name for e in engines])
    await parts.stop(["coordinator"])
    return results


def table(results: Sequence[tuple[Version, Mapping[str, float]]]) -> str:
    """Format one line per checkpoint, with each metric at k and the cost of a server's answers."""
    names = [
        n
        for _, values in results
        for n in values
        if "@" in n or "/parts/" in n or n == "bench/cost_usd"
    ]
    names = list(dict.fromkeys(names))
    rows = [["step", *names]]
    for version, values in results:
        cells = (f"{values[n]:.4f}" if n in values else "-" for n in names)
        rows.append(["base" if version.step == 0 else str(version.step), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows
    )
