"""From a configuration file to a finished run: check, claim the folder, run, report.  Shared by
`rft run` and `rft quickstart`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import rft.secrets as logs
from rft.buffer.audit import audit_run
from rft.config.load import stage_names
from rft.config.plan import Plan
from rft.config.plan_serve import ENDLESS
from rft.config.roles import apart, serves
from rft.config.save import refuse_changes, save, start_command
from rft.config.schema.root import RunConfig
from rft.config.verify import load_plan
from rft.errors import (
    BufferFailed,
    ConfigError,
    Interrupted,
    OutOfMemory,
    PluginStopped,
    RftError,
    RunFailed,
    is_out_of_memory,
)
from rft.files.disk import full, is_full
from rft.launch import bench, leftovers, modes
from rft.launch.drive import Outcome
from rft.launch.progress import Progress
from rft.launch.remote import memory_remedy
from rft.launch.rundir import INTERRUPTED, STATE, RunDir
from rft.launch.runtime import LocalRuntime, Runtime, check_local
from rft.launch.stages import Program, began_with, refuse_program
from rft.plugins import extra_entry
from rft.taskset import task_pipeline as tasks
from rft.trainer import manifest as manifests
from rft.worker.threads import as_failure
from rft.workflow.endpoint import listening

log = logging.getLogger(__name__)


def execute(
    config: Path,
    overrides: Sequence[str],
    *,
    plugin_dirs: Sequence[str] = (),
    in_process: bool = False,
) -> Outcome:
    """Runs `config` to the end, with all its stages.  Raises RftError; nothing has been started if
    it is a ConfigError.
    """
    try:
        return _execute(config, overrides, plugin_dirs, in_process)
    except Exception as e:
        if not isinstance(e, RftError) and is_full(e):
            raise full(e) from e
        raise


def _execute(
    config: Path, overrides: Sequence[str], plugin_dirs: Sequence[str], in_process: bool
) -> Outcome:
    logs.learn_environment()
    if stage_names(config, overrides):
        return Program(config, overrides, plugin_dirs).run(
            lambda loaded, plan: _run(loaded, plan, in_process)
        )
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
    if plan.joins:
        return _run(
            loaded, plan, in_process, folder=plan.run_dir / "explorers" / plan.explorer.name
        )
    if not plan.continue_from_checkpoint and (plan.run_dir / "state.json").exists():
        raise ConfigError(
            f"is false, and {plan.run_dir} holds a run.  Processes that meet by a run's name do "
            f"not change it: write another `name` in "
            "the files of all of them, or true",
            key="continue_from_checkpoint",
            given=False,
        )
    return _run(loaded, plan, in_process)


def _run(loaded: RunConfig, plan: Plan, in_process: bool, folder: Path | None = None) -> Outcome:
    """One run, or one stage of a program; in `folder` where that is not the run's."""
    if plan.mode == "bench":
        return _bench(loaded, plan, in_process)
    if plan.serve is not None:
        # before anything starts; the service's process may not have this one's environment
        clients = extra_entry("service", "clients", key="mode")(plan.serve)
        plan = replace(plan, serve=replace(plan.serve, clients=clients))
    # with an address, explorers may be on other machines; what is left of a run that was killed may
    # still hold the ports
    if plan.cluster.ray_address is None and not ((folder or plan.run_dir) / STATE).exists():
        ports = [
            ("127.0.0.1", api.port)
            for api in plan.explorer.apis
            if api.port and plan.mode != "train"
        ]
        for host, port in (
            ports if plan.serve is None else [(plan.serve.host, plan.serve.port), *ports]
        ):
            listening(host, port).close()
    command = _command(loaded, plan, in_process)
    # also those of the command line
    loaded = loaded.model_copy(update={"plugin_dirs": plan.plugin_dirs})
    runtime = _runtime(plan, in_process)
    mode = modes.mode_of(plan)
    rundir = RunDir.claim(folder or plan.run_dir)
    changed = _changes(loaded, plan, rundir) if folder is None else []
    with _owned(rundir, plan, "launcher.log"), rundir.ending():
        try:
            rundir.goes_on(command)
            for line in changed:
                log.info("%s", line)
            _clean_after_a_crash(rundir)
            if plan.task_pipeline is not None and plan.mode != "train":
                print(
                    f"task pipeline: {tasks.write(plan.task_pipeline)} → "
                    f"{plan.task_pipeline.output}",
                    flush=True,
                )
            notes = [*changed, *plan.notes, *plan.warnings]
            if "tensorboard" in plan.monitor.kinds:
                notes.append(f"curves: tensorboard --logdir {rundir.path / 'tensorboard'}")
            steps = None if plan.trainer.total_steps == ENDLESS else plan.trainer.total_steps
            with Progress(
                rundir.path, total_steps=steps, notes=notes, served=serves(loaded)
            ) as progress:
                ended: list[str] = []
                try:
                    with leftovers.collected() as ended:
                        saving = partial(save, loaded, rundir.path, began_with(rundir.path))
                        outcome = asyncio.run(_followed(mode, rundir, progress, runtime, saving))
                finally:  # a run that fails is the one that leaves things
                    for line in ended:
                        log.info("left by the run: %s", line)
            if (
                outcome.seconds == 0.0
                and (phase := rundir.read_state().get("phase", "done")) != "done"
            ):
                how = phase if phase in ("failed", "interrupted") else "killed"
                text = (
                    f"note  its last process ended ({how}) after all steps; what was to come, "
                    f"such as the final evaluation, is not there"
                )
                print(f"{text}: mode=bench evaluates the checkpoints", flush=True)
            rundir.state("done", version=str(outcome.version))
            return outcome
        except (Interrupted, KeyboardInterrupt) as e:
            raise Interrupted(INTERRUPTED) from e
        except BaseException as e:
            if isinstance(e, PluginStopped) or not isinstance(e, Exception):
                e = RunFailed(f"{as_failure(e)}\n{''.join(traceback.format_exception(e)[-3:])}")
            if is_out_of_memory(e):
                log.error("%s", e, exc_info=True)
                e = OutOfMemory(memory_remedy("the process of rft run"))
            elif not isinstance(e, RftError) and is_full(e):
                e = full(e)
            log.error("%s", e, exc_info=not isinstance(e, RftError))
            raise e


async def _followed(
    mode: modes.Mode,
    rundir: RunDir,
    progress: Progress,
    runtime: Runtime,
    begins: Callable[[], None],
) -> Outcome:
    async with progress.telling(runtime.activities):
        return await modes.run(mode, rundir, progress.update, runtime, begins)


def _command(loaded: RunConfig, plan: Plan, in_process: bool) -> str:
    """What starts this run again, for people."""
    source = loaded.source  # of the command line
    folders = plan.plugin_dirs[len(loaded.plugin_dirs) :]
    again = (
        ()
        if plan.continue_from_checkpoint
        else (f"name={plan.run_dir.name}", "continue_from_checkpoint=true")
    )
    assert source.path is not None, "runs are started from files"
    return start_command(
        loaded.mode, source.path, (*source.overrides, *again), folders, in_process=in_process
    )


def _bench(loaded: RunConfig, plan: Plan, in_process: bool) -> Outcome:
    """Evaluates checkpoints.  What the folder's own run has saved, its configuration and its state,
    stays as it is.
    """
    runtime = _runtime(plan, in_process)
    rundir = RunDir.claim(plan.run_dir)
    began = time.time()  # else there is a run
    alone = not (plan.run_dir / STATE).exists()
    with _owned(rundir, plan, "bench.log"), rundir.ending() if alone else nullcontext():
        if alone:
            save(loaded, rundir.path)
            rundir.state("running")

        async def evaluated() -> bench.Results:
            async with progress.telling(runtime.activities):
                return await bench.evaluate(plan, rundir, runtime)

        try:
            with Progress(rundir.path, total_steps=0, what="evaluation") as progress:
                results = asyncio.run(evaluated())
        except (Interrupted, KeyboardInterrupt) as e:
            raise Interrupted("stopped on request; what was evaluated is in metrics.jsonl") from e
        if alone:
            rundir.state("done")
    print(bench.table(results), flush=True)
    return Outcome(results[-1][0], plan.run_dir, time.time() - began, None)


@contextmanager
def _owned(rundir: RunDir, plan: Plan, name: str) -> Iterator[None]:
    """While the folder is ours: what is logged goes into its file `name`."""
    try:
        handler = logs.to_file(
            logs.node_folder(rundir.logs, plan.log_by_node) / name, plan.log_level
        )
    except OSError:
        rundir.release()
        raise
    told = logs.ErrorTeller(lambda line: print(line, file=sys.stderr, flush=True))
    # what ends the run is told by who called
    told.addFilter(lambda record: record.name != __name__)
    logging.getLogger().addHandler(told)
    try:
        yield
    finally:
        for one in (told, handler):
            logging.getLogger().removeHandler(one)
            one.close()
        rundir.release()
        sys.stdout.flush()


def _changes(loaded: RunConfig, plan: Plan, rundir: RunDir) -> list[str]:
    """What is new since the run began, in words.  Until there is a checkpoint anything may change:
    nothing learnt would be thrown away, and rows are set aside, unless some are to be kept.

    Raises ConfigError for those that would make it another run, and where its checkpoints or its
    state are not as it left them.
    """
    try:
        rundir.read_state()
        manifests.recover(rundir.checkpoints)
        if plan.resume_mode == "auto":
            manifests.refuse_lost(rundir.checkpoints)
        goes_on = bool(manifests.committed(rundir.checkpoints)) or _keeps_rows(plan, rundir)
        found = refuse_changes(loaded, rundir.path) if goes_on else []
    except (RftError, OSError):
        rundir.release()
        raise
    own = {"resume_from_path": ", without effect: the run goes on from its own checkpoint"}
    said = (
        (c.key, textwrap.shorten(f"{c.key} {c.old!r} -> {c.new!r}", 300, placeholder=" ..."))
        for c in found
    )
    return [f"changed since the run began: {text}{own.get(key, '')}" for key, text in said]


def _keeps_rows(plan: Plan, rundir: RunDir) -> bool:
    """Whether experiences of an earlier attempt are to be trained in this one."""
    if plan.buffer.resume_rows != "keep":
        return False
    try:
        return audit_run(rundir.path, payload=False, ledger_url=plan.buffer.ledger_url).acked > 0
    except BufferFailed:  # there is no ledger; one that cannot be read is refused when it is opened
        return False


def _clean_after_a_crash(rundir: RunDir) -> None:
    """A run that was killed could not clean up; whatever of it is still on this machine goes now.
    A copy of one that lives is not that.
    """
    state = rundir.read_state()
    if (run_id := state.get("run_id")) and not rundir.copied_from_one_that_lives(state):
        for line in leftovers.clean(run_id):
            log.info("left by an earlier run: %s", line)


def _runtime(plan: Plan, in_process: bool) -> Runtime:
    if in_process:
        check_local(plan)
        return LocalRuntime()
    from rft.launch.ray_runtime import RayRuntime

    return RayRuntime()
