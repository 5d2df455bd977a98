"""A whole run in simulated time: the real explorer, buffer, synchronizer, gate and trainer loop;
only models and optimizer are scripts.

`VirtualLoop` never waits: when nothing can go on it jumps to the next timer, and where there is
none it says that all wait for each other.  What others give to a thread runs at once.  So a run of
hours takes a fraction of a second and is the same every time.
"""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.engine.scripted import ScriptedEngine, logprobs, weights_key
from rft.engine.settings import EngineSettings
from rft.errors import RftError
from rft.explorer.assign import Assignments, BatchAssigner
from rft.explorer.explorer import Explorer
from rft.explorer.settings import ExplorerSettings
from rft.fault_injection import fault
from rft.launch import drive
from rft.launch.signals import Signals
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.waits import Waits
from rft.taskset.settings import TasksetSettings
from rft.trainer.loop.trainer import Trainer
from rft.trainer.rows.batch_builder import StepBatch
from rft.trainer.settings import TrainerSettings
from rft.types.block import decode
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.types.ports import Assignment, Lease, ScoreRow, WeightManifest

PROMPTS = [[1, 2, i] for i in range(16)]


class Stuck(Exception):
    """Everybody waits, and for nobody who would come."""


class _Jumping(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if found := super().select(0):
            return found
        if timeout is None:
            raise Stuck(f"at {self.loop.now} s")
        self.loop.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:
            done.set_exception(e)
        return done


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, kw_only=True)
class World:
    """What happens in a run.  Times are drawn from the lists, in seconds; `fails` = share of runs
    that fail.
    """

    schedule: Schedule = field(default_factory=Schedule)
    steps: int = 10  # train steps
    batches: int | None = None  # explore batches; None = as many as the steps need
    groups: int = 2  # of an explore batch
    step_groups: int = 2
    explore_s: Sequence[float] = (1.0,)
    train_s: Sequence[float] = (1.0,)
    load_s: float = 0.0
    fails: float = 0.0
    on_short_batch: Literal["stop", "train", "carry"] = "train"
    max_refill: int = 0
    partial_rollout: bool = True
    require_batches: int = 1
    max_inflight: int | None = None
    eval_interval: int = 0
    eval_in_background: bool = True
    eval_s: float = 5.0
    explorer_dies_at: int | None = None  # batch
    trainer_dies_at: int | None = None  # step
    capacity: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        """The schedule counts in groups."""
        object.__setattr__(
            self,
            "schedule",
            replace(self.schedule, batch_units=self.groups, step_units=self.step_groups),
        )


@dataclass
class Run:
    """What happened.  Rows: (step, staleness in steps of the oldest token, of the newest);
    `versions` of each explore batch's start.
    """

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)  # number, begin, end
    versions: dict[int, int] = field(default_factory=dict)
    published: list[tuple[float, int]] = field(default_factory=list)
    begun: list[tuple[float, int]] = field(default_factory=list)  # time, explore batch
    evaluated: list[tuple[float, int]] = field(default_factory=list)
    started: int = 0  # groups
    most_ahead: int = 0  # groups begun and not consumed when the version before was published
    playing_at_load: list[int] = field(default_factory=list)
    records: list[MetricRecord] = field(default_factory=list)
    end: float = 0.0
    audit: Any = None

    @property
    def oldest(self) -> int:
        return max((age for _, age, _ in self.rows), default=0)


class Engine(ScriptedEngine):
    """Each answer takes its time after its first token, so that weights may move under it."""

    def __init__(self, world: World, found: Run) -> None:
        super().__init__(
            answer=self._say, settings=EngineSettings(engine_type="scripted", name="scripted-0")
        )
        self._world = world
        self._found = found
        self._random = random.Random(world.seed)
        self._number = 0
        self._hold_after = 1

    def _say(self, messages: list[dict[str, Any]]) -> str:
        return str(messages[-1]["content"])[0]

    async def wait(self) -> None:
        self._number += 1
        await asyncio.sleep(self._world.explore_s[self._number % len(self._world.explore_s)])

    async def _write(self, request: Any, prompt: np.ndarray, text: str) -> Any:
        asks = not request.prompt_tokens  # the canary does not
        self._released = self if asks else None  # type: ignore[assignment]
        if asks and self._random.random() < self._world.fails:
            raise ValueError("this run fails")
        return await super()._write(request, prompt, text)

    async def load(self, manifest: WeightManifest) -> Any:
        self._found.playing_at_load.append(self._under_way)
        await asyncio.sleep(self._world.load_s)
        before = self._key
        report = await super().load(manifest)
        if fault("sync.skip"):
            self._key = before
        return report


class Ranks:
    """The learner's side: weights are their version."""

    key = 0

    async def stage(
        self, version: Version, transport: Any, *, average: bool = False
    ) -> WeightManifest:
        made = WeightManifest(version=version, transport="memory", path="", tensors=())
        self.key = weights_key(made)
        return made

    async def remember(self) -> None: ...

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return [
            logprobs(r.tokens[: r.prompt_length], r.tokens[r.prompt_length :], self.key)
            for r in rows
        ]


class Transport:
    def release(self, version: Version) -> None: ...


class SimTrainer(Trainer):
    """The loop as it is; a step takes time and uses its rows."""

    world: World
    found: Run

    async def _train(self, lease: Lease) -> Any:
        with self._timed("train"):
            begin = now()
            rows = decode(lease.frame)
            if self.world.trainer_dies_at == lease.step:
                raise RftError("the trainer dies")
            for x in rows:
                assert x.oldest_version is not None and x.newest_version is not None
                age, least = (lease.step - 1 - v.step for v in (x.oldest_version, x.newest_version))
                assert (
                    self.world.schedule.max_staleness is None
                    or age <= self.world.schedule.max_staleness
                )
                self.found.rows.append((lease.step, age, least))
            self._window.rows(rows)
            await asyncio.sleep(self.world.train_s[lease.step % len(self.world.train_s)])
            await self.buffer.use(lease.step)
            self.found.steps.append((lease.step, begin, now()))
        return StepBatch([], 1, len(rows), []), None

    async def _publish(self, step: int) -> None:
        await super()._publish(step)
        self.found.published.append((now(), step))

    async def _save(self, step: int, *, export: bool, wait: bool = True) -> None:
        self._saved = step


class Gate:
    """The synchronizer as the explorer sees it, watched."""

    def __init__(
        self, sync: Synchronizer, room: Callable[[int], Awaitable[None]], world: World, found: Run
    ) -> None:
        self._sync = sync
        self._world = world
        self._found = found
        assignments = Assignments(0, None, world.max_inflight)
        self._assigner = BatchAssigner(assignments, room, self.may_explore, Waits(3600.0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync, name)

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        self._assigner.assignments.total = total
        return await self._assigner.next("explorer", lag)

    async def explored(self, batch: int) -> None:
        await self._sync.explored(batch)
        await self._assigner.close(batch)

    async def evaluates(self) -> bool:
        return True

    async def may_explore(self, batch: int) -> Version | None:
        if self._world.explorer_dies_at == batch:
            raise RftError("the explorer dies")
        version = await self._sync.may_explore(batch)
        if version is not None:
            self._found.versions[batch] = version.step
            self._found.begun.append((now(), batch))
        return version

    async def acquire_group(self, batch: int, group: int | None) -> bool:
        may = await self._sync.acquire_group(batch, group)
        if may and group is not None:
            self._found.started += 1
            consumed = self._sync._gate.loaded.step * self._world.step_groups  # type: ignore[union-attr]
            self._found.most_ahead = max(self._found.most_ahead, self._found.started - consumed)
        return may


class Observer:
    """Coordinator and sink."""

    def __init__(self, sync: Synchronizer, found: Run) -> None:
        self._sync = sync
        self._found = found

    async def log(self, record: MetricRecord) -> None:
        self._found.records.append(record)
        if "eval/eval/tasks" in record.values:
            self._found.evaluated.append((now(), record.step))

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None: ...

    async def fail(self, reason: BaseException) -> None:
        await self._sync.fail(reason)

    async def records(self, after: int, *, wait: bool = True) -> tuple[int, list[MetricRecord]]:
        return await asyncio.get_running_loop().create_future() if wait else (0, [])


def play(world: World, folder: Path) -> Run:
    """The run to its end; raises what ended it otherwise."""
    found = Run()
    run(_play(world, folder, found))
    return found


async def _play(world: World, folder: Path, found: Run) -> None:
    rows = folder / "sums.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}?", "response": str(i)}) + "\n" for i in range(8))
    )
    schedule = world.schedule
    config = FixedSync(partial_rollout=world.partial_rollout)
    buffer = Buffer(
        BufferSettings(
            folder=folder / "buffer", on_short_batch=world.on_short_batch, capacity=world.capacity
        )
    )
    await buffer.open()
    await buffer.start_lineage(None, None)
    engine = Engine(world, found)
    ranks = Ranks()
    sync = Synchronizer(config, SyncRuntime(), [engine], ranks, schedule, PROMPTS, Version(1, 0))
    observer = Observer(sync, found)
    taskset = TasksetSettings(
        name="sums", path=str(rows), workflow="simple_workflow", reward="exact_answer", num_runs=2
    )
    trainer = SimTrainer(
        TrainerSettings(
            total_steps=world.steps,
            batch_groups=world.step_groups,
            batch_rows=None,
            checkpoint_dir=folder / "checkpoints",
            max_staleness=schedule.max_staleness,
            require_batches=world.require_batches,
        ),
        ranks,  # type: ignore[arg-type]
        buffer.reader(1),
        sync,
        observer,
        transport=Transport(),  # type: ignore[arg-type]
        lineage=1,
        start_step=0,
        parent=None,
        must_publish=schedule.must_publish,
        first_after=schedule.first_after,
        on_demand=schedule.on_demand,
    )
    trainer.world = world
    trainer.found = found
    explorer = Explorer(
        ExplorerSettings(
            tasksets=(taskset,),
            eval_tasksets=(replace(taskset, name="eval", is_eval=True, num_runs=1),)
            if world.eval_interval
            else (),
            eval_interval=world.eval_interval,
            eval_on_startup=bool(world.eval_interval),
            eval_at_end=bool(world.eval_interval),
            eval_in_background=world.eval_in_background,
            batch_size=world.groups,
            total_batches=world.batches or -(-world.steps * world.step_groups // world.groups),
            total_epochs=None,
            max_refill=world.max_refill,
            max_retry_times=0,
            on_short_batch=world.on_short_batch,
            by_group=schedule.by_group or not world.partial_rollout,
            max_inflight=world.max_inflight,
            breaker=10**6,
        ),
        model=engine,
        buffer=buffer.writer(1),
        gate=Gate(sync, buffer.writer(1).room, world, found),  # type: ignore[arg-type]
        sink=observer,
        lineage=1,
    )
    try:
        await drive.run_to_end(
            (explorer.run(), trainer.run()),
            (trainer, explorer),
            observer,
            lambda record: None,
            Signals(),
        )
    finally:
        found.end = now()
        found.audit = await buffer.audit()
        await buffer.close()
