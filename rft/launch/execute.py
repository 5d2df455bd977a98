"""Execute a configuration file: check, lock the run folder, run, record the outcome."""

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
from rft.launch.stages import Program, RunStage, began_with, refuse_program
from rft.plugins import extra_entry
from rft.preflight.check import load_plan
from rft.taskset import task_pipeline as tasks
from rft.trainer.checkpoint import manifest as manifests
from rft.worker.teller import Teller
from rft.worker.threads import as_failure
from rft.worker.waiting import works
from rft.workflow.endpoint import listening

log = logging.getLogger(__name__)


def execute(
    config: Path,
    overrides: Sequence[str],
    *,
    plugin_dirs: Sequence[str] = (),
    in_process: bool = False,
    teller: Teller | None = None,
) -> Outcome:
    """Run `config` with all its stages.

    `teller`: an open one, which says what is waited for.  Raises RftError; on ConfigError nothing
    was started.
    """
    if teller is None:
        with Teller() as teller:
            return execute(
                config, overrides, plugin_dirs=plugin_dirs, in_process=in_process, teller=teller
            )
    try:
        return _execute(config, overrides, plugin_dirs, partial(_run, teller, in_process))
    except Exception as e:
        if not isinstance(e, RftError) and is_full(e):
            raise full(e) from e
        raise


def _execute(
    config: Path, overrides: Sequence[str], plugin_dirs: Sequence[str], run: RunStage
) -> Outcome:
    logs.learn_environment()
    if stage_names(config, overrides):
        return Program(config, overrides, plugin_dirs).run(run)
    loaded, plan = load_plan(config, list(overrides), plugin_dirs=plugin_dirs)
    if apart(loaded):
        refuse_program(plan.run_dir)
        return _run_one_role(loaded, plan, run)
    if not plan.continue_from_checkpoint and plan.run_dir.exists() and plan.mode != "bench":
        name = f"{plan.run_dir.name}_{time.strftime('%Y%m%d_%H%M%S')}"
        loaded, plan = load_plan(config, list(overrides), plugin_dirs=plugin_dirs, name=name)
    refuse_program(plan.run_dir)
    return run(loaded, plan)


def _run_one_role(loaded: RunConfig, plan: Plan, run: RunStage) -> Outcome:
    """Run one of several processes that meet by the run's name; it may not change that name."""
    if (
        not plan.joins
        and not plan.continue_from_checkpoint
        and (plan.run_dir / "state.json").exists()
    ):
        raise ConfigError(
            f"is false, and {plan.run_dir} holds a run.  Processes that meet by a run's name do "
            f"not change it: write another `name` in "
            "the files of all of them, or true",
            key="continue_from_checkpoint",
            given=False,
        )
    return run(loaded, plan)


def _run(teller: Teller, in_process: bool, loaded: RunConfig, plan: Plan) -> Outcome:
    """Run one run or one stage of a program."""
    if plan.mode == "bench":
        return _bench(teller, in_process, loaded, plan)
    folder = plan.run_dir / "explorers" / plan.explorer.name if plan.joins else plan.run_dir
    if plan.serve is not None:
        # before any process starts; the service's process may lack this environment
        clients = extra_entry("service", "clients", key="mode")(plan.serve)
        plan = replace(plan, serve=replace(plan.serve, clients=clients))
    _check_ports(plan, folder)
    command = _command(loaded, plan, in_process)
    loaded = loaded.model_copy(update={"plugin_dirs": plan.plugin_dirs})  # with --plugin-dir
    runtime = _runtime(plan, in_process)
    mode = modes.mode_of(plan)
    rundir = RunDir.claim(folder)
    with works(f"reading what is in {folder}"):
        changes = [] if plan.joins else _changes(loaded, plan, rundir)
    with _owned(rundir, plan, "launcher.log"), rundir.record_outcome(), _errors_of_a_run():
        rundir.goes_on(command)
        for line in changes:
            log.info("%s", line)
        with works("removing what an earlier process left"):
            _clean_after_a_crash(rundir)
        if plan.task_pipeline is not None and plan.mode != "train":
            with works("task pipeline"):
                counts = tasks.write(plan.task_pipeline)
            print(f"task pipeline: {counts} → {plan.task_pipeline.output}", flush=True)
        notes = [*changes, *plan.notes, *plan.warnings]
        if "tensorboard" in plan.monitor.monitor_type:
            notes.append(f"curves: tensorboard --logdir {rundir.path / 'tensorboard'}")
        outcome = _work(teller, mode, rundir, runtime, loaded, notes)
        phase = rundir.read_state().get("phase", "done")
        if outcome.seconds == 0.0 and phase != "done":
            how = phase if phase in ("failed", "interrupted") else "killed"
            print(
                f"note  its last process ended ({how}) after all steps; what was to come, such as "
                f"the final evaluation, is not there: mode=bench evaluates the checkpoints",
                flush=True,
            )
        rundir.state("done", version=str(outcome.version))
        return outcome


def _check_ports(plan: Plan, folder: Path) -> None:
    """Raise SetupError for a taken port, before any process starts.

    Skipped with a Ray address, whose explorers may be on other machines, and for a folder with a
    state, whose killed run may still hold the ports.
    """
    if plan.cluster.ray_address is not None or (folder / STATE).exists():
        return
    ports = [] if plan.serve is None else [(plan.serve.host, plan.serve.port)]
    if plan.mode != "train":
        ports += [("127.0.0.1", api.port) for api in plan.explorer.apis if api.port]
    for host, port in ports:
        listening(host, port).close()


def _work(
    teller: Teller,
    mode: modes.Mode,
    rundir: RunDir,
    runtime: Runtime,
    loaded: RunConfig,
    notes: list[str],
) -> Outcome:
    """Run the mode with its progress on the terminal; end leftover processes."""
    total_steps = mode.plan.trainer.total_steps
    steps = None if total_steps == ENDLESS else total_steps
    with Progress(
        rundir.path, teller, total_steps=steps, notes=notes, served=serves(loaded)
    ) as progress:
        ended: list[str] = []
        try:
            with leftovers.collected() as ended:
                saving = partial(save, loaded, rundir.path, began_with(rundir.path))
                return asyncio.run(_followed(mode, rundir, progress, runtime, saving))
        finally:
            for line in ended:
                log.info("left by the run: %s", line)


@contextmanager
def _errors_of_a_run() -> Iterator[None]:
    """Turn Ctrl-C into Interrupted; log every other error and raise it, as an RftError if possible."""
    try:
        yield
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
    """Return the command that resumes this run."""
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


def _bench(teller: Teller, in_process: bool, loaded: RunConfig, plan: Plan) -> Outcome:
    """Evaluate checkpoints; leave the configuration and state of a run in the folder unchanged."""
    runtime = _runtime(plan, in_process)
    rundir = RunDir.claim(plan.run_dir)
    began = time.time()
    alone = not (plan.run_dir / STATE).exists()
    with _owned(rundir, plan, "bench.log"), rundir.record_outcome() if alone else nullcontext():
        if alone:
            save(loaded, rundir.path)
            rundir.state("running")

        async def evaluated() -> bench.Results:
            async with progress.telling(runtime.activities):
                return await bench.evaluate(plan, rundir, runtime)

        try:
            with Progress(rundir.path, teller, total_steps=0, what="evaluation") as progress:
                results = asyncio.run(evaluated())
        except (Interrupted, KeyboardInterrupt) as e:
            raise Interrupted("stopped on request; what was evaluated is in metrics.jsonl") from e
        if alone:
            rundir.state("done")
    print(bench.table(results), flush=True)
    return Outcome(results[-1][0], plan.run_dir, time.time() - began, None)


@contextmanager
def _owned(rundir: RunDir, plan: Plan, name: str) -> Iterator[None]:
    """Log to the file `name` of the locked folder, and log errors to the terminal, too."""
    try:
        handler = logs.to_file(
            logs.node_folder(rundir.logs, plan.log_by_node) / name, plan.log_level
        )
    except OSError:
        rundir.release()
        raise
    terminal = logs.ErrorTeller(lambda line: print(line, file=sys.stderr, flush=True))
    # the caller prints the error that ends the run
    terminal.addFilter(lambda record: record.name != __name__)
    logging.getLogger().addHandler(terminal)
    try:
        yield
    finally:
        for each in (terminal, handler):
            logging.getLogger().removeHandler(each)
            each.close()
        rundir.release()
        sys.stdout.flush()


def _changes(loaded: RunConfig, plan: Plan, rundir: RunDir) -> list[str]:
    """Describe changes of the configuration since the run began.

    Without a checkpoint or kept rows any change is allowed.  Raises ConfigError for changes that
    would make it another run, and for damaged checkpoints or state.
    """
    try:
        rundir.read_state()
        manifests.recover(rundir.checkpoints)
        if plan.resume_mode == "auto":
            manifests.refuse_lost(rundir.checkpoints)
        goes_on = bool(manifests.committed(rundir.checkpoints)) or _keeps_rows(plan, rundir)
        changed = refuse_changes(loaded, rundir.path) if goes_on else []
    except (RftError, OSError):
        rundir.release()
        raise
    notes = {"resume_from_path": ", without effect: the run goes on from its own checkpoint"}
    changes = (
        (c.key, textwrap.shorten(f"{c.key} {c.old!r} -> {c.new!r}", 300, placeholder=" ..."))
        for c in changed
    )
    return [f"changed since the run began: {text}{notes.get(key, '')}" for key, text in changes]


def _keeps_rows(plan: Plan, rundir: RunDir) -> bool:
    """Return whether experiences of an earlier attempt will be trained in this attempt."""
    if plan.buffer.resume_rows != "keep":
        return False
    try:
        return audit_run(rundir.path, payload=False, ledger_url=plan.buffer.ledger_url).acked > 0
    except BufferFailed:  # no ledger; opening refuses an unreadable one
        return False


def _clean_after_a_crash(rundir: RunDir) -> None:
    """Remove leftovers of a killed process of the run on this machine, unless the folder is a copy
    of a living run's.
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
