"""Calls of a process that answers nothing end; calls that only take long do not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rft.errors import EngineFailed, EngineStalled
from rft.launch.remote import Proxy, Pulse


@pytest.fixture
def child() -> Iterator[int]:
    """A process that waits."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


class Answering:
    """The process behind a pulse; `gone` makes its beats wait for ever."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.gone = False
        self.beats = 0

    async def beat(self) -> tuple[str, int]:
        self.beats += 1
        if self.gone:
            await asyncio.Event().wait()
        return os.uname().nodename, self.pid


@pytest.mark.e2e
async def test_calls_of_a_process_that_hangs_end_and_it_is_named(child: int) -> None:
    process = Answering(child)
    pulse = Pulse("engine-0", process.beat, 0.5, 60.0)
    calls = [asyncio.ensure_future(pulse.during(asyncio.Event().wait())) for _ in range(50)]
    await asyncio.sleep(0.3)
    assert process.beats <= 3, "one watcher, however many calls"
    process.gone = True
    os.kill(child, signal.SIGSTOP)
    began = asyncio.get_running_loop().time()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, EngineStalled) for r in results)
    assert "engine-0 hangs" in str(results[0]) and "is stopped" in str(results[0]) and pulse.hung
    assert asyncio.get_running_loop().time() - began < 5.0
    process.gone = False
    assert await pulse.during(asyncio.sleep(0.4, "well again")) == "well again"
    assert not pulse.hung


@pytest.mark.e2e
async def test_a_call_may_take_long_while_the_process_answers(child: int) -> None:
    process = Answering(child)
    pulse = Pulse("engine-0", process.beat, 0.1, 0.2)
    assert await pulse.during(asyncio.sleep(1.0, 7)) == 7
    assert process.beats > 5
    beats = process.beats
    await asyncio.sleep(0.2)
    assert process.beats <= beats + 1, "nobody asks while nothing is under way"


@pytest.mark.e2e
async def test_a_process_that_is_busy_has_until_the_other_limit() -> None:
    process = Answering(os.getpid())  # this one works in the meantime
    pulse = Pulse("engine-0", process.beat, 0.3, 1.5)
    assert await pulse.during(asyncio.sleep(0, 1)) == 1
    process.gone = True

    async def work() -> None:
        async with asyncio.timeout(1.0):
            while True:
                sum(range(20_000))
                await asyncio.sleep(0)

    call = asyncio.ensure_future(pulse.during(asyncio.Event().wait()))
    with pytest.raises(TimeoutError):
        await work()
    assert not call.done()
    with pytest.raises(EngineStalled):
        await call


async def test_errors_of_a_call_are_its_own(child: int) -> None:
    pulse = Pulse("engine-0", Answering(child).beat, 10.0, None)

    async def fails(error: Exception) -> None:
        await asyncio.sleep(0)
        raise error

    for error in (TimeoutError("mine"), EngineFailed("died")):
        with pytest.raises(type(error), match=str(error)):
            await pulse.during(fails(error))

    async def dead() -> tuple[str, int]:
        raise EngineFailed("engine-0 died")

    pulse = Pulse("engine-0", dead, 0.1, None)
    assert await pulse.during(asyncio.sleep(0.3, 1)) == 1, (
        "the calls of a dead process say themselves that it died"
    )


def test_a_proxy_takes_its_limits_with_it() -> None:
    proxy = Proxy.__reduce__(
        Proxy("handle", "engine-0", EngineFailed, limits=(None, None), start_s=5.0)
    )
    assert proxy[1] == ("handle", "engine-0", EngineFailed, (None, None), 5.0)
