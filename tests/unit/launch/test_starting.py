"""Ctrl-C while Ray starts: it is let up and then closed, because killing its processes under it
would hold this process for a minute.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rft.errors import Interrupted
from rft.launch import ray_runtime
from rft.launch.signals import Signals


class Starting:
    """A Ray that is up when the test says so; `events` in the order in which they happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.began = threading.Event()
        self.up = threading.Event()
        monkeypatch.setattr(ray_runtime.Cluster, "connect", self.connect)
        monkeypatch.setattr(
            ray_runtime, "_clean", lambda run_id: self.events.append("killed what is left")
        )
        monkeypatch.setenv(ray_runtime.leftovers.RUN_ID, "0")  # what is not cleaned stays

    def connect(
        self, address: str | None, *, num_cpus: int | None = None, timeline: bool = False
    ) -> Any:
        self.began.set()
        assert self.up.wait(60)
        self.events.append("up")
        return SimpleNamespace(close=lambda: self.events.append("closed"))

    async def play(self, *when: str) -> None:
        """Signals arrive at once, or "up" lets it up."""
        plan: Any = SimpleNamespace(
            cluster=SimpleNamespace(ray_address=None, num_cpus=None, timeline=False)
        )
        rundir: Any = SimpleNamespace(run_id="0")
        with Signals() as signals:

            async def press() -> None:
                assert await asyncio.to_thread(self.began.wait, 60)
                for what in when:
                    if what == "up":
                        self.up.set()
                    else:
                        signals.arrived()
                    await asyncio.sleep(0)

            pressing = asyncio.ensure_future(press())
            with pytest.raises(Interrupted):
                async with ray_runtime.RayRuntime().open(plan, rundir, signals):
                    raise AssertionError("it was interrupted")
            await pressing


async def test_ctrl_c_waits_until_ray_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Starting(monkeypatch)
    await ray.play("ctrl-c", "up")
    assert ray.events == ["up", "closed", "killed what is left"]


async def test_ctrl_c_twice_waits_for_nothing_and_kills_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Starting(monkeypatch)
    await ray.play("ctrl-c", "ctrl-c")
    assert ray.events == []
    ray.up.set()
