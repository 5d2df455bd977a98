"""The coordinator of a run: monitor and synchronizer; explorers join it, get batches, leave or die.

Every run has a coordinator, and at least one explorer.  Invariant: a batch is assigned again only
after the process that had it has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, structs

from rft.config.plan import Plan
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, ConfigErrors, DeadlineExceeded, RunFailed, SetupError
from rft.explorer.assign import Assignments, BatchAssigner
from rft.launch.membership import Member, Membership, differences
from rft.launch.rundir import write_json
from rft.launch.start import Start, probe_prompts, schedule
from rft.monitor.alarm_rules import RULES
from rft.monitor.alarms import LOGGED, Alarms
from rft.monitor.monitor import FILE as METRICS
from rft.monitor.monitor import Monitor
from rft.monitor.read import MetricTail
from rft.sync.settings import SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.waits import Waits
from rft.trainer.checkpoint.checkpoints import Evaluations
from rft.types.ids import Version
from rft.types.metrics import Metric, MetricRecord
from rft.types.ports import Assignment, Engine, Scorer, Sender, WeightManifest
from rft.worker.waiting import idles

log = logging.getLogger(__name__)
AVERAGE_METRICS = {
    f"sync/{name}" for name in ("version", "bytes", "total_s", "canary_max_abs", "canary_limit")
}
KEPT = 500  # newest records in memory, for followers; metrics.jsonl has all


class JoinReply(Struct, frozen=True, kw_only=True):
    """Reply to an explorer that joined; `member` is its number."""

    member: int
    start: Start
    engines: tuple[int, ...]  # numbers of its engines
    resumes_evaluation: bool  # one was due when the earlier process of the run ended


class MonitorPart:
    """The coordinator of a run without exploration."""

    def __init__(self, plan: Plan) -> None:
        self.monitor = Monitor(plan.monitor, plan.tracked_run)
        self._alarms = Alarms(plan.monitor.alarms.model_dump(), RULES)
        self._evaluations = Evaluations()  # of earlier processes
        self._take_history(plan.tracked_run.folder / METRICS)
        self._records: deque[MetricRecord] = deque(maxlen=KEPT)
        self._num_records = 0  # including dropped ones
        self._news = asyncio.Condition()

    def _take_history(self, path: Path) -> None:
        """Resume alarms and evaluations from the metrics of earlier processes; skip damaged lines."""
        tail = MetricTail(path)
        self._alarms.resume(map(self._evaluations.add, tail.new()))
        for problem in tail.problems:
            log.warning("alarms know nothing of this line: %s", problem)

    async def fail(self, reason: BaseException) -> None:
        """Do nothing: no call waits."""

    async def log(self, record: MetricRecord) -> None:
        """Log a record and its alarms.

        Raises RunFailed for an alarm that stops the run.
        """
        await self._log(record)
        for alarm in self._alarms.see(record):
            log.warning("%s", alarm.text())
            await self._log(
                structs.replace(
                    record, values={f"{LOGGED}{alarm.name}": 1.0}, notes=(alarm.text(),)
                )
            )
            if self._alarms.stops(alarm):
                raise RunFailed(
                    f"{alarm.text()}  monitor.alarms.{alarm.name} is stop, so the run ends; the "
                    f"same command resumes it from its last "
                    "checkpoint, and this alarm is not raised again"
                )

    async def _log(self, record: MetricRecord) -> None:
        await self.monitor.log(record)
        await self._tell(record)

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        await self.monitor.samples(name, step, rows)

    async def _tell(self, record: MetricRecord) -> None:
        async with self._news:
            self._records.append(record)
            self._num_records += 1
            self._news.notify_all()

    async def records(self, after: int, *, wait: bool = True) -> tuple[int, list[MetricRecord]]:
        """Return (total, records after number `after`, at most KEPT); `wait`: for a new one."""
        async with self._news:
            await self._news.wait_for(lambda: not wait or self._num_records > after)
            new = min(max(0, self._num_records - after), len(self._records))
            return self._num_records, list(self._records)[len(self._records) - new :]

    async def close(self) -> None:
        await self.monitor.close()


class Coordinator(MonitorPart):
    """Coordinator of a run with exploration.

    `buffer` limits batches by its room; `node` is the machine of the trainer's first rank.
    `restarts`: dead engines can get a new process.  Calls of explorers begin with their name and
    member number.
    """

    def __init__(
        self,
        plan: Plan,
        scorer: Scorer,
        buffer: Any,
        start: Start,
        node: str = "",
        *,
        restarts: bool = True,
    ) -> None:
        super().__init__(plan)
        self._plan = plan
        self._start = start
        self._node = node
        self._engines: dict[int, Any] = {}
        self._waits = Waits(plan.sync.sync_timeout)
        self._members = Membership(
            self._waits, plan.cluster.stall_timeout_s, self._departed, self.fail
        )
        prompts = probe_prompts(
            plan.learner.model_path, plan.sync_runtime.canary_prompts, plan.seed
        )

        def synchronizer(
            runtime: SyncRuntime, scorer: Scorer, engines: Mapping[int, Any]
        ) -> Synchronizer:
            return Synchronizer(
                plan.sync,
                runtime,
                (),
                scorer,
                schedule(plan, start),
                prompts,
                start.version,
                restart=(lambda index: engines[index].restart()) if restarts else None,
                sender=cast(Sender, scorer),
                on_evicted=self._members.evict,
            )

        self.sync = synchronizer(plan.sync_runtime, scorer, self._engines)
        self._teachers: dict[int, Any] = {}  # engines that serve the weights' moving average
        self._average: dict[str, float] = {}  # metrics of its last publication
        self.teaching: Synchronizer | None = None
        if plan.averaged is not None:
            runtime = _teachers_runtime(plan, plan.auxiliary[plan.averaged].engines)
            self.teaching = synchronizer(runtime, _ScoresAverage(scorer), self._teachers)
        limits = (start.cursor, plan.explorer.total_batches, plan.explorer.max_inflight)
        self._assigner = BatchAssigner(
            Assignments(*limits), buffer.room, self.sync.may_explore, self._waits
        )
        self._fingerprint = ""
        self._evaluator = ""
        # later evaluations are repeated with their steps
        self._resumes_evaluation = any(step <= start.step for _, step in self._evaluations.due)
        sync = self.sync
        self.wait_for_demand = sync.wait_for_demand
        self.step_started = sync.step_started
        self.allow_batch = sync.allow_batch
        self.wait_verified = sync.wait_verified
        self.wait_final = sync.wait_final
        self.revive = sync.revive

    # ------------------------------------------------------------ for the trainer (`WeightSync`)

    async def publish(self, manifest: WeightManifest) -> list[Metric]:
        metrics = await self.sync.publish(manifest)
        values = {m.name: m.value for m in metrics} | self._average
        await self.log(MetricRecord(role="synchronizer", step=manifest.version.step, values=values))
        return metrics

    async def publish_average(self, manifest: WeightManifest) -> list[Metric]:
        assert self.teaching is not None, "the plan says so"
        metrics = await self.teaching.publish(manifest)
        self._average = {
            m.name.replace("sync/", "sync/average/"): m.value
            for m in metrics
            if m.name in AVERAGE_METRICS
        }
        return metrics

    async def step_finished(self, step: int, *, finished: bool = False) -> bool:
        requested = await self.sync.step_finished(step, finished=finished)
        if finished:
            await self._assigner.finish()
        return requested

    # ------------------------------------------------------------ explorers come and go

    async def welcome(self, name: str, config: Mapping[str, Any]) -> None:
        """Raise ConfigErrors or SetupError unless explorer `name`, started with `config`, may join."""
        self._waits.raise_failure()
        if differing := differences(self._plan.tracked_run.config, config):
            raise ConfigErrors(
                [ConfigError(text, key=key, given=value) for key, value, text in differing]
            )
        if config.get("mode") == "serve":  # two services would answer for the same sessions
            await self._members.check_alone()
        await self._members.check_name(name)

    async def join(
        self,
        name: str,
        nodes: Sequence[str],
        engines: Sequence[Any],
        process: Any,
        runtime: SyncRuntime,
    ) -> JoinReply:
        """Add explorer `name`; its engines, on `nodes`, load the newest verified version, if any.

        `process`: proxy to watch an explorer that may leave; None: it stays until the end.
        `runtime`: its engines' workers and broadcast backend.
        """
        self._waits.raise_failure()
        self._check_transport(name, nodes, runtime)
        await self._members.check_name(name)
        with self._members.joining(name):
            joining = cast("Sequence[Engine]", engines)
            numbers = await self.sync.join(
                name, joining, runtime.workers, may_leave=process is not None
            )
        if process is not None and not self.sync.owned(name):
            raise RunFailed(
                f"the engines of explorer {name} were lost while it joined; start it again"
            )
        self._engines |= dict(zip(numbers, engines, strict=True))
        member = await self._members.add(name, process)
        if process is not None:
            where = ", ".join(dict.fromkeys(nodes))
            which = ", ".join(map(str, numbers))
            log.info("explorer %s on %s has joined with engines %s", name, where, which)
            self._write()
        resumes_evaluation = self._resumes_evaluation
        self._resumes_evaluation = False
        return JoinReply(
            member=member.number,
            start=self._start,
            engines=numbers,
            resumes_evaluation=resumes_evaluation,
        )

    async def join_teacher(self, engines: Sequence[Any]) -> None:
        """Add the engines of the model that serves the weights' moving average."""
        assert self.teaching is not None, "the plan says so"
        joining = cast("Sequence[Engine]", engines)
        numbers = await self.teaching.join("the teacher", joining, may_leave=False)
        self._teachers |= dict(zip(numbers, engines, strict=True))

    async def wait_taught(self, version: Version) -> bool:
        """Wait for the canary of the moving average `version`; False if it failed."""
        assert self.teaching is not None, "the plan says so"
        return await self.teaching.wait_verified(version)

    async def revive_teacher(self, index: int) -> None:
        assert self.teaching is not None, "the plan says so"
        await self.teaching.revive(index)

    def _check_transport(self, name: str, nodes: Sequence[str], runtime: SyncRuntime) -> None:
        method = self._plan.sync.sync_method
        backend = self._plan.sync_runtime.backend
        if method == "memory" and (far := sorted(set(nodes) - {self._node})):
            raise SetupError(
                f"sync_method memory works inside one machine: the trainer is on {self._node}, "
                f"engines of explorer {name} on "
                f"{', '.join(far)}.  Write sync_method: checkpoint, with checkpoint_root_dir on a "
                f"file system that all share"
            )
        if method == "nccl" and backend == "nccl" != runtime.backend:
            raise SetupError(
                f"sync_method nccl broadcasts from GPU to GPU here, and the engines of explorer "
                f"{name} are on CPUs; give it GPUs, or "
                "write sync_method: checkpoint"
            )

    async def leave(self, name: str, number: int, reason: str) -> None:
        """Remove explorer `name`; a non-empty `reason` marks a failure.

        Its batches are assigned again when its process has ended.
        """
        if self._members.is_member(name, number):
            await self.sync.leave(name)
            await self._members.leave(name, reason)

    async def _departed(self, member: Member, reason: str) -> None:
        await self.sync.leave(member.name)
        while member.groups:  # this may be cancelled and repeated
            member.groups -= 1
            await self.sync.release_group()
        if back := self._assigner.assignments.give_back(member.name):
            log.warning(
                "explore batches %s of explorer %s are assigned again",
                ", ".join(map(str, back)),
                member.name,
            )
        if self._evaluator == member.name and reason:
            self._evaluator = ""
            if self._assigner.finished:
                log.warning(
                    "the final evaluation was explorer %s's; another plays it only where one has "
                    "not ended yet",
                    member.name,
                )
        self._write(without=member.name)

    async def stays(self, name: str, number: int) -> None:
        """Wait while explorer `name` belongs to the run; raise the reason of its end."""
        await self._members.get(name, number).unless_gone(
            self._waits.without_deadline(lambda: False)
        )

    async def serve_explorers(self) -> None:
        """Wait until the trainer is finished and all explorers have left.

        Raises DeadlineExceeded after too long without an explorer.
        """
        limit = self._plan.sync.sync_timeout
        members = self._members
        while True:
            try:
                with idles(
                    "the trainer waits for an explorer to join (mode: explore, or rft serve)"
                ):
                    await self._waits.without_deadline(
                        lambda: bool(members.names) or self._assigner.finished, limit
                    )
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no explorer was there for {limit:g} s.  Start one (mode: explore), or raise "
                    f"synchronizer.sync_timeout; "
                    "the run resumes from its last checkpoint when it is started again"
                ) from None
            if self._assigner.finished:
                break
            await self._waits.without_deadline(lambda: not members.names or self._assigner.finished)
            if not self._assigner.finished:
                log.warning("no explorer is left; the run waits up to %g s for one", limit)
        # no deadline, because of the final evaluation; explorers are watched
        await self._waits.without_deadline(lambda: not members.names)

    # ------------------------------------------------------------ for explorers (`ExploreGate`)

    async def next_batch(
        self, name: str, number: int, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        member = self._members.get(name, number)
        self._fingerprint = self._fingerprint or fingerprint
        if fingerprint != self._fingerprint:
            raise ConfigError(
                f"explorer {name} finds other tasks than earlier explorers; give all of them the "
                f"same files",
                key="buffer.explorer_input.tasksets",
            )
        # an explorer that may leave does not know the length of the run
        if member.process is None:
            self._assigner.assignments.total = total
        return await member.unless_gone(
            self._assigner.next(name, lag, lambda: self._members.get(name, number))
        )

    async def evaluates(self, name: str, number: int) -> bool:
        """Return whether `name`, the first present explorer, evaluates the final weights."""
        self._members.get(name, number)
        self._evaluator = self._evaluator or self._members.names[0]
        return self._evaluator == name

    async def finished(self, name: str, number: int) -> None:
        member = self._members.get(name, number)
        await member.unless_gone(self._waits.without_deadline(lambda: self._assigner.finished))

    async def acquire_group(self, name: str, number: int, batch: int, group: int | None) -> bool:
        member = self._members.get(name, number)
        acquired = await member.unless_gone(self.sync.acquire_group(batch, group))
        if member.departed.is_set():  # it left at the same moment; its groups are already released
            if acquired:
                await self.sync.release_group()
            raise member.had_to_leave()
        member.groups += acquired
        return acquired

    async def release_group(self, name: str, number: int) -> None:
        self._members.get(name, number).groups -= 1
        await self.sync.release_group()

    async def explored(self, batch: int) -> None:
        await self.sync.explored(batch)
        await self._assigner.close(batch)

    # ------------------------------------------------------------ for the launcher

    async def fail(self, reason: BaseException) -> None:
        for synchronizer in filter(None, (self.sync, self.teaching)):
            await synchronizer.fail(reason)
        await self._waits.fail(RunFailed(f"the trainer's side ended: {reason}"))

    def _write(self, without: str = "") -> None:
        """Write the present explorers to explorers.json, for display."""
        explorers = {
            name: {"engines": self.sync.owned(name)}
            for name in self._members.names
            if name != without
        }
        write_json(self._plan.run_dir / "explorers.json", explorers)


def _teachers_runtime(plan: Plan, engines: Sequence[EngineSettings]) -> SyncRuntime:
    """Return the runtime of the engines that serve the weights' moving average."""
    first = engines[0]
    return dataclasses.replace(
        plan.sync_runtime,
        workers=tuple(e.workers for e in engines),
        engine_dtype=first.dtype,
        in_turns=False,
        at_a_time=None,
        shares_cores=plan.learner.device == first.device == "cpu",
    )


class _ScoresAverage:
    """The trainer, which scores under the moving average of its weights."""

    def __init__(self, trainer: Any) -> None:
        self.score = trainer.score_average


class ExplorerClient:
    """The coordinator's `ports.ExploreGate` in the process of one explorer."""

    def __init__(self, coordinator: Any, name: str, joined: JoinReply) -> None:
        self._coordinator = coordinator
        self._joined = joined
        self._me = (name, joined.member)
        self.wait_verified = coordinator.wait_verified
        self.wait_final = coordinator.wait_final
        self.wait_taught = coordinator.wait_taught
        self.revive_teacher = coordinator.revive_teacher
        self.explored = coordinator.explored
        calls = (
            coordinator.evaluates,
            coordinator.acquire_group,
            coordinator.finished,
            coordinator.release_group,
        )
        self.evaluates, self.acquire_group, self.finished, self.release_group = (
            partial(call, *self._me) for call in calls
        )

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        assignment: Assignment | str = await self._coordinator.next_batch(
            *self._me, lag, fingerprint, total
        )
        return assignment

    async def revive(self, index: int) -> None:
        """Revive an engine; `index` is its number among this explorer's engines."""
        await self._coordinator.revive(self._joined.engines[index])
