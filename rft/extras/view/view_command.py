"""`rft view`: pages about runs in a browser."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from rft.errors import ConfigError


def view(
    run: Annotated[
        Path, typer.Argument(metavar="[RUN | FOLDER]", help="folder of a run, or one above several")
    ] = Path(),
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="on this machine alone; if it is in use, the next one; 0: any"
        ),
    ] = 7373,
) -> None:
    """Show runs in a browser, while they go on and afterwards: curves, rollouts token by token,
    SQL.  Nothing can be changed there.
    """
    if not run.is_dir():
        raise ConfigError(
            f"{run} is no folder; give the folder of a run, or one above several",
            key="RUN",
            given=str(run),
        )
    asyncio.run(_serve(run, port))


async def _serve(folder: Path, port: int) -> None:
    from rft.buffer.query import limit_memory
    from rft.extras.view.sql_answers import MEMORY_BYTES
    from rft.extras.view.view_pages import ViewPages
    from rft.extras.view.view_server import ViewServer

    limit_memory(MEMORY_BYTES)
    server = ViewServer(ViewPages(folder), port=port)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await server.start()
    try:
        print(f"view  {server.address}", flush=True)
        print(
            "      for this machine alone; the address is its key, so do not pass it on.  Ctrl-C "
            "ends it",
            flush=True,
        )
        await ended.wait()
    finally:
        await server.close()
