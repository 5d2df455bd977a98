"""Runtime of parts in Ray actors: start the cluster, place, build and watch the parts, clean up."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import sys
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import psutil

from rft.config.plan import ClusterSettings, Plan
from rft.engine.environment import cpu_environment, host_program
from rft.errors import DeadlineExceeded, EngineFailed, Interrupted, RayFailed, RunFailed, SetupError
from rft.launch import drive, leftovers
from rft.launch.cluster import Cluster, Places, gpus_of_nodes, here, placement, reserve
from rft.launch.part_host import Host
from rft.launch.progress import STARTING
from rft.launch.ray_calls import LOOK_S, answer, in_daemon, stopped_parts
from rft.launch.remote import Proxy, guarded
from rft.launch.rundir import RunDir
from rft.launch.runtime import Parts, PartSpec, Runtime
from rft.launch.signals import Signals
from rft.secrets import learnt_secrets
from rft.sync.waits import all_of, cancel, race
from rft.worker.waiting import ACTIVITY_S, Activity, activities, works

log = logging.getLogger(__name__)
RESTARTS = 3  # most restarts of a dying engine
LET_UP_S = 30.0  # limit for a Ray that is starting when the run ends
TIMELINE = "ray_timeline.json"
KILL_S = 2.0  # for Ray to accept a kill; its processes end with it in any case
ASK_GCS_S = 10.0


class RayRuntime(Runtime):
    @asynccontextmanager
    async def open(self, plan: Plan, rundir: RunDir, signals: Signals) -> AsyncIterator[Parts]:
        """Open parts on the plan's Ray; on exit end and remove everything with the run's id."""
        os.environ[leftovers.RUN_ID], ended = rundir.run_id, threading.Event()
        connecting = asyncio.ensure_future(_connect(plan.cluster, ended))
        try:
            with works("starting Ray"):
                cluster = await signals.guard(asyncio.shield(connecting))
            signals.install()
            log.info("Ray is up", extra=STARTING)
        except BaseException as e:
            if (
                isinstance(e, Interrupted)
                and plan.cluster.ray_address is None
                and not await _let_up(connecting, signals)
            ):
                # second signal: end at once with Ray's processes; the next start cleans up
                raise
            ended.set()
            _clean(rundir.run_id)
            raise
        interrupted = False
        try:
            self.parts = RayParts(plan, rundir, cluster, signals)
            yield self.parts
        except (RunFailed, SetupError) as e:
            if not isinstance(e, RayFailed) and (trouble := cluster.watched.trouble()):
                raise RayFailed(f"{trouble}, and {type(e).__name__}: {e}") from e
            raise
        except Interrupted:
            interrupted = True
            raise
        finally:
            self.parts = None
            try:
                with works("ending Ray"):
                    await asyncio.to_thread(cluster.close)
            except RayFailed as e:
                if not interrupted:  # else the program ends without Ray's exit handlers
                    raise
                log.warning("%s", e)
            finally:
                ended.set()
                with works("removing what the run left"):
                    _clean(rundir.run_id)


async def _let_up(connecting: asyncio.Future[Cluster], signals: Signals) -> bool:
    """Close a Ray that is still starting; return False after LET_UP_S or at a second signal.

    Killing its processes while it starts would make Ray's library block the interpreter for a
    minute.
    """
    async with race(asyncio.wait([connecting], timeout=LET_UP_S), signals.wait(2)):
        if connecting.done() and connecting.exception() is None:
            await asyncio.to_thread(connecting.result().close)
        return connecting.done()


async def _connect(settings: ClusterSettings, ended: threading.Event) -> Cluster:
    """Connect in a daemon thread, because starting Ray cannot be interrupted by Ctrl-C.

    The thread lasts until `ended`: Ray's processes die with the thread that started them.
    """
    how = {"num_cpus": settings.num_cpus, "timeline": settings.timeline}
    return await asyncio.wrap_future(
        in_daemon(Cluster.connect, settings.ray_address, until=ended, **how)
    )


def _clean(run_id: str) -> None:
    for line in leftovers.clean(run_id):
        log.info("cleaned up: %s", line)
    os.environ.pop(leftovers.RUN_ID, None)


class RayParts(Parts):
    """Parts in Ray actors; `by_name` holds their proxies."""

    restarts = True

    def __init__(self, plan: Plan, rundir: RunDir, cluster: Cluster, signals: Signals) -> None:
        super().__init__(plan, rundir)
        self.cluster = cluster
        self._signals = signals
        self._handles: dict[str, Any] = {}
        self._places = Places([], None)
        self._listening: list[asyncio.Future[None]] = []
        self._restarted: set[str] = set()  # parts that Ray restarts when they die

    async def reserve(self, *, engines: bool, trainer: bool) -> None:
        plan = self.plan
        gpus = [
            e.gpus
            for model in plan.auxiliary
            for e in model.engines
            if e.external is None and e.gpus and engines
        ]
        roles = (plan.engines if engines else (), plan.learner if trainer else None)
        self._places = await reserve(
            lambda free: placement(*roles, free, gpus, shared=plan.cluster.shared)
        )

    async def start(self, specs: Sequence[PartSpec]) -> None:
        await all_of(*map(self._start, specs))

    async def activities(self) -> list[Activity]:
        answers = await asyncio.gather(
            *(_activities(name, h) for name, h in self._handles.items() if name in self.by_name)
        )
        return [*activities(), *chain.from_iterable(answers)]

    async def together(self, *starts: Callable[[], Awaitable[None]]) -> None:
        await all_of(*(start() for start in starts))

    async def _start(self, spec: PartSpec) -> None:
        import ray

        name = spec.name
        plan = self.plan
        engine = spec.engine
        options = {**here(), "max_restarts": 0, "max_concurrency": 10000}
        options |= {} if spec.seat is None else self._places.options(*spec.seat)
        env = {**spec.env, **({} if spec.seat is None else self._places.env(*spec.seat))}
        error = RunFailed
        limits: tuple[float | None, float | None] = (None, None)
        if engine is not None:
            env |= {**cpu_environment(engine), leftovers.PART: name}
            error = EngineFailed
            limits = (engine.stall_timeout_s, engine.step_timeout_s)
            options["max_restarts"] = RESTARTS
            self._restarted.add(name)
        # a joined Ray does not pass this process's environment on
        if plan.cluster.ray_address is not None:
            env = {leftovers.RUN_ID: self.rundir.run_id, **env}
        runtime_env: dict[str, Any] = {"env_vars": env} if env else {}
        if (
            engine is not None
            and plan.cluster.ray_address is None
            and (program := host_program(engine))
        ):
            runtime_env["py_executable"] = shlex.join(program)
        if runtime_env:
            options["runtime_env"] = runtime_env
        # calls of these methods wait for a restart
        again = {
            n: ray.method(max_task_retries=-1)(_copy(getattr(Host, n))) for n in ("start", "broken")
        }
        # process lists show the class: ray::engine_0
        titled = type(re.sub(r"\W", "_", name), (Host,), again)
        arguments = (
            name,
            str(self.rundir.logs),
            plan.log_by_node,
            plan.log_level,
            learnt_secrets(),
            spec.factory,
            spec.args,
        )
        create = ray.remote(titled).options(**options).remote
        handle = self._handles[name] = await answer(f"create {name}", create, *arguments)
        deadline_s = plan.cluster.actor_start_timeout_s
        with works(f"starting {name}"):
            self.nodes[name], self.pids[name] = await guarded(
                handle.beat.remote(), name, error, deadline_s
            )
            await guarded(handle.start.remote(), name, error, deadline_s)
        self.by_name[name] = Proxy(handle, name, error, limits=limits, start_s=deadline_s)
        self._listening.append(asyncio.ensure_future(_tell(name, handle)))
        log.info("%s is up (pid %d)", name, self.pids[name], extra=STARTING)

    async def stop(self, names: Sequence[str]) -> None:
        await asyncio.gather(*(drive.quietly(self.by_name.pop(name).close()) for name in names))
        await self._kill(names)

    async def _kill(self, names: Sequence[str]) -> None:
        import ray

        handles = [(name, self._handles.pop(name)) for name in names]
        await asyncio.gather(
            *(
                drive.quietly(answer(f"end {n}", ray.kill, h, no_restart=True), KILL_S)
                for n, h in handles
            )
        )

    async def watch_ray(self) -> None:
        await all_of(
            self._processes_live(),
            *([] if self.plan.cluster.ray_address is None else [self._gcs_answers()]),
        )

    async def _processes_live(self) -> None:
        while True:
            if trouble := self.cluster.watched.failed(self.plan.cluster.stall_timeout_s):
                raise RayFailed(
                    f"{trouble}; run the same command again to resume from the last checkpoint"
                )
            await asyncio.sleep(LOOK_S)

    async def watch_stopped(self) -> None:
        looks: dict[psutil.Process, int] = {}
        limit = self.plan.cluster.stall_timeout_s
        while limit is not None:
            stopped = await asyncio.to_thread(stopped_parts)
            looks = {process: looks.get(process, 0) + 1 for process in stopped}
            if hung := [
                stopped[process] for process, count in looks.items() if count * LOOK_S >= limit
            ]:
                raise RunFailed(f"{', '.join(hung)} hangs: the process is stopped")
            await asyncio.sleep(LOOK_S)
        await asyncio.Event().wait()

    async def _gcs_answers(self) -> None:
        """Raise when the GCS of a joined Ray, possibly on another machine, does not answer."""
        while True:
            await answer(
                f"list its nodes (GCS of {self.plan.cluster.ray_address})",
                gpus_of_nodes,
            )
            await asyncio.sleep(ASK_GCS_S)

    async def watch(self) -> None:
        """Raise RunFailed naming the first part that dies or hangs and is not restarted."""
        lasting = [proxy for name, proxy in self.by_name.items() if name not in self._restarted]
        await all_of(
            self.watch_ray(), *(proxy.lives(self.plan.cluster.stall_timeout_s) for proxy in lasting)
        )

    async def end(self, *, graceful: bool) -> None:
        if graceful:  # until a second signal or a failure of Ray
            async with race(self._close(), self._signals.wait(2), self.watch_ray()) as (
                closing,
                *_,
            ):
                if closing.done():
                    closing.result()
        await cancel(self._listening)
        await self._kill(list(self._handles))
        for path in self.rundir.path.glob(".rendezvous-*"):
            path.unlink(missing_ok=True)

    async def _close(self) -> None:
        """Close parts in the order of the data path."""
        await self.stop([name for name in self.by_name if name not in ("buffer", "explorer")])
        await self.stop([name for name in self.by_name if name == "buffer"])
        if self.plan.cluster.timeline:
            await answer("write its timeline", self.cluster.timeline, self.rundir.path / TIMELINE)


async def _activities(name: str, handle: Any) -> list[Activity]:
    try:
        return list(await guarded(handle.activities.remote(), name, timeout_s=ACTIVITY_S))
    except DeadlineExceeded:
        return [Activity(f"{name} does not answer", "", False, 1, ACTIVITY_S)]
    except RunFailed:  # the callers of the part report it
        return []


async def _tell(name: str, handle: Any) -> None:
    """Print the errors that a part logs, as long as it lives."""
    printed = 0
    try:
        while True:
            lines = await guarded(handle.errors.remote(printed), name)
            printed += len(lines)
            for line in lines:
                print(f"{name}: {line}", file=sys.stderr, flush=True)
    except RunFailed:  # the callers of the part report it
        return


def _copy(method: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function, so that Ray's mark on it applies to one part."""
    assert isinstance(method, types.FunctionType)
    return types.FunctionType(
        method.__code__,
        method.__globals__,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
