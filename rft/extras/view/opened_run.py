"""One run that is looked at: its curves, its ledger and the index of its rollouts, each refreshed
when files have changed.

Depends on files, not on pages.  Invariant: the ledger is asked by one thread, in short transactions
that only read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rft.buffer.query import Questions, locate
from rft.buffer.token_texts import TokenTexts
from rft.errors import ConfigError, RftError
from rft.extras.view.metric_curves import Curves
from rft.extras.view.rollout_index import RolloutIndex
from rft.launch.rundir import RunDir
from rft.types.ids import GroupId

log = logging.getLogger(__name__)
T = TypeVar("T")
REFRESH_S = 2.0  # the index is not read anew more often
PAGE_TIMEOUT_S = 20.0


class OpenedRun:
    """Made in the event loop; `close` it there."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._curves = Curves(run_dir)
        self.index = RolloutIndex()
        self.users = 0  # requests under way
        self.words: TokenTexts | None = None  # once a rollout was shown
        # columns of the documented views, once they are known
        self.views: dict[str, tuple[str, ...]] = {}
        self._metrics_lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._questions: Questions | None = None
        self._file: tuple[int, int] = (0, 0)  # of the ledger that is open
        self._changes: tuple[int, ...] = ()  # of the ledger's files at the last refresh
        self._refreshed = 0.0
        self._building: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._building is not None:
            self._building.cancel()
            await asyncio.gather(self._building, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_ledger)
        self._thread.shutdown(wait=False)

    # ------------------------------------------------------------ files

    async def metrics(self, read: Callable[[Curves], T]) -> T:
        """What `read` finds in all metrics, as far as they are written; they do not change
        meanwhile.
        """

        def refreshed() -> T:
            with self._metrics_lock:
                self._curves.refresh()
                return read(self._curves)

        return await asyncio.to_thread(refreshed)

    def state(self) -> dict[str, Any]:
        """Phase, process, and what the run has written of itself; a damaged file is a problem, no
        error.
        """
        run = RunDir(self.run_dir)
        try:
            state = run.read_state()
            problem = ""
        except ConfigError as e:
            state = {}
            problem = str(e)
        phase, holder = run.phase(state)
        return {"phase": phase, "holder": holder, "problem": problem, "state": state}

    # ------------------------------------------------------------ ledger

    async def ask(self, question: Callable[[Questions], T]) -> T:
        """What `question` finds in the ledger, in the ledger's thread.  Raises ConfigError where
        none can be read.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: question(self._opened())
        )

    def _opened(self) -> Questions:
        where = locate(self.run_dir)
        file = (0, 0)
        if where.path is not None:
            stat = where.path.stat()
            file = (stat.st_dev, stat.st_ino)
        if self._questions is not None and file == self._file:
            return self._questions
        self._close_ledger()
        questions = Questions(where, self.run_dir)
        try:
            questions.open()
        except BaseException:
            questions.close()
            raise
        self._questions = questions
        self._file = file
        self._changes = ()
        self.index = RolloutIndex()
        return questions

    def _close_ledger(self) -> None:
        if self._questions is not None:
            self._questions.close()
            self._questions = None

    # ------------------------------------------------------------ index

    async def indexed(self) -> RolloutIndex | None:
        """The index as the ledger is now; None on PostgreSQL.  The first call reads all rows: see
        `progress`.
        """
        if not await self.ask(lambda q: q.sqlite):
            return None
        if self._building is None or self._building.done():
            self._building = asyncio.ensure_future(self._build())
        await asyncio.shield(self._building)
        return self.index

    def begin_index(self) -> None:
        """Begin to read it in the background."""
        if self._building is None:
            self._building = asyncio.ensure_future(self._build())
            self._building.add_done_callback(_log_failure)

    async def _build(self) -> None:
        while not await self.ask(self._portion):
            pass  # between portions the questions of pages have their turn

    def _portion(self, questions: Questions) -> bool:
        if not questions.sqlite:
            return True
        changes = _changes(questions)
        if self.index.ready:
            if changes == self._changes or time.monotonic() < self._refreshed + REFRESH_S:
                return True
            self._changes = changes
        elif not self.index.size:
            self._changes = changes
        if done := self.index.refresh(questions):
            self._refreshed = time.monotonic()
        return done

    @property
    def progress(self) -> float:
        """Part of the index that is read, 0 to 1."""
        return 1.0 if self.index.ready else self.index.size / max(self.index.total, 1)


def _changes(questions: Questions) -> tuple[int, ...]:
    """Another one after each commit to a ledger of SQLite."""
    path = questions.where.path
    assert path is not None, "of SQLite"
    stamps: list[int] = []
    for file in (path, path.with_name(path.name + "-wal")):
        with suppress(FileNotFoundError):
            stat = file.stat()
            stamps += [stat.st_mtime_ns, stat.st_size]
    return tuple(stamps)


def _log_failure(job: asyncio.Task[None]) -> None:
    if (
        not job.cancelled()
        and (error := job.exception()) is not None
        and not isinstance(error, RftError)
    ):
        log.error("the index of rollouts ended: %s", error, exc_info=error)


def group_of(id: str) -> str:
    """The group of an experience's id, or of a group's."""
    return str(GroupId.parse(".".join(id.split(".")[:4])))
