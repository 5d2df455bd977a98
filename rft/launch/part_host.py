"""The actor that hosts a part in its own process, with the output files of that process."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rft.errors import EngineFailed, RftError
from rft.launch import leftovers
from rft.launch.rundir import PRIVATE
from rft.secrets import ErrorTeller, learn_secrets, node_folder, redact, to_file
from rft.worker.parent import die_with_parent
from rft.worker.threads import contained
from rft.worker.waiting import Activity, activities

log = logging.getLogger(__name__)
MOST_LINES = 20  # errors of one part printed on the terminal


class Host:
    """Body of every actor: builds one part with a factory of `rft.launch.parts` and forwards calls.

    The constructor takes all arguments, so that Ray can restart the actor in another process.
    `secrets` of the configuration are redacted in this process's files, too.
    """

    def __init__(
        self,
        name: str,
        logs: str,
        by_node: bool,
        level: str,
        secrets: Sequence[str],
        factory: str,
        args: tuple[Any, ...],
    ) -> None:
        self._name = name
        self._factory = factory
        self._args = args
        learn_secrets(secrets)
        own_output(node_folder(Path(logs), by_node), name, level)
        self._errors = ErrorLines()
        logging.getLogger().addHandler(ErrorTeller(self._errors.add))
        self._part: Any = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Build the part once, after ending leftovers of an earlier process of this part."""
        async with self._starting:
            if self._part is None:
                for line in await asyncio.to_thread(leftovers.end_former):
                    log.warning("%s: %s", self._name, line)
                with contained(f"a plugin in {self._name}"), _without_garbage_collection():
                    self._part = await getattr(
                        importlib.import_module("rft.launch.parts"), self._factory
                    )(*self._args)

    async def broken(self) -> str:
        """Return the error of the part's health check; empty if it is healthy or not built."""
        try:
            if self._part is not None:
                await self._part.health()
        except RftError as e:
            return str(e)
        return ""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._part is None:
            raise EngineFailed(f"{self._name} was restarted and is not ready yet")
        with contained(f"a plugin in {self._name}"):
            return await getattr(self._part, method)(*args, **kwargs)

    async def beat(self) -> tuple[str, int]:
        """Return machine and pid of this process."""
        return os.uname().nodename, os.getpid()

    async def activities(self) -> list[Activity]:
        """Return the activities of this process."""
        return activities()

    async def last(self) -> None:
        """Wait for ever: the call fails when this process ends."""
        await asyncio.Event().wait()

    async def errors(self, skip: int) -> list[str]:
        """Wait for logged errors after the first `skip`, and return them."""
        return await self._errors.after(skip)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which takes a fifth of the time of imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class ErrorLines:
    """Lines added from any thread, for one waiter in the event loop."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        with self._lock:
            if len(self._lines) < MOST_LINES:
                self._lines.append(
                    line if len(self._lines) < MOST_LINES - 1 else "further errors are in its log"
                )
            if self._waiting is not None and not self._waiting[0].is_closed():
                self._waiting[0].call_soon_threadsafe(self._waiting[1].set)

    async def after(self, skip: int) -> list[str]:
        event = asyncio.Event()
        with self._lock:
            self._waiting = asyncio.get_running_loop(), event
            if len(self._lines) > skip:
                event.set()
        await event.wait()
        with self._lock:
            return self._lines[skip:]


def own_output(logs: Path, name: str, level: str) -> None:
    """Send this process's log to `logs/name.log`, and its and its children's output to
    `logs/name.out`.
    """
    os.umask(PRIVATE)
    to_file(logs / f"{name}.log", level)
    out = os.open(logs / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = sys.stderr = _RedactingStream(
        os.fdopen(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True
    )
    faulthandler.enable(file=2)
    die_with_parent()


class _RedactingStream(io.TextIOWrapper):
    """Redacts the output of plugins, like the log."""

    def write(self, text: str, /) -> int:
        super().write(redact(text))
        return len(text)
