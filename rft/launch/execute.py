"""From a configuration file to a finished run: check, claim the folder, run, report.  Shared by `rft run` and `rft quickstart`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rft import logs
from rft.config.check import load_plan
from rft.config.plan import Plan
from rft.config.save import refuse_changes, save
from rft.errors import RftError
from rft.launch import leftovers
from rft.launch.drive import Outcome
from rft.launch.progress import Progress
from rft.launch.rundir import RunDir
from rft.monitor.monitor import check_available

log = logging.getLogger(__name__)


def execute(config: Path, overrides: Sequence[str], *, plugin_dirs: Sequence[str] = (), in_process: bool = False) -> Outcome:
    """Runs `config` to the end.  Raises RftError; nothing has been started if it is a ConfigError."""
    logs.learn_environment()
    loaded, plan = load_plan(config, list(overrides), plugin_dirs=list(plugin_dirs))
    check_available(plan.monitor.kinds, plan.monitor.args)
    rundir = RunDir.claim(plan.run_dir)
    began = time.time()
    handler = logs.to_file(rundir.logs / "launcher.log", plan.log_level)
    try:
        for change in refuse_changes(loaded, rundir.path) if plan.continue_from_checkpoint else ():
            log.info("changed since the run began: %s %r -> %r", change.key, change.old, change.new)
        save(loaded, rundir.path)
        _clean_after_a_crash(rundir)
        with Progress(plan.run_dir, total_steps=plan.trainer.total_steps, notes=plan.notes) as progress:
            outcome = asyncio.run(_run(plan, rundir, progress, in_process))
        rundir.state("done", version=str(outcome.version), seconds=round(time.time() - began, 1))
        return outcome
    except BaseException as e:
        phase = "interrupted" if isinstance(e, KeyboardInterrupt) or getattr(e, "exit_code", 4) == 130 else "failed"
        rundir.state(phase, reason=f"{type(e).__name__}: {e}")
        log.error("%s", e, exc_info=not isinstance(e, RftError))
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
        rundir.release()
        sys.stdout.flush()


def _clean_after_a_crash(rundir: RunDir) -> None:
    """A run that was killed could not clean up; whatever of it is still on this machine goes now."""
    if run_id := rundir.read_state().get("run_id"):
        for line in leftovers.clean(run_id):
            log.info("left by the run before: %s", line)


async def _run(plan: Plan, rundir: RunDir, progress: Progress, in_process: bool) -> Outcome:
    if in_process:
        from rft.launch import inprocess

        return await inprocess.run(plan, rundir, progress.update)
    from rft.launch import supervise

    return await supervise.run(plan, rundir, progress.update)
