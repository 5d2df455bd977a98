"""Runs a Plan in this one process: one rank, `transformers` or scripted engines, no Ray import.

For unit and algorithm tests, for debugging a workflow, and for machines without Ray.  The parts are the same objects that sit in
actors otherwise; only the wires are shorter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from rft.config.plan import Facts, Plan
from rft.errors import ConfigError, SetupError
from rft.launch import bench, drive, parts
from rft.launch.drive import OnRecord, Outcome, Signals
from rft.launch.rundir import RunDir
from rft.trainer import manifest as manifests
from rft.trainer.manifest import Manifest
from rft.types.ports import Engine

log = logging.getLogger(__name__)


def check(plan: Plan) -> None:
    """Raises ConfigError or SetupError for what one process, or this machine, cannot do."""
    if plan.learner.world_size != 1:
        raise ConfigError(
            "several ranks need Ray; leave out --in-process, or use 1", key="trainer.world_size", given=plan.learner.world_size
        )
    if plan.mode == "explore" or (plan.mode == "train" and plan.trainer.given is None):
        raise ConfigError("is one of several processes, which meet on Ray; leave out --in-process", key="mode", given=plan.mode)
    engines = plan.engines if plan.trainer.given is None else ()
    served = [("explorer.rollout_model", e) for e in engines]
    served += [(f"explorer.auxiliary_models: {m.name}", e) for m in plan.auxiliary for e in m.engines if engines]
    for key, e in served:
        if e.engine_type == "vllm":
            raise ConfigError(
                "vllm needs Ray; leave out --in-process, or use transformers", key=f"{key}.engine_type", given="vllm"
            )
    if engines and plan.sync.method == "nccl" and plan.mode != "bench":
        raise ConfigError(
            "a broadcast needs engines in processes of their own; leave out --in-process, or use memory",
            key="synchronizer.sync_method",
            given="nccl",
        )
    if plan.explorer.env_vars:
        raise ConfigError(
            "one process has one environment; leave out --in-process, or set them in the shell",
            key="explorer.env_vars",
            given=sorted(plan.explorer.env_vars),
        )
    if "cuda" in {plan.learner.device, *(e.device for _, e in served)} and Facts().gpus == 0:
        raise SetupError(
            "the plan needs GPUs, and this machine has none; set explorer.rollout_model.device and trainer.device to cpu, "
            "leave out cluster.gpu_per_node, or use a machine with GPUs"
        )


async def run(plan: Plan, rundir: RunDir, on_record: OnRecord, *, engines: Sequence[Engine] = ()) -> Outcome:
    """Runs to the end.  `engines` replace the plan's own (tests).  Raises the RftError of the part that failed, or Interrupted."""
    began = time.monotonic()
    found = manifests.latest(rundir.checkpoints) if plan.continue_from_checkpoint else None
    if found is not None and found.version.step >= plan.trainer.total_steps:
        return Outcome(found.version, rundir.path, 0.0, found.version)
    other = drive.origin(plan.resume_from_path) if found is None else None
    rundir.state("running")
    if plan.cluster.timeline:
        log.warning("monitor.enable_ray_timeline has no effect: one process has no Ray")
    work = _explore_and_train if plan.trainer.given is None else _train_given
    await work(plan, found, other, on_record, engines)
    last = manifests.latest(rundir.checkpoints)
    assert last is not None, "a run that ends without an error has a final checkpoint"
    return Outcome(last.version, rundir.path, time.monotonic() - began, found.version if found else None)


async def _explore_and_train(
    plan: Plan, found: Manifest | None, other: Manifest | None, on_record: OnRecord, engines: Sequence[Engine]
) -> None:
    async with AsyncExitStack() as started:
        buffer = await parts.buffer(plan)
        started.push_async_callback(buffer.close)
        made: list[Engine] = []
        for i in range(len(engines) or len(plan.engines)):
            made.append(engines[i] if engines else await parts.engine(plan, i))
            started.push_async_callback(made[-1].close)
        beside: list[list[Engine]] = []
        for m, model in enumerate(plan.auxiliary):
            beside.append([await parts.auxiliary_engine(plan, m, i) for i, e in enumerate(model.engines) if e.external is None])
            for e in beside[-1]:
                started.push_async_callback(e.close)
        trainer = await parts.trainer(plan, 0, None)
        started.push_async_callback(trainer.close)
        explorer = await parts.explorer(plan)
        start = await drive.begin(buffer, found, other)
        coordinator = parts.Coordinator(plan, made, trainer, start)
        started.push_async_callback(coordinator.close)
        with Signals() as signals:
            await drive.work(
                trainer.run([], buffer.reader(start.lineage), coordinator, coordinator, start),
                explorer.run(made, beside, buffer.writer(start.lineage), coordinator, coordinator, start),
                (trainer, explorer),
                coordinator,
                on_record,
                signals,
            )


async def evaluate(plan: Plan, rundir: RunDir) -> bench.Results:
    """`mode: bench` in this process.  Raises as `run` does."""
    results: bench.Results = []
    async with AsyncExitStack() as started:
        beside: list[list[Engine]] = []
        for m, model in enumerate(plan.auxiliary):
            beside.append([await parts.auxiliary_engine(plan, m, i) for i, e in enumerate(model.engines) if e.external is None])
            for e in beside[-1]:
                started.push_async_callback(e.close)
        explorer, observer = await parts.explorer(plan), await parts.observer(plan)
        started.push_async_callback(observer.close)
        with Signals() as signals:
            for target in bench.targets(plan):
                with bench.plan_for(plan, target) as served:
                    async with AsyncExitStack() as opened:
                        made: list[Engine] = []
                        for i in range(len(served.engines)):
                            made.append(await signals.guard(parts.engine(served, i)))
                            opened.push_async_callback(made[-1].close)
                        told = await signals.guard(explorer.bench(made, beside, observer, target.version))
                results.append((target.version, told))
    return results


async def _train_given(
    plan: Plan, found: Manifest | None, other: Manifest | None, on_record: OnRecord, engines: Sequence[Engine]
) -> None:
    """The trainer alone, on a data set."""
    assert not engines, "nothing is sampled"
    async with AsyncExitStack() as started:
        trainer = await parts.trainer(plan, 0, None)
        started.push_async_callback(trainer.close)
        start = drive.begin_given(found, other)
        observer = await parts.observer(plan)
        started.push_async_callback(observer.close)
        with Signals() as signals:
            used = found.consumption if found is not None else None
            await drive.work(trainer.run_given([], observer, start, used), None, (trainer,), observer, on_record, signals)
