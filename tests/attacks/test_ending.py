"""Endings: a run is over in seconds, however often and when it is asked to stop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal

import pytest

from rft.errors import Interrupted
from rft.launch import ray_runtime
from rft.launch.signals import Signals
from tests.attacks.table import attack


@attack("–", "a library in C takes the signals", "taken back: Ctrl-C is rft's")
async def test_signals_are_taken_back_from_a_library_in_c() -> None:
    """Ray's prints a trace at the first one and ends the program at the second."""
    with Signals() as signals:
        # SIG_DFL: the next one would end this process
        ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(0))
        signals.install()
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(signals.wait(count), 20)
        with pytest.raises(Interrupted):
            await signals.guard(asyncio.Event().wait())


@attack("–", "a Ray that never gets up", "SetupError in time; Ctrl-C ends the wait")
async def test_a_ray_that_never_gets_up_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "LET_UP_S", 0.1)
    connecting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with Signals() as signals:
        assert not await asyncio.wait_for(ray_runtime._let_up(connecting, signals), 20)  # type: ignore[arg-type]
    connecting.cancel()
