"""The synchronizer against engines that really compute with the staged bytes, and against every way
a sync can go wrong.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rft.errors import ConfigError, DeadlineExceeded, EngineFailed, RunFailed, WeightSyncFailed
from rft.sync.base import Transport
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.choose import make
from rft.types.completion import Completion, VersionSpan
from rft.types.ids import Version
from rft.types.metrics import Metric
from rft.types.ports import GenerateRequest, LoadReport, PausedRequests, ScoreRow, WeightManifest
from tests.helpers import simulated
from tests.helpers.sync_config import sync_config

V = 32
H = 8
PROMPTS = [[i % V, (3 * i) % V, 5] for i in range(8)]
Weights = dict[str, torch.Tensor]


def weights(step: int, scale: float = 1.0) -> Weights:
    g = torch.Generator().manual_seed(1000 + step)
    base = torch.Generator().manual_seed(0)
    return {
        n: torch.randn(V, H, generator=base) + scale * torch.randn(V, H, generator=g)
        for n in ("embed", "head")
    }


def logprobs(w: Weights, last: int, temperature: float = 1.0) -> np.ndarray:
    return torch.log_softmax(
        w["head"].double() @ w["embed"][last].double() / temperature, 0
    ).numpy()


def staged_bytes(manifest: WeightManifest) -> bytes:
    return Path(manifest.path).read_bytes()


class TableEngine:
    """A bigram model whose weights are exactly the bytes it read; `trouble` decides what goes wrong
    in each load.
    """

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.version: Version | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.trouble: Callable[[int, WeightManifest], str] = lambda n, m: ""
        self.divisor: Callable[[float], float] = lambda temperature: temperature
        self.num_loads = 0
        self.hung = asyncio.Event()
        self.shift = 0.0  # all log-probs are off by it

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        await self.go.wait()
        await asyncio.sleep(0)
        assert self.version is not None
        rng = np.random.default_rng(request.sampling.seed)
        tokens = []
        logps = []
        last = request.prompt_tokens[-1]
        for _ in range(request.sampling.max_tokens):
            table = logprobs(self.weights, last, self.divisor(request.sampling.temperature))
            last = int(rng.choice(V, p=np.exp(table) / np.exp(table).sum()))
            tokens.append(last)
            logps.append(table[last] - self.shift)
        return [
            Completion(
                prompt_tokens=np.array(request.prompt_tokens, np.int32),
                tokens=np.array(tokens, np.int32),
                logprobs=np.array(logps, np.float32),
                text="",
                finish_reason="length",
                version_spans=(VersionSpan(self.version, 0, len(tokens)),),
                sampling=request.sampling,
            )
        ]

    async def pause(self, *, clear_cache: bool = True) -> None:
        self.go.clear()

    async def load(self, manifest: WeightManifest) -> LoadReport:
        assert not self.go.is_set(), "load needs a paused engine"
        self.num_loads += 1
        what = self.trouble(self.num_loads, manifest)
        await asyncio.sleep(0)
        if what == "raise":
            raise EngineFailed("worker died")
        if what == "hang":
            await self.hung.wait()
        specs = manifest.tensors[: 1 if what in ("missing", "half") else None]
        if what != "skip":
            blob = staged_bytes(manifest)
            for spec in specs:
                part = bytearray(blob[spec.offset : spec.offset + spec.nbytes])
                self.weights[spec.name] = torch.frombuffer(part, dtype=torch.float32).reshape(
                    spec.shape
                )
                await asyncio.sleep(0)
        if what == "half":
            raise EngineFailed("broke in tensor 2")
        self.version = Version(1, 77) if what == "label" else manifest.version
        return LoadReport(
            version=manifest.version,
            num_tensors=len(specs),
            nbytes=manifest.nbytes,
            missing=("head",) if what == "missing" else (),
            unexpected=("extra",) if what == "unexpected" else (),
            bad_hash=("embed",) if what == "hash" else (),
            probed_layers=1,
            probe_error=0.5 if what == "probe" else 1e-7,
            probe_worst="head",
            verify_s=0.25,
            probe_s=0.5,
            paused=PausedRequests(requests=3, aborted=0, recomputed_tokens=40, tokens_per_s=100.0),
        )

    async def resume(self) -> None:
        self.go.set()

    async def health(self) -> None: ...
    async def metrics(self) -> list[Metric]:
        return []

    async def close(self) -> None: ...

    def holds(self, w: Weights) -> bool:
        return self.go.is_set() and all(torch.equal(self.weights[n], w[n]) for n in w)


class Trainer:
    """Stages weights, and scores with what it staged last."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.weights: Weights = {}
        self.calls = self.positions = 0
        self.noise = 0.0  # what other roundings do
        self.before_score: Callable[[], Any] = lambda: None

    def stage(self, step: int, w: Weights | None = None) -> WeightManifest:
        self.weights = w or weights(step)
        return self.transport.stage(Version(1, step), self.weights.items(), {})

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        self.calls += 1
        # that a model reads for these rows
        self.positions = sum(len(row.tokens) - 1 for row in rows)
        for _ in range(10):
            await asyncio.sleep(0)  # a forward pass is long: who may begin meanwhile begins
        if (waits := self.before_score()) is not None:
            await waits
        out = []
        for row in rows:
            t = row.tokens
            out.append(
                np.array(
                    [
                        logprobs(self.weights, int(t[i - 1]), row.temperature)[t[i]]
                        for i in range(row.prompt_length, len(t))
                    ],
                    np.float32,
                )
                + np.float32(self.noise if row.rounded else 0.0)
            )
        return out


class World:
    def __init__(self, transport: Transport, engines: int = 1, **settings: Any) -> None:
        self.engines = [TableEngine() for _ in range(engines)]
        self.trainer = Trainer(transport)
        self.schedule = Schedule(
            interval=settings.pop("interval", 1), offset=settings.pop("offset", 0)
        )
        settings.setdefault("sync_timeout", 20.0)
        self.sync = Synchronizer(
            *sync_config(**settings),
            self.engines,
            self.trainer,
            self.schedule,
            PROMPTS,
            Version(1, 0),
        )

    async def publish(self, step: int, w: Weights | None = None) -> dict[str, float]:
        return {m.name: m.value for m in await self.sync.publish(self.trainer.stage(step, w))}

    def all_hold(self, step: int) -> bool:
        return all(
            e.holds(weights(step)) and e.version.published == Version(1, step) for e in self.engines
        )


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Transport]:
    made = make(FixedSync(), tmp_path)
    yield made
    made.close()


@pytest.fixture(
    params=[(1, False), (2, False), (2, True)], ids=["one-engine", "pool", "shared-cores"]
)
async def world(request: pytest.FixtureRequest, transport: Transport) -> AsyncIterator[World]:
    engines, shared = request.param
    yield World(transport, engines, shares_cores=shared)


async def begun(*waits: Any) -> list[asyncio.Task[Any]]:
    """Tasks that have run up to their first wait."""
    tasks = [asyncio.create_task(w) for w in waits]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


# ------------------------------------------------------------ the good way


async def test_versions_are_served_one_after_the_other(world: World) -> None:
    for step in range(4):
        said = await world.publish(step)
        assert world.all_hold(step)
        await world.sync.wait_verified(Version(1, step))
        assert said["sync/canary_max_abs"] < 1e-5
        assert said["sync/below_noise"] == 0
        assert (said["sync/opened_s"] < said["sync/total_s"]) == (step > 0), (
            "nothing begins with a first version that is not verified"
        )
        assert said["sync/version"] == step
        assert said["sync/bytes"] == 2 * V * H * 4
        assert said["sync/total_s"] >= said["sync/load_s"] > 0
        assert (said["sync/canary_moved"] > 0.1) == (step > 0)
    assert world.trainer.calls == 4, "one scorer call per version, for old and new probe together"
    assert (
        world.sync._updates.manifest is not None
        and world.sync._updates.manifest.version == Version(1, 3)
    )


async def test_what_a_pause_costs_is_said(world: World) -> None:
    """Sums over the engines; tokens lost are those that the engines would have written in the time."""
    said = await world.publish(0)
    engines = len(world.engines)
    assert said["sync/requests_paused"] == 3 * engines and said["sync/requests_aborted"] == 0
    assert said["sync/recomputed_tokens"] == 40 * engines
    paused_s = said["sync/pause_s"] + said["sync/load_s"] + said["sync/resume_s"]
    assert said["sync/lost_tokens"] == pytest.approx(100 * engines * paused_s)
    assert (said["sync/load/verify_s"], said["sync/load/probe_s"]) == (0.25, 0.5)


async def test_a_step_too_small_to_see_is_reported(world: World) -> None:
    await world.publish(0)
    tiny = {n: t + 1e-7 for n, t in weights(0).items()}
    assert (await world.publish(1, tiny))["sync/below_noise"] == 1


async def test_rollouts_run_while_rows_wait_for_the_canary(world: World) -> None:
    await world.publish(0)
    scoring = asyncio.Event()
    go = asyncio.Event()

    async def slow() -> None:
        scoring.set()
        await go.wait()

    world.trainer.before_score = slow
    publish, explore, rows = await begun(
        world.publish(1), world.sync.may_explore(1), world.sync.wait_verified(Version(1, 1))
    )
    await scoring.wait()
    assert await explore == Version(1, 1), "provisional: exploring may start"
    assert all(e.go.is_set() != world.sync._runtime.shares_cores for e in world.engines), (
        "engines wait for the trainer's forward pass"
    )
    assert not rows.done() and not publish.done()
    go.set()
    await asyncio.gather(publish, rows)


async def test_what_a_canary_costs(transport: Transport) -> None:
    """64 tokens of an engine, and a scoring pass over them and a quarter of the previous ones."""
    world = World(transport)
    each = len(PROMPTS[0]) + SyncRuntime().canary_tokens - 1
    said = [await world.publish(0), await world.publish(1)]
    assert [s["sync/canary_tokens"] for s in said] == [64, 64] and said[1][
        "sync/canary_moved"
    ] > 0.1
    assert world.trainer.positions == (8 + 2) * each


@pytest.mark.parametrize(("playing", "offset"), [(False, 0), (True, 0), (False, 1)])
async def test_probes_come_before_what_the_new_version_is_asked_else(
    transport: Transport, playing: bool, offset: int
) -> None:
    """So a batch or an evaluation that begins with it cannot hold up the canary.  Where both sides
    have nothing else to do, it begins together with the probes.
    """
    world = World(transport, offset=offset)
    idle = not playing and not offset
    last = 1 + offset
    await world.publish(0)
    for batch in range(last):
        assert await world.sync.may_explore(batch) == Version(1, 0)
        if batch or not playing:
            await world.sync.explored(batch)
    asked = asyncio.Event()
    go = asyncio.Event()
    engine = world.engines[-1]
    generate = engine.generate

    async def slow(request: GenerateRequest) -> list[Completion]:
        asked.set()
        await go.wait()
        return await generate(request)

    engine.generate = slow  # type: ignore[method-assign]
    explore, publish = await begun(world.sync.may_explore(last), world.publish(1))
    await asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert explore.done() == idle and world.trainer.calls == 1
    go.set()
    assert await explore == Version(1, 1)
    said = await publish
    assert said["sync/canary_s"] >= said["sync/canary/score_s"] > 0
    assert 0 < said["sync/opened_s"] < said["sync/total_s"]


async def test_what_idle_engines_began_with_weights_that_fail_their_probes_never_counts(
    world: World,
) -> None:
    await world.publish(0)
    generate = world.engines[0].generate
    fails = True

    async def broken(request: GenerateRequest) -> list[Completion]:
        nonlocal fails
        if fails:
            assert await explore == Version(1, 1), "provisional"
            fails = False
            raise ValueError("no logits")
        return await generate(request)

    world.engines[0].generate = broken  # type: ignore[method-assign]
    (explore,) = await begun(world.sync.may_explore(1))
    async with asyncio.timeout(30):
        said = await world.publish(1)
    assert said["sync/attempt"] == 1 and world.engines[0].version == Version(1, 1, 1)
    assert (
        await world.sync.wait_verified(Version(1, 1)) is False
        and await world.sync.wait_verified(Version(1, 1, 1)) is True
    )


async def test_what_was_written_before_a_publish_was_cancelled_at_its_probes_never_counts(
    world: World,
) -> None:
    await world.publish(0)
    asked = asyncio.Event()
    generate = world.engines[0].generate

    async def never(request: GenerateRequest) -> list[Completion]:
        if asked.is_set():  # what restores the version before
            return await generate(request)
        asked.set()
        raise await asyncio.Event().wait()  # type: ignore[misc]

    world.engines[0].generate = never  # type: ignore[method-assign]
    publish, rows = await begun(world.publish(1), world.sync.wait_verified(Version(1, 1)))
    await asked.wait()
    publish.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publish
    assert world.all_hold(0)
    world.trainer.transport.release(Version(1, 1))
    await world.publish(1)
    assert await rows is False and world.engines[0].version == Version(1, 1, 1), (
        "another label than the cancelled attempt's"
    )


async def test_batches_wait_for_the_schedule(transport: Transport) -> None:
    world = World(transport, interval=2, offset=1)
    first, second, third, fourth = await begun(*(world.sync.may_explore(b) for b in range(4)))
    await world.publish(0)
    assert [await first, await second, await third] == [Version(1, 0)] * 3
    await asyncio.sleep(0)
    assert not fourth.done()
    await world.publish(2)
    assert await fourth == Version(1, 2)


async def test_the_end(world: World) -> None:
    await world.publish(0)
    batch, final = await begun(world.sync.may_explore(5), world.sync.wait_final())
    await world.sync.step_finished(1)
    await world.publish(1)
    await world.sync.step_finished(2, finished=True)
    assert await batch is None
    await asyncio.sleep(0)
    assert not final.done(), "the last version is not served yet"
    await world.publish(2)
    assert await final == Version(1, 2)


# ------------------------------------------------------------ every way it goes wrong


BEFORE_RESUME = {
    "missing": "got no weights",
    "unexpected": "not in the model",
    "hash": "damaged",
    "probe": "layer head",
    "raise": "worker died",
    "half": "tensor 2",
}
AFTER_RESUME = {"skip": "old weights", "label": "labelled 1:77"}


@pytest.mark.parametrize("what", [*BEFORE_RESUME, *AFTER_RESUME])
async def test_a_broken_sync_is_rejected_rolled_back_and_named(world: World, what: str) -> None:
    await world.publish(0)
    await world.publish(1)
    world.engines[-1].trouble = lambda n, m: what if m.version.step == 2 else ""
    rows, final = await begun(world.sync.wait_verified(Version(1, 2)), world.sync.wait_final())
    with pytest.raises(
        WeightSyncFailed,
        match=f"1:2.*engine {len(world.engines) - 1}.*{(BEFORE_RESUME | AFTER_RESUME)[what]}",
    ) as e:
        await world.publish(2)
    assert "attempts: 2" in str(e.value) and "serve 1:1 again, verified" in str(e.value)
    assert world.all_hold(1), "the old weights serve, under the old label"
    with pytest.raises(WeightSyncFailed, match="1:2 could not be served"):
        await rows
    with pytest.raises(WeightSyncFailed, match="1:2 could not be served"):
        await final
    with pytest.raises(WeightSyncFailed):
        await world.sync.may_explore(9)
    with pytest.raises(WeightSyncFailed):
        await world.publish(3)
    await world.sync.wait_verified(Version(1, 1))


@pytest.mark.parametrize("what", [*BEFORE_RESUME, *AFTER_RESUME])
async def test_a_fault_that_passes_is_survived(world: World, what: str) -> None:
    await world.publish(0)
    world.engines[-1].trouble = lambda n, m: what if n == 2 else ""
    said = await world.publish(1)
    assert world.all_hold(1)
    label = Version(1, 1, 1 if what in AFTER_RESUME else 0)
    assert (
        world.sync._updates.manifest is not None and world.sync._updates.manifest.version == label
    )
    assert await world.sync.wait_verified(label) is True and said["sync/attempt"] == label.attempt


@pytest.mark.parametrize("what", ["hash", "label", "raise", "missing"])
async def test_a_run_whose_first_version_fails_does_not_start(world: World, what: str) -> None:
    world.engines[0].trouble = lambda n, m: what
    explore, *_ = await begun(world.sync.may_explore(0))
    with pytest.raises(WeightSyncFailed, match="first version, so the run does not start"):
        await world.publish(0)
    with pytest.raises(WeightSyncFailed, match="1:0 could not be served"):
        await explore


async def test_the_first_version_has_an_absolute_limit(world: World) -> None:
    manifest = world.trainer.stage(0)
    world.trainer.weights = {n: t + 0.01 * torch.randn(t.shape) for n, t in weights(0).items()}
    with pytest.raises(WeightSyncFailed, match=r"allowed are 1\.00e-03"):
        await world.sync.publish(manifest)


async def test_a_retry_while_batches_are_under_way_leaves_the_rows_of_the_failed_attempt_out(
    world: World,
) -> None:
    """The failed attempt has a label of its own: the second one does not make its rows good."""
    await world.publish(0)
    world.engines[0].trouble = lambda n, m: "skip" if n == 2 else ""
    explore, rows = await begun(world.sync.may_explore(1), world.sync.wait_verified(Version(1, 1)))
    said = await world.publish(1)
    assert await explore == Version(1, 1), "begun while the first attempt was provisional"
    assert await rows is False
    assert world.all_hold(1) and said["sync/attempt"] == 1
    assert await world.sync.wait_verified(Version(1, 1, 1)) is True
    assert await world.sync.may_explore(2 - 1) == Version(1, 1, 1)
    await world.publish(2)
    assert await world.sync.wait_verified(Version(1, 1)) is False, "and it stays so"


async def test_that_rows_are_rejected_is_told_when_others_can_replace_them_under_these_weights(
    world: World,
) -> None:
    """Until then the engines serve the version before: what replaced them would be older than the
    schedule allows.
    """
    await world.publish(0)
    world.engines[0].trouble = lambda n, m: "skip" if n == 2 else ""

    async def verdict() -> tuple[bool, Version | None]:
        return await world.sync.wait_verified(Version(1, 1)), world.engines[0].version

    (told,) = await begun(verdict())
    await world.publish(1)
    assert await told == (False, Version(1, 1, 1))


async def test_a_cancelled_publish_can_be_repeated(world: World) -> None:
    await world.publish(0)
    scoring = asyncio.Event()

    async def slow() -> None:
        scoring.set()
        await asyncio.Event().wait()

    world.trainer.before_score = slow
    publish, rows = await begun(world.publish(1), world.sync.wait_verified(Version(1, 1)))
    await scoring.wait()
    publish.cancel()
    await asyncio.wait({publish})
    assert world.all_hold(0)
    world.trainer.before_score = lambda: None
    world.trainer.transport.release(Version(1, 1))
    await world.publish(1)
    assert await rows is False and world.engines[0].version == Version(1, 1, 1)


async def test_a_publish_that_is_cancelled_on_its_way_back_is_rolled_back_all_the_same(
    world: World,
) -> None:
    await world.publish(0)
    back = asyncio.Event()

    def trouble(n: int, manifest: WeightManifest) -> str:
        if manifest.version.step == 1:
            return "hash"
        if back.is_set():
            return ""
        back.set()
        return "hang"

    world.engines[0].trouble = trouble
    (publish,) = await begun(world.publish(1))
    await back.wait()
    publish.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publish
    assert world.all_hold(0)
    world.engines[0].trouble = lambda n, m: ""
    world.trainer.transport.release(Version(1, 1))
    assert (await world.publish(1))["sync/version"] == 1


async def test_an_unproven_roll_back_says_so(world: World) -> None:
    await world.publish(0)
    world.engines[0].trouble = lambda n, m: "hash" if m.version.step == 1 else "skip"
    world.engines[0].weights = dict(world.engines[0].weights)

    def spoil(n: int, m: WeightManifest) -> str:
        world.engines[0].weights = weights(50)
        return "hash" if m.version.step == 1 else "skip"

    world.engines[0].trouble = spoil
    with pytest.raises(
        WeightSyncFailed, match=r"roll-back to 1:0 is not verified \(engine 0.*restart the engines"
    ):
        await world.publish(1)


@pytest.mark.parametrize("where", ["load", "score"])
async def test_a_hang_ends_at_the_deadline_and_names_who(transport: Transport, where: str) -> None:
    world = World(transport, sync_timeout=1.0, retries=0)
    await world.publish(0)
    if where == "load":
        world.engines[0].trouble = lambda n, m: "hang" if m.version.step == 1 else ""
    else:
        world.trainer.before_score = asyncio.Event().wait
    said = (
        "engine 0 did not answer `load` within 1 s"
        if where == "load"
        else "the trainer did not score the canary within 1 s"
    )
    with pytest.raises(WeightSyncFailed, match=said):
        await world.publish(1)
    assert world.all_hold(0)


async def test_a_trainer_that_cannot_score_means_the_way_back(world: World) -> None:
    await world.publish(0)

    def broken() -> None:
        raise RuntimeError("rank 1 is gone")

    world.trainer.before_score = broken
    with pytest.raises(
        WeightSyncFailed, match="could not score the canary: RuntimeError: rank 1 is gone"
    ):
        await world.publish(1)
    assert world.all_hold(0)


@pytest.mark.e2e
@pytest.mark.parametrize(("engines", "shared"), [(1, False), (2, False), (2, True)])
async def test_two_hundred_interrupted_publishes_leave_no_mixture(
    transport: Transport, engines: int, shared: bool
) -> None:
    """Cancelled or broken anywhere: all engines serve wholly the old or wholly the new weights, and
    the next sync works.
    """
    rng = random.Random(engines)
    world = World(transport, engines, shares_cores=shared)
    await world.publish(0)
    served = 0
    counts = {"old": 0, "new": 0}
    for trial in range(1, 201):
        hurt = rng.choice(["cancel", "half", "raise", "skip", "hash"])
        at = rng.randrange(engines)
        if hurt != "cancel":
            loads = world.engines[at].num_loads
            world.engines[at].trouble = lambda n, m, loads=loads, hurt=hurt: (
                hurt if n == loads + 1 else ""
            )  # type: ignore[misc]
        task = asyncio.create_task(world.publish(trial))
        if hurt == "cancel":
            for _ in range(rng.randrange(45)):
                await asyncio.sleep(0)
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        for e in world.engines:
            e.trouble = lambda n, m: ""
        if isinstance(result, asyncio.CancelledError):
            counts["old"] += 1
            transport.release(Version(1, trial))
        else:
            assert not isinstance(result, BaseException), result
            counts["new"] += 1
            transport.release(Version(1, served))
            served = trial
        assert world.all_hold(served), f"trial {trial} ({hurt})"
        assert all(e.go.is_set() for e in world.engines)
    assert min(counts.values()) > 10, counts
    await world.publish(201)
    assert world.all_hold(201)


# ------------------------------------------------------------ waits and order


async def test_fail_releases_everyone(world: World) -> None:
    await world.publish(0)
    waits = await begun(
        world.sync.may_explore(7), world.sync.wait_verified(Version(1, 3)), world.sync.wait_final()
    )
    await world.sync.fail(RunFailed("the trainer died"))
    await world.sync.fail(RunFailed("something later"))
    for wait in waits:
        with pytest.raises(RunFailed, match="the trainer died"):
            await wait


def test_a_wait_without_news_ends_and_names_who_waited_for_whom(transport: Transport) -> None:
    async def waiting() -> None:
        world = World(transport, sync_timeout=10.0)
        await world.publish(0)
        with pytest.raises(
            DeadlineExceeded,
            match=r"explore batch 3 waited 10 s for weights of train step 3 or later.*served 1:0",
        ):
            await world.sync.may_explore(3)
        assert simulated.now() == 10.0

    simulated.run(waiting())


def test_news_from_the_trainer_renews_the_deadline(transport: Transport) -> None:
    async def told() -> None:
        world = World(transport, sync_timeout=10.0)
        await world.publish(0)
        (final,) = await begun(world.sync.wait_final())
        for step in range(1, 5):
            await asyncio.wait({final}, timeout=6.0)
            await world.sync.step_finished(step, finished=step == 4)
        await world.publish(4)
        assert await final == Version(1, 4)
        assert simulated.now() == 24.0

    simulated.run(told())


async def test_other_lineages_and_older_versions_are_refused(world: World) -> None:
    await world.publish(2)
    with pytest.raises(WeightSyncFailed, match="1:1 is not newer than 1:2"):
        await world.publish(1)
    other = msgspec.structs.replace(world.trainer.stage(3), version=Version(2, 3))
    with pytest.raises(WeightSyncFailed, match="another lineage"):
        await world.sync.publish(other)
    for never in (Version(1, 1), Version(9, 2)):
        with pytest.raises(WeightSyncFailed, match="never will be"):
            await world.sync.wait_verified(never)


def test_too_few_probe_tokens_are_refused(transport: Transport) -> None:
    with pytest.raises(ConfigError, match="8 prompts x 3 tokens = 24"):
        World(transport, canary_tokens=3)


@pytest.mark.parametrize(
    ("dtype", "noise", "mean", "largest"),
    [
        ("bfloat16", 0.0, 0.02, 1.0),
        ("float16", 0.0, 0.004, 1.0),
        ("bfloat16", 0.05, 0.15, 1.0),
        ("bfloat16", 0.5, 1.5, 3.0),
    ],
)
async def test_the_limits_of_short_types_follow_from_their_noise(
    dtype: str, noise: float, mean: float, largest: float, transport: Transport
) -> None:
    """U1: no ceiling cuts them."""
    world = World(transport, engine_dtype=dtype)
    world.trainer.noise = noise
    for step in (0, 1):
        said = await world.publish(step)
        assert said["sync/canary_mean_limit"] == pytest.approx(mean, rel=1e-3)
        assert said["sync/canary_limit"] == pytest.approx(largest, rel=1e-3)
        assert said["sync/canary_noise"] == pytest.approx(noise, rel=1e-3)


async def test_the_first_versions_error_counts_as_noise(transport: Transport) -> None:
    world = World(transport, engine_dtype="bfloat16")
    world.trainer.noise = 0.05
    world.engines[0].shift = 0.1
    assert (await world.publish(0))["sync/canary_mean_limit"] == pytest.approx(0.15, rel=1e-3)
    assert (await world.publish(1))["sync/canary_mean_limit"] == pytest.approx(0.3, rel=1e-3)


async def test_a_higher_tolerance_lets_a_first_version_start(transport: Transport) -> None:
    """U1: one key helps where a right version is refused."""
    refused = (
        r"3.00e-01 nats on average .* allowed are 1.50e-01 .*\(synchronizer.canary_tolerance "
        r"3 x the noise of this model in bfloat16"
    )
    for tolerance in (3.0, 8.0):
        world = World(transport, engine_dtype="bfloat16", canary_tolerance=tolerance)
        world.trainer.noise = 0.05
        world.engines[0].shift = 0.3
        if tolerance == 3:
            with pytest.raises(WeightSyncFailed, match=refused):
                await world.publish(0)
        else:
            assert (await world.publish(0))["sync/canary_mean_limit"] == pytest.approx(
                0.4, rel=1e-3
            )


async def test_a_model_without_noise_is_not_allowed_that_of_others(transport: Transport) -> None:
    """0.05 nats are a wrong engine where the model's own noise is a hundred times smaller."""
    world = World(transport, engine_dtype="bfloat16")
    world.trainer.noise = 5e-4
    world.engines[0].shift = 0.05
    with pytest.raises(
        WeightSyncFailed,
        match=r"5.0.e-02 nats on average and 5.0.e-02 at most, allowed are 2.00e-02",
    ):
        await world.publish(0)


async def test_old_weights_are_refused_in_short_types(transport: Transport) -> None:
    """U1: a load that did nothing, a step after."""
    world = World(transport, engine_dtype="bfloat16", retries=0)
    world.trainer.noise = 0.05
    await world.publish(0)
    world.engines[0].trouble = lambda n, manifest: "skip" if manifest.version.step else ""
    with pytest.raises(
        WeightSyncFailed, match=r"on average.*what an engine with the old weights would show"
    ):
        await world.publish(1)


async def test_the_trainers_type_counts_where_it_is_the_shorter_one(transport: Transport) -> None:
    world = World(transport, engine_dtype="float32", trainer_dtype="bfloat16")
    world.trainer.noise = 0.05
    world.engines[0].shift = 0.1
    assert (await world.publish(0))["sync/canary_mean_limit"] == pytest.approx(0.15, rel=1e-3)


async def test_float32_is_not_measured(transport: Transport) -> None:
    assert "sync/canary_noise" not in await World(transport).publish(0)


async def test_the_canary_probes_at_the_temperature_of_training(transport: Transport) -> None:
    """An engine that divides by another temperature, here by one rounded to bfloat16, is right at
    temperature 1.
    """
    world = World(transport, canary_temperature=0.9)
    assert (await world.publish(0))["sync/canary_max_abs"] < 1e-5
    world = World(transport, canary_temperature=0.9)
    world.engines[0].divisor = lambda temperature: float(torch.tensor(temperature).bfloat16())
    with pytest.raises(WeightSyncFailed, match="differ from the trainer's"):
        await world.publish(0)
