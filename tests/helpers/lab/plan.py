"""What a run of the fault laboratory does: everything in it follows from these few numbers, so any
interruption can be judged.

Batch b holds `groups` accepted groups (every third batch also a rejected one) of `runs` rows; train
step s uses batch s - 1, except that every fifth one is skipped as not finite.  Tokens follow from
(batch, task, run) alone.  So however often a run is killed, its last checkpoint must have used each
row of the trained batches exactly once, and must carry the weights of a run without faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import group
from rft.types import token_logprobs
from rft.types.experience import Experience, failed
from rft.types.ids import GroupId, Version
from rft.types.images import Image, ImagePlace

REJECTED = 100  # number of the rejected task of a batch


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run.  `root`, where its processes work, holds `run/` (what a power loss may shorten) and
    `events/` (what the processes saw).
    """

    root: str
    storage: str = "sql"
    ledger_url: str | None = None
    durability: Literal["process", "power"] = "process"
    steps: int = 8
    groups: int = 3
    runs: int = 3
    tokens: int = 12
    save_interval: int = 2
    offset: int = 1  # train steps that the explorer may be ahead
    capacity: int = 10000
    explorers: int = 1
    duplicate: bool = False  # every message is sent twice
    clock: int = 0  # see `lab_arm` in shim.c
    power_loss: bool = False  # keep a shadow of what was synced
    deadline_s: float = 20.0
    on_damaged_payload: Literal["stop", "explain"] = "stop"
    full_disk_wait_s: float = 0.0
    patience: int = 0  # how often a client repeats a call that the buffer could not carry out
    images: bool = False  # rows show an image

    @property
    def run(self) -> Path:
        return Path(self.root) / "run"

    @property
    def events(self) -> Path:
        return Path(self.root) / "events"

    @property
    def shadow(self) -> Path:
        return Path(self.root) / "shadow"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def settings(self) -> BufferSettings:
        storage: Any = self.storage
        return BufferSettings(
            folder=self.run / "buffer",
            storage_type=storage,
            ledger_url=self.ledger_url,
            run=f"lab/faults/{Path(self.root).name}",
            durability=self.durability,
            capacity=self.capacity,
            num_explorers=self.explorers,
            on_damaged_payload=self.on_damaged_payload,
            full_disk_wait_s=self.full_disk_wait_s,
            max_retry_interval_s=0.05,
        )

    def tasks(self, batch: int) -> list[tuple[int, bool]]:
        """(task, accepted) of the groups of a batch, per explorer."""
        return [(task, True) for task in range(self.groups)] + [(REJECTED, False)] * (
            batch % 3 == 1
        )

    def skipped(self, step: int) -> bool:
        """Whether the step's gradient is "not finite"."""
        return step % 5 == 3

    def logprobs(self, rows: list[Experience], step: int) -> bytes:
        """What the trainer of `step` says of its rows: one number for all tokens, by which the step
        is known.
        """
        return token_logprobs.encode(
            [
                token_logprobs.of_row(x, np.full(x.num_response_tokens, -step, np.float32))
                for x in rows
            ]
        )

    def trained(self, step: int) -> set[tuple[int, int, int, int]]:
        """(explorer, batch, task, run) of every row that the weights of `step` were trained on."""
        rows = range(self.runs)
        return {
            (explorer, s - 1, task, run)
            for s in range(1, step + 1)
            if not self.skipped(s)
            for explorer in range(self.explorers)
            for task in range(self.groups)
            for run in rows
            if not self.fails(s - 1, task, run)
        }

    def fails(self, batch: int, task: int, run: int) -> bool:
        """Whether this run of the workflow ends in a failed row."""
        return self.runs > 2 and run == self.runs - 1 and (batch + task) % 4 == 3

    def image(self, batch: int, task: int) -> Image:
        """The image of a task; a batch's last task and its rejected one show that of the first."""
        number = 0 if task == REJECTED else task % max(1, self.groups - 1)
        return Image.of(f"image {batch} {number} ".encode() * 100)

    def files(self, groups: Iterable[tuple[int, int]]) -> dict[str, bytes]:
        """The files that groups (batch, task) show, by name."""
        return {x.sha256: x.data for x in (self.image(*g) for g in groups if self.images)}

    def rows(
        self, lineage: int, explorer: int, batch: int, task: int, version: Version
    ) -> list[Experience]:
        made = group(
            lineage,
            batch,
            task,
            runs=self.runs,
            version=version,
            explorer=explorer,
            tokens=self.tokens,
        )
        name = GroupId(lineage, explorer, batch, task)
        if self.images:
            places = (ImagePlace(self.image(batch, task).sha256, 1, 2, (1, 2, 2), "h"),)
            made = [msgspec.structs.replace(x, images=places) for x in made]
        return [
            failed(name.run(i), taskset="toy", task_index=task, workflow="toy", reason="timeout")
            if self.fails(batch, task, i)
            else x
            for i, x in enumerate(made)
        ]


def learn(weights: str, rows: list[Experience]) -> str:
    """The next weights: a chain over what was trained on, without the names of lineages and
    attempts.
    """
    seen = xxhash.xxh3_128(weights.encode())
    for x in rows:
        seen.update(f"{x.id.explorer}.{x.id.batch}.{x.id.task}.{x.id.run}:{x.reward}".encode())
        seen.update(x.tokens.tobytes())
    return seen.hexdigest()


def weights_of(plan: Plan, step: int) -> str:
    """The weights of `step` of a run without faults."""
    weights = "base"
    for s in range(1, step + 1):
        rows = [
            x
            for explorer in range(plan.explorers)
            for task in range(plan.groups)
            for x in plan.rows(1, explorer, s - 1, task, Version(1, 0))
            if x.trainable
        ]
        weights = weights if plan.skipped(s) else learn(weights, rows)
    return weights
