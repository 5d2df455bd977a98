"""Runs one half of a Plan on a Ray that others share: the process that trains, or one that explores.

    mode: train     buffer, trainer ranks and the hub; waits for explorers      ┐ find each other in a meeting,
    mode: explore   engines, auxiliary models and an explorer; waits for a hub  ┘ in any order

Both are `supervise.run` with other parts.  Invariant: neither ends, cleans up or renames anything of the other's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from rft.config.plan import Plan
from rft.errors import RunFailed
from rft.launch import drive, meeting, supervise
from rft.launch.drive import OnRecord, Outcome, Signals
from rft.launch.hub import Joined
from rft.launch.parts import Start
from rft.launch.remote import ANSWER_S, Proxy
from rft.launch.rundir import RunDir
from rft.launch.supervise import Parts
from rft.trainer import manifest as manifests
from rft.types.metrics import MetricRecord

log = logging.getLogger(__name__)


async def train(plan: Plan, rundir: RunDir, on_record: OnRecord) -> Outcome:
    """`mode: train` of a run that others explore for.  Raises as `supervise.run`, and DeadlineExceeded when nobody explores."""
    return await supervise.run(plan, rundir, on_record, _Training)


class _Training(Parts):
    async def start(self, found: manifests.Manifest | None, other: manifests.Manifest | None) -> Start:
        await self._start(engines=False, trainer=True, buffer=True)
        start = await drive.begin(self.proxies["buffer"], found, other)
        trainer, buffer = self.proxies["trainer-0"], self.proxies["buffer"].bind(start.lineage)
        await self._part("coordinator", "hub", self.plan, trainer, buffer, start, self.nodes["trainer-0"])
        return start

    async def work(self, start: Start, on_record: OnRecord, signals: Signals) -> None:
        p = self.proxies
        trainer, hub, buffer = p["trainer-0"], p["coordinator"], p["buffer"].bind(start.lineage)
        others = [p[f"trainer-{rank}"] for rank in range(1, self.plan.learner.world_size)]
        open_to_all = meeting.keep(self.plan, self.rundir.run_id, {"coordinator": hub, "buffer": buffer})
        await drive.work(
            trainer.run(others, buffer, hub, hub, start),
            hub.play(),
            (trainer,),
            hub,  # type: ignore[arg-type]  # a proxy has every method of its part
            on_record,
            signals,
            _all(self._watched(), open_to_all),
        )


async def explore(plan: Plan, rundir: RunDir, on_record: OnRecord) -> Outcome:
    """`mode: explore`: until the trainer is finished.  Raises what ended it otherwise; the others of the run go on."""
    began = time.monotonic()
    with Signals() as signals:
        if RunDir(plan.run_dir).read_state().get("phase") == "done" and (done := _done(plan)) is not None:
            return done
        supervise.number(rundir)
        rundir.state("waiting for the trainer")
        async with supervise.cluster_of(plan, rundir, signals) as cluster:
            parts, joined = _Exploring(plan, rundir, cluster), None
            try:
                await signals.guard(parts.meet())
                rundir.state("starting")
                joined = await signals.guard(parts.begin())
                rundir.state("running", lineage=joined.start.lineage, parts=parts.pids)
                await parts.explore(joined, on_record, signals)
                last = await parts.hub.final()
                await parts.hub.leave(plan.explorer.name, joined.seat, "")
            except RunFailed as e:
                if not await parts.trainer_ended():
                    raise
                if joined is None and (done := _done(plan)) is not None:
                    return done  # while this process was starting
                raise RunFailed(
                    f"the process that trains run {plan.buffer.run} has ended ({e}).  Start it again, and this one: both go on from "
                    "the last checkpoint"
                ) from e
            finally:
                rundir.state("stopping")
                await parts.end(graceful=joined is not None)
    return Outcome(last, plan.run_dir, time.monotonic() - began, None)


def _done(plan: Plan) -> Outcome | None:
    """The end of a run that needs no explorer any more, as far as its folder can be seen from here."""
    last = manifests.latest(plan.run_dir / "checkpoints")
    if last is None or last.version.step < plan.trainer.total_steps:
        return None
    log.info("already trained to step %d", last.version.step)
    return Outcome(last.version, plan.run_dir, 0.0, last.version)


class _Exploring(Parts):
    hub: Any = None  # proxies, once they are found
    buffer: Any = None

    async def trainer_ended(self) -> bool:
        """Whether a hub was found and does not answer any more."""
        try:
            if self.hub is not None:
                await asyncio.wait_for(self.hub.recent(1 << 40), ANSWER_S)
        except (RunFailed, TimeoutError):
            return True
        return False

    async def meet(self) -> None:
        """Find the trainer's process, and hear whether this one may join."""
        config, name = self.plan.monitor.config, self.plan.explorer.name
        _, found = await meeting.find(self.plan, {"name": name, "config": config})
        self.hub, self.buffer = found["coordinator"], found["buffer"]

    async def begin(self) -> Joined:
        here = replace(self.plan, run_dir=self.rundir.path)
        self.plan = replace(here, explorer=replace(here.explorer, max_inflight=None))  # the hub counts them, over all explorers
        await self._start(engines=True, trainer=False, buffer=False)
        p, nodes = self.proxies, [self.nodes[f"engine-{i}"] for i in range(len(self.plan.engines))]
        joined: Joined = await self.hub.join(self.plan.explorer.name, nodes, self.engines, p["explorer"], self.plan.sync)
        return joined

    async def explore(self, joined: Joined, on_record: OnRecord, signals: Signals) -> None:
        name, explorer = self.plan.explorer.name, self.proxies["explorer"]
        await drive.work(
            explorer.join(self.engines, self.auxiliary, self.buffer, self.hub, name, joined),
            None,
            (explorer,),
            _Elsewhere(self.hub, name, joined.seat),
            on_record,
            signals,
            _all(self._watched(), self.hub.stays(name, joined.seat)),
        )


class _Elsewhere:
    """The hub as `drive.work` needs it: what fails here ends this explorer alone."""

    def __init__(self, hub: Proxy, name: str, seat: int) -> None:
        self._hub, self._me = hub, (name, seat)

    async def fail(self, reason: BaseException) -> None:
        await self._hub.leave(*self._me, f"{type(reason).__name__}: {reason}")

    async def records(self, after: int) -> list[MetricRecord]:
        found: list[MetricRecord] = await self._hub.records(after)
        return found

    async def recent(self, after: int) -> list[MetricRecord]:
        found: list[MetricRecord] = await self._hub.recent(after)
        return found


async def _all(*watches: Awaitable[None]) -> None:
    """Several waits as one; the first that raises ends them."""
    tasks = [asyncio.ensure_future(w) for w in watches]
    try:
        await asyncio.gather(*tasks)
    finally:
        await drive.cancel(tasks)
