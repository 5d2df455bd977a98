"""From a configuration file to a finished run: check, claim the folder, run, report.  Shared by `rft run` and `rft quickstart`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rft import logs
from rft.config.check import load_plan
from rft.config.halves import apart
from rft.config.load import stage_names
from rft.config.plan import Plan
from rft.config.save import Change, refuse_changes, save
from rft.config.schema.root import RunConfig
from rft.errors import ConfigError, Interrupted, OutOfMemory, RftError, is_out_of_memory
from rft.launch import bench, leftovers
from rft.launch.drive import INTERRUPTED, OnRecord, Outcome
from rft.launch.progress import Progress
from rft.launch.remote import memory_remedy
from rft.launch.rundir import RunDir
from rft.launch.stages import Program, refuse_program
from rft.monitor.monitor import check_available
from rft.taskset import pipeline as tasks
from rft.trainer import manifest as manifests

log = logging.getLogger(__name__)


def execute(config: Path, overrides: Sequence[str], *, plugin_dirs: Sequence[str] = (), in_process: bool = False) -> Outcome:
    """Runs `config` to the end, with all its stages.  Raises RftError; nothing has been started if it is a ConfigError."""
    logs.learn_environment()
    if stage_names(config, overrides):
        return Program(config, overrides, plugin_dirs).run(lambda loaded, plan: _run(loaded, plan, in_process))
    loaded, plan = load_plan(config, list(overrides), plugin_dirs=list(plugin_dirs))
    if apart(loaded):
        refuse_program(plan.run_dir)
        return _half(loaded, plan, in_process)
    if not plan.continue_from_checkpoint and plan.run_dir.exists() and plan.mode != "bench":
        name = f"{plan.run_dir.name}_{time.strftime('%Y%m%d_%H%M%S')}"
        loaded, plan = load_plan(config, list(overrides), plugin_dirs=list(plugin_dirs), name=name)
    refuse_program(plan.run_dir)
    return _run(loaded, plan, in_process)


def _half(loaded: RunConfig, plan: Plan, in_process: bool) -> Outcome:
    """One of several processes of a run.  They meet by the run's name, so none of them changes it."""
    if plan.mode == "explore":
        return _run(loaded, plan, in_process, folder=plan.run_dir / "explorers" / plan.explorer.name)
    if not plan.continue_from_checkpoint and (plan.run_dir / "state.json").exists():
        raise ConfigError(
            f"is false, and {plan.run_dir} holds a run.  Processes that meet by a run's name do not change it: write another `name` in "
            "the files of all of them, or true",
            key="continue_from_checkpoint",
            given=False,
        )
    return _run(loaded, plan, in_process)


def _run(loaded: RunConfig, plan: Plan, in_process: bool, folder: Path | None = None) -> Outcome:
    """One run, or one stage of a program; in `folder` where that is not the run's."""
    if plan.mode == "bench":
        return _bench(plan, in_process)
    if folder is None:
        check_available(plan.monitor.kinds, plan.monitor.args)
    run = _runner(loaded, plan, in_process)  # imported now, so that a Ctrl-C while it works finds its handlers in place
    rundir = RunDir.claim(folder or plan.run_dir)
    changed: list[Change] = []
    if folder is None:
        manifests.recover(rundir.checkpoints)
        changed = _changes(loaded, rundir)
    began = time.time()
    handler = logs.to_file(logs.node_folder(rundir.logs, plan.log_by_node) / "launcher.log", plan.log_level)
    try:
        for change in changed:
            log.info("changed since the run began: %s %r -> %r", change.key, change.old, change.new)
        save(loaded, rundir.path)
        _clean_after_a_crash(rundir)
        if plan.task_pipeline is not None and plan.mode != "train":
            print(f"task pipeline: {tasks.write(plan.task_pipeline)} → {plan.task_pipeline.output}", flush=True)
        with Progress(rundir.path, total_steps=plan.trainer.total_steps, notes=(*plan.notes, *plan.warnings)) as progress:
            outcome = asyncio.run(run(plan, rundir, progress.update))
        rundir.state("done", version=str(outcome.version), seconds=round(time.time() - began, 1))
        return outcome
    except (Interrupted, KeyboardInterrupt) as e:
        rundir.state("interrupted", reason=INTERRUPTED)
        raise Interrupted(INTERRUPTED) from e
    except BaseException as e:
        if is_out_of_memory(e):
            log.error("%s", e, exc_info=True)
            e = OutOfMemory(memory_remedy("the process of rft run"))
        rundir.state("failed", reason=f"{type(e).__name__}: {e}")
        log.error("%s", e, exc_info=not isinstance(e, RftError))
        raise e
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
        rundir.release()
        sys.stdout.flush()


def _bench(plan: Plan, in_process: bool) -> Outcome:
    """Evaluates checkpoints.  What the folder's own run has saved, its configuration and its state, stays as it is."""
    check_available(plan.monitor.kinds, plan.monitor.args)
    if in_process:
        from rft.launch import inprocess

        inprocess.check(plan)
        evaluate = inprocess.evaluate
    else:
        from rft.launch import supervise

        evaluate = supervise.evaluate
    rundir = RunDir.claim(plan.run_dir)
    began = time.time()
    handler = logs.to_file(logs.node_folder(rundir.logs, plan.log_by_node) / "bench.log", plan.log_level)
    try:
        results = asyncio.run(evaluate(plan, rundir))
    except (Interrupted, KeyboardInterrupt) as e:
        raise Interrupted("stopped on request; what was evaluated is in metrics.jsonl") from e
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
        rundir.release()
    print(bench.table(results), flush=True)
    return Outcome(results[-1][0], plan.run_dir, time.time() - began, None)


def _changes(loaded: RunConfig, rundir: RunDir) -> list[Change]:
    """What is new since the run began.  Until there is a checkpoint anything may change: nothing learnt would be thrown away."""
    try:
        return refuse_changes(loaded, rundir.path) if manifests.committed(rundir.checkpoints) else []
    except ConfigError:
        rundir.release()
        raise


def _clean_after_a_crash(rundir: RunDir) -> None:
    """A run that was killed could not clean up; whatever of it is still on this machine goes now."""
    if run_id := rundir.read_state().get("run_id"):
        for line in leftovers.clean(run_id):
            log.info("left by the run before: %s", line)


def _runner(loaded: RunConfig, plan: Plan, in_process: bool) -> Callable[[Plan, RunDir, OnRecord], Coroutine[Any, Any, Outcome]]:
    if in_process:
        from rft.launch import inprocess

        inprocess.check(plan)
        return inprocess.run
    if apart(loaded):
        from rft.launch import separate

        return separate.explore if plan.mode == "explore" else separate.train
    from rft.launch import supervise

    return supervise.run
