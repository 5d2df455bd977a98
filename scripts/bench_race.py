"""What the buffer's benchmarks share: the experiences, the two sides, what they must agree on.

The same experiences on both sides: groups of 8, lognormal lengths from 100 to 2000 tokens (about
800), token ids, log-probs, mask, texts, metrics and info.  Both buffers run in one process each,
without the hop into an actor that both have in a run.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import bench_harness as harness
import numpy as np
from safetensors.numpy import save_file

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.types.block import decode, encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import GroupId, Version
from rft.types.ports import BufferReader, BufferWriter, Lease
from rft.types.task import SamplingArgs

GROUP = 8  # experiences
BATCH = 64
GROUPS = BATCH // GROUP
AMPLE = 1_000_000  # groups, as capacity: no writer is held back
THREADS = os.cpu_count() or 1
LIBRARIES = ("sqlalchemy", "msgspec", "numpy", "torch", "ray")


@dataclass
class Work:
    """`count` experiences as plain arrays and texts; both sides make their own form of them."""

    count: int
    lengths: np.ndarray = field(init=False)  # int64 [count]
    prompts: np.ndarray = field(init=False)  # int64 [count], tokens of the prompt
    tokens: np.ndarray = field(init=False)  # int32 [sum(lengths)]
    mask: np.ndarray = field(init=False)  # bool
    logprobs: np.ndarray = field(init=False)  # float32, 0 in the prompt
    texts: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        """The race's own objects are no work for anybody's garbage collector; the peer does the
        same.
        """
        self._make()
        gc.freeze()

    def _make(self) -> None:
        rng = np.random.default_rng(0)
        self.prompts = np.repeat(rng.integers(60, 200, self.count // GROUP), GROUP)
        drawn = rng.lognormal(np.log(800) - 0.18, 0.6, self.count)
        self.lengths = np.clip(drawn, np.maximum(100, self.prompts + 10), 2000).astype(np.int64)
        parts: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        self.texts = []
        for i, (length, prompt) in enumerate(zip(self.lengths, self.prompts, strict=True)):
            shared = parts[-1][:prompt] if i % GROUP else rng.integers(0, 49_000, prompt, np.int32)
            parts.append(
                np.concatenate([shared, rng.integers(0, 49_000, length - prompt, np.int32)])
            )
            masks.append(np.arange(length) >= prompt)
            self.texts.append(
                {
                    "reward": float(i % GROUP % 3),
                    "prompt": "".join(f" w{t % 997}" for t in shared),
                    "response": "".join(f" w{t % 997}" for t in parts[-1][prompt:]),
                    "info": {
                        "source": "race",
                        "row": i // GROUP,
                        "tags": ["a", "b"],
                        "difficulty": 0.5,
                    },
                    "metrics": {"time/run": 1.25, "response_length": float(length - prompt)},
                }
            )
        self.tokens = np.concatenate(parts)
        self.mask = np.concatenate(masks)
        self.logprobs = np.where(self.mask, -rng.exponential(1.0, len(self.tokens)), 0.0).astype(
            np.float32
        )

    def save(self, folder: Path) -> dict[str, str]:
        """As files for the peer."""
        arrays = folder / "arrays.safetensors"
        texts = folder / "texts.json"
        names = ("lengths", "prompts", "tokens", "mask", "logprobs")
        save_file({name: np.ascontiguousarray(getattr(self, name)) for name in names}, arrays)
        texts.write_text(json.dumps(self.texts))
        return {"arrays": str(arrays), "texts": str(texts)}

    def experiences(self, *, explorers: int = 1) -> list[Experience]:
        """Batch n of 64 is of explorer n % explorers, whose batches count from 0."""
        ends = np.cumsum(self.lengths)
        made = []
        for i, end in enumerate(ends):
            length = int(self.lengths[i])
            prompt = int(self.prompts[i])
            text = self.texts[i]
            span = slice(end - length, end)
            batch, explorer = divmod(i // BATCH, explorers)
            made.append(
                Experience(
                    id=GroupId(1, explorer, batch, i // GROUP % GROUPS).run(i % GROUP),
                    taskset="race",
                    task_index=i // GROUP,
                    workflow="math",
                    status="complete",
                    finish_reason="stop",
                    tokens=self.tokens[span],
                    loss_mask=self.mask[span],
                    logprobs=self.logprobs[span],
                    version_spans=(VersionSpan(Version(1, 0), prompt, length),),
                    sampling=(
                        SamplingRecord(
                            start=prompt, end=length, sampling=SamplingArgs(), engine="engine-0"
                        ),
                    ),
                    reward=text["reward"],
                    reward_parts={"accuracy": text["reward"]},
                    prompt_text=text["prompt"],
                    response_text=text["response"],
                    info=text["info"],
                    metrics=text["metrics"],
                )
            )
        gc.freeze()
        return made


def facts(rows: Sequence[Experience]) -> dict[str, Any]:
    """What both sides must agree on."""
    uids = "\n".join(sorted(f"{x.task_index}/{x.id.run}" for x in rows))
    return {
        "rows": len(rows),
        "uids": hashlib.sha256(uids.encode()).hexdigest(),
        "tokens": sum(int(x.tokens.sum()) for x in rows),
        "logprobs": round(sum(float(x.logprobs.sum(dtype=np.float64)) for x in rows), 3),
    }


class Unequal(Exception):
    """The two sides did not do the same; no ratio is worth anything."""


def agree(what: str, ours: dict[str, Any], peer: dict[str, Any]) -> None:
    differ = [k for k in ours if peer[k] != ours[k]]
    if differ:
        raise Unequal(
            f"{what}: ours { ({k: ours[k] for k in differ}) }, the peer "
            f"{ ({k: peer[k] for k in differ}) }"
        )


# ---------------------------------------------------------------- the two sides


class Trinity(harness.Child):
    """The peer in a process and environment of its own; it answers one order at a time."""

    def __init__(self, work: Work, folder: Path) -> None:
        python = harness.peer_python()
        if subprocess.run(
            [python, "-c", "import trinity.buffer.storage.sql"], capture_output=True
        ).returncode:
            raise harness.PeerMissing(
                f"{harness.PEERS.name} cannot import trinity-rft: run `make peers` again"
            )
        spec = folder / "spec.json"
        spec.write_text(
            json.dumps({**work.save(folder), "folder": str(folder), "threads": THREADS})
        )
        script = harness.ROOT / "scripts" / "peers" / "trinity_buffer.py"
        super().__init__("trinity-rft", [python, script, spec], ready_s=300, answer_s=1800)
        self._folder = folder
        self._count = 0

    def database(self) -> str:
        self._count += 1
        return str(self._folder / f"trinity-{self._count}.db")

    @cached_property
    def versions(self) -> dict[str, str]:
        listed = subprocess.run(
            [harness.peer_python(), "-m", "pip", "list", "--format=json"],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        found = {p["name"].lower(): p["version"] for p in json.loads(listed)}
        ours = harness.versions(*LIBRARIES)
        return {
            **ours,
            **{
                f"peer's {name}": found[name]
                for name in ("trinity-rft", *LIBRARIES)
                if name in found
            },
        }


class Ours:
    """A fresh buffer in a folder of its own, with the ends that explorers and the trainer have."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=folder, prefix="rft-")
        self._buffer = Buffer(
            BufferSettings(
                folder=Path(self._folder.name), capacity=AMPLE, capacity_bytes=1 << 40, **settings
            )
        )
        self._parent: Version | None = None

    def after(self, parent: Version) -> Self:
        """Goes on from that checkpoint, so that experiences of all its steps may come."""
        self._parent = parent
        return self

    async def __aenter__(self) -> Self:
        await self._buffer.open()
        self.lineage = (await self._buffer.start_lineage(self._parent, None)).lineage
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._buffer.close()
        self._folder.cleanup()

    @property
    def reader(self) -> BufferReader:
        return self._buffer.reader(self.lineage)

    def writer(self, explorer: int = 0) -> BufferWriter:
        return self._buffer.writer(self.lineage, explorer)

    async def write(self, rows: Sequence[Experience], explorer: int = 0) -> None:
        """Explore batches of 64 of this explorer, each group acknowledged, each batch closed."""
        writer = self.writer(explorer)
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            await append(writer, batch)
            await close_batch(writer, batch)

    async def lease(
        self, step: int, *, groups: int | None = GROUPS, rows: int | None = None
    ) -> Lease:
        return await self.reader.lease(
            step, groups=groups, rows=rows, deadline_s=60, max_staleness=None
        )

    async def drain(self, batches: int, *, first: int = 1) -> list[Experience]:
        """What comes back."""
        return [
            x
            for step in range(first, first + batches)
            for x in decode((await self.lease(step)).frame)
        ]


async def append(writer: BufferWriter, rows: Sequence[Experience]) -> None:
    """All groups at once, as an explorer appends those of its batch that are complete."""
    frames = (encode(rows[at : at + GROUP]) for at in range(0, len(rows), GROUP))
    await asyncio.gather(*(writer.append(frame, accepted=True) for frame in frames))


async def close_batch(writer: BufferWriter, rows: Sequence[Experience]) -> None:
    await writer.close_batch(rows[0].id.batch, accepted=GROUPS, expected=GROUPS, reasons={})


def within(name: str, seconds: Sequence[float], limit_s: float, quantile: float) -> harness.Check:
    """limit / quantile of the samples, at least 1 when it is kept, with its bootstrap 95 %
    interval.
    """
    rng = np.random.default_rng(0)
    draws = limit_s / np.quantile(rng.choice(seconds, (2000, len(seconds))), quantile, axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return harness.Check(
        name,
        round(limit_s / float(np.quantile(seconds, quantile)), 3),
        round(float(low), 3),
        round(float(high), 3),
        1.0,
    )


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    p50, p90, p99 = (float(q) for q in np.quantile(seconds, [0.5, 0.9, 0.99]))
    return {
        "p50_ms": round(p50 * 1e3, 3),
        "p90_ms": round(p90 * 1e3, 3),
        "p99_ms": round(p99 * 1e3, 3),
        "max_ms": round(max(seconds) * 1e3, 3),
        "samples": len(seconds),
    }
