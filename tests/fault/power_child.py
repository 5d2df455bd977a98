"""Lives of a buffer, each a fork of this process: it appends and trains until a fault point kills
it (a JSON object a line on stdin).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import group, take
from rft.types.block import encode

STEPS = 8


async def live(root: Path, storage_type: Any, durability: Any, said: int) -> None:
    def say(**what: Any) -> None:
        os.write(said, (json.dumps(what) + "\n").encode())

    buffer = Buffer(
        BufferSettings(folder=root / "run/buffer", storage_type=storage_type, durability=durability)
    )
    await buffer.open()
    line = (await buffer.start_lineage(None, None)).lineage
    writer = buffer.writer(line)

    async def append(batch: int, task: int) -> None:
        frame = encode(group(line, batch, task, tokens=100 + 900 * task))
        await writer.append(frame, accepted=True)
        say(acked=[line, batch, task])

    for batch in range(STEPS):
        await asyncio.gather(*(append(batch, task) for task in range(3)))
        await writer.close_batch(batch, accepted=3, expected=3, reasons={})
        await take(buffer, line, batch + 1, 3)
        await buffer.reader(line).use(batch + 1)
        say(used=[line, batch + 1])
    await buffer.close()


def main() -> None:
    for text in sys.stdin:
        what = json.loads(text)
        pid = os.fork()
        if not pid:
            os.environ |= what["env"]
            asyncio.run(
                live(
                    Path(what["root"]),
                    what["kind"],
                    what["durability"],
                    os.open(what["said"], os.O_WRONLY | os.O_APPEND),
                )
            )
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
