"""Runs a Plan on Ray: start the parts, watch them, stop them, leave nothing behind.

Who waits for whom: the explorer waits for the synchronizer's gate, the trainer for the buffer's lease, the launcher for either to
end.  The first part that fails ends the run; its error becomes the program's exit code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
import types
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rft.config.plan import ClusterSettings, Plan
from rft.engine.environment import cpu_environment, trainer_environment
from rft.engine.settings import EngineSettings
from rft.errors import EngineFailed, RunFailed
from rft.launch import bench, drive, leftovers
from rft.launch.cluster import Cluster
from rft.launch.drive import OnRecord, Outcome, Signals
from rft.launch.parts import Start
from rft.launch.place import here, placement, reserve
from rft.launch.remote import Host, Proxy, guarded
from rft.launch.rundir import RunDir
from rft.logs import learnt_secrets
from rft.trainer import manifest as manifests
from rft.types.ports import Consumption

log = logging.getLogger(__name__)
RESTARTS = 3  # of one engine that dies
ENGINES = ("engine-", "aux-")  # how the names of parts begin that are restarted
TIMELINE = "ray_timeline.json"


async def run(plan: Plan, rundir: RunDir, on_record: OnRecord, parts_of: Callable[..., Parts] | None = None) -> Outcome:
    """Runs to the end.  Raises the RftError of the part that failed first, or Interrupted.  `parts_of` makes other parts than those
    of a whole run."""
    began = time.monotonic()
    with Signals() as signals:
        found = manifests.latest(rundir.checkpoints) if plan.continue_from_checkpoint else None
        if found is not None and found.version.step >= plan.trainer.total_steps:
            log.info("already trained to step %d; raise buffer.total_steps to go on", found.version.step)
            return Outcome(found.version, rundir.path, 0.0, found.version)
        other = drive.origin(plan.resume_from_path) if found is None else None
        number(rundir)
        rundir.state("starting")
        async with cluster_of(plan, rundir, signals) as cluster:
            parts = (parts_of or Parts)(plan, rundir, cluster)
            worked = False
            try:
                start = await signals.guard(parts.start(found, other))
                worked = True
                rundir.state("running", lineage=start.lineage, parts=parts.pids)
                await parts.work(start, on_record, signals)
            finally:
                rundir.state("stopping")
                await parts.end(graceful=worked)
    last = manifests.latest(rundir.checkpoints)
    assert last is not None, "a run that ends without an error has a final checkpoint"
    return Outcome(last.version, rundir.path, time.monotonic() - began, found.version if found else None)


async def evaluate(plan: Plan, rundir: RunDir) -> bench.Results:
    """`mode: bench`.  Raises as `run` does."""
    with Signals() as signals:
        targets = bench.targets(plan)
        number(rundir)
        async with cluster_of(plan, rundir, signals) as cluster:
            parts = Parts(plan, rundir, cluster)
            try:
                return await signals.guard(parts.evaluate(targets))
            finally:
                await parts.end(graceful=False)


def number(rundir: RunDir) -> None:
    """A run id for all that this process starts."""
    rundir.run_id = os.environ[leftovers.RUN_ID] = uuid.uuid4().hex[:12]


@asynccontextmanager
async def cluster_of(plan: Plan, rundir: RunDir, signals: Signals) -> AsyncIterator[Cluster]:
    """The Ray of a run; nothing of the run's id is left afterwards."""
    run_id, ended = rundir.run_id, threading.Event()
    try:
        cluster = await signals.guard(_connect(plan.cluster, ended))
    except BaseException:
        _clean(run_id)
        raise
    try:
        yield cluster
    finally:
        await asyncio.to_thread(cluster.close)
        ended.set()
        _clean(run_id)


async def _connect(settings: ClusterSettings, ended: threading.Event) -> Cluster:
    """Connects in a daemon thread: starting Ray cannot be interrupted, and a person's Ctrl-C must not wait for it.

    The thread stays until `ended`, because Ray's processes ask the kernel to die with the thread that started them.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Cluster] = loop.create_future()

    def give(cluster: Cluster | None, error: BaseException | None) -> None:
        if answer.cancelled():
            return
        if error is not None:
            answer.set_exception(error)
        elif cluster is not None:
            answer.set_result(cluster)

    def connect() -> None:
        try:
            loop.call_soon_threadsafe(give, Cluster.connect(settings.ray_address, num_cpus=settings.num_cpus), None)
            ended.wait()
        except BaseException as e:
            if not loop.is_closed():
                loop.call_soon_threadsafe(give, None, e)

    threading.Thread(target=connect, name="ray-start", daemon=True).start()
    return await answer


def _clean(run_id: str) -> None:
    for line in leftovers.clean(run_id):
        log.info("cleaned up: %s", line)
    os.environ.pop(leftovers.RUN_ID, None)


class Parts:
    """All actors of a run, or of one process of a run that has several."""

    def __init__(self, plan: Plan, rundir: RunDir, cluster: Cluster) -> None:
        self.plan, self.rundir, self.cluster = plan, rundir, cluster
        self.handles: dict[str, Any] = {}
        self.proxies: dict[str, Proxy] = {}
        self.pids: dict[str, int] = {}
        self.nodes: dict[str, str] = {}  # machine of each
        self._used: Consumption | None = None  # what the checkpoint says of a data set

    async def start(self, found: manifests.Manifest | None, other: manifests.Manifest | None) -> Start:
        """Start every part, the slow ones side by side; take the next lineage; connect the coordinator."""
        plan = self.plan
        given = plan.trainer.given is not None
        await self._start(engines=not given, trainer=True, buffer=not given)
        if given:
            self._used = found.consumption if found is not None else None
            await self._part("coordinator", "observer", plan)
            return drive.begin_given(found, other)
        start = await drive.begin(self.proxies["buffer"], found, other)
        await self._part("coordinator", "coordinator", plan, self.engines, self.proxies["trainer-0"], start)
        return start

    async def _start(self, *, engines: bool, trainer: bool, buffer: bool) -> None:
        """Reserves seats and starts these parts side by side: with `engines` come auxiliary models and the explorer."""
        plan = self.plan
        others = [(m, i, e) for m, model in enumerate(plan.auxiliary) for i, e in enumerate(model.engines)]
        others = [(m, i, e) for m, i, e in others if e.external is None and engines]
        seated = [e.name for _, _, e in others if e.gpus]
        served = plan.engines if engines else ()
        gpus = [e.gpus for _, _, e in others if e.gpus]
        places = await reserve(placement(served, plan.learner if trainer else None, self.cluster.gpus_per_node(), gpus))
        world = plan.learner.world_size if trainer else 0
        rendezvous = str(self.rundir.path / f".rendezvous-{self.rundir.run_id}") if world > 1 else None
        starting: list[Coroutine[Any, Any, None]] = []
        if buffer:
            starting.append(self._part("buffer", "buffer", plan))
        if engines:
            starting.append(self._part("explorer", "explorer", plan, env=plan.explorer.env_vars))
        for i, settings in enumerate(served):
            seat = places.options("engine", i)
            starting.append(self._engine(f"engine-{i}", settings, "engine", plan, i, **seat))
        for m, i, settings in others:
            seat = places.options("auxiliary", seated.index(settings.name)) if settings.gpus else {}
            starting.append(self._engine(settings.name, settings, "auxiliary_engine", plan, m, i, **seat))
        for rank in range(world):
            seat = places.options("trainer", rank)
            env = trainer_environment(plan.learner.cpu_threads)
            starting.append(self._part(f"trainer-{rank}", "trainer", plan, rank, rendezvous, env=env, **seat))
        tasks = [asyncio.ensure_future(s) for s in starting]
        try:
            await asyncio.gather(*tasks)
        finally:
            await drive.cancel(tasks)

    async def work(self, start: Start, on_record: OnRecord, signals: Signals) -> None:
        p = self.proxies
        trainer, coordinator = p["trainer-0"], p["coordinator"]
        others = [p[f"trainer-{rank}"] for rank in range(1, self.plan.learner.world_size)]
        if self.plan.trainer.given is not None:
            training = trainer.run_given(others, coordinator, start, self._used)
            await drive.work(training, None, (trainer,), coordinator, on_record, signals, self._watched())  # type: ignore[arg-type]
            return
        explorer, buffer = p["explorer"], p["buffer"].bind(start.lineage)
        await drive.work(
            trainer.run(others, buffer, coordinator, coordinator, start),
            explorer.run(self.engines, self.auxiliary, buffer, coordinator, coordinator, start),
            (trainer, explorer),
            coordinator,  # type: ignore[arg-type]  # a proxy has every method of its part
            on_record,
            signals,
            self._watched(),
        )

    async def _watched(self) -> None:
        """Of all parts that are not restarted.  Raises RunFailed that names the first which died or hangs."""
        lasting = [p for name, p in self.proxies.items() if not name.startswith(ENGINES)]
        tasks = [asyncio.ensure_future(p.lives(self.plan.cluster.stall_timeout_s)) for p in lasting]
        try:
            await asyncio.gather(*tasks)
        finally:
            await drive.cancel(tasks)

    async def evaluate(self, targets: Sequence[bench.Target]) -> bench.Results:
        """Plays the evaluation tasksets under all targets, each with fresh engines in the same seats."""
        import ray

        plan = self.plan
        others = [(m, i, e) for m, model in enumerate(plan.auxiliary) for i, e in enumerate(model.engines) if e.external is None]
        seated = [e.name for _, _, e in others if e.gpus]
        gpus = [e.gpus for _, _, e in others if e.gpus]
        places = await reserve(placement(plan.engines, None, self.cluster.gpus_per_node(), gpus))
        await self._part("coordinator", "observer", plan)
        await self._part("explorer", "explorer", plan, env=plan.explorer.env_vars)
        for m, i, settings in others:
            seat = places.options("auxiliary", seated.index(settings.name)) if settings.gpus else {}
            await self._engine(settings.name, settings, "auxiliary_engine", plan, m, i, **seat)
        p, results = self.proxies, []
        for target in targets:
            with bench.plan_for(plan, target) as served:
                for i, settings in enumerate(served.engines):
                    await self._engine(f"engine-{i}", settings, "engine", served, i, **places.options("engine", i))
                told = await p["explorer"].bench(self.engines, self.auxiliary, p["coordinator"], target.version)
            results.append((target.version, told))
            for i in range(len(plan.engines)):
                await drive.quietly(self.proxies.pop(f"engine-{i}").close())
                ray.kill(self.handles.pop(f"engine-{i}"), no_restart=True)
        await drive.quietly(p["coordinator"].close())
        return results

    @property
    def engines(self) -> list[Proxy]:
        return [self.proxies[f"engine-{i}"] for i in range(len(self.plan.engines))]

    @property
    def auxiliary(self) -> list[list[Proxy]]:
        """Of every auxiliary model its engines; none for those that the explorer asks over the network."""
        return [[self.proxies[e.name] for e in model.engines if e.external is None] for model in self.plan.auxiliary]

    async def _engine(self, name: str, settings: EngineSettings, factory: str, *args: Any, **seat: Any) -> None:
        env = {**cpu_environment(settings), leftovers.PART: name}
        limits = (settings.stall_timeout_s, settings.step_timeout_s)
        await self._part(name, factory, *args, env=env, error=EngineFailed, limits=limits, max_restarts=RESTARTS, **seat)

    async def _part(
        self,
        name: str,
        factory: str,
        *args: Any,
        env: dict[str, str] | None = None,
        error: type[RunFailed] = RunFailed,
        limits: tuple[float | None, float | None] = (None, None),
        **options: Any,
    ) -> None:
        import ray

        options = {**here(), "max_restarts": 0, "max_concurrency": 10000, **options}
        if self.plan.cluster.ray_address is not None:  # a Ray of others does not hand this process's environment on
            env = {leftovers.RUN_ID: self.rundir.run_id, **(env or {})}
        if env:
            options["runtime_env"] = {"env_vars": env}
        again = {n: ray.method(max_task_retries=-1)(_copy(getattr(Host, n))) for n in ("start", "broken")}  # wait for a restart
        titled = type(re.sub(r"\W", "_", name), (Host,), again)  # `ps` shows the class: ray::engine_0
        made = (name, str(self.rundir.logs), self.plan.log_by_node, self.plan.log_level, learnt_secrets(), factory, args)
        handle = ray.remote(titled).options(**options).remote(*made)
        self.handles[name] = handle
        deadline_s = self.plan.cluster.actor_start_timeout_s
        facts = await guarded(handle.facts.remote(), name, error, deadline_s)
        self.pids[name], self.nodes[name] = facts["pid"], facts["node"]
        await guarded(handle.start.remote(), name, error, deadline_s)
        self.proxies[name] = Proxy(handle, name, error, limits=limits, start_s=deadline_s)
        log.info("%s is up (pid %d)", name, self.pids[name])

    async def end(self, graceful: bool) -> None:
        """Close along the data path, if the parts ever worked together, then end every process."""
        import ray

        if graceful:
            await self._close()
            if self.plan.cluster.timeline:
                await asyncio.to_thread(self.cluster.timeline, self.rundir.path / TIMELINE)
        for handle in self.handles.values():
            ray.kill(handle, no_restart=True)
        for path in self.rundir.path.glob(".rendezvous-*"):
            path.unlink(missing_ok=True)

    async def _close(self) -> None:
        closing = [n for n in self.proxies if n.startswith((*ENGINES, "trainer", "coordinator"))]
        await asyncio.gather(*(drive.quietly(self.proxies[n].close()) for n in closing))
        if "buffer" in self.proxies:
            await drive.quietly(self.proxies["buffer"].close())


def _copy(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as another object, which may be marked without marking it for every part."""
    assert isinstance(method, types.FunctionType)
    return types.FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
