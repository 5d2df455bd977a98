"""The parts of `bench_growth.py` that need several processes or much memory: explorers on Ray,
receivers of a broadcast, larger models.

Costs are processor time of all processes that take part.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bench_harness as harness
import numpy as np
import psutil
import torch

from rft.config.plan import Plan
from rft.engine.scripted import logprobs, weights_key
from rft.engine.weights import WeightIntake
from rft.launch.ray_runtime import RayRuntime
from rft.launch.rundir import RunDir
from rft.launch.runtime import BoundPart, Parts, PartSpec
from rft.launch.signals import Signals
from rft.launch.start import Start, begin
from rft.preflight.check import load_plan
from rft.sync.settings import FixedSync
from rft.sync.transport.choose import make
from rft.sync.transport.nccl import BroadcastTransport
from rft.sync.update import Rounds
from rft.sync.waits import cancel
from rft.testing import tiny
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings, LoraSettings
from rft.types.ids import Version
from rft.types.ports import LoadReport, ScoreRow, WeightManifest

CONFIG = harness.ROOT / "tests" / "integration" / "tiny_config.yaml"
GROUPS = 8  # of a batch; batches of an explorer before costs are measured; of all of them meanwhile
WARM = 4
BATCHES = 320
ENDLESS = 1_000_000


def rows(count: int, length: int, draw: np.random.Generator) -> tuple[TrainRow, ...]:
    """Rows that share nothing, the second half of each trained."""
    mask = np.arange(length) >= length // 2
    return tuple(
        TrainRow(
            tokens=draw.integers(3, 259, length).astype(np.int32),
            loss_mask=mask,
            logprobs=np.zeros(length, np.float32),
            temperatures=1.0,
            advantages=np.ones(int(mask.sum()), np.float32),
        )
        for _ in range(count)
    )


# ---------------------------------------------------------------- explorers


@dataclass
class Scorer:
    """The trainer's part in a publication: scores as scripted engines do that have the weights
    `key`.
    """

    key: int = 0
    calls: int = 0
    positions: int = 0

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        self.calls += 1
        self.positions += sum(len(r.tokens) - 1 for r in rows)
        return [
            logprobs(r.tokens[: r.prompt_length], r.tokens[r.prompt_length :], self.key)
            for r in rows
        ]


def explorers(size: int) -> dict[str, float]:
    """`size` explorers of one run, each in an actor of Ray with a scripted engine in another;
    nothing is trained.
    """
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        model = tiny.make(Path(name) / "tiny")
        given = [
            f"model.model_path={model}",
            f"checkpoint_root_dir={name}",
            f"buffer.batch_size={GROUPS}",
            "mode=both",
        ]
        given += [
            "explorer.rollout_model.engine_type=scripted",
            "synchronizer.sync_style=trainer_driven",
        ]
        given += [
            f"synchronizer.max_staleness={ENDLESS}",
            f"trainer.total_steps={ENDLESS}",
            f"buffer.total_epochs={ENDLESS}",
        ]
        given += [
            "explorer.eval_on_startup=false",
            "explorer.eval_at_end=false",
            f"explorer.max_inflight_batches={2 * size}",
        ]
        return asyncio.run(_explorers(load_plan(CONFIG, given)[1], size))


async def _explorers(plan: Plan, size: int) -> dict[str, float]:
    rundir = RunDir.claim(plan.run_dir)
    with Signals() as signals:
        async with (
            RayRuntime().open(plan, rundir, signals) as parts,
            _playing(parts, plan, size) as coordinator,
        ):
            await _batches(coordinator, WARM * size)
            before = {part: _processor_s(pid) for part, pid in parts.pids.items()}
            await _batches(coordinator, WARM * size + BATCHES)
            spent = {part: _processor_s(pid) - before[part] for part, pid in parts.pids.items()}
    rundir.release()
    groups = BATCHES * GROUPS
    cost = {
        f"{part}_us_per_group": spent.pop(part) / groups * 1e6 for part in ("buffer", "coordinator")
    }
    return {**cost, "explorers_us_per_group": sum(spent.values()) / groups * 1e6}


@asynccontextmanager
async def _playing(parts: Parts, plan: Plan, size: int) -> AsyncIterator[Any]:
    """The coordinator of a run that `size` explorers play without end, from version 0 on."""
    await parts.start([PartSpec("buffer", "buffer", (plan,))])
    start: Start = await begin(parts.by_name["buffer"], None, None)
    buffer = BoundPart(parts.by_name["buffer"], start.lineage)
    transport = make(plan.sync, plan.run_dir, backend=plan.sync_runtime.backend)
    manifest = transport.stage(start.version, [("head", torch.ones(2))], {})
    scorer = Scorer(weights_key(manifest))
    await parts.start(
        [
            PartSpec(
                "coordinator",
                "coordinator",
                (plan, scorer, buffer, start, parts.nodes["buffer"], False),
            )
        ]
    )
    coordinator = parts.by_name["coordinator"]
    playing = list[asyncio.Future[Any]]()
    engines = [PartSpec(f"engine_{i}", "engine", (plan, plan.engines[0])) for i in range(size)]
    plans = [replace(plan, explorer=replace(plan.explorer, name=f"e{i}")) for i in range(size)]
    await parts.start(
        [*engines, *(PartSpec(f"explorer_{i}", "explorer", (p,)) for i, p in enumerate(plans))]
    )
    try:
        for i in range(size):
            engine = parts.by_name[f"engine_{i}"]
            explorer = parts.by_name[f"explorer_{i}"]
            joined = await coordinator.join(
                f"e{i}", [parts.nodes[f"engine_{i}"]], [engine], explorer, plan.sync_runtime
            )
            playing.append(
                asyncio.ensure_future(
                    explorer.run([engine], [], buffer, coordinator, f"e{i}", joined)
                )
            )
        await coordinator.publish(manifest)
        yield coordinator
    finally:
        await cancel(playing)
        await parts.end(graceful=False)
        transport.close()


async def _batches(coordinator: Any, count: int) -> None:
    """Until `count` batches are played."""
    seen = 0
    played = 0
    async with asyncio.timeout(900):
        while played < count:
            seen, records = await coordinator.records(seen)
            played = max([played, *(r.step for r in records if r.role == "explorer")])


def _processor_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------- receivers of a broadcast


def _receive(pipe: Connection) -> None:
    """One engine's worker: takes versions as they come over gloo, compares their hashes; then says
    what it spent.
    """
    intake = WeightIntake()
    began = 0.0
    while (manifest := pipe.recv()) is not None:
        began = began or time.process_time()  # imports are done
        pipe.send(intake.take(manifest).report)
    pipe.send(time.process_time() - began)


@dataclass(frozen=True)
class Received:
    """What one version cost for one engine: processor seconds of trainer and engine, bytes that
    came.
    """

    spent_s: float
    moved: int


def broadcast(size: int, *, mb: int = 64, versions: int = 5) -> Received:
    """Versions of `mb` MB for `size` engines over gloo."""
    context = multiprocessing.get_context("spawn")
    pipes = list[Connection]()
    workers = list[Any]()
    for _ in range(size):
        ours, theirs = context.Pipe()
        workers.append(context.Process(target=_receive, args=(theirs,), daemon=True))
        workers[-1].start()
        pipes.append(ours)
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        transport = BroadcastTransport(
            FixedSync(sync_method="nccl", sync_timeout=300.0), Path(name)
        )
        rounds = Rounds(transport, 300.0)
        moved = set[int]()

        async def load(index: int, manifest: WeightManifest) -> LoadReport:
            pipes[index].send(manifest)
            report: LoadReport = await asyncio.to_thread(pipes[index].recv)
            return report

        async def publish(step: int) -> None:
            weights = [(f"layer_{i}", torch.full((1 << 18,), float(step))) for i in range(mb)]
            manifest = transport.stage(Version(1, step), weights, {})
            for report in (
                await rounds.load(manifest, dict.fromkeys(range(size), 1), load)
            ).values():
                if report.bad_hash or report.failed:
                    raise RuntimeError(str(report))
                moved.add(report.moved_bytes)

        for step in range(versions + 1):
            asyncio.run(publish(step))
            if not step:  # the group is formed
                began = time.process_time()
            else:
                transport.release(Version(1, step - 1))
        spent = time.process_time() - began
        for pipe in pipes:
            pipe.send(None)
        spent += sum(float(pipe.recv()) for pipe in pipes) * versions / (versions + 1)
        for worker in workers:
            worker.join()
        transport.close()
    (each,) = moved
    return Received(spent / versions / size, each)


# ---------------------------------------------------------------- larger models

# million weights -> hidden size, layers
SHAPES = {10: (256, 8), 135: (768, 14), 500: (1280, 19), 1700: (2048, 25)}
TRAINED = 512  # tokens of a step


def model(size: int) -> dict[str, float]:
    """A random Llama of `size` million weights: a train step of 512 tokens in float32 with LoRA; a
    version in bfloat16 on its way.
    """
    hidden, layers = SHAPES[size]
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        shape: Any = {
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "vocab_size": 4096,
        }
        heads: Any = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
        path = tiny.make(Path(name) / "model", **shape, **heads, max_position_embeddings=TRAINED)
        weights, spent = _trained(path)
        return {
            "train_ns_per_weight": spent / weights * 1e9,
            "sync_ns_per_weight": _passed_on(Path(name), layers, weights // layers),
        }


def _trained(path: Path) -> tuple[int, float]:
    """The number of weights, and the processor seconds of the second step; the first allocates."""
    settings = LearnerSettings(
        model_path=str(path), max_token_len_per_gpu=TRAINED, cpu_threads=1, lora=LoraSettings()
    )
    learner = Learner(settings)
    draw = np.random.default_rng(0)
    try:
        for step in (1, 2):
            began = time.process_time()
            learner.step(
                RankBatch(
                    step=step, micro_batches=(rows(1, TRAINED, draw),), tokens=TRAINED / 2, rows=1
                ),
                None,
            )
        return sum(p.numel() for p in learner.policy.parameters()), time.process_time() - began
    finally:
        learner.close()


def _passed_on(folder: Path, layers: int, weights: int) -> float:
    """Processor nanoseconds for each weight of a version in shared memory: copied there with its
    hashes, compared by one engine.
    """
    transport = make(FixedSync(sync_method="memory"), folder)
    intake = WeightIntake()
    tensors = [
        (f"layer_{i}", torch.full((weights,), 0.5, dtype=torch.bfloat16)) for i in range(layers)
    ]
    for step in range(3):
        began = time.process_time()
        report = intake.take(transport.stage(Version(1, step), tensors, {})).report
        spent = time.process_time() - began
        if report.bad_hash or report.failed:
            raise RuntimeError(str(report))
        if step:
            transport.release(Version(1, step - 1))
    transport.close()
    return spent / (layers * weights) * 1e9
