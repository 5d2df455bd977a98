"""What each mode of a run starts and lets work.  Knows no Ray: a runtime creates the parts and
calls them.

    both       buffer, trainer, coordinator, engines, explorer                       ExploreAndTrain
    serve      the same, with a service for sessions of clients instead of tasks     ExploreAndTrain
    train      buffer, trainer, coordinator; waits for explorers to join    ┐        ExploreAndTrain(explores=False)
    explore    engines, explorer; waits for a coordinator to join           ┘        Explore
    serve      joins such a trainer, where explorer.serve.trainer_apart              Explore
    train      on a data set: trainer and monitor                                    TrainOffline

Who waits for whom: the explorer waits for the coordinator's gate, the trainer for the buffer's
lease, the launcher for either to end.  The first part that fails ends the run; its error becomes
the program's exit code.  The processes of `train` and `explore` find each other at a rendezvous, in
any order; neither ends, cleans up or renames anything of the other's.
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
from rft.launch.coordinator import Joined
from rft.launch.drive import OnRecord, Outcome
from rft.launch.remote import ANSWER_S
from rft.launch.rundir import RunDir
from rft.launch.runtime import (
    Bound,
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
from rft.trainer import manifest as manifests
from rft.trainer.manifest import Manifest
from rft.types.ids import Version

log = logging.getLogger(__name__)


class Mode(ABC):
    """One process of a run, from its start to its end."""

    phase = "starting"
    begun: Start

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @abstractmethod
    def done(self, rundir: RunDir) -> Version | None:
        """The last version, where nothing is left to do.  Called first."""

    @abstractmethod
    async def start(self, parts: Parts) -> bool:
        """Build and connect the parts.  False: nothing was left to do after all."""

    @abstractmethod
    async def work(self, parts: Parts, on_record: OnRecord, signals: Signals) -> None:
        """Let them work until they are done.  Raises the error of the part that failed first, or
        Interrupted.
        """

    @abstractmethod
    def outcome(self) -> tuple[Version, Version | None]:
        """The last version, and the one that the run went on from."""


async def run(
    mode: Mode, rundir: RunDir, on_record: OnRecord, runtime: Runtime, begins: Callable[[], None]
) -> Outcome:
    """Runs to the end; `begins` is called first where anything is left to do.  Raises the first
    RftError, or Interrupted.
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
                    rundir.state("running", lineage=mode.begun.lineage, parts=parts.pids)
                    await mode.work(parts, on_record, signals)
            finally:
                try:
                    rundir.state("stopping")
                finally:
                    await parts.end(graceful=worked)
    last, resumed = mode.outcome()
    return Outcome(last, mode.plan.run_dir, time.monotonic() - began, resumed)


def mode_of(plan: Plan) -> Mode:
    """The mode that the plan asks for (bench: see `rft.launch.bench`)."""
    if plan.joins:
        return Explore(plan)
    if plan.trainer.alone:
        return TrainOffline(plan)
    return ExploreAndTrain(plan, explores=plan.mode != "train")


class _Training(Mode):
    """A process with the trainer: it begins a lineage, and ends with a checkpoint."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._found: Manifest | None = None  # checkpoint of this run
        self._other: Manifest | None = None  # of another run, to begin with

    def done(self, rundir: RunDir) -> Version | None:
        total = self.plan.trainer.total_steps
        self._found = (
            manifests.latest(rundir.checkpoints) if self.plan.continue_from_checkpoint else None
        )
        if self._found is not None:
            return self._found.version if self._found.version.step >= total else None
        self._other = other = origin(self.plan.resume_from_path)
        if other is not None and other.version.step >= total:
            why = (
                f"is {total}, and steps count on from {other.folder}, which resume_from_path "
                f"names: write more than "
            )
            why += (
                f"{other.version.step}, or begin with the model alone (model.model_path: what "
                f"rft export gives)"
            )
            raise ConfigError(why, key="trainer.total_steps", given=total)
        return None

    def outcome(self) -> tuple[Version, Version | None]:
        last = manifests.latest(self.plan.run_dir / "checkpoints")
        assert last is not None, "a run that ends without an error has a final checkpoint"
        return last.version, self._found.version if self._found else None


class ExploreAndTrain(_Training):
    """Explorer and trainer around one buffer; without `explores` the explorers are other processes."""

    def __init__(self, plan: Plan, *, explores: bool) -> None:
        super().__init__(plan)
        self._explores = explores
        self._joined: Joined | None = None

    async def start(self, parts: Parts) -> bool:
        plan = self.plan
        await parts.reserve(engines=self._explores, trainer=True)
        exploring = [*engine_specs(plan), *explorer_specs(plan)] if self._explores else []
        if plan.cluster.shared:  # an engine measures what is free on its GPU when it starts
            await parts.start(exploring)
            await self._start_training(parts)
        else:
            await parts.together(
                partial(parts.start, exploring), partial(self._start_training, parts)
            )
        if self._explores:
            nodes = [
                parts.nodes[f"engine-{i}"]
                for i in range(len(plan.engines))
                if f"engine-{i}" in parts.nodes
            ]
            coordinator = parts.made["coordinator"]
            self._joined = await coordinator.join(
                plan.explorer.name, nodes, parts.engines, None, plan.sync
            )
        return True

    async def _start_training(self, parts: Parts) -> None:
        plan = self.plan
        await parts.start(
            [PartSpec("buffer", "buffer", (plan,)), *trainer_specs(plan, parts.rundir)]
        )
        self.begun = await begin(
            parts.made["buffer"],
            self._found,
            self._other,
            (plan.sync.batch_units, plan.sync.step_units),
        )
        buffer = Bound(parts.made["buffer"], self.begun.lineage)
        node = parts.nodes.get("trainer-0", "")
        wiring = (plan, parts.ranks[0], buffer, self.begun, node, parts.restarts)
        await parts.start([PartSpec("coordinator", "coordinator", wiring)])

    async def work(self, parts: Parts, on_record: OnRecord, signals: Signals) -> None:
        (trainer, *others), coordinator = parts.ranks, parts.made["coordinator"]
        buffer = Bound(parts.made["buffer"], self.begun.lineage)
        training = trainer.run(others, buffer, coordinator, coordinator, self.begun)
        if self._joined is not None:
            explorer = parts.made["explorer"]
            name = self.plan.explorer.name
            exploring = explorer.run(
                parts.engines, parts.auxiliary, buffer, coordinator, name, self._joined
            )
            await drive.work(
                training,
                exploring,
                (trainer, explorer),
                coordinator,
                on_record,
                signals,
                parts.watch(),
            )
            return
        open_to_all = rendezvous.keep(
            self.plan, parts.rundir.run_id, {"coordinator": coordinator, "buffer": buffer}
        )
        watch = all_of(parts.watch(), open_to_all)
        await drive.work(
            training,
            coordinator.serve_explorers(),
            (trainer,),
            coordinator,
            on_record,
            signals,
            watch,
        )


class TrainOffline(_Training):
    """The trainer alone, on a data set."""

    async def start(self, parts: Parts) -> bool:
        if self._found is not None and not (begins := windows(self.plan))(self._found.version.step):
            self._found = manifests.latest(self.plan.run_dir / "checkpoints", begins)
        await parts.reserve(engines=False, trainer=True)
        await parts.start(
            [
                *trainer_specs(self.plan, parts.rundir),
                PartSpec("coordinator", "monitor", (self.plan,)),
            ]
        )
        self.begun = begin_offline(self._found, self._other)
        return True

    async def work(self, parts: Parts, on_record: OnRecord, signals: Signals) -> None:
        (trainer, *others), monitor = parts.ranks, parts.made["coordinator"]
        used = None if self._found is None else self._found.consumption
        training = trainer.run_offline(others, monitor, self.begun, used)
        await drive.work(training, None, (trainer,), monitor, on_record, signals, parts.watch())


class Explore(Mode):
    """One explorer of a run whose trainer is another process.  What fails here ends this explorer
    alone.
    """

    phase = "waiting for the trainer"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._coordinator: Any = None  # proxies, once they are found
        self._buffer: Any = None
        self._joined: Joined | None = None
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
                self._last = last  # while this process was starting
                return False
            raise self._explained(e) if ended else e from None
        return True

    async def _join(self, parts: Parts) -> None:
        """Find the trainer's process, and join with engines."""
        plan = self.plan
        name = self.plan.explorer.name
        _, found = await rendezvous.find(plan, {"name": name, "config": plan.monitor.config})
        self._coordinator = found["coordinator"]
        self._buffer = found["buffer"]
        parts.rundir.state("starting")
        parts.plan = replace(plan, run_dir=parts.rundir.path)
        await parts.reserve(engines=True, trainer=False)
        await parts.start([*engine_specs(parts.plan), *explorer_specs(parts.plan)])
        nodes = [parts.nodes[f"engine-{i}"] for i in range(len(plan.engines))]
        self._joined = await self._coordinator.join(
            name, nodes, parts.engines, parts.made["explorer"], plan.sync
        )
        self.begun = self._joined.start

    async def work(self, parts: Parts, on_record: OnRecord, signals: Signals) -> None:
        assert self._joined is not None
        coordinator = self._coordinator
        explorer = parts.made["explorer"]
        me = (self.plan.explorer.name, self._joined.member)
        exploring = explorer.run(
            parts.engines, parts.auxiliary, self._buffer, coordinator, me[0], self._joined
        )
        watch = all_of(parts.watch(), coordinator.stays(*me))

        async def fail(reason: BaseException) -> None:
            await coordinator.leave(*me, f"{type(reason).__name__}: {reason}")

        try:
            await drive.work(
                exploring, None, (explorer,), coordinator, on_record, signals, watch, fail
            )
            self._last = await coordinator.wait_final()
            await coordinator.leave(*me, "")
        except RunFailed as e:
            raise self._explained(e) if await self._trainer_ended() else e from None

    def outcome(self) -> tuple[Version, Version | None]:
        assert self._last is not None
        return self._last, None if self._joined is not None else self._last

    def _finished(self) -> Version | None:
        """The end of a run that needs no explorer any more, as far as its folder can be seen from
        here.
        """
        last = manifests.latest(self.plan.run_dir / "checkpoints")
        return (
            None
            if last is None or last.version.step < self.plan.trainer.total_steps
            else last.version
        )

    async def _trainer_ended(self) -> bool:
        """Whether a coordinator was found and does not answer any more."""
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
