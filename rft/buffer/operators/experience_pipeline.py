"""Run operators over one group at a time, between the explorer and the buffer.

    copy of the input ─> reward operators ─> can the group be trained? ─> statistics operators ─>
    drop operators ─> still a row to train?

Depends on neither tasksets nor the ledger.  Invariant: every input row comes out once, with the
same tokens; a dropped row has the operator's name as `reason` and is never trained.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from numbers import Real
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from rft.buffer.operators.base import STAGES, GroupView, Operator, Result, Stage, engines_named
from rft.buffer.settings import OperatorSettings, PipelineSettings
from rft.errors import ConfigError, PluginError, PluginStopped, RftError, RunFailed
from rft.files.disk import drop_cut_line
from rft.plugins import REGISTRY, checked_args
from rft.secrets import redact
from rft.types.block import json_value
from rft.types.credit import parted_runs
from rft.types.experience import Experience, check, scored_members
from rft.types.metrics import Metric, Reduction
from rft.types.ports import ChatModel
from rft.types.readonly import freeze, hint
from rft.types.task import Task
from rft.worker.threads import blamed, contained, in_thread, last_lines, unblocked

KEY = "data_processor.experience_pipeline.input_save_path"

_ARRAYS = (
    *("tokens", "loss_mask", "logprobs", "token_rewards", "routed_experts"),
    *("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
)
REFUSED = dict.fromkeys(
    ("data-juicer", "datajuicer", "DataJuicerOperator"),
    "write data_juicer, or data_juicer_filter, which drops rows",
)
log = logging.getLogger(__name__)
Judge = Callable[[list[Experience], int, int | None], tuple[bool, str]]
FILTERED = "filtered"


class InputCopy:
    """A JSON-lines copy of every experience before the operators, for people and other programs;
    the accounting ignores it.

    A thread encodes and writes lines; a group waits for its own lines, so nothing accumulates.
    Opening the file again removes a line cut off by a crash; a later lineage appends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        # runs jobs in order, even if a caller is cancelled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="experience-copy")

    async def open(self) -> None:
        """Open the file.  Raises RunFailed if it cannot be written."""
        await self._work(self._open)

    async def write(self, rows: Sequence[Experience]) -> None:
        await self._work(lambda: self._write(rows))

    async def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            await self._work(self._file.close)
            self._file = None
        self._thread.shutdown()

    async def _work(self, job: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, job)
        except OSError as e:
            raise RunFailed(
                f"{self._path} cannot be written: {e}.  Make room, or set {KEY} or save_input: "
                f"false"
            ) from e

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b", buffering=0)
        drop_cut_line(self._file)

    def _write(self, rows: Sequence[Experience]) -> None:
        assert self._file is not None, "write after open"
        lines = []
        for row in rows:
            # the buffer reports values that are not JSON, and refuses the group
            with suppress(TypeError, ValueError, OverflowError, RecursionError):
                lines.append(msgspec.json.encode(as_line(row), enc_hook=json_value) + b"\n")
        rest = memoryview(b"".join(lines))
        while rest:
            rest = rest[self._file.write(rest) :]


def as_line(row: Experience) -> dict[str, Any]:
    """Return an experience as JSON values: all its fields, arrays as lists, its id as text."""
    line: dict[str, Any] = {"id": str(row.id), "group": str(row.group)}
    for name in row.__struct_fields__:
        if name != "id":
            value = getattr(row, name)
            line[name] = value.tolist() if hasattr(value, "tolist") else value
    line["version_spans"] = [
        {"version": str(s.version), "start": s.start, "end": s.end} for s in row.version_spans
    ]
    return line


_MAY_CHANGE: dict[Stage, set[str]] = {
    "reward": {"info", "metrics", "reward", "reward_parts", "token_rewards"},
    "statistics": {"info", "metrics"},
    "drop": {"info", "metrics", "loss_mask", "logprobs"},
}


def broken(stage: Stage, before: Sequence[Experience], result: Any) -> str:
    """Return the fault of `result` as the end of a sentence about the operator; "" if valid.

    An operator may only judge the experiences in `before`, never create, copy, rename or rewrite
    one.
    """
    if not isinstance(result, Result):
        return (
            f"returned {type(result).__name__}; it must return Result(rows, metrics) of "
            f"rft.buffer.operators.base"
        )
    inputs = {r.id: r for r in before}
    returned = set()
    for row in _listed(result.rows):
        if not isinstance(row, Experience):
            return (
                f"returned a {type(row).__name__} among its rows; they must be the experiences "
                f"it was given"
            )
        if row.id not in inputs:
            return (
                f"returned {row.id}, which it was not given in this call; operators neither "
                f"create nor rename experiences"
            )
        if row.id in returned:
            return (
                f"returned {row.id} twice; rows are never copied (see max_uses for training "
                f"them more often)"
            )
        returned.add(row.id)
        if fault := _changed(stage, inputs[row.id], row) or _invalid(row):
            return fault
    if stage != "drop" and len(returned) < len(inputs):
        missing = next(i for i in inputs if i not in returned)
        return f"left out {missing}; only operators of stage drop may, and its stage is {stage}"
    return _numbers(result)


def _listed(rows: Any) -> Sequence[Any]:
    return rows if isinstance(rows, list | tuple) else [rows]


def _changed(stage: Stage, old: Experience, new: Experience) -> str:
    if new is old:
        return ""
    may = _MAY_CHANGE[stage]
    for name in old.__struct_fields__:
        was = getattr(old, name)
        now = getattr(new, name)
        if was is now or name in may:
            continue
        same = (
            np.array_equal(was, now)
            if name in _ARRAYS and was is not None and now is not None
            else was == now
        )
        if not bool(same):
            return (
                f"changed {name} of {old.id}; an operator of stage {stage} may change "
                f"{', '.join(sorted(may))}"
            )
    if bool(np.any(new.loss_mask & ~old.loss_mask)):
        return (
            f"trains tokens of {old.id} that were not to be trained; a loss_mask may only be "
            f"cleared"
        )
    if not np.array_equal(new.logprobs[new.loss_mask], old.logprobs[new.loss_mask]):
        return f"changed log-probs of {old.id}; they are the sampling policy's"
    return ""


def _invalid(row: Experience) -> str:
    """Check a changed row.  A row checks itself when created, but an operator may write into `info`
    and `metrics` afterwards.
    """
    if not row.info and not row.metrics:
        return ""
    try:
        check(row)
    except (ValueError, TypeError, RecursionError) as e:
        return f"made {row.id} invalid: {e}"
    wild = [
        str(n)
        for n, v in row.metrics.items()
        if type(v) is bool or not isinstance(v, Real) or not math.isfinite(v)
    ]
    return (
        f"made {row.id} invalid: metrics {', '.join(wild)} are not finite numbers" if wild else ""
    )


def _numbers(result: Result) -> str:
    for m in _listed(result.metrics):
        if not (
            isinstance(m, Metric)
            and isinstance(m.name, str)
            and isinstance(m.value, Real)
            and math.isfinite(m.value)
            and m.reduction in get_args(Reduction)
        ):
            return (
                f"reported {m!r}; metrics are Metric(name, finite number, "
                f"{' or '.join(get_args(Reduction))})"
            )
    return ""


def build(
    settings: Sequence[OperatorSettings], engines: Collection[str] | None = None
) -> list[Operator]:
    """Return the operators, built with their checked arguments.  Plugins must be loaded.

    `engines`: names that arguments may use; None = any. Raises ConfigError for invalid arguments
    and for an order that differs from STAGES, PluginError for an unknown name.
    """
    operators = [_build(s, engines) for s in settings]
    for before, after, where in zip(operators, operators[1:], settings[1:], strict=False):
        if STAGES.index(before.stage) > STAGES.index(after.stage):
            raise ConfigError(
                f"{where.name} ({after.stage}) comes after an operator of stage {before.stage}; "
                f"operators run in the order "
                f"{', '.join(STAGES)}.  Write them so: {', '.join(_sorted(settings, operators))}",
                key=where.key,
                given=where.name,
            )
    return operators


def _build(settings: OperatorSettings, engines: Collection[str] | None) -> Operator:
    name = settings.name
    key = settings.key
    if name in REFUSED:
        raise ConfigError(REFUSED[name], key=f"{key}.name", given=name)
    try:
        plugin = REGISTRY.get("operator", name)
    except PluginError as e:
        raise ConfigError(e.message, key=f"{key}.name", given=name) from None
    cls: Any = plugin.obj
    if not inspect.isclass(cls) or not issubclass(cls, Operator) or cls.stage not in STAGES:
        raise ConfigError(
            f"operator {name!r} must be a class X(Operator) of rft.buffer.operators.base with "
            f"`stage`, one of {', '.join(STAGES)}",
            key=f"{key}.name",
            given=name,
        )
    args = checked_args(plugin, settings.args, key=f"{key}.args")
    if engines is not None and plugin.args is not None:
        for argument, engine in engines_named(plugin.args, args).items():
            if engine not in engines:
                raise ConfigError(
                    f"no engine has this name; there is {', '.join(engines)} "
                    f"(explorer.auxiliary_models)",
                    key=f"{key}.args.{argument}",
                    given=engine,
                )
    try:
        with (
            blamed(f"operator {name!r} cannot be made", f"{key}.name"),
            contained(f"operator {name!r}"),
        ):
            instance: Operator = cls(**args)
    except ConfigError as e:
        raise ConfigError(e.message, key=e.key or f"{key}.args", given=settings.args) from None
    return instance


def _sorted(settings: Sequence[OperatorSettings], operators: Sequence[Operator]) -> list[str]:
    pairs = sorted(
        zip(settings, operators, strict=True), key=lambda pair: STAGES.index(pair[1].stage)
    )
    return [s.name for s, _ in pairs]


class OperatorFailed(Exception):
    """An operator raised or exceeded its deadline; the group is unusable.

    `traceback` is the operator's.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


@dataclass
class Processed:
    """A group after all operators: every input row, in order.  `reason`: why it is not accepted."""

    rows: list[Experience]
    accepted: bool
    reason: str = ""
    metrics: list[Metric] = field(default_factory=list)


class ExperiencePipeline:
    """The operators of a run.  `judge(rows, num_runs, needed)` returns whether a group can be
    trained, and a reason if not.
    """

    def __init__(self, settings: PipelineSettings, judge: Judge, deadline_s: float) -> None:
        """Build the operators; plugins must be loaded.  `deadline_s`: operator's limit per group.

        Raises ConfigError.
        """
        pairs = zip(settings.operators, build(settings.operators), strict=True)
        self._operators = [_Running(s.name, i, o, deadline_s) for i, (s, o) in enumerate(pairs)]
        self._copy = InputCopy(settings.input_path) if settings.input_path is not None else None
        self._judge = judge
        self._prepared: list[_Running] = []

    @property
    def active(self) -> bool:
        """Return whether there are operators or a copy of the input."""
        return bool(self._operators) or self._copy is not None

    async def prepare(self, models: Mapping[str, ChatModel]) -> None:
        """Prepare the operators and open the copy.

        Raises RunFailed, with the traceback, if an operator fails to prepare or the copy cannot be
        written.
        """
        if self._copy is not None:
            await self._copy.open()
        for running in self._operators:
            await running.life("prepare", models)
            self._prepared.append(running)

    async def close(self) -> None:
        """Close the prepared operators, last first.

        Raises the first RunFailed after all were closed; logs the others.
        """
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

    async def process(
        self, task: Task, rows: Sequence[Experience], needed: int | None = None
    ) -> Processed:
        """Return the group's rows after all operators.

        `needed`: how many of its runs must be trainable; None: as `judge` decides. Raises
        OperatorFailed if an operator raises or is too slow; RunFailed if an operator returns an
        invalid result; RftError from an engine.
        """
        began = time.monotonic()
        if self._copy is not None:
            await self._copy.write(rows)
        group = _Group(task, rows)
        if group.members:
            await self._run("reward", group)
        accepted, reason = self._judge(group.rows, task.num_runs, needed)
        before = trainable_runs(group.rows)
        if any(m.reward is not None for m in group.members):
            await self._run("statistics", group)
        if accepted:
            await self._run("drop", group)
            if not any(r.trainable for r in group.rows):
                accepted = False
                reason = FILTERED
        done = Processed(group.rows, accepted, reason, group.metrics)
        done.metrics += [
            Metric("failed_count", 0, "sum"),
            Metric("filtered_count", group.dropped, "sum"),
            Metric("filtered_runs", len(before - trainable_runs(group.rows)), "sum"),
            Metric(
                "experience_count", sum(r.trainable for r in group.rows) if accepted else 0, "sum"
            ),
            Metric("time/total", time.monotonic() - began, "sum"),
        ]
        return done

    async def _run(self, stage: Stage, group: _Group) -> None:
        for running in self._operators:
            if running.operator.stage == stage and group.alive:
                await running.run(group)


def trainable_runs(rows: Sequence[Experience]) -> set[int]:
    """Return the runs with a trainable row."""
    return {r.id.run for r in rows if r.trainable}


class _Group:
    """The rows of one group during the pipeline."""

    def __init__(self, task: Task, rows: Sequence[Experience]) -> None:
        self.task = task.deep_copy()
        self.rows = list(rows)
        self.dropped = 0  # rows that operators dropped
        self.metrics: list[Metric] = []
        self._freeze()

    def _freeze(self) -> None:
        for row in self.rows:
            freeze(row, *_ARRAYS, "messages", "tools", "reward_parts", "metrics", "info")

    @property
    def members(self) -> tuple[Experience, ...]:
        return tuple(r for r in self.rows if r.status != "failed")

    @property
    def alive(self) -> list[Experience]:
        """Return the input of the next operator."""
        return [r for r in self.rows if r.status != "failed" and not r.reason]

    def take(self, name: str, before: Sequence[Experience], result: Result) -> None:
        """Replace the rows by an operator's result; rows that are missing in it, or lost all
        trained tokens, get the operator's name as reason.
        """
        input_ids = {r.id for r in before}
        back = {r.id: r for r in result.rows}
        for i, row in enumerate(self.rows):
            if row.id not in input_ids:
                continue
            now = back.get(row.id)
            if now is None or (row.loss_mask.any() and not now.loss_mask.any()):
                now = msgspec.structs.replace(row if now is None else now, reason=name)
                self.dropped += 1
            self.rows[i] = now
        self._freeze()
        self.metrics += result.metrics


class _Running:
    """An operator with its name, index and lock."""

    def __init__(self, name: str, index: int, operator: Operator, deadline_s: float) -> None:
        self.name = name
        self.index = index
        self.operator = operator
        self._deadline_s = deadline_s
        self._blocking = not inspect.iscoroutinefunction(operator.process)
        self._lock = asyncio.Lock()  # an ordinary function processes one group at a time

    async def run(self, group: _Group) -> None:
        before = group.alive
        view = GroupView(task=group.task, members=group.members)
        began = time.monotonic()
        result = await self._call(before, view)
        if fault := broken(self.operator.stage, before, result):
            raise RunFailed(
                f"operator {self.name} {fault}.  Its result cannot be trusted, so the run stops; "
                f"correct the operator"
            )
        if self.operator.stage == "reward":
            self._check_shared(result.rows)
        group.take(self.name, before, result)
        group.metrics.append(
            Metric(f"time/operator/{self.index}_{self.name}", time.monotonic() - began, "sum")
        )

    def _check_shared(self, rows: Sequence[Experience]) -> None:
        """Raise OperatorFailed if rows of a run with a shared reward got different rewards."""
        for run, rewards in parted_runs(scored_members(rows)).items():
            listed = ", ".join(f"{r:g}" for r in rewards)
            raise OperatorFailed(
                f"operator {self.name} gave the rows of run {run} the rewards {listed}, but they "
                f"share the reward of the run.  Change it by "
                "what is the same for all of them, or let the workflow reward its calls "
                "(score_step)"
            )

    async def _call(self, rows: list[Experience], view: GroupView) -> Any:
        limit = asyncio.timeout(self._deadline_s)
        try:
            if not self._blocking:
                async with limit:
                    with contained(f"operator {self.name}"):
                        return await self.operator.process(list(rows), view)  # type: ignore[misc]
            async with self._lock:
                limit = asyncio.timeout(self._deadline_s)
                async with limit:
                    return await in_thread(
                        lambda: self.operator.process(list(rows), view), f"operator {self.name}"
                    )
        except RftError:
            raise
        except Exception as e:  # user code may raise anything; the group becomes failed rows
            late = isinstance(e, TimeoutError) and limit.expired()
            what = (
                f"took longer than {self._deadline_s:g} s"
                if late
                else f"raised {type(e).__name__}: {e}{hint(e)}"
            )
            if isinstance(e, PluginStopped):
                what = str(e).removeprefix(f"operator {self.name} ")
            raise self._failed(e, what) from e

    def _failed(self, error: BaseException, what: str) -> OperatorFailed:
        return OperatorFailed(redact(f"operator {self.name} {what}"), last_lines(error))

    async def life(self, method: str, *args: Any) -> None:
        with blamed(f"operator {self.name} failed to {method}"):
            async with asyncio.timeout(self._deadline_s):
                await unblocked(getattr(self.operator, method), f"operator {self.name}", *args)
