"""Runs operators over one group at a time, between the explorer and the buffer.

    copy of the input ─> reward operators ─> can the group be trained? ─> statistics operators ─> drop operators ─> still a row to train?

It knows neither tasksets nor the ledger.  Invariant: out come the rows that went in, each once, with the same tokens; what an operator
left out has its name as `reason` and is never trained.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rft.buffer.operators.base import GroupView, Operator, Result, Stage
from rft.buffer.operators.build import build
from rft.buffer.operators.contract import broken, freeze, mark
from rft.buffer.operators.copy import InputCopy
from rft.buffer.operators.settings import PipelineSettings
from rft.errors import RftError, RunFailed
from rft.logs import redact
from rft.threads import in_thread
from rft.types.experience import Experience
from rft.types.metrics import Metric
from rft.types.ports import ChatModel
from rft.types.task import Task

log = logging.getLogger(__name__)
Judge = Callable[[list[Experience], int], tuple[bool, str]]
FILTERED = "filtered"
_TRACEBACK_LINES = 12


class OperatorFailed(Exception):
    """An operator raised, or passed its deadline; the group cannot be used.  `traceback` is the user's."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


@dataclass
class Processed:
    """A group after all operators: every row that went in, in the same order.

    `reason` says why it is not accepted; `dropped` counts the rows that operators left out, by operator.
    """

    rows: list[Experience]
    accepted: bool
    reason: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)


class Pipeline:
    """The operators of a run.  `judge(rows, num_runs)` says whether a group can be trained, and if not why."""

    def __init__(self, settings: PipelineSettings, judge: Judge, deadline_s: float) -> None:
        """`deadline_s` is how long an operator may take over one group.  Raises ConfigError; plugins must be loaded."""
        made = zip(settings.operators, build(settings.operators), strict=True)
        self._operators = [_Running(s.name, i, o, deadline_s) for i, (s, o) in enumerate(made)]
        self._copy = InputCopy(settings.input_path) if settings.input_path is not None else None
        self._judge = judge
        self._prepared: list[_Running] = []

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._operators) or self._copy is not None

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Raises RunFailed, with the traceback, when an operator cannot get ready or the copy's file cannot be written."""
        if self._copy is not None:
            await self._copy.open()
        for one in self._operators:
            await one.life("prepare", models)
            self._prepared.append(one)

    async def close(self) -> None:
        """Closes what was prepared, last first.  Raises the first RunFailed, after all had their turn; the others are logged."""
        errors: list[RunFailed] = []
        while self._prepared:
            try:
                await self._prepared.pop().life("close")
            except RunFailed as e:
                log.error("%s", e)
                errors.append(e)
        if self._copy is not None:
            await self._copy.close()
        if errors:
            raise errors[0]

    async def process(self, task: Task, rows: Sequence[Experience]) -> Processed:
        """The group's rows after all operators.

        Raises OperatorFailed when one raises or is too slow; RunFailed when one returns what it must not; RftError from an engine.
        """
        began = time.monotonic()
        if self._copy is not None:
            await self._copy.write(rows)
        group = _Group(task, rows)
        if group.members:
            await self._run("reward", group)
        accepted, reason = self._judge(group.rows, task.num_runs)
        if any(m.reward is not None for m in group.members):
            await self._run("statistics", group)
        if accepted:
            await self._run("drop", group)
            if not any(r.trainable for r in group.rows):
                accepted, reason = False, FILTERED
        done = Processed(group.rows, accepted, reason, group.dropped, group.metrics)
        done.metrics += [
            Metric("failed_count", 0, "sum"),
            Metric("filtered_count", sum(group.dropped.values()), "sum"),
            Metric("experience_count", sum(r.trainable for r in group.rows) if accepted else 0, "sum"),
            Metric("time/total", time.monotonic() - began, "sum"),
        ]
        return done

    async def _run(self, stage: Stage, group: _Group) -> None:
        for one in self._operators:
            if one.operator.stage == stage and group.alive:
                await one.run(group)


class _Group:
    """The rows of one group while operators work on them."""

    def __init__(self, task: Task, rows: Sequence[Experience]) -> None:
        self.task = task
        self.rows = list(rows)
        self.dropped: dict[str, int] = {}
        self.metrics: list[Metric] = []
        for row in rows:
            freeze(row)

    @property
    def members(self) -> tuple[Experience, ...]:
        return tuple(r for r in self.rows if r.status != "failed")

    @property
    def alive(self) -> list[Experience]:
        """What the next operator gets."""
        return [r for r in self.rows if r.status != "failed" and not r.reason]

    def take(self, name: str, before: Sequence[Experience], result: Result) -> None:
        """Puts what came back in its place; what did not, or has no token left to train, gets the operator's name as reason."""
        given, back = {r.id for r in before}, {r.id: r for r in result.rows}
        gone = 0
        for i, row in enumerate(self.rows):
            if row.id not in given:
                continue
            now = back.get(row.id)
            if now is None or (row.loss_mask.any() and not now.loss_mask.any()):
                now = msgspec.structs.replace(row if now is None else now, reason=name)
                gone += 1
            self.rows[i] = now
        if gone:
            self.dropped[name] = self.dropped.get(name, 0) + gone
        self.metrics += result.metrics


class _Running:
    """One operator with its name, its place and its turns."""

    def __init__(self, name: str, index: int, operator: Operator, deadline_s: float) -> None:
        self.name, self.index, self.operator = name, index, operator
        self._deadline_s = deadline_s
        self._blocking = not inspect.iscoroutinefunction(operator.process)
        self._turn = asyncio.Lock()  # an ordinary function sees one group after the other

    async def run(self, group: _Group) -> None:
        before, view = group.alive, GroupView(task=group.task, members=group.members)
        marks = [mark(r) for r in before]
        began = time.monotonic()
        result = await self._call(before, view)
        if fault := broken(self.operator.stage, before, marks, result):
            raise RunFailed(
                f"operator {self.name} {fault}.  Its result cannot be trusted, so the run stops; correct the operator"
            )
        group.take(self.name, before, result)
        group.metrics.append(Metric(f"time/operator/{self.index}_{self.name}", time.monotonic() - began, "sum"))

    async def _call(self, rows: list[Experience], view: GroupView) -> Any:
        limit = asyncio.timeout(self._deadline_s)
        try:
            if not self._blocking:
                async with limit:
                    return await self.operator.process(list(rows), view)  # type: ignore[misc]
            async with self._turn:
                limit = asyncio.timeout(self._deadline_s)
                async with limit:
                    return await in_thread(lambda: self.operator.process(list(rows), view), f"operator-{self.name}", error=_error)
        except RftError:
            raise
        except (Exception, SystemExit) as e:  # user code may raise anything; the group becomes failed records
            late = isinstance(e, TimeoutError) and limit.expired()
            what = f"took longer than {self._deadline_s:g} s" if late else f"raised {type(e).__name__}: {e}"
            raise self._failed(e, what) from e

    def _failed(self, error: BaseException, what: str) -> OperatorFailed:
        lines = redact("".join(traceback.format_exception(error))).splitlines()[-_TRACEBACK_LINES:]
        return OperatorFailed(redact(f"operator {self.name} {what}"), "\n".join(lines))

    async def life(self, method: str, *args: Any) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                waiting = getattr(self.operator, method)(*args)
                if inspect.isawaitable(waiting):
                    await waiting
        except RftError:
            raise
        except (Exception, SystemExit) as e:  # user code may raise anything
            text = redact("".join(traceback.format_exception(e)))
            raise RunFailed(f"operator {self.name} failed to {method}:\n{text}") from e


def _error(e: BaseException) -> BaseException:
    return RuntimeError("it raised StopIteration") if isinstance(e, StopIteration) else e
