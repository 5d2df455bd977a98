"""One life of a run: resume from the last manifest, explore and train, and die at the n-th database
event (argv: dir kind n [URL]).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import event
from sqlalchemy.engine import Engine

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import fill, ids, take
from rft.types.ids import Version
from rft.types.ports import Consumption

GROUPS = 3


def die_at(nth: int) -> None:
    """SIGKILL to this process before the nth statement or commit."""
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", count)
    event.listen(Engine, "after_cursor_execute", count)
    event.listen(Engine, "commit", count)


def say(*words: Any) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def newest(run: Path) -> tuple[Version, Consumption] | None:
    found = []
    for path in run.glob("checkpoints/global_step_*/manifest.json"):
        m = json.loads(path.read_bytes())
        found.append((Version(*m["version"]), msgspec.convert(m["consumption"], Consumption)))
    return max(found, key=lambda x: x[0], default=None)


def commit(run: Path, version: Version, parent: Version | None, consumption: Consumption) -> None:
    folder = run / f"checkpoints/global_step_{version.step}"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "format": 5,
        "version": version,
        "parent": parent,
        "consumption": consumption,
        "files": {},
    }
    aside = folder / "manifest.tmp"
    aside.write_bytes(msgspec.json.encode(manifest))
    aside.rename(folder / "manifest.json")


async def main(run: Path, kind: str, nth: int, url: str | None = None) -> None:
    settings = BufferSettings(
        folder=run / "buffer", storage_type=kind, ledger_url=url, run=run.as_posix()
    )  # type: ignore[arg-type]
    buffer = Buffer(settings)
    await buffer.open()
    found = newest(run)
    parent = found[0] if found else None
    start = await buffer.start_lineage(*(found or (None, None)))
    line = start.lineage
    step = parent.step if parent else 0
    die_at(nth)
    while True:  # until killed
        weights = Version(line, step)
        before = [h for h in await buffer.writer(line).stored_groups(step) if h.batch == step]
        await fill(buffer, line, step, groups=GROUPS, version=weights)
        say("acked", line, step, 4 * (GROUPS - len(before)))
        step += 1
        lease = await take(buffer, line, step, GROUPS)
        if ids(lease) != [(step - 1, t, r) for t in range(GROUPS) for r in range(4)]:
            say("WRONG", step, ids(lease))
            return
        await buffer.reader(line).use(step)
        say("used", line, step)
        if step % 2 == 0:
            commit(run, Version(line, step), parent, await buffer.reader(line).consumption(step))
            say("manifest", line, step)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:5]))
