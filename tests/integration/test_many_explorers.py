"""Several explorers of one run in simulated time; processes are events, everything else but models
and optimizer is real.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.engine.pool import EnginePool
from rft.errors import DeadlineExceeded, EngineFailed, RunFailed, SetupError
from rft.explorer.explorer import Explorer
from rft.explorer.settings import ExplorerSettings
from rft.launch import drive
from rft.launch.coordinator import Coordinator, ExplorerClient
from rft.launch.signals import Signals
from rft.launch.start import Start
from rft.preflight.check import load_plan
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.waits import cancel
from rft.taskset.settings import TasksetSettings
from rft.trainer.settings import TrainerSettings
from rft.types.ids import Version
from rft.types.ports import WeightManifest
from tests.helpers import simulated
from tests.helpers.counted import Counted

now = simulated.now

STYLES = (
    Schedule(),
    Schedule(offset=2),
    Schedule(interval=2, offset=1),
    Schedule(style="trainer_driven", max_staleness=2),
    Schedule(style="explorer_driven", interval=2, max_staleness=3),
    Schedule(style="fully_async", interval=2, threshold=0.5),
)


@dataclass(frozen=True, kw_only=True)
class Player:
    """One explorer process; killed while it plays batch `dies_at`, or after `dies_after` seconds,
    and back `again` seconds later.
    """

    name: str
    joins_at: float = 0.0
    dies_at: int | None = None
    backend: Any = "gloo"  # what its engines can take part in
    again: float | None = None
    explore_s: float = 1.0


@dataclass
class Found(simulated.Run):
    assigned: list[tuple[str, int, bool]] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)


class Engine(simulated.Engine):
    """One that a process owns: when that is gone it answers nothing."""

    dead = False

    def alive(self) -> None:
        if self.dead:
            raise EngineFailed("its process is gone")

    async def generate(self, request: Any) -> Any:
        self.alive()
        answer = asyncio.ensure_future(super().generate(request))
        end = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait({answer, end}, return_when=asyncio.FIRST_COMPLETED)
            if self.ended.is_set():
                if not request.prompt_tokens:  # its own process is gone, too
                    await asyncio.Event().wait()
                raise EngineFailed("its process is gone")
            return answer.result()
        finally:
            answer.cancel(), end.cancel()
            await asyncio.gather(answer, end, return_exceptions=True)

    async def load(self, manifest: WeightManifest) -> Any:
        self.alive()
        return await super().load(manifest)

    async def pause(self, *, clear_cache: bool = True) -> None:
        self.alive()
        await super().pause(clear_cache=clear_cache)

    async def restart(self) -> None:
        raise EngineFailed("its owner is gone")


class Process:
    """What the coordinator sees of an explorer's process."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def lives(self, stall_s: float | None) -> None:
        await self.ended.wait()
        raise RunFailed("explorer died: killed")

    async def kill(self) -> None:
        self.ended.set()


class Watched(ExplorerClient):
    """The client, which also tells what was assigned and dies on request."""

    player: Player
    found: Found
    process: Process
    world: Any

    async def next_batch(self, **order: Any) -> Any:
        begun = await super().next_batch(**order)
        if not isinstance(begun, str):
            self.found.assigned.append((self.player.name, begun.batch, begun.again))
            self.found.versions[begun.batch] = begun.version.step
            if self.player.dies_at is not None and begun.batch >= self.player.dies_at:
                asyncio.get_running_loop().call_later(0.4, self.process.ended.set)
        return begun


async def process(
    player: Player,
    coordinator: Coordinator,
    buffer: Buffer,
    world: Any,
    found: Found,
    tasks: ExplorerSettings,
) -> None:
    """One `rft run` with mode: explore."""
    await asyncio.sleep(player.joins_at)
    engine = Engine(replace(world, explore_s=(player.explore_s,)), found)
    own = Process()
    engine.ended = own.ended
    joined = await coordinator.join(
        player.name, ["here"], [engine], own, SyncRuntime(backend=player.backend)
    )
    client = Watched(coordinator, player.name, joined)
    client.player = player
    client.found = found
    client.process = own
    client.world = world
    explorer = Explorer(
        replace(tasks, name=player.name, max_inflight=None),
        model=EnginePool([engine], revive=client.revive),
        buffer=buffer.writer(1),
        gate=client,
        sink=coordinator,
        lineage=1,
        cursor=joined.start.cursor,
    )
    playing = asyncio.ensure_future(explorer.run())
    end = asyncio.ensure_future(own.ended.wait())
    await asyncio.wait({playing, end}, return_when=asyncio.FIRST_COMPLETED)
    if not end.done():
        await playing
        await coordinator.leave(player.name, joined.member, "")
        found.outcomes[player.name] = "done"
        end.cancel()
        return
    engine.dead = True
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    found.outcomes[player.name] = "killed"
    if player.again is not None:
        await asyncio.sleep(player.again)
        await process(
            replace(player, dies_at=None, joins_at=0.0), coordinator, buffer, world, found, tasks
        )


def play(
    world: Any, players: list[Player], plan: Any, folder: Path, backend: Any = "gloo", **sync: Any
) -> Found:
    found = Found()
    folder.mkdir(exist_ok=True)
    runtime = SyncRuntime(backend=backend)
    simulated.run(_play(world, players, plan, folder, found, sync, runtime))
    return found


async def _play(
    world: Any,
    players: list[Player],
    plan: Any,
    folder: Path,
    found: Found,
    sync: dict[str, Any],
    runtime: SyncRuntime,
) -> None:
    rows = folder / "sums.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}?", "response": str(i)}) + "\n" for i in range(8))
    )
    s = world.schedule
    config = FixedSync(partial_rollout=world.partial_rollout, **sync)
    taskset = TasksetSettings(
        name="sums", path=str(rows), workflow="simple_workflow", reward="exact_answer", num_runs=2
    )
    tasks = ExplorerSettings(
        tasksets=(taskset,),
        eval_tasksets=(replace(taskset, name="eval", is_eval=True, num_runs=1),)
        if world.eval_interval
        else (),
        eval_interval=world.eval_interval,
        eval_on_startup=bool(world.eval_interval),
        eval_at_end=bool(world.eval_interval),
        batch_size=world.groups,
        total_batches=-(-world.steps * world.step_groups // world.groups),
        total_epochs=None,
        max_retry_times=0,
        by_group=s.by_group or not world.partial_rollout,
        max_inflight=world.max_inflight,
    )
    plan = replace(
        plan, sync=config, sync_runtime=runtime, schedule=s, explorer=tasks, run_dir=folder
    )
    buffer = Buffer(
        BufferSettings(
            folder=folder / "buffer", on_short_batch=world.on_short_batch, capacity=world.capacity
        )
    )
    await buffer.open()
    await buffer.start_lineage(None, None)
    ranks = simulated.Ranks()
    coordinator = Coordinator(plan, ranks, buffer.writer(1), Start(1), "here")
    trainer = simulated.SimTrainer(
        TrainerSettings(
            total_steps=world.steps,
            batch_groups=world.step_groups,
            batch_rows=None,
            checkpoint_dir=folder / "checkpoints",
            max_staleness=s.max_staleness,
            require_batches=world.require_batches,
        ),
        ranks,
        buffer.reader(1),
        coordinator,
        coordinator,
        transport=simulated.Transport(),
        lineage=1,
        start_step=0,
        parent=None,
        must_publish=s.must_publish,
        first_after=s.first_after,
        on_demand=s.on_demand,
    )
    trainer.world = world
    trainer.found = found
    others = [
        asyncio.ensure_future(process(p, coordinator, buffer, world, found, tasks)) for p in players
    ]
    try:
        await drive.run_to_end(
            (coordinator.serve_explorers(), trainer.run()),
            (trainer,),
            coordinator,
            lambda record: found.records.append(record),
            Signals(),
        )
        await asyncio.gather(*others)
    finally:
        await cancel(others)
        found.end = now()
        found.audit = await buffer.audit()
        await coordinator.close()
        await buffer.close()


@pytest.fixture(autouse=True)
def _no_error_is_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a task raised and nobody looked at is told when it is collected."""
    yield
    gc.collect()
    assert not [r.getMessage() for r in caplog.get_records("call") if r.name == "asyncio"]


@pytest.fixture(scope="module")
def plan(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("many")
    config = Path(__file__).parent / "tiny_config.yaml"
    given = (
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={root}",
        "mode=train",
        "cluster.ray_address=here:1",
    )
    return load_plan(config, given)[1]


def check(world: Any, found: Found) -> None:
    assert [n for n, *_ in found.steps] == list(range(1, world.steps + 1)) and found.audit.ok
    assert found.end < 500, "nobody waited for a deadline"
    if (bound := world.schedule.staleness_bound) is not None:
        assert found.oldest <= bound
    per_step = Counter(step for step, *_ in found.rows)
    assert set(per_step.values()) == {2 * world.step_groups}, "each step has each of its rows once"
    first = [b for _, b, again in found.assigned if not again]
    assert first == sorted(first) and len(set(first)) == len(first), "one order for all"


@pytest.mark.parametrize("schedule", STYLES, ids=lambda s: f"{s.style}-{s.interval}-{s.offset}")
@pytest.mark.parametrize("partial", (True, False))
def test_two_explorers_share_one_order(schedule, partial, plan, tmp_path):
    world = simulated.World(schedule=schedule, steps=12, train_s=(0.3,), partial_rollout=partial)
    found = play(
        world,
        [Player(name="a", explore_s=1.0), Player(name="b", joins_at=2.5, explore_s=1.7)],
        plan,
        tmp_path,
    )
    check(world, found)
    assert found.outcomes == {"a": "done", "b": "done"}
    if schedule.staleness_bound:
        assert {name for name, *_ in found.assigned} == {"a", "b"}


@pytest.mark.parametrize("schedule", STYLES, ids=lambda s: f"{s.style}-{s.interval}-{s.offset}")
@pytest.mark.parametrize("dies_at", (0, 3, 11))
def test_the_batches_of_an_explorer_that_is_killed_are_played_by_another(
    schedule, dies_at, plan, tmp_path
):
    world = simulated.World(schedule=schedule, steps=12, train_s=(0.3,))
    players = [Player(name="a", dies_at=dies_at), Player(name="b", joins_at=0.5, explore_s=1.3)]
    found = play(world, players, plan, tmp_path)
    check(world, found)
    assert found.outcomes["b"] == "done"
    assert found.outcomes["a"] in ("killed", "done")
    for name, batch, again in found.assigned:
        assert not again or (name == "b" and ("a", batch, False) in found.assigned)


@pytest.mark.parametrize("schedule", STYLES, ids=lambda s: f"{s.style}-{s.interval}-{s.offset}")
def test_the_only_explorer_is_killed_and_comes_back(schedule, plan, tmp_path):
    world = simulated.World(schedule=schedule, steps=8)
    found = play(world, [Player(name="a", dies_at=3, again=20.0)], plan, tmp_path)
    check(world, found)
    assert found.outcomes["a"] == "done" and found.end > 20
    assert any(again for *_, again in found.assigned)


@pytest.mark.e2e
def test_a_batch_costs_the_same_however_many_explorers_there_are(plan, tmp_path):
    """Lines of Python for one more batch, without new weights."""

    def lines(explorers: int, steps: int) -> int:
        world = simulated.World(
            schedule=Schedule(style="fully_async", interval=100, max_staleness=100),
            steps=steps,
            train_s=(0.1,),
        )
        with Counted() as counted:
            found = play(
                world,
                [Player(name=f"e{i}") for i in range(explorers)],
                plan,
                tmp_path / f"{explorers}-{steps}",
            )
        assert len({name for name, *_ in found.assigned}) == explorers
        return counted.lines

    lines(1, 10)  # imports and caches
    one, eight = ((lines(n, 60) - lines(n, 20)) / 40 for n in (1, 8))
    assert eight < 1.25 * one, (one, eight)


def test_max_inflight_holds_over_all_explorers(plan, tmp_path):
    world = simulated.World(
        schedule=Schedule(style="fully_async", max_staleness=9),
        steps=10,
        max_inflight=2,
        train_s=(0.1,),
    )
    players = [Player(name=n, explore_s=s) for n, s in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    check(world, play(world, players, plan, tmp_path))


def test_a_full_buffer_does_not_hold_back_the_batch_that_the_trainer_needs(plan, tmp_path):
    """The killed one had the first open batch; the other has begun later ones that have no room
    until it is played.
    """
    world = simulated.World(
        schedule=Schedule(style="trainer_driven", max_staleness=20),
        steps=10,
        capacity=3,
        train_s=(0.1,),
    )
    players = [Player(name="a", dies_at=2, explore_s=5.0), Player(name="b", explore_s=0.2)]
    check(world, play(world, players, plan, tmp_path))


def test_each_evaluation_is_played_once(plan, tmp_path):
    world = simulated.World(schedule=Schedule(offset=1), steps=9, eval_interval=3, eval_s=1.0)
    found = play(world, [Player(name="b"), Player(name="a", joins_at=0.2)], plan, tmp_path)
    check(world, found)
    steps = [r.step for r in found.records if "eval/eval/tasks" in r.values]
    assert [r.step for r in found.records if "eval/eval/due" in r.values] == steps[:-1], (
        "the last one is of the end"
    )
    assert len(steps) == 4 and steps[0] == 0 and steps[-1] == 9


def test_an_evaluation_that_was_under_way_is_given_to_the_first_that_joins_a_run_that_goes_on(
    plan, tmp_path
):
    """The one of step 4 had; that of step 6 comes again by itself, as its batch is explored again."""
    lines = [(2, "due"), (2, "score"), (4, "due"), (2, "time"), (6, "due")]
    written = [
        {"role": "eval", "step": s, "time": 0.0, "values": {f"eval/x/{name}": 1.0}}
        for s, name in lines
    ]
    plan = replace(plan, run_dir=tmp_path, tracked_run=replace(plan.tracked_run, folder=tmp_path))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))

    async def joined(step: int) -> list[bool]:
        coordinator = Coordinator(
            plan,
            simulated.Ranks(),
            SimpleNamespace(room=None),
            Start(2, step, Version(1, step)),
            "here",
        )
        try:
            return [
                (await coordinator.join(name, ["here"], [], None, SyncRuntime())).resumes_evaluation
                for name in ("a", "b")
            ]
        finally:
            await coordinator.close()

    assert [asyncio.run(joined(step)) for step in (3, 5, 6)] == [
        [False, False],
        [True, False],
        [True, False],
    ]


def test_no_explorer_comes(plan, tmp_path):
    with pytest.raises(DeadlineExceeded, match=r"mode: explore"):
        play(simulated.World(steps=3), [], plan, tmp_path, sync_timeout=30.0)


def test_engines_on_cpus_are_refused_where_weights_go_from_gpu_to_gpu(plan, tmp_path):
    players = [Player(name="gpu", backend="nccl"), Player(name="cpu", joins_at=1.0)]
    with pytest.raises(SetupError, match="explorer cpu are on CPUs"):
        play(simulated.World(steps=6), players, plan, tmp_path, backend="nccl", sync_method="nccl")


def test_two_of_one_name_are_refused_while_the_first_lives(plan, tmp_path):
    players = [Player(name="a"), Player(name="a", joins_at=1.0)]
    found = Found()

    async def both() -> None:
        await _play(simulated.World(steps=6), players, plan, tmp_path, found, {}, SyncRuntime())

    with pytest.raises(SetupError, match="explorer named a has joined"):
        simulated.run(both())
    assert found.audit.ok and found.outcomes == {"a": "done"}
