"""Builds the parts of a run from its Plan, in whatever process they live.

Each factory is awaited in the process that will own the part.  A local runtime calls them one after
the other; with Ray every part sits in an actor (`remote.Host`) and the others see it through a
proxy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil

from rft.config.plan import Plan
from rft.engine.settings import AuxiliarySettings, EngineSettings
from rft.errors import SetupError
from rft.files.disk import write_whole
from rft.launch.remote import Proxy
from rft.launch.start import Start, schedule, windows
from rft.types.experience import Demonstration
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.types.modelfiles import vocab_size
from rft.types.ports import (
    BufferReader,
    ChatModel,
    Consumption,
    Engine,
    MetricSink,
    Scorer,
    ScoreRow,
    WeightManifest,
    WeightSync,
)

if TYPE_CHECKING:
    from rft.launch.coordinator import Coordinator, Joined, MonitorPart

log = logging.getLogger(__name__)


# ---------------------------------------------------------------- buffer


async def buffer(plan: Plan) -> Any:
    from rft.buffer.buffer import Buffer
    from rft.plugins import load_all

    load_all(plan.plugin_dirs)  # priority functions, storages
    mix = None
    if plan.mix is not None and plan.expert is not None:
        from rft.buffer.mixing import Mix, demonstrations
        from rft.taskset.offline_data import open_offline_data

        data = await asyncio.to_thread(open_offline_data, plan.expert)
        rows = [r for r in data.records if isinstance(r, Demonstration)]
        mix = Mix(plan.mix, demonstrations(rows, taskset=plan.mix.name))
    made = Buffer(
        dataclasses.replace(plan.buffer, vocab_size=vocab_size(Path(plan.learner.model_path))),
        mix=mix,
    )
    await made.open()
    return made


# ---------------------------------------------------------------- engine


async def engine(plan: Plan, settings: EngineSettings) -> Engine:
    """A rollout engine, or one of an auxiliary model."""
    from rft.engine.built_in import make
    from rft.plugins import load_all

    load_all(plan.plugin_dirs)
    return await make(settings)


def _reviver(engines: Sequence[Any]) -> Callable[[int], Awaitable[None]] | None:
    """How to give an engine a new process, where it has one."""
    return (lambda i: engines[i].restart()) if engines and isinstance(engines[0], Proxy) else None


# ---------------------------------------------------------------- coordinator


async def monitor(plan: Plan) -> MonitorPart:
    from rft.launch.coordinator import MonitorPart

    return MonitorPart(plan)


async def coordinator(
    plan: Plan, scorer: Any, buffer: Any, start: Start, node: str, restarts: bool
) -> Coordinator:
    from rft.launch.coordinator import Coordinator

    return Coordinator(plan, cast(Scorer, scorer), buffer, start, node, restarts=restarts)


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
        coordinator: Any,
        name: str,
        joined: Joined,
    ) -> None:
        """Explores as `name`, which has joined.  `auxiliary`: of every auxiliary model its engines,
        none for one behind a server.
        """
        from rft.engine.pool import EnginePool
        from rft.explorer.explorer import Explorer
        from rft.launch.coordinator import ExplorerClient
        from rft.plugins import extra_entry
        from rft.reward.run_folder import run_folder

        run_folder.set(self.plan.run_dir)
        client = ExplorerClient(coordinator, name, joined)
        async with AsyncExitStack() as clients:
            policy = cast(
                ChatModel, EnginePool(engines, revive=client.revive if _reviver(engines) else None)
            )
            models = await _models(self.plan, auxiliary, clients)
            await _observers(self.plan, policy, models, clients)
            sides: dict[str, Any] = {
                "model": policy,
                "buffer": writer,
                "gate": client,
                "sink": coordinator,
                "models": models,
            }
            sides["lineage"] = joined.start.lineage
            if self.plan.serve is not None:
                service = extra_entry("service", "explorer", key="mode")
                sides["folder"] = self.plan.run_dir
                self._explorer = service(self.plan.serve, self.plan.explorer.pipeline, **sides)
            else:
                self._explorer = Explorer(
                    self.plan.explorer,
                    cursor=joined.start.cursor,
                    evaluates=joined.evaluates,
                    **sides,
                )
            await self._explorer.run()

    async def bench(
        self,
        engines: Sequence[Any],
        auxiliary: Sequence[Sequence[Any]],
        sink: Any,
        version: Version,
    ) -> dict[str, float]:
        """Evaluates the weights that the engines serve; what was reported."""
        from rft.engine.pool import EnginePool
        from rft.explorer.evaluate import bench, spent
        from rft.reward.run_folder import run_folder

        run_folder.set(self.plan.run_dir)
        async with AsyncExitStack() as clients:
            server = self.plan.engines[0].external
            policy = EnginePool([*engines, *await _servers(self.plan.engines, clients)])
            models, reports = await _models(self.plan, auxiliary, clients), cast(MetricSink, sink)
            told = await bench(
                self.plan.explorer, cast(ChatModel, policy), reports, version, models=models
            )
            return told if server is None else told | await spent(server, policy, reports)

    async def stop(self) -> None:
        if self._explorer is not None:
            await self._explorer.stop()

    async def close(self) -> None:
        """`run` closes what it opens."""


async def _models(
    plan: Plan, auxiliary: Sequence[Sequence[Any]], clients: AsyncExitStack
) -> dict[str, ChatModel]:
    """The auxiliary models by name."""
    from rft.engine.pool import EnginePool

    models: dict[str, ChatModel] = {}
    for settings, given in zip(plan.auxiliary, auxiliary, strict=True):
        engines = [*given, *await _servers(settings.engines, clients)]
        how: dict[str, Any] = {"max_concurrent": settings.max_concurrent, "revive": _reviver(given)}
        pool = EnginePool(
            engines, identity=identity(settings), name=f"model {settings.names[0]}", **how
        )
        models |= dict.fromkeys(settings.names, cast(ChatModel, pool))
    return models


async def _servers(engines: Sequence[EngineSettings], clients: AsyncExitStack) -> list[Any]:
    """Clients of those that are behind servers; they live in this process and are closed with
    `clients`.
    """
    from rft.engine.built_in import make

    made = [await make(e) for e in engines if e.external is not None]
    for client in made:
        clients.push_async_callback(client.close)
    return made


def identity(settings: AuxiliarySettings) -> str:
    """Which model it is: its files, or its name and server."""
    first = settings.engines[0]
    if (server := first.external) is None:
        return f"{first.model_path} ({first.dtype})"
    return f"{server.model_name} at {server.base_url or server.base_url_env}"


async def _observers(
    plan: Plan, policy: ChatModel, models: dict[str, ChatModel], servers: AsyncExitStack
) -> None:
    """Servers for people outside the run; their addresses and keys stand in a file that only its
    owner can read.
    """
    from rft.workflow.endpoint import public

    found = {}
    for api in plan.explorer.apis:
        name = api.model or "policy"
        model = policy if api.model is None else models[api.model]
        found[name] = await servers.enter_async_context(
            public(model, name, port=api.port, key=api.key)
        )
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
        self.plan = plan
        self.learner = learner
        self.rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._trainer: Any = None
        self._transport: Any = None

    async def run(
        self, others: Sequence[Any], reader: Any, sync: Any, sink: Any, start: Start
    ) -> None:
        from rft.sync.transport.choose import make

        self._transport = make(self.plan.sync, self.plan.run_dir / "sync", _address(self.plan))
        when = schedule(self.plan, start)
        try:
            await self._train(
                others,
                reader,
                cast(WeightSync, sync),
                sink,
                start,
                transport=self._transport,
                must_publish=when.must_publish,
                first_after=when.first_after,
                on_demand=when.on_demand,
            )
        finally:
            self._transport.close()

    async def run_offline(
        self, others: Sequence[Any], sink: Any, start: Start, consumption: Consumption | None
    ) -> None:
        """Train on a data set, with no engines to sample from or publish to.  `consumption`: what
        the checkpoint of `start` says.
        """
        from rft.taskset.base import OTHER_ROWS
        from rft.taskset.offline_data import open_offline_data
        from rft.trainer.offline_reader import HeldOut, OfflineReader

        s = self.plan.trainer
        if s.replay_run is not None:
            await self._replay(others, s.replay_run, sink, start, consumption)
            return
        assert s.offline_data is not None and s.batch_groups is not None, "the plan says so"
        data = await asyncio.to_thread(open_offline_data, s.offline_data)
        held_out = None
        if s.held_out is not None:
            rows = await asyncio.to_thread(open_offline_data, s.held_out)
            held_out = HeldOut(rows)
            noted = self.plan.run_dir / "held_out.txt"
            if consumption is not None and noted.exists() and noted.read_text() != rows.fingerprint:
                note = OTHER_ROWS.format(held_out.name)
                await sink.log(
                    MetricRecord(
                        role="eval", step=start.step, time=time.time(), values={}, notes=(note,)
                    )
                )
            write_whole(noted, rows.fingerprint)
        reader = OfflineReader(
            data, size=s.batch_groups, seed=s.seed, lineage=start.lineage, total_steps=s.total_steps
        )
        if consumption is not None:
            reader.go_on(start.step, consumption)
        await self._train(
            others,
            reader,
            None,
            sink,
            start,
            transport=None,
            must_publish=lambda step: False,
            held_out=held_out,
        )

    async def _replay(
        self,
        others: Sequence[Any],
        run: Path,
        sink: Any,
        start: Start,
        consumption: Consumption | None,
    ) -> None:
        """The steps of another run, on the rows that each of them used."""
        from rft.buffer.replay_reader import ReplayReader

        with ReplayReader(run) as reader:
            if consumption is not None:
                reader.go_on(start.step, consumption)
            await self._train(
                others, reader, None, sink, start, transport=None, must_publish=windows(self.plan)
            )

    async def _train(
        self,
        others: Sequence[Any],
        reader: Any,
        sync: WeightSync | None,
        sink: Any,
        start: Start,
        **how: Any,
    ) -> None:
        from rft.trainer.ranks import Ranks
        from rft.trainer.trainer import Trainer

        ranks = Ranks(self.learner, others)
        if start.checkpoint is not None:
            await ranks.load(start.checkpoint)
        how |= {"lineage": start.lineage, "start_step": start.step, "parent": start.parent}
        self._trainer = Trainer(
            self.plan.trainer,
            ranks,
            cast(BufferReader, reader),
            sync,
            cast(MetricSink, sink),
            **how,
        )
        await self._trainer.run()

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return cast("list[np.ndarray]", await self._trainer.score(rows))

    async def send(self, manifest: WeightManifest) -> None:
        await self._transport.send(manifest)

    async def abandon(self, round: int, reason: str) -> None:
        await self._transport.abandon(round, reason)

    async def stop(self) -> None:
        if self._trainer is not None:
            await self._trainer.stop()

    async def call(self, method: str, *args: Any) -> Any:
        """One collective call on this rank's learner (ranks above 0)."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, getattr(self.learner, method), *args
        )

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


def ready_to_meet(plan: Plan, rank: int, rendezvous: str) -> None:
    """Where ranks are on several machines: they see one folder, and gloo takes the network between
    them.  Raises SetupError.
    """
    host = os.uname().nodename
    name = "GLOO_SOCKET_IFNAME"
    if not Path(rendezvous).exists():
        why = (
            "ranks on several machines need checkpoint_root_dir on a file system that all of "
            "them mount"
        )
        raise SetupError(f"trainer rank {rank} on {host} does not see {rendezvous}: {why}")
    if plan.cluster.node_num > 1 and name not in os.environ:
        address = _address(plan)
        found = [n for n, at in psutil.net_if_addrs().items() if address in (a.address for a in at)]
        if not found:
            raise SetupError(
                f"no network interface of {host} has Ray's address {address}; set {name} to that "
                f"which ranks can use"
            )
        os.environ[name] = found[0]


async def trainer(plan: Plan, rank: int, rendezvous: str | None) -> TrainerPart:
    from rft.plugins import load_all
    from rft.trainer.learner import Learner

    if rendezvous is not None:
        ready_to_meet(plan, rank, rendezvous)
    load_all(plan.plugin_dirs)
    learner = await asyncio.to_thread(Learner, plan.learner, rank, rendezvous)
    return TrainerPart(plan, learner, rank)
