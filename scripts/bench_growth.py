"""Cost as work grows: more concurrent runs and explorers, a larger ledger, more engines, longer contexts, larger models.

Each point is measured in a process of its own, `python scripts/bench_growth.py PART SIZE`, which prints its costs as JSON.  Costs are
processor time of that process and those that it starts, all threads, and not time on the clock: who else uses the machine matters little.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_harness as harness
import numpy as np
import torch
from bench_explorer import NoTimeForWork, Writer, play
from growth_scale import Scorer, broadcast, explorers, model, rows

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.sync.schedule import Schedule
from rft.sync.settings import SyncSettings
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.choose import make
from rft.testing import tiny
from rft.testing.scripted import ScriptedEngine, echo, weights_key
from rft.testing.storage_contract import group, take
from rft.trainer.learner import Learner
from rft.trainer.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.block import encode
from rft.types.ids import Version

PICTURE = harness.ROOT / "docs" / "assets" / "growth.svg"
TOKENS = 32_768  # of one train step, whatever the context


@contextmanager
def _spent(cost: dict[str, float], name: str, per: float) -> Iterator[None]:
    """Adds processor time, divided by `per`, to `cost`."""
    began = time.process_time()
    yield
    cost[name] = (time.process_time() - began) / per


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------- what is measured


def runs(size: int) -> dict[str, float]:
    """`size` runs at a time against engines that answer at once or after two seconds."""
    cost: dict[str, float] = {}
    play(64, seed=0, writer=Writer(), loop=NoTimeForWork, in_flight=32)  # imports and caches
    base, count = _peak_mb(), max(8192, 2 * size)
    with _spent(cost, "us_per_run", count / 1e6):
        play(count, seed=1, writer=Writer(), loop=NoTimeForWork, in_flight=size)
    return {**cost, "kb_per_run_in_flight": max(0.0, _peak_mb() - base) * 1024 / size}


def buffer(size: int) -> dict[str, float]:
    """`size` rows of 128 tokens in groups of 8: appended, leased 8 groups at a time, opened again, audited."""
    return asyncio.run(_buffer(size))


async def _buffer(size: int) -> dict[str, float]:
    cost: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        settings = BufferSettings(folder=Path(name) / "buffer", capacity=size, capacity_bytes=1 << 50)
        ledger = Buffer(settings)
        await ledger.open()
        await ledger.start_lineage(None, None)
        writer, spent, groups = ledger.writer(1), 0.0, 8
        for batch in range(size // 64):
            frames = [encode(group(1, batch, task, runs=8, tokens=128)) for task in range(groups)]
            began = time.process_time()
            for frame in frames:
                await writer.append(frame, accepted=True)
            await writer.close_batch(batch, accepted=groups, wanted=groups, reasons={})
            spent += time.process_time() - began
        cost["append_us_per_row"] = spent / size * 1e6
        await take(ledger, 1, 1, groups)
        reader, leases = ledger.reader(1), []
        for step in range(1, 33):
            await reader.use(step)
            began = time.process_time()
            await take(ledger, 1, step + 1, groups)
            leases.append(time.process_time() - began)
        cost["lease_us_per_row"] = statistics.median(leases) / 64 * 1e6
        await ledger.close()
        with _spent(cost, "reopen_us_per_row", size / 1e6):
            again = Buffer(settings)
            await again.open()
        await again.close()
        with _spent(cost, "audit_us_per_row", size / 1e6):
            audit = audit_run(Path(name))
        if audit.problems or not audit.balanced or audit.acked != size // 64 * 64:
            raise RuntimeError(f"the audit does not balance: {audit}")
    return cost


@dataclass(frozen=True)
class Synced:
    """Weight versions for some scripted engines."""

    spent_s: list[float]  # processor time of each
    asked_of_each: int  # what one engine was asked to generate
    scorer_calls: int
    positions: int  # that the trainer scored for the last one


def engines(size: int) -> dict[str, float]:
    """One version for `size` scripted engines: loaded, compared with its hashes, proven; one of 64 MB for `size` receivers over gloo."""
    made = asyncio.run(synced(size, versions=12))
    return {
        "ms_per_engine": statistics.median(made.spent_s[2:]) / size * 1e3,
        "broadcast_ms_per_engine": broadcast(size).spent_s * 1e3,
    }


async def synced(size: int, *, versions: int) -> Synced:
    """Publishes `versions` versions to `size` engines."""
    settings, scorer, spent = SyncSettings(method="checkpoint"), Scorer(), []
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        transport = make(settings, Path(name))
        made = [ScriptedEngine(answer=echo) for _ in range(size)]
        prompts = [[10 + i, 20] for i in range(settings.canary_prompts)]
        sync = Synchronizer(settings, made, scorer, Schedule(), prompts, Version(1, 0))
        for step in range(versions):
            weights = {"embed": torch.full((256, 1024), float(step)), "head": torch.ones(2)}
            manifest = transport.stage(Version(1, step), weights.items(), {})
            scorer.key, scorer.positions = weights_key(manifest), 0
            began = time.process_time()
            await sync.publish(manifest)
            spent.append(time.process_time() - began)
            if step:
                transport.release(Version(1, step - 1))
        transport.close()
    (asked,) = {len(e.calls) for e in made}
    return Synced(spent, asked, scorer.calls, scorer.positions)


def context(size: int) -> dict[str, float]:
    """One train step on 32,768 tokens of the tiny model in rows of `size`, half of each trained."""
    draw, cost = np.random.default_rng(0), dict[str, float]()
    with tiny_learner(TOKENS) as learner:

        def step(number: int, given: tuple[TrainRow, ...]) -> None:
            learner.step(RankBatch(step=number, micro_batches=(given,), tokens=TOKENS / 2, rows=len(given)), None)

        step(1, rows(2, 64, draw))
        base = _peak_mb()
        with _spent(cost, "us_per_token", TOKENS / 1e6):
            step(2, rows(TOKENS // size, size, draw))
        cost["mb"] = _peak_mb() - base
    return cost


@contextmanager
def tiny_learner(tokens: int) -> Iterator[Learner]:
    """Trains the tiny model on one thread, `tokens` at once."""
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        model = tiny.make(Path(name) / "tiny", max_position_embeddings=tokens)
        learner = Learner(LearnerSettings(model_path=str(model), max_token_len_per_gpu=tokens, cpu_threads=1))
        try:
            yield learner
        finally:
            learner.close()


PARTS: dict[str, tuple[Callable[[int], dict[str, float]], tuple[int, ...], tuple[int, ...]]] = {
    "runs": (runs, (32, 512, 8192), (32, 128, 512, 2048, 8192)),
    "buffer": (buffer, (10_240, 40_960, 163_840), (10_240, 102_400, 1_024_000)),
    "engines": (engines, (1, 4, 8), (1, 2, 4, 8)),
    "explorers": (explorers, (1, 4), (1, 2, 4, 8, 16)),
    "model": (model, (10, 135), (10, 135, 500, 1700)),
    "context": (context, (1024, 4096, 16_384), (1024, 2048, 4096, 8192, 16_384, 32_768)),
}
BOUNDS = {  # cost -> how much more it may be for the largest size than for the smallest
    ("runs", "us_per_run"): 1.5,
    ("buffer", "append_us_per_row"): 1.5,
    ("buffer", "lease_us_per_row"): 1.5,
    ("buffer", "reopen_us_per_row"): 1.5,
    ("buffer", "audit_us_per_row"): 1.5,
    ("engines", "ms_per_engine"): 1.5,
    ("engines", "broadcast_ms_per_engine"): 1.5,
    ("explorers", "buffer_us_per_group"): 1.5,
    ("explorers", "coordinator_us_per_group"): 1.5,
    ("explorers", "explorers_us_per_group"): 1.5,
    ("model", "train_ns_per_weight"): 1.5,
    ("model", "sync_ns_per_weight"): 1.5,
}


def growth(quick: bool) -> harness.Result:
    """Cost of one more as the number grows, in processor time; a check is its bound / (cost of the largest size / of the smallest).

    `runs`: of one run, 32 to 8,192 at a time, with a scripted engine: flat.  `buffer`: of one row to append, to lease (8 groups at a time),
    to open the ledger again and to audit it, of 10,240 rows and more: flat, so opening and auditing are at most linear.  `engines`: of one
    engine in a weight sync, 1 to 8 scripted ones in one process, and of one receiver of a broadcast over gloo: at most flat, so a sync is
    at most linear.  `explorers`: of one group of two runs, 1 to 16 explorers on Ray with scripted engines, for the buffer, the coordinator
    and all explorers with their engines: flat.  `model`: of one weight, 10 million to 1.7 billion, in a train step of 512 tokens with LoRA
    and in a version that one engine takes from shared memory: at most flat.  `context`: of one token
    in a train step of 32,768 tokens of the tiny model on one thread, in rows of 1,024 to 32,768: a constant and a part that is linear in
    the context, attention's (so a row is quadratic); memory is published.  `tests/unit/scripts/test_growth.py` counts operations: calls of
    functions, instructions of the database, requests and scored positions, FLOP.

    ![cost of one more as the number grows](assets/growth.svg)
    """
    measured = harness.probes()
    found: dict[str, dict[int, dict[str, float]]] = {}
    for part, (_, few, many) in PARTS.items():
        for size in few if quick else many:
            found.setdefault(part, {})[size] = _child(part, size)
            harness.note(f"{part} {size}: {found[part][size]}")
    checks = [_check(found[part], part, cost, bound) for (part, cost), bound in BOUNDS.items()]
    _draw(found)
    rounded = {part: {n: {k: round(v, 2) for k, v in c.items()} for n, c in sizes.items()} for part, sizes in found.items()}
    return harness.Result(
        "growth", checks, rounded, {}, measured, versions=harness.versions("torch", "numpy", "sqlalchemy", "msgspec")
    )


def _child(part: str, size: int) -> dict[str, float]:
    command = [sys.executable, __file__, part, str(size)]
    answer: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    return answer


def _check(sizes: dict[int, dict[str, float]], part: str, cost: str, bound: float) -> harness.Check:
    ratio = round(bound * sizes[min(sizes)][cost] / sizes[max(sizes)][cost], 3)
    return harness.Check(f"{part} {cost} at_most {bound}x", ratio, ratio, ratio, 1.0)


def _draw(found: dict[str, dict[int, dict[str, float]]]) -> None:
    """A panel for each part: every cost over the size, both logarithmic."""
    import matplotlib
    from matplotlib.figure import Figure

    titles = {
        "runs": "runs at a time",
        "buffer": "rows in the ledger",
        "engines": "engines in a sync",
        "explorers": "explorers of a run",
        "model": "million weights",
        "context": "tokens in a row",
    }
    with matplotlib.rc_context(
        {"svg.hashsalt": "growth", "svg.fonttype": "none", "text.color": "#858585", "axes.labelcolor": "#858585"}
    ):
        figure = Figure(figsize=(10, 9), layout="constrained")
        for axes, (part, sizes) in zip(figure.subplots(3, 2).flat, found.items(), strict=True):
            for cost in next(iter(sizes.values())):
                axes.plot(list(sizes), [max(c[cost], 1e-2) for c in sizes.values()], marker="o", label=cost.replace("_", " "))
            axes.set(xscale="log", yscale="log", xlabel=titles[part])
            axes.tick_params(colors="#858585", which="both")
            axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    answer: Any = PARTS[sys.argv[1]][0](int(sys.argv[2]))
    print(json.dumps(answer))
