"""Which explorers belong to a run, and that one that dies is let go once, whoever finds out."""

from __future__ import annotations

import asyncio

from rft.errors import RunFailed
from rft.launch.membership import Member, Membership
from rft.sync.waits import Waits


class Process:
    """Of an explorer, as `Membership` asks it."""

    def __init__(self) -> None:
        self.dies = asyncio.Event()

    async def lives(self, stall_s: float | None) -> None:
        await self.dies.wait()
        raise RunFailed("its process is gone")

    async def kill(self) -> None:
        self.dies.set()


async def test_one_whose_death_is_found_twice_is_let_go_once() -> None:
    gone: list[str] = []
    finding = asyncio.Event()
    go_on = asyncio.Event()

    async def on_gone(member: Member, reason: str) -> None:
        gone.append(member.name)
        finding.set()
        await go_on.wait()

    failures: list[BaseException] = []

    async def on_failure(error: BaseException) -> None:
        failures.append(error)

    members = Membership(Waits(30.0), None, on_gone, on_failure)
    process = Process()
    first = await members.add("a", process)
    process.dies.set()
    await finding.wait()
    # the explorer was started again meanwhile
    coming_back = asyncio.ensure_future(members.check_name("a"))
    for _ in range(20):  # it finds out, too
        await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(30):
        await coming_back
        assert first.watch is not None
        await first.watch
    assert gone == ["a"] and members.names == [] and failures == []
