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
from rft.config.save import save
from rft.errors import RftError
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
        save(loaded, rundir.path)
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


async def _run(plan, rundir, progress, in_process):  # type: ignore[no-untyped-def]
    if in_process:
        from rft.launch import inprocess

        return await inprocess.run(plan, rundir, progress.update)
    from rft.launch import supervise

    return await supervise.run(plan, rundir, progress.update)
