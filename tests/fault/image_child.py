"""Lives of a buffer whose rows show images, each a fork of this process: it goes on with the run
until a fault point kills it or the run is done (a JSON object a line on stdin).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import group, take
from rft.types.block import encode
from rft.types.images import Image, ImagePlace

STEPS = 4
GROUPS = 3


def image(batch: int, task: int) -> Image:
    """The image of a task; the last task of a batch shows the first one's."""
    return Image.of(f"image {batch} {task % (GROUPS - 1)}".encode() * 500)


async def live(root: Path, kind: Any) -> None:
    buffer = Buffer(
        BufferSettings(
            folder=root / "buffer", run="run", storage_type=kind, resume_rows="keep", max_uses=1
        )
    )
    await buffer.open()
    line = (await buffer.start_lineage(None, None)).lineage
    writer = buffer.writer(line)
    stored = {(x.batch, x.task) for x in await writer.stored_groups(0)}

    async def append(batch: int, task: int) -> None:
        shown = image(batch, task)
        places = (ImagePlace(shown.sha256, 1, 2, (), "h"),)
        rows = group(line, batch, task, runs=2, tokens=200)
        rows = [msgspec.structs.replace(row, images=places) for row in rows]
        files = {shown.sha256: shown.data}
        await writer.append(encode(rows), accepted=True, images=files)

    for batch in range(STEPS):
        new = [task for task in range(GROUPS) if (batch, task) not in stored]
        await asyncio.gather(*(append(batch, task) for task in new))
        await writer.close_batch(batch, accepted=GROUPS, expected=GROUPS, reasons={})
    lease = await take(buffer, line, 1, STEPS * GROUPS)
    expected = {image(b, t) for b in range(STEPS) for t in range(GROUPS)}
    assert lease.images == {x.sha256: x.data for x in expected}
    await buffer.close()


def main() -> None:
    for text in sys.stdin:
        what = json.loads(text)
        pid = os.fork()
        if not pid:
            os.environ |= what["env"]
            asyncio.run(live(Path(what["root"]), what["kind"]))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
