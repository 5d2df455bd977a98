"""Explorers of a run: name, number, process, and a configuration that agrees with the run's.

Depends on neither engines nor batches.  Invariant: one living explorer per name; it leaves the
members only when its process has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rft.config.save import compare
from rft.config.schema.source import dotted, undotted
from rft.errors import RftError, RunFailed, SetupError
from rft.sync.waits import Waits, race

log = logging.getLogger(__name__)
T = TypeVar("T")
END_S = 60.0  # for the process of an evicted explorer


@dataclass(eq=False)
class Member:
    """An explorer that has joined; `number` distinguishes explorers of one name over time."""

    name: str
    number: int
    # proxy of its explorer; None: the launcher watches it, and its end ends the run
    process: Any
    groups: int = 0  # running groups, if they are limited
    departed: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    watch: asyncio.Task[None] | None = None
    going: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """Await `work`.  Raises RunFailed once the explorer has to leave."""
        async with race(work, self.departed.wait()) as (task, _):
            if not task.done():
                raise self.had_to_leave()
            result: T = task.result()
            return result

    def had_to_leave(self) -> RunFailed:
        return RunFailed(f"explorer {self.name} had to leave: {self.reason}")


class Membership:
    """Members of a run.

    `on_gone(member, reason)` is awaited when a member has left, `on_failure` when watching fails.
    `waits` is notified of every change.
    """

    def __init__(
        self,
        waits: Waits,
        stall_timeout_s: float | None,
        on_gone: Callable[[Member, str], Awaitable[None]],
        on_failure: Callable[[BaseException], Awaitable[None]],
    ) -> None:
        self._waits = waits
        self._stall_timeout_s = stall_timeout_s
        self._on_gone = on_gone
        self._on_failure = on_failure
        self._members: dict[str, Member] = {}
        self._joining: set[str] = set()
        self._last_number = 0
        # a reference, which prevents its collection
        self._failing: asyncio.Future[None] | None = None

    @property
    def names(self) -> list[str]:
        return sorted(self._members)

    def get(self, name: str, number: int) -> Member:
        """Return a member.  Raises RunFailed if it has left the run."""
        self._waits.raise_failure()
        member = self._members.get(name)
        if member is None or member.number != number:
            raise RunFailed(f"explorer {name} has left the run; start it again to rejoin")
        if member.departed.is_set():
            raise member.had_to_leave()
        return member

    def is_member(self, name: str, number: int) -> bool:
        return name in self._members and self._members[name].number == number

    async def check_alone(self) -> None:
        """Raise SetupError if an explorer is alive; remove dead ones."""
        for name in self.names:
            await self.check_name(name)

    async def check_name(self, name: str) -> None:
        """Raise SetupError if a living explorer has the name; remove a dead one."""
        if (other := self._members.get(name)) is None:
            return
        try:
            await asyncio.wait_for(other.process.lives(None), 1.0)
        except TimeoutError:
            raise _taken(name) from None
        except RftError as e:
            await self._remove(other, str(e))

    @contextmanager
    def joining(self, name: str) -> Iterator[None]:
        """Reserve the name for an explorer that is about to be added."""
        if name in self._joining:
            raise _taken(name)
        self._joining.add(name)
        try:
            yield
        finally:
            self._joining.discard(name)

    async def add(self, name: str, process: Any) -> Member:
        self._last_number += 1
        member = self._members[name] = Member(name, self._last_number, process)
        if process is not None:
            member.watch = asyncio.ensure_future(self._watch(member))
            member.watch.add_done_callback(self._watched)
        await self._waits.changed()
        return member

    async def leave(self, name: str, reason: str) -> None:
        """Remove a member that ends; a non-empty `reason` marks a failure."""
        member = self._members[name]
        log.info("explorer %s leaves%s", name, f": {reason}" if reason else "")
        if reason and member.process is not None:
            self.evict(name, reason)  # `_watch` sees the end of its process
            return
        if member.watch is not None:
            member.watch.cancel()
        await self._remove(member, reason)

    def evict(self, name: str, reason: str) -> None:
        """Make the explorer leave: all its waits raise."""
        if (member := self._members.get(name)) is not None:
            member.reason = reason
            member.departed.set()

    async def _watch(self, member: Member) -> None:
        """Wait for the end of the member's process, and remove the member."""
        async with race(member.process.lives(self._stall_timeout_s), member.departed.wait()) as (
            lives,
            _,
        ):
            if not lives.done():  # evicted
                await asyncio.wait({lives}, timeout=END_S)
            reason = member.reason or (str(lives.exception()) if lives.done() else "")
            await member.process.kill()  # in case it hangs
            log.warning("explorer %s is gone: %s", member.name, reason)
            await self._remove(member, reason)

    def _watched(self, watch: asyncio.Task[None]) -> None:
        """End the run on an error in watching, because deaths would go unnoticed."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._failing = asyncio.ensure_future(self._on_failure(error))

    async def _remove(self, member: Member, reason: str) -> None:
        async with member.going:  # its watch and a new explorer of the same name may both remove it
            if self._members.get(member.name) is not member:
                return
            member.reason = member.reason or reason
            member.departed.set()
            await self._on_gone(member, reason)
            del self._members[member.name]
        await self._waits.changed()


def _taken(name: str) -> SetupError:
    return SetupError(
        f"an explorer named {name} has joined this run already; give this one another explorer.name"
    )


# ------------------------------------------------------------ agreement of configurations

SHARED = (  # sections and keys that both processes read
    "project",
    "group",
    "name",
    "seed",
    "deterministic",
    "algorithm.algorithm_type",
    "algorithm.repeat_times",
    "algorithm.advantage_fn",
    "model",
    "buffer.batch_size",
    "buffer.train_batch_size",
    "buffer.max_refill",
    "buffer.on_short_batch",
    "buffer.explorer_input",
    "synchronizer",
    "explorer.max_inflight_batches",
    "explorer.serve.trainer_apart",
    "explorer.rollout_model.dtype",
)
_UNSHARED = ("synchronizer.sync_timeout",)  # keys of these sections that may differ
_TASKS = "buffer.explorer_input"


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Return (key, the joining side's value, message) of each key of `SHARED` that differs."""
    differing = []
    # the training process need not name the tasks
    named = any(_at(ours, f"{_TASKS}.{key}") for key in ("taskset", "tasksets"))
    for key in SHARED if named else [k for k in SHARED if k != _TASKS]:
        for at, a, b in compare(_at(ours, key), _at(theirs, key), undotted(key)):
            if not (name := dotted(at)).startswith(_UNSHARED):
                differing.append(
                    (
                        name,
                        b,
                        f"is {b!r} here and {a!r} in the process that trains; both halves of a run "
                        f"need the same",
                    )
                )
    return differing


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
