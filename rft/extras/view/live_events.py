"""News of a run as server-sent events: something was written, look again.

Depends on files, on no metrics.  Invariant: a page hears at most once a second, and a reader that
has gone is noticed within `_BEAT_S`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from rft.errors import SetupError
from rft.monitor.changes import FolderChanges

_BEAT_S = 10.0
_LEAST_S = 1.0


async def live(
    request: web.Request, run_dir: Path, phase: Callable[[], str], closing: asyncio.Event
) -> web.StreamResponse:
    """One event "changed" for all that was written since the one before; its data is the phase of
    the run.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    watch = _watch(run_dir)
    if watch is not None:
        loop.add_reader(watch.fileno(), _take, watch, news)
    ended = asyncio.ensure_future(closing.wait())
    try:
        await response.write(f"event: hello\ndata: {json.dumps(phase())}\n\n".encode())
        while not closing.is_set():
            heard = asyncio.ensure_future(news.wait())
            await asyncio.wait({heard, ended}, timeout=_BEAT_S, return_when=asyncio.FIRST_COMPLETED)
            heard.cancel()
            if news.is_set():
                news.clear()
                await response.write(f"event: changed\ndata: {json.dumps(phase())}\n\n".encode())
                await asyncio.wait({ended}, timeout=_LEAST_S)
            else:
                await response.write(b": still here\n\n")
    except (ConnectionResetError, asyncio.CancelledError):
        pass  # the reader has gone
    finally:
        ended.cancel()
        if watch is not None:
            loop.remove_reader(watch.fileno())
            watch.close()
    return response


def _take(watch: FolderChanges, news: asyncio.Event) -> None:
    watch.wait()  # there are some, so it does not
    news.set()


def _watch(run_dir: Path) -> FolderChanges | None:
    """None where the system cannot watch: pages are then as new as when they were opened."""
    folders = [f for f in (run_dir, run_dir / "buffer") if f.is_dir()]
    with suppress(SetupError, OSError):
        return FolderChanges(*folders, recursive=False)
    return None
