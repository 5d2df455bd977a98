"""`Runtime` and `Parts`: create, watch and end the parts of a run; a mode knows only these.

`LocalRuntime` has all parts in this process: one rank, `transformers` or scripted engines, no Ray.
`rft.launch.ray_runtime` has one actor for each part.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rft.config.plan import Facts, Plan
from rft.engine.environment import trainer_environment
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, SetupError
from rft.launch import parts as factories
from rft.launch.rundir import RunDir
from rft.launch.signals import Signals
from rft.launch.stalled import watched
from rft.sync.waits import all_of, race
from rft.worker.waiting import Activity, activities, works

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class PartSpec:
    """One part: its factory in `rft.launch.parts`, and its seat."""

    name: str
    factory: str
    args: tuple[Any, ...]
    seat: tuple[str, int] | None = None  # role and index of `rft.launch.cluster`
    engine: EngineSettings | None = None  # set for engines, which are restarted when they die
    env: dict[str, str] = field(default_factory=dict)


class Parts(ABC):
    """The parts of one process of a run, by name."""

    restarts: bool  # whether dead engines can get a new process

    def __init__(self, plan: Plan, rundir: RunDir) -> None:
        self.plan = plan
        self.rundir = rundir
        self.by_name: dict[str, Any] = {}
        self.pids: dict[str, int] = {}
        self.nodes: dict[str, str] = {}  # machine of each part

    @abstractmethod
    async def reserve(self, *, engines: bool, trainer: bool) -> None:
        """Reserve the devices of engines (with auxiliary models) and trainer."""

    @abstractmethod
    async def start(self, specs: Sequence[PartSpec]) -> None:
        """Build these parts, concurrently if they have processes."""

    @abstractmethod
    async def together(self, *starts: Callable[[], Awaitable[None]]) -> None:
        """Start independent parts, concurrently if they have processes."""

    @abstractmethod
    async def stop(self, names: Sequence[str]) -> None:
        """Close and end these parts."""

    async def watch_ray(self) -> None:
        """Wait until a process of Ray has ended or hangs, and raise RayFailed.

        This and the other watches wait for ever if all parts are in this process.
        """
        await asyncio.Event().wait()

    async def watch_stopped(self) -> None:
        """Wait until a process of a part is stopped, and raise RunFailed; used while parts start."""
        await asyncio.Event().wait()

    async def supervised(self, work: Awaitable[T]) -> T:
        """Await `work`, which starts parts; cancel it and raise when Ray or a part's process fails."""
        async with race(work, all_of(self.watch_ray(), self.watch_stopped())) as (task, failure):
            if not task.done():
                failure.result()
            result: T = task.result()
            return result

    async def watch(self) -> None:
        """Wait until Ray or a part that is not restarted dies or hangs, and raise."""
        await asyncio.Event().wait()

    async def activities(self) -> list[Activity]:
        """Return activities of parts and launcher, within ACTIVITY_S."""
        return activities()

    @abstractmethod
    async def end(self, *, graceful: bool) -> None:
        """End every part; `graceful`: close them first."""

    @property
    def engines(self) -> list[Any]:
        return [
            self.by_name[f"engine-{i}"]
            for i, e in enumerate(self.plan.engines)
            if e.external is None
        ]

    @property
    def auxiliary(self) -> list[list[Any]]:
        """Engines of every auxiliary model, without those behind servers."""
        return [
            [self.by_name[e.name] for e in model.engines if e.external is None]
            for model in self.plan.auxiliary
        ]

    @property
    def ranks(self) -> list[Any]:
        return [self.by_name[f"trainer-{rank}"] for rank in range(self.plan.learner.world_size)]


class BoundPart:
    """A part (or its proxy) with leading arguments for every call.  Can be sent to other actors."""

    def __init__(self, part: Any, *first: Any) -> None:
        self._part = part
        self._first = first

    def __reduce__(self) -> tuple[Any, ...]:
        return (BoundPart, (self._part, *self._first))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(getattr(self._part, method), *self._first)


class Runtime(ABC):
    """Opens the parts of a run."""

    parts: Parts | None = None  # while it is open

    @abstractmethod
    def open(
        self, plan: Plan, rundir: RunDir, signals: Signals
    ) -> AbstractAsyncContextManager[Parts]:
        """Open the parts; on exit, end and remove everything of the run."""

    async def activities(self) -> list[Activity]:
        """Return `Parts.activities`, or those of this process without parts."""
        if self.parts is None:
            return activities()
        return await self.parts.activities()


# ---------------------------------------------------------------- specs of parts


def engine_specs(plan: Plan) -> list[PartSpec]:
    # the explorer calls external engines itself
    local = ((i, e) for i, e in enumerate(plan.engines) if e.external is None)
    return [PartSpec(f"engine-{i}", "engine", (plan, e), ("engine", i), e) for i, e in local]


def auxiliary_specs(plan: Plan) -> list[PartSpec]:
    specs = []
    seats = 0
    for e in (e for model in plan.auxiliary for e in model.engines if e.external is None):
        seat = ("auxiliary", seats) if e.gpus else None
        seats += bool(e.gpus)
        specs.append(PartSpec(e.name, "engine", (plan, e), seat, e))
    return specs


def explorer_specs(plan: Plan) -> list[PartSpec]:
    return [
        PartSpec("explorer", "explorer", (plan,), env=plan.explorer.env_vars),
        *auxiliary_specs(plan),
    ]


def trainer_specs(plan: Plan, rundir: RunDir) -> list[PartSpec]:
    world = plan.learner.world_size
    env = trainer_environment(plan.learner.cpu_threads, plan.learner.device)
    meeting = rundir.path / f".rendezvous-{rundir.run_id}"
    if world > 1:
        meeting.touch()  # invisible on a machine without the run's folder
    rendezvous = str(meeting) if world > 1 else None
    return [
        PartSpec(f"trainer-{rank}", "trainer", (plan, rank, rendezvous), ("trainer", rank), env=env)
        for rank in range(world)
    ]


# ---------------------------------------------------------------- one process


class LocalRuntime(Runtime):
    """All parts in this process: for tests, debugging, and machines without Ray."""

    @asynccontextmanager
    async def open(self, plan: Plan, rundir: RunDir, signals: Signals) -> AsyncIterator[Parts]:
        if plan.cluster.timeline:
            log.warning("monitor.enable_ray_timeline has no effect: one process has no Ray")
        with watched(
            plan.cluster.stall_timeout_s, lambda reason: rundir.state("failed", reason=reason)
        ):
            self.parts = LocalParts(plan, rundir)
            yield self.parts


class LocalParts(Parts):
    restarts = False

    async def reserve(self, *, engines: bool, trainer: bool) -> None:
        """Do nothing: one process has all devices."""

    async def start(self, specs: Sequence[PartSpec]) -> None:
        for spec in specs:
            with works(f"starting {spec.name}"):
                self.by_name[spec.name] = await getattr(factories, spec.factory)(*spec.args)

    async def together(self, *starts: Callable[[], Awaitable[None]]) -> None:
        for start in starts:
            await start()

    async def stop(self, names: Sequence[str]) -> None:
        async with AsyncExitStack() as closing:  # closes all, even if one raises
            for part in [self.by_name.pop(name) for name in names]:
                closing.push_async_callback(part.close)

    async def end(self, *, graceful: bool) -> None:
        await self.stop(sorted(self.by_name, key=lambda name: name != "buffer"))  # buffer last


def check_local(plan: Plan) -> None:
    """Raise ConfigError or SetupError for a plan that one process, or this machine, cannot run."""
    if plan.learner.world_size != 1:
        raise ConfigError(
            "several ranks need Ray; leave out --in-process, or use 1",
            key="trainer.world_size",
            given=plan.learner.world_size,
        )
    if plan.joins or (plan.mode == "train" and not plan.trainer.alone):
        raise ConfigError(
            "is one of several processes, which meet on Ray; leave out --in-process",
            key="mode",
            given=plan.mode,
        )
    engines = () if plan.trainer.alone else plan.engines
    served = [("explorer.rollout_model", e) for e in engines]
    served += [
        (f"explorer.auxiliary_models: {m.name}", e)
        for m in plan.auxiliary
        for e in m.engines
        if engines
    ]
    for key, e in served:
        if e.engine_type == "vllm":
            raise ConfigError(
                "vllm needs Ray; leave out --in-process, or use transformers",
                key=f"{key}.engine_type",
                given="vllm",
            )
    if engines and plan.sync.sync_method == "nccl" and plan.mode != "bench":
        raise ConfigError(
            "a broadcast needs engines in their own processes; leave out --in-process, or use "
            "memory",
            key="synchronizer.sync_method",
            given="nccl",
        )
    if plan.explorer.env_vars:
        raise ConfigError(
            "one process has one environment; leave out --in-process, or set them in the shell",
            key="explorer.env_vars",
            given=sorted(plan.explorer.env_vars),
        )
    if "cuda" in {plan.learner.device, *(e.device for _, e in served)} and Facts().gpus == 0:
        raise SetupError(
            "the plan needs GPUs, and this machine has none; set explorer.rollout_model.device and "
            "trainer.device to cpu, "
            "leave out cluster.gpu_per_node, or use a machine with GPUs"
        )
