"""Build the parts of a run from its Plan, in any process.

Each factory is awaited in the process that will own the part.  A local runtime calls the factories
in turn; with Ray every part is in an actor (`part_host.Host`), and other parts call it through a
proxy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil

from rft.config.plan import Plan
from rft.engine.settings import AuxiliarySettings, EngineSettings, ExternalPolicyConfig
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
    from rft.launch.coordinator import Coordinator, ExplorerClient, JoinReply, MonitorPart

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
        mix = Mix(
            plan.mix,
            demonstrations(rows, taskset=plan.mix.name),
            lambda indices: data.images([rows[i] for i in indices]),
        )
    instance = Buffer(
        dataclasses.replace(plan.buffer, vocab_size=vocab_size(Path(plan.learner.model_path))),
        mix=mix,
    )
    await instance.open()
    return instance


# ---------------------------------------------------------------- engine


async def engine(plan: Plan, settings: EngineSettings) -> Engine:
    """Make a rollout engine, or an engine of an auxiliary model."""
    from rft.engine.built_in import make
    from rft.plugins import load_all

    load_all(plan.plugin_dirs)
    return await make(settings)


def _reviver(engines: Sequence[Any]) -> Callable[[int], Awaitable[None]] | None:
    """Return a function that restarts an engine's process, if engines have processes."""
    if engines and isinstance(engines[0], Proxy):
        return lambda i: engines[i].restart()
    return None


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
        joined: JoinReply,
    ) -> None:
        """Explore as `name`, which has joined.

        `auxiliary`: local engines of each auxiliary model.
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
            models = await _models(self.plan, auxiliary, clients, client)
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
                    resumes_evaluation=joined.resumes_evaluation,
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
        """Evaluate the weights that the engines serve; return the reported metrics."""
        from rft.engine.pool import EnginePool
        from rft.explorer.evaluate import bench, spent
        from rft.reward.run_folder import run_folder

        run_folder.set(self.plan.run_dir)
        async with AsyncExitStack() as clients:
            server = self.plan.engines[0].external
            policy = EnginePool([*engines, *await _servers(self.plan.engines, clients)])
            models, reports = await _models(self.plan, auxiliary, clients), cast(MetricSink, sink)
            values = await bench(
                self.plan.explorer, cast(ChatModel, policy), reports, version, models=models
            )
            if isinstance(server, ExternalPolicyConfig):
                values |= await spent(server, policy, reports)
            return values

    async def stop(self) -> None:
        if self._explorer is not None:
            await self._explorer.stop()

    async def close(self) -> None:
        """Do nothing: `run` closes its models."""


async def _models(
    plan: Plan,
    auxiliary: Sequence[Sequence[Any]],
    clients: AsyncExitStack,
    gate: ExplorerClient | None = None,
) -> dict[str, ChatModel]:
    """Return the auxiliary models by name.  `gate`: of a run that may publish to one of them."""
    from rft.engine.pool import EnginePool

    models: dict[str, ChatModel] = {}
    for settings, proxies in zip(plan.auxiliary, auxiliary, strict=True):
        engines = [*proxies, *await _servers(settings.engines, clients)]
        how: dict[str, Any] = {
            "max_concurrent": settings.max_concurrent,
            "revive": _reviver(proxies),
            "unscorable": settings.unscorable,
        }
        if settings.decay is not None and gate is not None:
            how["verified"] = gate.wait_taught
            how["revive"] = gate.revive_teacher if _reviver(proxies) else None
        pool = EnginePool(
            engines, identity=identity(settings), name=f"model {settings.names[0]}", **how
        )
        models |= dict.fromkeys(settings.names, cast(ChatModel, pool))
    return models


async def _servers(engines: Sequence[EngineSettings], clients: AsyncExitStack) -> list[Any]:
    """Make clients of external engines in this process; they are closed with `clients`."""
    from rft.engine.built_in import make

    servers = [await make(e) for e in engines if e.external is not None]
    for client in servers:
        clients.push_async_callback(client.close)
    return servers


def identity(settings: AuxiliarySettings) -> str:
    """Identify a model by its files, or by its name and server."""
    first = settings.engines[0]
    if (server := first.external) is None:
        return f"{first.model_path} ({first.dtype})"
    return f"{server.model_name} at {server.base_url or server.base_url_env}"


async def _observers(
    plan: Plan, policy: ChatModel, models: dict[str, ChatModel], servers: AsyncExitStack
) -> None:
    """Serve models to programs outside the run; addresses and keys are in a file with mode 0600."""
    from rft.workflow.endpoint import public

    served = {}
    for api in plan.explorer.apis:
        name = api.model or "policy"
        model = policy if api.model is None else models[api.model]
        served[name] = await servers.enter_async_context(
            public(model, name, port=api.port, key=api.key)
        )
        log.info(
            "%s is served at %s; the key is in openai_api.json", name, served[name]["base_url"]
        )
    if served:
        file = plan.run_dir / "openai_api.json"
        file.touch(mode=0o600)
        file.write_text(json.dumps(served, indent=1))
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
        self._average_transport: Any = None

    async def run(
        self, other_ranks: Sequence[Any], reader: Any, sync: Any, sink: Any, start: Start
    ) -> None:
        from rft.sync.transport.choose import make
        from rft.trainer.loop.outlet import Outlet

        self._transport = make(
            self.plan.sync,
            self.plan.run_dir / "sync",
            _address(self.plan),
            self.plan.sync_runtime.backend,
        )
        average = None
        if self.plan.averaged is not None:
            method = "memory" if self.plan.cluster.node_num == 1 else "checkpoint"
            config = self.plan.sync.model_copy(update={"sync_method": method})
            to = self._average_transport = make(config, self.plan.run_dir / "sync" / "average")
            average = Outlet(to, sync.publish_average, average=True)
        when = schedule(self.plan, start)
        try:
            await self._train(
                other_ranks,
                reader,
                cast(WeightSync, sync),
                sink,
                start,
                transport=self._transport,
                average=average,
                must_publish=when.must_publish,
                first_after=when.first_after,
                on_demand=when.on_demand,
            )
        finally:
            self._transport.close()
            if self._average_transport is not None:
                self._average_transport.close()

    async def run_offline(
        self, other_ranks: Sequence[Any], sink: Any, start: Start, consumption: Consumption | None
    ) -> None:
        """Train on a data set without engines.

        `consumption`: that of the checkpoint of `start`.
        """
        from rft.taskset.base import OTHER_ROWS
        from rft.taskset.offline_data import open_offline_data
        from rft.trainer.loop.offline_reader import HeldOut, OfflineReader

        s = self.plan.trainer
        if s.replay_run is not None:
            await self._replay(other_ranks, s.replay_run, sink, start, consumption)
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
                await sink.log(MetricRecord(role="eval", step=start.step, values={}, notes=(note,)))
            write_whole(noted, rows.fingerprint)
        reader = OfflineReader(
            data, size=s.batch_groups, seed=s.seed, lineage=start.lineage, total_steps=s.total_steps
        )
        if consumption is not None:
            reader.go_on(start.step, consumption)
        await self._train(
            other_ranks,
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
        other_ranks: Sequence[Any],
        run: Path,
        sink: Any,
        start: Start,
        consumption: Consumption | None,
    ) -> None:
        """Train on the rows that each step of another run used."""
        from rft.buffer.replay_reader import ReplayReader

        with ReplayReader(run) as reader:
            if consumption is not None:
                reader.go_on(start.step, consumption)
            await self._train(
                other_ranks,
                reader,
                None,
                sink,
                start,
                transport=None,
                must_publish=windows(self.plan),
            )

    async def _train(
        self,
        other_ranks: Sequence[Any],
        reader: Any,
        sync: WeightSync | None,
        sink: Any,
        start: Start,
        **how: Any,
    ) -> None:
        from rft.trainer.loop.ranks import Ranks
        from rft.trainer.loop.trainer import Trainer

        ranks = Ranks(self.learner, other_ranks)
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

    async def score_average(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return cast("list[np.ndarray]", await self._trainer.score(rows, "average"))

    async def send(self, manifest: WeightManifest) -> None:
        await self._transport.send(manifest)

    async def abort_round(self, round: int, reason: str) -> None:
        await self._transport.abort_round(round, reason)

    async def stop(self) -> None:
        if self._trainer is not None:
            await self._trainer.stop()

    async def call(self, method: str, *args: Any) -> Any:
        """Run a collective method of this rank's learner (ranks above 0)."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, getattr(self.learner, method), *args
        )

    async def aside(self, method: str, *args: Any) -> Any:
        """Run a method that may overlap collective calls."""
        return await asyncio.to_thread(getattr(self.learner, method), *args)

    async def close(self) -> None:
        await asyncio.to_thread(self.learner.close)


def _address(plan: Plan) -> str:
    """Return the address of this process for engines."""
    if plan.cluster.node_num == 1 and plan.mode != "train":
        return "127.0.0.1"
    import ray.util

    return str(ray.util.get_node_ip_address())


def ready_to_meet(plan: Plan, rank: int, rendezvous: str) -> None:
    """Check that ranks on several machines share a folder, and set gloo's network interface.

    Raises SetupError.
    """
    host = os.uname().nodename
    name = "GLOO_SOCKET_IFNAME"
    if not Path(rendezvous).exists():
        reason = (
            "ranks on several machines need checkpoint_root_dir on a file system that all of "
            "them mount"
        )
        raise SetupError(f"trainer rank {rank} on {host} does not see {rendezvous}: {reason}")
    if plan.cluster.node_num > 1 and name not in os.environ:
        address = _address(plan)
        interfaces = [
            n for n, at in psutil.net_if_addrs().items() if address in (a.address for a in at)
        ]
        if not interfaces:
            raise SetupError(
                f"no network interface of {host} has Ray's address {address}; set {name} to that "
                f"which ranks can use"
            )
        os.environ[name] = interfaces[0]


async def trainer(plan: Plan, rank: int, rendezvous: str | None) -> TrainerPart:
    from rft.plugins import load_all
    from rft.trainer.loop.learner import Learner

    if rendezvous is not None:
        ready_to_meet(plan, rank, rendezvous)
    load_all(plan.plugin_dirs)
    learner = await asyncio.to_thread(Learner, plan.learner, rank, rendezvous)
    return TrainerPart(plan, learner, rank)
