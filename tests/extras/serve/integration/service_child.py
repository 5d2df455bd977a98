"""A service that is killed: the real gateway, book and buffer, a scripted engine, and a trainer that uses every row at once.

python -m tests.fault.service_child FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rft.testing.scripted import ScriptedEngine
from tests.helpers.serving import started


async def main(folder: Path) -> None:
    engine = ScriptedEngine(answer=lambda m: f"to {m[-1]['content']}")
    async with started(folder, engine, num_runs=2, batch_size=1) as (_, buffer, _, _, lineage):
        reader, step = buffer.reader(lineage), 0
        while True:
            step += 1
            await reader.lease(step, groups=1, rows=None, deadline_s=1e6, max_staleness=None)
            await reader.use(step)


asyncio.run(main(Path(sys.argv[1])))
