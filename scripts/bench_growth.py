"""Cost as work grows: more concurrent runs and explorers, a larger ledger, more engines, longer
contexts, larger models.

Each point is measured in a process of its own, `python scripts/bench_growth.py PART SIZE`, which
prints its costs as JSON.  Costs are processor time of that process and those that it starts, all
threads, and not time on the clock.  The speed of a core matters still: on a virtual machine the
same loop took 1.4 to 3.4 ms of it within a minute, whether the other core worked or not.  So a
ledger is compared with a small one that takes turns with it.
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
from rft.engine.scripted import ScriptedEngine, echo, weights_key
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.choose import make
from rft.testing import tiny
from rft.testing.storage_contract import group, take
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.block import encode
from rft.types.ids import Version

PICTURE = harness.ROOT / "docs" / "assets" / "growth.svg"
TOKENS = 32_768  # of one train step, whatever the context
SMALL = 10_240  # rows of the ledger that takes turns with a larger one
ROWS = 64  # of a batch and of a lease; leases of a ledger, which has a batch for each
LEASES = 128
OF_SMALL = "_of_small"  # a cost that the small ledger had in turn with that of the same name


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
    base = _peak_mb()
    count = max(8192, 2 * size)
    with _spent(cost, "us_per_run", count / 1e6):
        play(count, seed=1, writer=Writer(), loop=NoTimeForWork, in_flight=size)
    return {**cost, "kb_per_run_in_flight": max(0.0, _peak_mb() - base) * 1024 / size}


def buffer(size: int) -> dict[str, float]:
    """`size` rows of 128 tokens in groups of 8: appended, leased 8 groups at a time, opened again,
    audited; and those of SMALL rows.

    The two take turns, so that both meet the same machine.  Raises ValueError for a size that is no
    multiple of SMALL.
    """
    if size < SMALL or size % SMALL:
        raise ValueError(
            f"buffer: SIZE is a multiple of {SMALL} rows, of the ledger that takes turns with it; "
            f"given {size}"
        )
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        small = _Filled(Path(name) / "small", SMALL)
        large = _Filled(Path(name) / "large", size)
        asyncio.run(_in_turn(small, large))
    return {**large.costs(), **{name + OF_SMALL: cost for name, cost in small.costs().items()}}


async def _in_turn(small: _Filled, large: _Filled) -> None:
    for each in (small, large):
        await each.ledger.open()
        await each.ledger.start_lineage(None, None)
    every = large.size // small.size
    for batch in range(large.size // ROWS):
        await large.append(batch)
        if batch % every == 0:
            await small.append(batch // every)
    for step in range(1, LEASES + 1):
        for each in (small, large):
            await each.lease(step)
    for each in (small, large, small):
        await each.reopen()
    for each in (small, large, small):
        each.audit()


class _Filled:
    """A ledger of `size` rows, and the processor seconds that each call took."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self._folder = folder
        self._settings = BufferSettings(
            folder=folder / "buffer", capacity=size, capacity_bytes=1 << 50
        )
        self.ledger = Buffer(self._settings)
        self._spent: dict[str, list[float]] = {}

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self._spent.setdefault(name, []).append(time.process_time() - began)

    async def append(self, batch: int) -> None:
        writer = self.ledger.writer(1)
        frames = [encode(group(1, batch, task, runs=8, tokens=128)) for task in range(ROWS // 8)]
        with self._counted("append"):
            for frame in frames:
                await writer.append(frame, accepted=True)
            await writer.close_batch(batch, accepted=len(frames), expected=len(frames), reasons={})

    async def lease(self, step: int) -> None:
        with self._counted("lease"):
            await take(self.ledger, 1, step, ROWS // 8)
        await self.ledger.reader(1).use(step)

    async def reopen(self) -> None:
        await self.ledger.close()
        self.ledger = Buffer(self._settings)
        with self._counted("reopen"):
            await self.ledger.open()
        await self.ledger.close()

    def audit(self) -> None:
        with self._counted("audit"):
            audit = audit_run(self._folder)
        if audit.problems or not audit.balanced or audit.acked != self.size:
            raise RuntimeError(f"the audit does not balance: {audit}")

    def costs(self) -> dict[str, float]:
        """Microseconds for each row."""
        made = self._spent
        spent = {
            "append": sum(made["append"]) / self.size,
            "lease": statistics.median(made["lease"]) / ROWS,
        }
        spent |= {name: statistics.mean(made[name]) / self.size for name in ("reopen", "audit")}
        return {f"{name}_us_per_row": seconds * 1e6 for name, seconds in spent.items()}


@dataclass(frozen=True)
class Synced:
    """Weight versions for some scripted engines."""

    spent_s: list[float]  # processor time of each
    asked_of_each: int  # what one engine was asked to generate
    scorer_calls: int
    positions: int  # that the trainer scored for the last one


def engines(size: int) -> dict[str, float]:
    """One version for `size` scripted engines: loaded, compared with its hashes, proven; one of 64
    MB for `size` receivers over gloo.
    """
    made = asyncio.run(synced(size, versions=12))
    return {
        "ms_per_engine": statistics.median(made.spent_s[2:]) / size * 1e3,
        "broadcast_ms_per_engine": broadcast(size).spent_s * 1e3,
    }


async def synced(size: int, *, versions: int) -> Synced:
    """Publishes `versions` versions to `size` engines."""
    config = FixedSync(sync_method="checkpoint")
    runtime = SyncRuntime()
    scorer = Scorer()
    spent = []
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        transport = make(config, Path(name))
        made = [ScriptedEngine(answer=echo) for _ in range(size)]
        prompts = [[10 + i, 20] for i in range(runtime.canary_prompts)]
        sync = Synchronizer(config, runtime, made, scorer, Schedule(), prompts, Version(1, 0))
        for step in range(versions):
            weights = {"embed": torch.full((256, 1024), float(step)), "head": torch.ones(2)}
            manifest = transport.stage(Version(1, step), weights.items(), {})
            scorer.key = weights_key(manifest)
            scorer.positions = 0
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
    draw = np.random.default_rng(0)
    cost = dict[str, float]()
    with tiny_learner(TOKENS) as learner:

        def step(number: int, given: tuple[TrainRow, ...]) -> None:
            learner.step(
                RankBatch(step=number, micro_batches=(given,), tokens=TOKENS / 2, rows=len(given)),
                None,
            )

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
        learner = Learner(
            LearnerSettings(model_path=str(model), max_token_len_per_gpu=tokens, cpu_threads=1)
        )
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
    """Cost of one more as the number grows, in processor time; a check is its bound / (cost of the
    largest size / of the smallest).

    `runs`: of one run, 32 to 8,192 at a time, with a scripted engine: flat.  `buffer`: of one row
    to append, to lease (8 groups at a time), to open the ledger again and to audit it, of 10,240
    rows and more: flat, so opening and auditing are at most linear; the largest is compared with a
    ledger of 10,240 rows that takes turns with it (`of_small`), as the speed of a core may change
    twofold meanwhile. `engines`: of one engine in a weight sync, 1 to 8 scripted ones in one
    process, and of one receiver of a broadcast over gloo: at most flat, so a sync is at most
    linear.  `explorers`: of one group of two runs, 1 to 16 explorers on Ray with scripted engines,
    for the buffer, the coordinator and all explorers with their engines: flat.  `model`: of one
    weight, 10 million to 1.7 billion, in a train step of 512 tokens with LoRA and in a version that
    one engine takes from shared memory: at most flat.  `context`: of one token in a train step of
    32,768 tokens of the tiny model on one thread, in rows of 1,024 to 32,768: a constant and a part
    that is linear in the context, attention's (so a row is quadratic); memory is published.
    `tests/unit/scripts/test_growth.py` counts operations: calls of functions, instructions of the
    database, requests and scored positions, FLOP.

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
    rounded = {
        part: {n: {k: round(v, 2) for k, v in c.items()} for n, c in sizes.items()}
        for part, sizes in found.items()
    }
    return harness.Result(
        "growth",
        checks,
        rounded,
        {},
        measured,
        versions=harness.versions("torch", "numpy", "sqlalchemy", "msgspec"),
    )


def _child(part: str, size: int) -> dict[str, float]:
    command = [sys.executable, __file__, part, str(size)]
    answer: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    return answer


def _check(sizes: dict[int, dict[str, float]], part: str, cost: str, bound: float) -> harness.Check:
    most = sizes[max(sizes)]
    ratio = round(bound * most.get(cost + OF_SMALL, sizes[min(sizes)][cost]) / most[cost], 3)
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
        {
            "svg.hashsalt": "growth",
            "svg.fonttype": "none",
            "text.color": "#858585",
            "axes.labelcolor": "#858585",
        }
    ):
        figure = Figure(figsize=(10, 9), layout="constrained")
        for axes, (part, sizes) in zip(figure.subplots(3, 2).flat, found.items(), strict=True):
            for cost in (
                name for name in next(iter(sizes.values())) if not name.endswith(OF_SMALL)
            ):
                axes.plot(
                    list(sizes),
                    [max(c[cost], 1e-2) for c in sizes.values()],
                    marker="o",
                    label=cost.replace("_", " "),
                )
            axes.set(xscale="log", yscale="log", xlabel=titles[part])
            axes.tick_params(colors="#858585", which="both")
            axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    answer: Any = PARTS[sys.argv[1]][0](int(sys.argv[2]))
    print(json.dumps(answer))
