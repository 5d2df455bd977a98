"""End a run of one process whose event loop is blocked.  With Ray, `rft.launch.remote` watches."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rft.engine.watch import Watch, usage
from rft.errors import RunFailed
from rft.worker.blocked import held_up_by

log = logging.getLogger(__name__)


@contextmanager
def watched(stall_s: float | None, failed: Callable[[str], None]) -> Iterator[None]:
    """End the process with exit code 4 if its loop does not answer for `stall_s` while the process
    is idle.

    `failed` gets the reason first.  A debugger may hold the loop for any time.
    """
    if stall_s is None:
        yield
        return
    loop = asyncio.get_running_loop()
    thread = threading.get_ident()
    over = threading.Event()
    looks = Watch(stall_s, None, lambda: usage([os.getpid()], family=False))

    def watch() -> None:
        while not over.is_set():
            answered = threading.Event()
            loop.call_soon_threadsafe(answered.set)
            while not answered.wait(looks.interval_s) and not over.is_set():
                if (reason := looks.look()) and (place := held_up_by(thread)) is not None:
                    _end(
                        f"the run hangs: {place[1]} blocks its event loop, {reason}.  Let it await, or "
                        f"raise cluster.stall_timeout",
                        failed,
                    )
            looks.progress()
            over.wait(looks.interval_s)

    watcher = threading.Thread(target=watch, name="loop-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _end(reason: str, failed: Callable[[str], None]) -> None:
    log.error("%s", reason)
    failed(reason)
    print(f"RunFailed: {reason}", file=sys.stderr, flush=True)
    os._exit(RunFailed.exit_code)
