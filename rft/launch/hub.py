"""The coordinator of a run whose explorers are processes of their own: they join with their engines, get batches, leave or die.

Knows the synchronizer and the deal of batches; an explorer is to it a name, engines, and a process that lives or does not.  Invariants:
one living explorer of a name; a batch is dealt again only after the process that had it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import Struct

from rft.config.plan import Plan
from rft.errors import ConfigError, ConfigErrors, DeadlineExceeded, RftError, RunFailed, SetupError
from rft.explorer.deal import Begun, Deal
from rft.launch.parts import Coordinator, Start
from rft.launch.rundir import write_json
from rft.launch.same import differences
from rft.sync.settings import SyncSettings
from rft.types.ids import Version
from rft.types.ports import Engine, Scorer

log = logging.getLogger(__name__)
T = TypeVar("T")
END_S = 60.0  # for a process that was told to end


class Joined(Struct, frozen=True, kw_only=True):
    """What an explorer gets that has joined: `seat` tells it from others of its name, before and after."""

    seat: int
    start: Start
    engines: tuple[int, ...]  # their numbers


@dataclass
class _Member:
    name: str
    seat: int
    process: Any  # proxy of its explorer
    playing: int = 0  # groups, where they are counted
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    watch: asyncio.Task[None] | None = None


class Hub(Coordinator):
    """Synchronizer, monitor, and the explorers that come and go.  `buffer` says when there is room for a batch."""

    def __init__(self, plan: Plan, scorer: Scorer, buffer: Any, start: Start, node: str = "") -> None:
        """`node`: the machine of the trainer's first rank."""
        super().__init__(plan, (), scorer, start, restart=self._restart_engine, put_out=self._put_out)
        self._plan, self._buffer, self._start, self._node = plan, buffer, start, node
        self._engines: dict[int, Any] = {}
        self._members: dict[str, _Member] = {}
        self._seats = 0
        self._joining: set[str] = set()
        self._deal = Deal(start.cursor, plan.explorer.total_batches, plan.explorer.max_inflight)
        self._fingerprint = ""
        self._turn = asyncio.Lock()  # who asks for a batch; the first to ask is the first to get one
        self._moved = asyncio.Condition()
        self._finished = False
        self._failure: BaseException | None = None
        self._evaluator = ""
        self._failing: asyncio.Future[None] | None = None  # kept, or it might be collected before it ends

    # ------------------------------------------------------------ coming

    async def welcome(self, name: str, config: Mapping[str, Any]) -> None:
        """May explorer `name`, started with `config`, join?  Raises ConfigErrors with what differs from this run's, or SetupError."""
        self._raise_failure()
        if found := differences(self._plan.monitor.config, config):
            raise ConfigErrors([ConfigError(text, key=key, given=given) for key, given, text in found])
        await self._alone(name)

    async def join(self, name: str, nodes: Sequence[str], engines: Sequence[Any], process: Any, way: SyncSettings) -> Joined:
        """Explorer `name` counts from now on; its engines, on `nodes`, serve the newest proven version, where there is one.

        `way`: how weights come to its engines, as far as they decide it.
        """
        self._raise_failure()
        if self._plan.sync.method == "memory" and (far := sorted(set(nodes) - {self._node})):
            raise SetupError(
                f"sync_method memory works inside one machine: the trainer is on {self._node}, engines of explorer {name} on "
                f"{', '.join(far)}.  Write sync_method: checkpoint, with checkpoint_root_dir on a file system that all share"
            )
        if self._plan.sync.method == "nccl" and self._plan.sync.backend == "nccl" != way.backend:
            raise SetupError(
                f"sync_method nccl broadcasts from GPU to GPU here, and the engines of explorer {name} are on CPUs; give it GPUs, or write "
                "sync_method: checkpoint"
            )
        await self._alone(name)
        if name in self._joining:
            raise _taken(name)
        self._joining.add(name)
        try:
            numbers = await self.sync.join(name, [_known(e) for e in engines], way.workers)
        finally:
            self._joining.discard(name)
        if not self.sync.owned(name):
            raise RunFailed(f"the engines of explorer {name} were lost while it joined; start it again")
        self._engines |= dict(zip(numbers, engines, strict=True))
        self._seats += 1
        member = self._members[name] = _Member(name, self._seats, process)
        member.watch = asyncio.ensure_future(self._watch(member))
        member.watch.add_done_callback(self._watched)
        where = ", ".join(dict.fromkeys(nodes))
        log.info("explorer %s on %s has joined with engines %s", name, where, ", ".join(map(str, numbers)))
        self._write()
        await self._changed()
        return Joined(seat=member.seat, start=self._start, engines=numbers)

    async def _alone(self, name: str) -> None:
        """Raises SetupError where a living explorer has the name; one that has died is let go."""
        if (other := self._members.get(name)) is None:
            return
        try:
            await asyncio.wait_for(other.process.lives(None), 1.0)
        except TimeoutError:
            raise _taken(name) from None
        except RftError as e:
            await self._let_go(other, str(e))

    # ------------------------------------------------------------ going

    async def leave(self, name: str, seat: int, why: str) -> None:
        """Explorer `name` ends, well (`why` is empty) or not.  Its batches are dealt again when its process is gone."""
        member = self._members.get(name)
        if member is None or member.seat != seat:
            return
        log.info("explorer %s leaves%s", name, f": {why}" if why else "")
        await self.sync.leave(name)
        if why:
            member.why = why
            member.gone.set()
            return  # `_watch` sees the end of its process
        if member.watch is not None:
            member.watch.cancel()
        await self._let_go(member, "")

    def _put_out(self, name: str, why: str) -> None:
        """The synchronizer has let its engines go: they could not be brought back."""
        if (member := self._members.get(name)) is not None:
            member.why = why
            member.gone.set()

    async def _watch(self, member: _Member) -> None:
        """Until its process is gone."""
        lives = asyncio.ensure_future(member.process.lives(self._plan.cluster.stall_timeout_s))
        gone = asyncio.ensure_future(member.gone.wait())
        try:
            await asyncio.wait({lives, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not lives.done():  # it was told to end
                await asyncio.wait({lives}, timeout=END_S)
            why = member.why or (str(lives.exception()) if lives.done() else "")
            await member.process.kill()  # where it only hangs
            log.warning("explorer %s is gone: %s", member.name, why)
            await self._let_go(member, why)
        finally:
            for task in (lives, gone):
                task.cancel()
            await asyncio.gather(lives, gone, return_exceptions=True)

    def _watched(self, watch: asyncio.Task[None]) -> None:
        """What goes wrong in watching is told to everyone: nobody would be let go any more."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._failing = asyncio.ensure_future(self.fail(error))

    async def _let_go(self, member: _Member, why: str) -> None:
        if self._members.get(member.name) is not member:
            return
        member.why = member.why or why
        member.gone.set()
        await self.sync.leave(member.name)
        for _ in range(member.playing):
            await self.sync.played()
        if back := self._deal.give_back(member.name):
            log.warning("explore batches %s of explorer %s are dealt again", ", ".join(map(str, back)), member.name)
        if self._evaluator == member.name and why:
            self._evaluator = ""
            if self._finished:
                log.warning(
                    "the final evaluation was explorer %s's; another plays it only where one has not ended yet", member.name
                )
        del self._members[member.name]
        await self._changed()
        self._write()

    async def stays(self, name: str, seat: int) -> None:
        """As long as explorer `name` belongs to the run.  Raises what ends it."""
        member = self._member(name, seat)
        await self._unless_gone(member, self._until(lambda: False))

    # ------------------------------------------------------------ explorers' side; every call says who asks

    async def begin(self, name: str, seat: int, lag: int | None, fingerprint: str) -> Begun | str:
        """See `Dealer`."""
        member = self._member(name, seat)
        self._fingerprint = self._fingerprint or fingerprint
        if fingerprint != self._fingerprint:
            raise ConfigError(
                f"explorer {name} finds other tasks than the explorers before it; give all the same files",
                key="buffer.explorer_input.tasksets",
            )
        return await self._unless_gone(member, self._begin(member, lag))

    async def _begin(self, member: _Member, lag: int | None) -> Begun | str:
        deal = self._deal
        async with self._turn:
            while True:
                await self._until(lambda: self._finished or deal.over or deal.ready(lag))
                if self._finished:
                    return "the trainer is finished"
                if (batch := deal.candidate) is None:
                    return f"all {deal.total} explore batches are in the buffer"
                begun, version = await self._may_begin(batch)
                if not begun:
                    continue  # one that comes before it was given back
                if version is None:
                    return "the trainer is finished"
                self._member(member.name, member.seat)
                batch, again = deal.take(member.name)
                log.info("explore batch %d goes to explorer %s%s", batch, member.name, ", again" if again else "")
                return Begun(batch=batch, version=version, again=again)

    async def _may_begin(self, batch: int) -> tuple[bool, Version | None]:
        """Waits until the batch may begin (True, the version to expect) or another one is to be dealt first (False)."""

        async def may() -> Version | None:
            await self._buffer.room(batch)
            return await self.sync.may_explore(batch)

        asked = asyncio.ensure_future(may())
        other = asyncio.ensure_future(self._until(lambda: self._finished or self._deal.candidate != batch))
        try:
            await asyncio.wait({asked, other}, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            if self._finished and not asked.done():
                return True, None
            same = self._deal.candidate == batch
            return same, asked.result() if same and asked.done() else None
        finally:
            for task in (asked, other):
                task.cancel()
            await asyncio.gather(asked, other, return_exceptions=True)

    async def evaluates(self, name: str, seat: int) -> bool:
        """The first by name of those that are there evaluates the final weights."""
        self._member(name, seat)
        self._evaluator = self._evaluator or min(self._members)
        return self._evaluator == name

    async def may_play_for(self, name: str, seat: int, batch: int, group: int | None) -> bool:
        member = self._member(name, seat)
        may = await self._unless_gone(member, self.sync.may_play(batch, group))
        if member.gone.is_set():  # in the same moment: what it played has been counted back already
            if may:
                await self.sync.played()
            raise RunFailed(f"explorer {name} had to leave: {member.why}")
        member.playing += may
        return may

    async def played_for(self, name: str, seat: int) -> None:
        self._member(name, seat).playing -= 1
        await self.sync.played()

    async def explored(self, batch: int) -> None:
        await self.sync.explored(batch)
        self._deal.close(batch)
        await self._changed()

    # ------------------------------------------------------------ the run's side

    async def trained(self, step: int, *, finished: bool = False) -> bool:
        wanted = await self.sync.trained(step, finished=finished)
        if finished:
            self._finished = True
            await self._changed()
        return wanted

    async def play(self) -> None:
        """Until the trainer is finished and every explorer has left.  Raises DeadlineExceeded when none is there for too long."""
        limit = self._plan.sync.timeout_s
        while True:
            try:
                async with asyncio.timeout(limit):
                    await self._until(lambda: bool(self._members) or self._finished)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no explorer was there for {limit:g} s.  Start one (mode: explore), or raise synchronizer.sync_timeout; "
                    "the run goes on from its last checkpoint when it is started again"
                ) from None
            if self._finished:
                break
            await self._until(lambda: not self._members or self._finished)
            if not self._finished:
                log.warning("no explorer is left; the run waits %g s for one", limit)
        await self._until(lambda: not self._members)  # as long as the final evaluation takes: their processes are watched

    async def fail(self, reason: BaseException) -> None:
        self._failure = self._failure or reason
        await super().fail(reason)
        await self._changed()

    # ------------------------------------------------------------ inside

    def _restart_engine(self, index: int) -> Awaitable[None]:
        restarted: Awaitable[None] = self._engines[index].restart()
        return restarted

    def _member(self, name: str, seat: int) -> _Member:
        """Raises RunFailed for one that does not belong to the run any more."""
        self._raise_failure()
        member = self._members.get(name)
        if member is None or member.seat != seat:
            raise RunFailed(f"explorer {name} has left the run; start it again to join anew")
        if member.gone.is_set():
            raise RunFailed(f"explorer {name} had to leave: {member.why}")
        return member

    async def _unless_gone(self, member: _Member, work: Awaitable[T]) -> T:
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(member.gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RunFailed(f"explorer {member.name} had to leave: {member.why}")
            return task.result()
        finally:
            for t in (task, gone):
                t.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _until(self, done: Callable[[], bool]) -> None:
        async with self._moved:
            while not done():
                self._raise_failure()
                await self._moved.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RunFailed(f"the trainer's side ended: {self._failure}") from self._failure

    def _write(self) -> None:
        """Who is there, for people."""
        here = {name: {"engines": self.sync.owned(name)} for name in sorted(self._members)}
        write_json(self._plan.run_dir / "explorers.json", here)

    async def _changed(self) -> None:
        """Wakes all who wait here."""
        async with self._moved:
            self._moved.notify_all()


def _known(engine: Any) -> Engine:
    known: Engine = engine
    return known


def _taken(name: str) -> SetupError:
    return SetupError(f"an explorer named {name} has joined this run already; give this one another explorer.name")


class Seat:
    """The hub as one explorer sees it, in that explorer's process: its gate and its dealer."""

    def __init__(self, hub: Any, name: str, joined: Joined) -> None:
        self._hub, self._name, self._joined = hub, name, joined
        self._me = (name, joined.seat)

    async def begin(self, lag: int | None, fingerprint: str) -> Begun | str:
        begun: Begun | str = await self._hub.begin(*self._me, lag, fingerprint)
        return begun

    async def evaluates(self) -> bool:
        return bool(await self._hub.evaluates(*self._me))

    async def revive(self, index: int) -> None:
        """`index` counts this explorer's engines."""
        await self._hub.revive(self._joined.engines[index])

    async def may_explore(self, batch: int) -> Version | None:
        raise AssertionError("batches are dealt")

    async def may_play(self, batch: int, group: int | None) -> bool:
        return bool(await self._hub.may_play_for(*self._me, batch, group))

    async def played(self) -> None:
        await self._hub.played_for(*self._me)

    async def served(self, version: Version) -> None:
        await self._hub.served(version)

    async def explored(self, batch: int) -> None:
        await self._hub.explored(batch)

    async def final(self) -> Version:
        final: Version = await self._hub.final()
        return final
