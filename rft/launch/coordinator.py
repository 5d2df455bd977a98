"""The coordinator of a run: monitor, synchronizer, and the explorers that join with their engines,
get batches, leave or die.

Every run has one, and at least one explorer.  Invariant: a batch is assigned again only after the
process that had it is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, structs

from rft.config.plan import Plan
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
from rft.sync.settings import SyncSettings
from rft.sync.synchronizer import Synchronizer
from rft.sync.waits import Waits
from rft.trainer.checkpoints import Evaluations
from rft.types.metrics import Metric, MetricRecord
from rft.types.ports import Assignment, Engine, Scorer, Sender, WeightManifest
from rft.worker.waiting import idles

log = logging.getLogger(__name__)
KEPT = 500  # records, for those who follow the run; all of them are in metrics.jsonl


class Joined(Struct, frozen=True, kw_only=True):
    """What an explorer gets that has joined: `member` tells it from others of its name, before and
    after.
    """

    member: int
    start: Start
    engines: tuple[int, ...]  # their numbers
    evaluates: bool  # an evaluation was due when the earlier process of the run ended


class MonitorPart:
    """All that a run without exploration needs of a coordinator."""

    def __init__(self, plan: Plan) -> None:
        self.monitor = Monitor(plan.monitor)
        self._alarms = Alarms(plan.monitor.alarms, RULES)
        self._evaluations = Evaluations()  # of earlier processes
        self._take_history(plan.monitor.folder / METRICS)
        self._records: deque[MetricRecord] = deque(maxlen=KEPT)
        self._num_records = 0  # with those that are not kept any more
        self._news = asyncio.Condition()

    def _take_history(self, path: Path) -> None:
        """What an earlier process of this run has measured, as far as that can be read."""
        tail = MetricTail(path)
        self._alarms.resume(map(self._evaluations.take, tail.new()))
        for problem in tail.problems:
            log.warning("alarms know nothing of this line: %s", problem)

    async def fail(self, reason: BaseException) -> None:
        """Never waits."""

    async def log(self, record: MetricRecord) -> None:
        """Raises RunFailed for an alarm that is to stop the run; it is logged before."""
        await self._log(record)
        for found in self._alarms.see(record):
            log.warning("%s", found.text())
            await self._log(
                structs.replace(
                    record, values={f"{LOGGED}{found.name}": 1.0}, notes=(found.text(),)
                )
            )
            if self._alarms.stops(found):
                raise RunFailed(
                    f"{found.text()}  monitor.alarms.{found.name} is stop, so the run ends; the "
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
        """How many there were, and those from number `after` on, the last KEPT of them at most;
        `wait`: until there is one.
        """
        async with self._news:
            await self._news.wait_for(lambda: not wait or self._num_records > after)
            new = min(max(0, self._num_records - after), len(self._records))
            return self._num_records, list(self._records)[len(self._records) - new :]

    async def close(self) -> None:
        await self.monitor.close()


class Coordinator(MonitorPart):
    """`buffer` says when there is room for a batch; `node` is the machine of the trainer's first
    rank.

    `restarts`: engines that died can be given a new process.  Calls of explorers begin with who
    asks: a name and a member number.
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
        self._waits = Waits(plan.sync.timeout_s)
        self._members = Membership(self._waits, plan.cluster.stall_timeout_s, self._gone, self.fail)
        self.sync = Synchronizer(
            plan.sync,
            (),
            scorer,
            schedule(plan, start),
            probe_prompts(plan.learner.model_path, plan.sync.canary_prompts, plan.seed),
            start.version,
            restart=(lambda index: self._engines[index].restart()) if restarts else None,
            sender=cast(Sender, scorer),
            on_evicted=self._members.evict,
        )
        limits = (start.cursor, plan.explorer.total_batches, plan.explorer.max_inflight)
        self._assigner = BatchAssigner(
            Assignments(*limits), buffer.room, self.sync.may_explore, self._waits
        )
        self._fingerprint = ""
        self._evaluator = ""
        # later ones come again by themselves
        self._evaluates = any(step <= start.step for _, step in self._evaluations.due)
        sync = self.sync
        self.wait_for_demand = sync.wait_for_demand
        self.step_started = sync.step_started
        self.allow_batch = sync.allow_batch
        self.wait_verified = sync.wait_verified
        self.wait_final = sync.wait_final
        self.revive = sync.revive

    # ------------------------------------------------------------ the trainer's side; see
    # `ports.WeightSync`

    async def publish(self, manifest: WeightManifest) -> list[Metric]:
        metrics = await self.sync.publish(manifest)
        values = {m.name: m.value for m in metrics}
        await self.log(
            MetricRecord(
                role="synchronizer", step=manifest.version.step, time=time.time(), values=values
            )
        )
        return metrics

    async def step_finished(self, step: int, *, finished: bool = False) -> bool:
        wanted = await self.sync.step_finished(step, finished=finished)
        if finished:
            await self._assigner.finish()
        return wanted

    # ------------------------------------------------------------ explorers come and go

    async def welcome(self, name: str, config: Mapping[str, Any]) -> None:
        """May explorer `name`, started with `config`, join?  Raises ConfigErrors with what differs
        from this run's, or SetupError.
        """
        self._waits.raise_failure()
        if found := differences(self._plan.monitor.config, config):
            raise ConfigErrors(
                [ConfigError(text, key=key, given=given) for key, given, text in found]
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
        way: SyncSettings,
    ) -> Joined:
        """Explorer `name` counts from now on; its engines, on `nodes`, serve the newest verified
        version, where there is one.

        `process`: tells whether an explorer that may come and go lives; None: it belongs to the run
        from beginning to end. `way`: how weights come to its engines, as far as they decide it.
        """
        self._waits.raise_failure()
        self._check_way(name, nodes, way)
        await self._members.check_name(name)
        with self._members.joining(name):
            joining = cast("Sequence[Engine]", engines)
            numbers = await self.sync.join(
                name, joining, way.workers, may_leave=process is not None
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
        evaluates = self._evaluates
        self._evaluates = False
        return Joined(member=member.number, start=self._start, engines=numbers, evaluates=evaluates)

    def _check_way(self, name: str, nodes: Sequence[str], way: SyncSettings) -> None:
        sync = self._plan.sync
        if sync.method == "memory" and (far := sorted(set(nodes) - {self._node})):
            raise SetupError(
                f"sync_method memory works inside one machine: the trainer is on {self._node}, "
                f"engines of explorer {name} on "
                f"{', '.join(far)}.  Write sync_method: checkpoint, with checkpoint_root_dir on a "
                f"file system that all share"
            )
        if sync.method == "nccl" and sync.backend == "nccl" != way.backend:
            raise SetupError(
                f"sync_method nccl broadcasts from GPU to GPU here, and the engines of explorer "
                f"{name} are on CPUs; give it GPUs, or "
                "write sync_method: checkpoint"
            )

    async def leave(self, name: str, number: int, why: str) -> None:
        """Explorer `name` ends, well (`why` is empty) or not.  Its batches are assigned again when
        its process is gone.
        """
        if self._members.is_member(name, number):
            await self.sync.leave(name)
            await self._members.leave(name, why)

    async def _gone(self, member: Member, why: str) -> None:
        await self.sync.leave(member.name)
        while member.groups:  # this may be cancelled, and begun again
            member.groups -= 1
            await self.sync.release_group()
        if back := self._assigner.assignments.give_back(member.name):
            log.warning(
                "explore batches %s of explorer %s are assigned again",
                ", ".join(map(str, back)),
                member.name,
            )
        if self._evaluator == member.name and why:
            self._evaluator = ""
            if self._assigner.finished:
                log.warning(
                    "the final evaluation was explorer %s's; another plays it only where one has "
                    "not ended yet",
                    member.name,
                )
        self._write(without=member.name)

    async def stays(self, name: str, number: int) -> None:
        """As long as explorer `name` belongs to the run.  Raises what ends it."""
        await self._members.get(name, number).unless_gone(
            self._waits.without_deadline(lambda: False)
        )

    async def serve_explorers(self) -> None:
        """Until the trainer is finished and every explorer has left.  Raises DeadlineExceeded when
        none is there for too long.
        """
        limit = self._plan.sync.timeout_s
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
        # as long as the final evaluation takes: they are watched
        await self._waits.without_deadline(lambda: not members.names)

    # ------------------------------------------------------------ what explorers ask; see
    # `ports.ExploreGate`

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
        # one that comes and goes does not know for how long the run explores
        if member.process is None:
            self._assigner.assignments.total = total
        return await member.unless_gone(
            self._assigner.next(name, lag, lambda: self._members.get(name, number))
        )

    async def evaluates(self, name: str, number: int) -> bool:
        """The first by name of the present explorers evaluates the final weights."""
        self._members.get(name, number)
        self._evaluator = self._evaluator or self._members.names[0]
        return self._evaluator == name

    async def finished(self, name: str, number: int) -> None:
        member = self._members.get(name, number)
        await member.unless_gone(self._waits.without_deadline(lambda: self._assigner.finished))

    async def acquire_group(self, name: str, number: int, batch: int, group: int | None) -> bool:
        member = self._members.get(name, number)
        acquired = await member.unless_gone(self.sync.acquire_group(batch, group))
        if member.gone.is_set():  # in the same moment: its groups have been released already
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

    # ------------------------------------------------------------ the launcher's side

    async def fail(self, reason: BaseException) -> None:
        await self.sync.fail(reason)
        await self._waits.fail(RunFailed(f"the trainer's side ended: {reason}"))

    def _write(self, without: str = "") -> None:
        """Who is there, for people."""
        here = {
            name: {"engines": self.sync.owned(name)}
            for name in self._members.names
            if name != without
        }
        write_json(self._plan.run_dir / "explorers.json", here)


class ExplorerClient:
    """The coordinator as one explorer sees it, in that explorer's process.  Implements
    `ports.ExploreGate`.
    """

    def __init__(self, coordinator: Any, name: str, joined: Joined) -> None:
        self._coordinator = coordinator
        self._joined = joined
        self._me = (name, joined.member)
        self.wait_verified = coordinator.wait_verified
        self.wait_final = coordinator.wait_final
        self.explored = coordinator.explored
        mine = (
            coordinator.evaluates,
            coordinator.acquire_group,
            coordinator.finished,
            coordinator.release_group,
        )
        self.evaluates, self.acquire_group, self.finished, self.release_group = (
            partial(call, *self._me) for call in mine
        )

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        given: Assignment | str = await self._coordinator.next_batch(
            *self._me, lag, fingerprint, total
        )
        return given

    async def revive(self, index: int) -> None:
        """`index` counts this explorer's engines."""
        await self._coordinator.revive(self._joined.engines[index])
