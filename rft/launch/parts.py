"""Builds the parts of a run from its Plan, in whatever process they live.

Each factory is awaited in the process that will own the part.  The in-process mode calls them one after the other; with Ray every
part sits in an actor (`remote.Host`) and the others are proxies.  Parts keep no Ray object of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rft.config.plan import Plan
from rft.config.plan import schedule as planned
from rft.engine.settings import AuxiliarySettings
from rft.launch.probes import probe_prompts, vocab_size
from rft.sync.schedule import Schedule
from rft.types.experience import Demonstration
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.types.ports import (
    BufferReader,
    BufferWriter,
    ChatModel,
    Consumption,
    Engine,
    ExploreGate,
    MetricSink,
    Scorer,
    ScoreRow,
    Sender,
    WeightManifest,
    WeightSync,
)

if TYPE_CHECKING:
    from rft.explorer.deal import Dealer
    from rft.launch.hub import Hub, Joined

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Where a run begins: a fresh model, or the checkpoint folder of version `parent` with its next explore batch `cursor`."""

    lineage: int
    step: int = 0
    parent: Version | None = None
    cursor: int = 0
    checkpoint: str | None = None

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.step)


def schedule(plan: Plan, start: Start) -> Schedule:
    """The schedule that coordinator and trainer both follow; it knows how many explore batches a train step consumes."""
    return dataclasses.replace(planned(plan.sync), start_step=start.step)


# ---------------------------------------------------------------- buffer


async def buffer(plan: Plan) -> Any:
    from rft.buffer.buffer import Buffer
    from rft.plugins import load_all

    load_all(plan.plugin_dirs)  # priority functions, storages
    mix = None
    if plan.mix is not None and plan.expert is not None:
        from rft.buffer.mix import Mix
        from rft.buffer.sources import Demonstrations
        from rft.taskset.given import open_given

        data = await asyncio.to_thread(open_given, plan.expert)
        rows = [r for r in data.records if isinstance(r, Demonstration)]
        mix = Mix(plan.mix, Demonstrations(rows, taskset=plan.mix.name))
    made = Buffer(dataclasses.replace(plan.buffer, vocab_size=vocab_size(plan.learner.model_path)), mix=mix)
    await made.open()
    return made


# ---------------------------------------------------------------- engine


async def engine(plan: Plan, index: int) -> Engine:
    from rft.engine.base import make
    from rft.plugins import load_all

    load_all(plan.plugin_dirs)
    return await make(plan.engines[index])


async def auxiliary_engine(plan: Plan, model: int, index: int) -> Engine:
    from rft.engine.base import make
    from rft.plugins import load_all

    load_all(plan.plugin_dirs)
    return await make(plan.auxiliary[model].engines[index])


def _restart(engines: Sequence[Any]) -> Callable[[int], Awaitable[None]] | None:
    """How to give an engine a new process, where it has one."""
    return (lambda i: engines[i].restart()) if engines and hasattr(engines[0], "restart") else None


# ---------------------------------------------------------------- coordinator


class Observer:
    """The monitor in one light process; also tells the launcher what is going on."""

    def __init__(self, plan: Plan) -> None:
        from rft.monitor.monitor import Monitor

        self.monitor = Monitor(plan.monitor)
        self._records: list[MetricRecord] = []
        self._news = asyncio.Condition()

    async def fail(self, reason: BaseException) -> None:
        """Nobody waits for anything here."""

    async def log(self, record: MetricRecord) -> None:
        await self.monitor.log(record)
        async with self._news:
            self._records.append(record)
            self._news.notify_all()

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        await self.monitor.samples(name, step, rows)

    async def records(self, after: int) -> list[MetricRecord]:
        """All records from number `after` on; waits until there is one."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._records) > after)
            return self._records[after:]

    async def recent(self, after: int) -> list[MetricRecord]:
        return self._records[after:]

    async def close(self) -> None:
        await self.monitor.close()


async def observer(plan: Plan) -> Observer:
    return Observer(plan)


class Coordinator(Observer):
    """Synchronizer and monitor."""

    def __init__(self, plan: Plan, engines: Sequence[Engine], scorer: Scorer, start: Start, **more: Any) -> None:
        """Without `engines` it waits for such as join; `more` goes to the synchronizer."""
        from rft.engine.pool import EnginePool
        from rft.sync.synchronizer import Synchronizer

        super().__init__(plan)
        s = plan.sync
        self.sync = Synchronizer(
            s,
            EnginePool(engines) if engines else None,
            scorer,
            schedule(plan, start),
            probe_prompts(plan.learner.model_path, s.canary_prompts, plan.seed),
            start.version,
            sender=cast(Sender, scorer),
            **{"restart": _restart(engines), **more},
        )

    async def revive(self, index: int) -> None:
        await self.sync.revive(index)

    async def publish(self, manifest: Any) -> Any:
        metrics = await self.sync.publish(manifest)
        values = {m.name: m.value for m in metrics}
        await self.log(MetricRecord(role="synchronizer", step=manifest.version.step, time=time.time(), values=values))
        return metrics

    async def trained(self, step: int, *, finished: bool = False) -> bool:
        return await self.sync.trained(step, finished=finished)

    async def idle(self, step: int) -> bool:
        return await self.sync.idle(step)

    async def training(self, step: int) -> None:
        await self.sync.training(step)

    async def explore_on(self, batch: int) -> None:
        await self.sync.explore_on(batch)

    async def may_explore(self, batch: int) -> Version | None:
        return await self.sync.may_explore(batch)

    async def served(self, version: Version) -> None:
        await self.sync.served(version)

    async def may_play(self, batch: int, group: int | None) -> bool:
        return await self.sync.may_play(batch, group)

    async def played(self) -> None:
        await self.sync.played()

    async def explored(self, batch: int) -> None:
        await self.sync.explored(batch)

    async def final(self) -> Version:
        return await self.sync.final()

    async def fail(self, reason: BaseException) -> None:
        await self.sync.fail(reason)


async def coordinator(plan: Plan, engines: Sequence[Any], scorer: Any, start: Start) -> Coordinator:
    return Coordinator(plan, cast("Sequence[Engine]", engines), cast(Scorer, scorer), start)


async def hub(plan: Plan, scorer: Any, buffer: Any, start: Start, node: str) -> Hub:
    from rft.launch.hub import Hub

    return Hub(plan, cast(Scorer, scorer), buffer, start, node)


# ---------------------------------------------------------------- explorer


class ExplorerPart:
    def __init__(self, plan: Plan) -> None:
        from rft.plugins import load_all

        load_all(plan.plugin_dirs)
        self.plan = plan
        self._explorer: Any = None

    async def run(
        self,
        engines: Sequence[Any],
        auxiliary: Sequence[Sequence[Any]],
        writer: Any,
        gate: Any,
        sink: Any,
        start: Start,
        dealer: Dealer | None = None,
    ) -> None:
        """`auxiliary`: of every auxiliary model its engines, none for one behind a server.  `dealer`: for one of several explorers."""
        from rft.engine.pool import EnginePool
        from rft.explorer.explorer import Explorer
        from rft.reward.place import run_folder

        run_folder.set(self.plan.run_dir)
        async with AsyncExitStack() as clients:
            policy = cast(ChatModel, EnginePool(engines, revive=gate.revive if _restart(engines) else None))
            models = await _models(self.plan, auxiliary, clients)
            await _onlookers(self.plan, policy, models, clients)
            self._explorer = Explorer(
                self.plan.explorer,
                model=policy,
                buffer=cast(BufferWriter, writer),
                gate=cast(ExploreGate, gate),
                sink=cast(MetricSink, sink),
                lineage=start.lineage,
                cursor=start.cursor,
                models=models,
                dealer=dealer,
            )
            await self._explorer.run()

    async def join(
        self, engines: Sequence[Any], auxiliary: Sequence[Sequence[Any]], writer: Any, hub: Any, name: str, joined: Joined
    ) -> None:
        """As `run`, as explorer `name` of a run whose trainer is another process."""
        from rft.launch.hub import Seat

        seat = Seat(hub, name, joined)
        await self.run(engines, auxiliary, writer, seat, hub, joined.start, seat)

    async def bench(
        self, engines: Sequence[Any], auxiliary: Sequence[Sequence[Any]], sink: Any, version: Version
    ) -> dict[str, float]:
        """Evaluates the weights that the engines serve; what was reported."""
        from rft.engine.pool import EnginePool
        from rft.explorer.bench import bench
        from rft.reward.place import run_folder

        run_folder.set(self.plan.run_dir)
        async with AsyncExitStack() as clients:
            return await bench(
                self.plan.explorer,
                cast(ChatModel, EnginePool(engines)),
                cast(MetricSink, sink),
                version,
                models=await _models(self.plan, auxiliary, clients),
            )

    async def stop(self) -> None:
        if self._explorer is not None:
            await self._explorer.stop()


async def _models(plan: Plan, auxiliary: Sequence[Sequence[Any]], clients: AsyncExitStack) -> dict[str, ChatModel]:
    """The auxiliary models by name.  Clients of servers live in this process and are closed with `clients`."""
    from rft.engine.base import make
    from rft.engine.pool import EnginePool

    models: dict[str, ChatModel] = {}
    for settings, given in zip(plan.auxiliary, auxiliary, strict=True):
        engines = list(given)
        for e in settings.engines:
            if e.external is not None:
                engines.append(await make(e))
                clients.push_async_callback(engines[-1].close)
        pool = EnginePool(engines, max_concurrent=settings.max_concurrent, revive=_restart(given), identity=identity(settings))
        models |= dict.fromkeys(settings.names, cast(ChatModel, pool))
    return models


def identity(settings: AuxiliarySettings) -> str:
    """Which model it is: its files, or its name and server."""
    first = settings.engines[0]
    if (server := first.external) is None:
        return f"{first.model_path} ({first.dtype})"
    return f"{server.model_name} at {server.base_url or server.base_url_env}"


async def _onlookers(plan: Plan, policy: ChatModel, models: dict[str, ChatModel], servers: AsyncExitStack) -> None:
    """Servers for people outside the run; their addresses and keys stand in a file that only its owner can read."""
    from rft.workflow.endpoint import public

    found = {}
    for api in plan.explorer.apis:
        name, model = api.model or "policy", policy if api.model is None else models[api.model]
        found[name] = await servers.enter_async_context(public(model, name, port=api.port, key=api.key))
        log.info("%s is served at %s; the key is in openai_api.json", name, found[name]["base_url"])
    if found:
        file = plan.run_dir / "openai_api.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps(found, indent=1))
        servers.callback(file.unlink, missing_ok=True)


async def explorer(plan: Plan) -> ExplorerPart:
    return ExplorerPart(plan)


# ---------------------------------------------------------------- trainer


class TrainerPart:
    """One rank of the trainer.  Rank 0 also runs the training loop and calls the other ranks."""

    def __init__(self, plan: Plan, learner: Any, rank: int) -> None:
        self.plan, self.learner, self.rank = plan, learner, rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._trainer: Any = None
        self._transport: Any = None
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="sending")

    async def run(self, others: Sequence[Any], reader: Any, sync: Any, sink: Any, start: Start) -> None:
        from rft.sync.base import make
        from rft.trainer.ranks import Ranks
        from rft.trainer.trainer import Trainer

        self._transport = make(self.plan.sync, self.plan.run_dir / "sync", _address(self.plan))
        when = schedule(self.plan, start)
        ranks = Ranks(self.learner, others)
        try:
            if start.checkpoint is not None:
                await ranks.load(start.checkpoint)
            self._trainer = Trainer(
                self.plan.trainer,
                ranks,
                cast(BufferReader, reader),
                cast(WeightSync, sync),
                cast(MetricSink, sink),
                transport=self._transport,
                lineage=start.lineage,
                start_step=start.step,
                parent=start.parent,
                must_publish=when.must_publish,
                first_after=when.first_after,
                on_demand=when.on_demand,
            )
            await self._trainer.run()
        finally:
            self._transport.close()

    async def run_given(self, others: Sequence[Any], sink: Any, start: Start, consumption: Consumption | None) -> None:
        """Train on a data set, without anybody to sample or to publish to.  `consumption`: what the checkpoint of `start` says."""
        from rft.taskset.given import open_given
        from rft.trainer.given import GivenReader, HeldOut
        from rft.trainer.ranks import Ranks
        from rft.trainer.trainer import Trainer

        s = self.plan.trainer
        assert s.given is not None and s.batch_groups is not None, "the plan says so"
        data = await asyncio.to_thread(open_given, s.given)
        held_out = HeldOut(await asyncio.to_thread(open_given, s.held_out)) if s.held_out is not None else None
        reader = GivenReader(data, size=s.batch_groups, seed=s.seed, lineage=start.lineage, total_steps=s.total_steps)
        if consumption is not None:
            reader.go_on(start.step, consumption)
        ranks = Ranks(self.learner, others)
        if start.checkpoint is not None:
            await ranks.load(start.checkpoint)
        self._trainer = Trainer(
            s,
            ranks,
            reader,
            None,
            cast(MetricSink, sink),
            transport=None,
            lineage=start.lineage,
            start_step=start.step,
            parent=start.parent,
            must_publish=lambda step: False,
            held_out=held_out,
        )
        await self._trainer.run()

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return cast("list[np.ndarray]", await self._trainer.score(rows))

    async def send(self, manifest: WeightManifest) -> None:
        """See `ports.Sender`.  In a thread of its own, because an engine that comes back is sent its weights while steps go on."""
        await asyncio.get_running_loop().run_in_executor(self._sending, self._transport.send, manifest)

    async def abandon(self, round: int, reason: str) -> None:
        """See `ports.Sender`."""
        await asyncio.to_thread(self._transport.abandon, round, reason)

    async def stop(self) -> None:
        if self._trainer is not None:
            await self._trainer.stop()

    async def call(self, method: str, *args: Any) -> Any:
        """One collective call on this rank's learner (ranks above 0)."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, getattr(self.learner, method), *args)

    async def aside(self, method: str, *args: Any) -> Any:
        """A call that is not collective, while one that is may be at work."""
        return await asyncio.to_thread(getattr(self.learner, method), *args)

    async def close(self) -> None:
        await asyncio.to_thread(self.learner.close)


def _address(plan: Plan) -> str:
    """Where engines find this process when it sends them something."""
    if plan.cluster.node_num == 1 and plan.mode != "train":
        return "127.0.0.1"
    import ray.util

    return str(ray.util.get_node_ip_address())


async def trainer(plan: Plan, rank: int, rendezvous: str | None) -> TrainerPart:
    from rft.plugins import load_all
    from rft.trainer.learner import Learner

    load_all(plan.plugin_dirs)
    learner = await asyncio.to_thread(Learner, plan.learner, rank, rendezvous)
    return TrainerPart(plan, learner, rank)
