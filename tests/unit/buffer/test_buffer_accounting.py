"""Whatever happens in whatever order: acked = used + leased + available + explained, and no row is
used twice in an ancestry.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.errors import DeadlineExceeded, ShortBatch
from rft.testing.storage_contract import group, ids
from rft.types.block import encode
from rft.types.ids import Version
from rft.types.ports import Consumption

STEPS = st.lists(
    st.sampled_from(
        ["explore", "reject", "repeat", "lease", "use", "explain", "manifest", "crash", "replace"]
    ),
    min_size=5,
    max_size=40,
)


class Run:
    """A small run, driven step by step; `expected` remembers what the buffer has promised."""

    def __init__(self, folder: Path, kind: str, max_uses: int) -> None:
        self.settings = BufferSettings(
            folder=folder, storage_type=kind, max_uses=max_uses, on_short_batch="carry"
        )  # type: ignore[arg-type]
        self.manifest: tuple[Version, Consumption] | None = None
        self.acked = 0
        self.lineage = self.step = self.batch = 0
        self.leased = False
        self.used: list[tuple[int, int, int]] = []  # in the current ancestry
        self.committed: list[tuple[int, int, int]] = []

    async def start(self) -> None:
        self.buffer = Buffer(self.settings)
        await self.buffer.open()
        await self.take_over()

    async def take_over(self) -> None:
        started = await self.buffer.start_lineage(*(self.manifest or (None, None)))
        assert started.lineage > self.lineage
        self.lineage, self.leased, self.used = started.lineage, False, list(self.committed)
        self.step = self.manifest[0].step if self.manifest else 0
        self.batch = started.cursor
        writer = self.buffer.writer(self.lineage)
        held = await writer.stored_groups(started.cursor)
        last = max((h.batch for h in held), default=started.cursor - 1)
        # what the explorer does on resume: re-close what is whole
        for batch in range(started.cursor, last + 1):
            await self.explore(batch, {h.task for h in held if h.batch == batch})
        self.batch = last + 1

    async def explore(self, batch: int, held: set[int], accepted: bool = True) -> None:
        writer = self.buffer.writer(self.lineage)
        for task in range(2):
            if task not in held:
                await self.append(batch, task, accepted)
        await writer.close_batch(batch, accepted=2, expected=2, reasons={})

    async def append(self, batch: int, task: int, accepted: bool) -> None:
        frame = encode(
            group(self.lineage, batch, task, runs=2, version=Version(self.lineage, self.step))
        )
        result = await self.buffer.writer(self.lineage).append(
            frame, accepted=accepted, reason="" if accepted else "bad"
        )
        self.acked += result.appended

    async def do(self, action: str) -> None:
        reader = self.buffer.reader(self.lineage)
        if action in ("explore", "reject"):
            await self.explore(self.batch, set(), accepted=action == "explore")
            self.batch += 1
        elif action == "repeat" and self.batch:
            last = group(
                self.lineage, self.batch, 0, runs=2, version=Version(self.lineage, self.step)
            )
            for _ in range(2):
                self.acked += (
                    await self.buffer.writer(self.lineage).append(encode(last), accepted=True)
                ).appended
            await self.explore(self.batch, {0})
            self.batch += 1
        elif action == "lease" and not self.leased:
            try:
                lease = await reader.lease(
                    self.step + 1, groups=1, rows=None, deadline_s=0.01, max_staleness=2
                )
            except (DeadlineExceeded, ShortBatch):
                return
            self.leased = True
            self.rows = ids(lease)
        elif action == "use" and self.leased:
            self.step += 1
            await reader.use(self.step)
            self.used += self.rows
            self.leased = False
        elif action == "explain" and self.leased:
            self.step += 1
            await reader.discard(self.step, "nonfinite")
            self.leased = False
        elif action == "manifest" and not self.leased and self.step:
            self.manifest = (Version(self.lineage, self.step), await reader.consumption(self.step))
            self.committed = list(self.used)
        elif action == "crash":
            await self.buffer.close()
            await self.start()
        elif action == "replace":
            await self.take_over()

    async def check(self) -> None:
        audit = await self.buffer.audit()
        assert audit.ok, audit
        assert audit.acked == self.acked
        assert audit.num_uses == len(self.used)
        assert audit.used == (len(self.used) if self.settings.max_uses == 1 else audit.used)
        counts = {row: self.used.count(row) for row in self.used}
        assert max(counts.values(), default=0) <= self.settings.max_uses


@pytest.mark.parametrize(
    ("kind", "max_uses"),
    [("sql", 1), *(pytest.param(*x, marks=pytest.mark.e2e) for x in [("queue", 1), ("sql", 2)])],
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=STEPS)
def test_the_accounting_always_balances(kind: str, max_uses: int, actions: list[str]) -> None:
    async def play() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder), kind, max_uses)
            await run.start()
            for action in actions:
                await run.do(action)
                await run.check()
            await run.buffer.close()

    asyncio.run(play())
