"""When a process counts as hung: by a simulated clock, and of a real process that is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.engine import vllm
from rft.engine.settings import EngineSettings
from rft.engine.vllm_stats import Stats
from rft.engine.watch import Usage, Watch, usage
from rft.errors import EngineFailed, EngineStalled
from rft.types.ids import Version
from rft.types.ports import Broadcast, WeightManifest


class World:
    """A clock, and processes that use `share` of a core."""

    def __init__(self, stall_s: float | None = 10.0, step_s: float | None = 600.0) -> None:
        self.now = 0.0
        self.used: Usage | None = Usage(5.0)
        self.watch = Watch(stall_s, step_s, lambda: self.used, lambda: self.now)

    def passes(
        self, seconds: float, *, share: float = 0.0, step_every: float = 0.0
    ) -> tuple[float, str]:
        """Looks as often as it should; when and why it counts as hung, or "" at the end."""
        began = self.now
        last_step = self.now
        while self.now < began + seconds:
            self.now += self.watch.interval_s
            if self.used is not None:
                used_s = self.used.cpu_s + share * self.watch.interval_s
                self.used = dataclasses.replace(self.used, cpu_s=used_s)
            if step_every and self.now - last_step >= step_every:
                last_step = self.now
                self.watch.progress()
            elif why := self.watch.look():
                return self.now - began, why
        return self.now - began, ""


def test_a_process_that_does_nothing_is_found_in_time() -> None:
    after, why = World().passes(100.0)
    assert 10.0 <= after <= 14.0 and "do nothing" in why


def test_waking_up_now_and_then_is_no_sign_of_life() -> None:
    assert World().passes(100.0, share=0.005)[0] <= 14.0


def test_a_stopped_process_is_found_although_others_turn_in_circles() -> None:
    world = World()
    assert world.passes(20.0, share=1.0)[1] == ""
    world.used = Usage(30.0, stopped=True)
    after, why = world.passes(100.0, share=1.0)
    assert after <= 14.0 and "is stopped" in why


def test_one_that_goes_on_in_time_is_well() -> None:
    world = World()
    world.used = Usage(5.0, stopped=True)
    assert world.passes(8.0)[1] == ""
    world.used = Usage(5.0)
    assert world.passes(300.0, share=0.5)[1] == ""


@pytest.mark.parametrize(("share", "on_disk"), [(1.0, False), (0.05, False), (0.0, True)])
def test_a_slow_step_is_not_held_against_it(share: float, on_disk: bool) -> None:
    world = World()
    world.used = Usage(5.0, on_disk=on_disk)
    assert world.passes(590.0, share=share) == (pytest.approx(590.0, abs=2.0), "")


def test_one_that_waits_for_a_core_is_not_idle() -> None:
    world = World()
    for second in range(100):
        world.used = Usage(5.0, queued_s=float(second))
        assert world.passes(world.watch.interval_s)[1] == ""
    world.used = Usage(5.0, queued_s=3.0)  # threads have ended, and nothing else happens
    assert world.passes(100.0)[0] <= 14.0


def test_a_long_generation_goes_on_for_ever() -> None:
    assert World(step_s=20.0).passes(36_000.0, share=0.001, step_every=9.0)[1] == ""


def test_a_step_that_never_ends_is_found_too() -> None:
    after, why = World(step_s=60.0).passes(1000.0, share=2.0)
    assert 60.0 <= after <= 64.0 and "no step" in why


def test_waiting_for_others_is_no_hang_and_being_stopped_is() -> None:
    world = World()
    looks = int(100 / world.watch.interval_s)
    for _ in range(looks):
        world.now += world.watch.interval_s
        assert world.watch.look(waits=True) == ""
    assert world.passes(100.0)[0] <= 14.0
    world = World()
    world.used = Usage(5.0, stopped=True)
    reasons = []
    for _ in range(looks):
        world.now += world.watch.interval_s
        reasons.append(world.watch.look(waits=True))
    assert "is stopped" in reasons[-1]


def test_without_limits_nothing_counts() -> None:
    assert World(None, 1e9).passes(5000.0)[1] == ""
    assert World(10.0, None).passes(5000.0, share=1.0)[1] == ""


def test_of_unknown_processes_only_the_step_counts() -> None:
    world = World(step_s=60.0)
    world.used = None
    assert world.passes(55.0)[1] == "" and world.passes(20.0)[1]


def test_time_in_which_the_watcher_slept_does_not_count() -> None:
    world = World()
    world.now += 3600.0  # a suspended machine
    assert world.watch.look() == ""


@pytest.mark.parametrize("broadcast", [True, False])
async def test_an_engine_in_a_broadcast_waits_for_the_others(
    broadcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits in the meeting uses no processor; another engine may pin its buffer for
    longer than the stall limit.
    """
    looks = 0
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    def idle(*_: Any) -> Usage:
        nonlocal looks
        looks += 1
        if looks == 20:  # four times the limit
            loop.call_soon_threadsafe(enough.set)
        return Usage(5.0)

    async def meeting(*_: Any, **__: Any) -> list[bytes]:
        await enough.wait()
        raise RuntimeError("everyone came")

    async def fits(self: Any, manifest: WeightManifest) -> None: ...

    monkeypatch.setattr(vllm, "usage", idle)
    monkeypatch.setattr(vllm.VllmEngine, "check_load", fits)
    engine = vllm.VllmEngine.__new__(vllm.VllmEngine)
    settings = EngineSettings(stall_timeout_s=0.05, step_timeout_s=None)
    chat: Any = SimpleNamespace(tokenizer=None)
    vllm._VllmCalls.__init__(engine, settings, chat, Stats(), [])
    engine._asleep = set()
    engine._llm = SimpleNamespace(collective_rpc=meeting)
    to_all = Broadcast(
        host="127.0.0.1",
        port=1,
        token="t",
        backend="gloo",
        bucket_bytes=None,
        overlap=False,
        timeout_s=60.0,
    )
    manifest = WeightManifest(
        version=Version(1, 1),
        transport="nccl" if broadcast else "memory",
        path="",
        tensors=(),
        broadcast=to_all if broadcast else None,
    )
    with pytest.raises(EngineFailed if broadcast else EngineStalled):
        await engine.load(manifest)
    engine._watching.cancel()
    assert (looks >= 20) == broadcast


def test_a_real_process_that_is_stopped_and_goes_on() -> None:
    used = "sum(os.times()[:2]) < 0.05"  # several ticks of the kernel's clock
    program = (
        f"import os, sys\nwhile {used}: pass\nsys.stdout.write('x'); "
        f"sys.stdout.flush()\nwhile True: pass"
    )
    with (
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(child.kill)  # also where an assertion fails
        assert child.stdout is not None
        child.stdout.read(1)
        before = usage([child.pid])
        assert before.cpu_s > 0 and not before.stopped
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert usage([child.pid]).stopped
        assert usage([os.getpid()]).stopped and not usage([os.getpid()], family=False).stopped
    assert usage([child.pid]) == Usage(0.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="not told by this kernel")
def test_a_real_process_that_waits_for_its_core() -> None:
    core = min(os.sched_getaffinity(0))
    program = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        children = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
        for child in children:
            stack.enter_context(child)
            stack.callback(child.kill)
        deadline = time.monotonic() + 60
        while (used := usage([x.pid for x in children])).queued_s < 0.5:
            assert time.monotonic() < deadline, used
