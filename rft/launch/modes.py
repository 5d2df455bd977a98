"""Start the parts (processes) of a run in each mode, and wait until they are done.  Independent of
Ray, which the runtime hides.

    ExploreAndTrain   both      buffer, trainer, coordinator, engines, explorer
                      serve     the same, for sessions of clients instead of tasks
                      train     buffer, trainer, coordinator; explorers join them
    Explore           explore   engines, explorer; they join such a trainer
                      serve     the same, for sessions, with explorer.serve.trainer_apart
    TrainOffline      train     on a data set: trainer, monitor

The explorer waits for the coordinator's gate, the trainer for the buffer's lease, the launcher for
the end of either.  The first failing part ends the run; its error decides the exit code.  Programs
of modes `train` and `explore` may start in any order, and never touch each other's processes or
files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rft.config.plan import Plan
from rft.errors import ConfigError, RunFailed
from rft.launch import drive, rendezvous
from rft.launch.coordinator import JoinReply
from rft.launch.drive import OnRecord, Outcome
from rft.launch.remote import ANSWER_S
from rft.launch.rundir import RunDir
from rft.launch.runtime import (
    BoundPart,
    Parts,
    PartSpec,
    Runtime,
    engine_specs,
    explorer_specs,
    trainer_specs,
)
from rft.launch.signals import Signals
from rft.launch.start import Start, begin, begin_offline, origin, windows
from rft.sync.waits import all_of
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.manifest import Manifest
from rft.types.ids import Version
from rft.worker.waiting import works

log = logging.getLogger(__name__)


class Mode(ABC):
    """One program of a run, which starts its parts, from start to end."""

    phase = "starting"
    started: Start

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @abstractmethod
    def done(self, rundir: RunDir) -> Version | None:
        """Return the last version if the run is complete.  Called first."""

    @abstractmethod
    async def start(self, parts: Parts) -> bool:
        """Build and connect the parts; False if the run is complete."""

    @abstractmethod
    async def work(self, parts: Parts, on_record: OnRecord, signals: Signals) -> None:
        """Wait until the parts are done.

        Raises the first error of a part, or Interrupted.
        """

    @abstractmethod
    def outcome(self) -> tuple[Version, Version | None]:
        """Return the last version, and the version from which the run resumed."""


async def run(
    mode: Mode, rundir: RunDir, on_record: OnRecord, runtime: Runtime, begins: Callable[[], None]
) -> Outcome:
    """Run `mode` to its end; call `begins` first unless the run is complete.

    Raises the first RftError, or Interrupted.
    """
    began = time.monotonic()
    with Signals() as signals:
        if (version := mode.done(rundir)) is not None:
            log.info("already trained to step %d", version.step)
            return Outcome(version, mode.plan.run_dir, 0.0, version)
        begins()
        rundir.state(mode.phase)
        async with runtime.open(mode.plan, rundir, signals) as parts:
            worked = False
            try:
                if worked := await signals.guard(parts.supervised(mode.start(parts))):
                    rundir.state("running", lineage=mode.started.lineage, parts=parts.pids)
                    await mode.work(parts, on_record, signals)
            finally:
                try:
                    rundir.state("stopping")
                finally:
                    with works("ending the parts of the run"):
                        await parts.end(graceful=worked)
    last, resumed = mode.outcome()
    return Outcome(last, mode.plan.run_dir, time.monotonic() - began, resumed)


def mode_of(plan: Plan) -> Mode:
    """Return the mode of the plan (bench: see `rft.launch.bench`)."""
    if plan.joins:
        return Explore(plan)
    if plan.trainer.alone:
        return TrainOffline(plan)
    return ExploreAndTrain(plan, explores=plan.mode != "train")


class _Training(Mode):
    """A program with the trainer: it starts a lineage, and ends with a checkpoint."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._checkpoint: Manifest | None = None  # of this run
        self._origin: Manifest | None = None  # of another run, to start from

    def done(self, rundir: RunDir) -> Version | None:
        total = self.plan.trainer.total_steps
        self._checkpoint = (
            manifests.latest(rundir.checkpoints) if self.plan.continue_from_checkpoint else None
        )
        if self._checkpoint is not None:
            if self._checkpoint.version.step >= total:
                return self._checkpoint.version
            return None
        self._origin = other = origin(self.plan.resume_from_path)
        if other is not None and other.version.step >= total:
            reason = (
                f"is {total}, and the checkpoint {other.folder} (resume_from_path) has "
                f"{other.version.step} steps: write more than "
            )
            reason += (
                f"{other.version.step}, or begin with the model alone (model.model_path: what "
                f"rft export gives)"
            )
            raise ConfigError(reason, key="trainer.total_steps", given=total)
        return None

    def outcome(self) -> tuple[Version, Version | None]:
        last = manifests.latest(self.plan.run_dir / "checkpoints")
        assert last is not None, "a run that ends without an error has a final checkpoint"
        return last.version, self._checkpoint.version if self._checkpoint else None


class ExploreAndTrain(_Training):
    """Explorer and trainer with one buffer; `explores` False: explorers run elsewhere and join."""

    def __init__(self, plan: Plan, *, explores: bool) -> None:
        super().__init__(plan)
        self._explores = explores
        self._joined: JoinReply | None = None

    async def start(self, parts: Parts) -> bool:
        """Start engines and explorer, and buffer, trainer and coordinator; let the engines join."""
        plan = self.plan
        await parts.reserve(engines=self._explores, trainer=True)
        specs = [*engine_specs(plan), *explorer_specs(plan)] if self._explores else []
        if plan.cluster.shared:  # engines first: they measure the free memory of their GPU
            await parts.start(specs)
            await self._start_training(parts)
        else:
            await parts.together(partial(parts.start, specs), partial(self._start_training, parts))
        if self._explores:
            nodes = [
                parts.nodes[f"engine-{i}"]
                for i in range(len(plan.engines))
                if f"engine-{i}" in parts.nodes
            ]
            coordinator = parts.by_name["coordinator"]
            self._joined = await coordinator.join(
                plan.explorer.name, nodes, parts.engines, None, plan.sync_runtime
            )
            if plan.averaged is not None:
                await coordinator.join_teacher(parts.auxiliary[plan.averaged])
        return True

    async def _start_training(self, parts: Parts) -> None:
        plan = self.plan
        await parts.start(
            [PartSpec("buffer", "buffer", (plan,)), *trainer_specs(plan, parts.rundir)]
        )
        self.started = await begin(
            parts.by_name["buffer"],
            self._checkpoint,
            self._origin,
            (plan.schedule.batch_units, plan.schedule.step_units),
        )
        buffer = BoundPart(parts.by_name["buffer"], self.started.lineage)
        node = parts.nodes.get("trainer-0", "")
        arguments = (plan, parts.ranks[0], buffer, self.started, node, parts.restarts)
        await parts.start([PartSpec("coordinator", "coordinator", arguments)])

    async def work(self, parts: Parts, on_record: OnRecord, signals: Signals) -> None:
        """Train, and explore or serve the explorers that join, until both are done."""
        (trainer, *ranks), coordinator = parts.ranks, parts.by_name["coordinator"]
        buffer = BoundPart(parts.by_name["buffer"], self.started.lineage)
        sync = sink = coordinator
        training = trainer.run(ranks, buffer, sync, sink, self.started)
        if self._joined is not None:
            explorer = parts.by_name["explorer"]
            name = self.plan.explorer.name
            exploring = explorer.run(
                parts.engines, parts.auxiliary, buffer, coordinator, name, self._joined
            )
            await drive.run_to_end(
                (exploring, training),
                (trainer, explorer),
                coordinator,
                on_record,
                signals,
                parts.watch(),
            )
            return
        offer_to_explorers = rendezvous.keep(
            self.plan, parts.rundir.run_id, {"coordinator": coordinator, "buffer": buffer}
        )
        watch = all_of(parts.watch(), offer_to_explorers)
        await drive.run_to_end(
            (coordinator.serve_explorers(), training),
            (trainer,),
            coordinator,
            on_record,
            signals,
            watch,
        )


class TrainOffline(_Training):
    """The trainer alone, on a data set."""

    async def start(self, parts: Parts) -> bool:
        if self._checkpoint is not None and not (begins := windows(self.plan))(
            self._checkpoint.version.step
        ):
            self._checkpoint = manifests.latest(self.plan.run_dir / "checkpoints", begins)
        await parts.reserve(engines=False, trainer=True)
        await parts.start(
            [
                *trainer_specs(self.plan, parts.rundir),
                PartSpec("coordinator", "monitor", (self.plan,)),
            ]
        )
        self.started = begin_offline(self._checkpoint, self._origin)
        return True

    async def work(self, parts: Parts, on_record: OnRecord, signals: Signals) -> None:
        (trainer, *ranks), monitor = parts.ranks, parts.by_name["coordinator"]
        used = None if self._checkpoint is None else self._checkpoint.consumption
        training = trainer.run_offline(ranks, monitor, self.started, used)
        await drive.run_to_end((training,), (trainer,), monitor, on_record, signals, parts.watch())


class Explore(Mode):
    """An explorer of a run whose trainer is another program.

    A failure ends this explorer alone.
    """

    phase = "waiting for the trainer"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._coordinator: Any = None  # proxies, set by `_join`
        self._buffer: Any = None
        self._joined: JoinReply | None = None
        self._last: Version | None = None

    def done(self, rundir: RunDir) -> Version | None:
        return (
            self._finished()
            if RunDir(self.plan.run_dir).read_state().get("phase") == "done"
            else None
        )

    async def start(self, parts: Parts) -> bool:
        try:
            await self._join(parts)
        except RunFailed as e:
            ended = await self._trainer_ended()
            if ended and (last := self._finished()) is not None:
                self._last = last  # the run ended while this process was starting
                return False
            raise self._explained(e) if ended else e from None
        return True

    async def _join(self, parts: Parts) -> None:
        """Find the trainer's process and join with engines."""
        plan = self.plan
        name = self.plan.explorer.name
        _, remote_parts = await rendezvous.find(
            plan, {"name": name, "config": plan.tracked_run.config}
        )
        self._coordinator = remote_parts["coordinator"]
        self._buffer = remote_parts["buffer"]
        parts.rundir.state("starting")
        parts.plan = replace(plan, run_dir=parts.rundir.path)
        await parts.reserve(engines=True, trainer=False)
        await parts.start([*engine_specs(parts.plan), *explorer_specs(parts.plan)])
        nodes = [parts.nodes[f"engine-{i}"] for i in range(len(plan.engines))]
        self._joined = await self._coordinator.join(
            name, nodes, parts.engines, parts.by_name["explorer"], plan.sync_runtime
        )
        self.started = self._joined.start

    async def work(self, parts: Parts, on_record: OnRecord, signals: Signals) -> None:
        assert self._joined is not None
        coordinator = self._coordinator
        explorer = parts.by_name["explorer"]
        me = (self.plan.explorer.name, self._joined.member)
        exploring = explorer.run(
            parts.engines, parts.auxiliary, self._buffer, coordinator, me[0], self._joined
        )
        watch = all_of(parts.watch(), coordinator.stays(*me))

        async def fail(reason: BaseException) -> None:
            await coordinator.leave(*me, f"{type(reason).__name__}: {reason}")

        try:
            await drive.run_to_end(
                (exploring,), (explorer,), coordinator, on_record, signals, watch, fail
            )
            self._last = await coordinator.wait_final()
            await coordinator.leave(*me, "")
        except RunFailed as e:
            raise self._explained(e) if await self._trainer_ended() else e from None

    def outcome(self) -> tuple[Version, Version | None]:
        assert self._last is not None
        return self._last, None if self._joined is not None else self._last

    def _finished(self) -> Version | None:
        """Return the last version of a complete run, if its folder is visible here."""
        last = manifests.latest(self.plan.run_dir / "checkpoints")
        return (
            None
            if last is None or last.version.step < self.plan.trainer.total_steps
            else last.version
        )

    async def _trainer_ended(self) -> bool:
        """Return whether the coordinator has stopped answering."""
        try:
            if self._coordinator is not None:
                await asyncio.wait_for(self._coordinator.records(1 << 40, wait=False), ANSWER_S)
        except (RunFailed, TimeoutError):
            return True
        return False

    def _explained(self, error: RunFailed) -> RunFailed:
        return RunFailed(
            f"the process that trains run {self.plan.buffer.run} has ended ({error}).  Start it "
            f"again, and this one: both resume from "
            "the last checkpoint"
        )
