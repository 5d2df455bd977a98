"""`mode: bench`: which weights are evaluated, their evaluation, and the table of what came out.

Invariant: a checkpoint whose files are not what its manifest says is refused by name, never
evaluated.
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
from rft.trainer import manifest as manifests
from rft.types.ids import Version

BASE = Version(1, 0)  # the model of model.model_path: what a run has before its first step
Results = list[tuple[Version, dict[str, float]]]


@dataclass(frozen=True)
class Target:
    """Weights to evaluate: a checkpoint's folder, or None: the base model."""

    version: Version
    checkpoint: Path | None = None


def targets(plan: Plan) -> list[Target]:
    """The base model (explorer.eval_on_startup), then the checkpoints by step: all, or the newest
    one.

    They are those of this run's folder, or of the run or the single checkpoint that
    resume_from_path names. Raises ConfigError where nothing is left to evaluate, CheckpointInvalid
    for a checkpoint that is damaged.
    """
    if plan.engines[0].external is not None:
        return [Target(BASE)]
    given = plan.resume_from_path
    own = plan.run_dir / "checkpoints"
    found = [
        manifests.read(folder)
        for folder in (manifests.committed(own) if given is None else checkpoints(given))
    ]
    if plan.explorer.bench_latest:
        found = sorted(found, key=lambda m: m.version)[-1:]
    made = [Target(BASE)] if plan.explorer.eval_on_startup else []
    made += [Target(m.version, m.folder) for m in sorted(found, key=lambda m: m.version.step)]
    if not made:
        raise ConfigError(
            f"there is no checkpoint in {own}; write explorer.eval_on_startup: true to evaluate "
            f"the base "
            "model, name the run whose checkpoints are meant (project, group, name), or write "
            "resume_from_path",
            key="mode",
            given="bench",
        )
    return made


@contextmanager
def plan_for(plan: Plan, target: Target) -> Iterator[Plan]:
    """The plan with engines that serve the weights of `target`; what has no model folder is put
    together meanwhile.
    """
    found = target.checkpoint
    adapter = None if plan.learner.lora is None else plan.learner.lora.path
    if found is None and adapter is None:
        yield _serving(plan, None)
        return
    if found is not None and any((found / "huggingface").glob("*.safetensors")):
        yield _serving(plan, found / "huggingface")
        return
    from rft.trainer.hf_folder import assemble, assemble_first

    folder = plan.run_dir / "bench" / ("base" if found is None else found.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if found is not None:
            assemble(found / "trainer", folder)
        elif adapter is not None:  # what a run that starts from it has before its first step
            assemble_first(plan.learner, Path(adapter), folder)
        yield _serving(plan, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serving(plan: Plan, folder: Path | None) -> Plan:
    """Weights are whole, an adapter's added to them."""
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
    """Plays the evaluation tasksets under all targets, each with fresh engines in the same places.
    Raises as `modes.run` does.
    """
    with Signals() as signals:
        found = targets(plan)
        async with runtime.open(plan, rundir, signals) as parts:
            try:
                return await signals.guard(parts.supervised(_evaluate(plan, parts, found)))
            finally:
                await parts.end(graceful=False)


async def _evaluate(plan: Plan, parts: Parts, found: Sequence[Target]) -> Results:
    results: Results = []
    await parts.reserve(engines=True, trainer=False)
    await parts.start([PartSpec("coordinator", "monitor", (plan,)), *explorer_specs(plan)])
    for target in found:
        with plan_for(plan, target) as served:
            engines = engine_specs(served)
            await parts.start(engines)
            explorer = parts.made["explorer"]
            monitor = parts.made["coordinator"]
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
    """One line for each checkpoint, one column for each number at k of each taskset, and what a
    server's answers cost.
    """
    names = list(
        dict.fromkeys(n for _, told in results for n in told if "@" in n or n == "bench/cost_usd")
    )
    heads = ["step", *(n.removeprefix("bench/") for n in names)]
    rows = [
        [
            "base" if v.step == 0 else str(v.step),
            *("-" if (x := told.get(n)) is None else f"{x:.4f}" for n in names),
        ]
        for v, told in results
    ]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    return "\n".join(
        "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in [heads, *rows]
    )
