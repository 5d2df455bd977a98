"""A service that is killed: the real gateway, book, buffer and checkpoints, a scripted engine, and
a trainer without a model.

python -m tests.extras.serve.integration.service_child FOLDER [SECONDS: end where no step has rows for so long]
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from rft.engine.scripted import ScriptedEngine
from rft.errors import DeadlineExceeded
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.checkpoints import Checkpoints
from rft.types.ids import Version
from tests.extras.serve.serving import started

SAVE_INTERVAL = 3  # steps in between are lost by a kill, with their weights


async def main(folder: Path, patience_s: float) -> None:
    engine = ScriptedEngine(answer=lambda m: f"to {m[-1]['content']}")
    store = Checkpoints(folder / "checkpoints", keep=2)
    found = manifests.latest(store.folder)
    parent = None if found is None else found.version

    async def fill(aside: Path) -> dict[str, str]:
        (aside / "weights").write_text(str(engine.version))
        return {}

    async with started(folder, engine, found, num_runs=2, batch_size=1) as (
        _,
        buffer,
        _,
        _,
        lineage,
    ):
        reader = buffer.reader(lineage)
        step = 0 if parent is None else parent.step
        while True:
            step += 1
            await reader.lease(step, groups=1, rows=None, deadline_s=patience_s, max_staleness=None)
            await reader.use(step)
            engine.version = Version(lineage, step)
            if step % SAVE_INTERVAL == 0:
                await store.save(engine.version, parent, await reader.consumption(step), fill)


with contextlib.suppress(DeadlineExceeded):
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]) if sys.argv[2:] else 1e6))
