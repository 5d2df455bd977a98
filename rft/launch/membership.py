"""Which explorers belong to a run: a name, a number, a process that lives or does not, and a
configuration that agrees with the run's.

Knows neither engines nor batches.  Invariant: one living explorer of a name; it counts as gone only
when its process is.
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
END_S = 60.0  # for a process that was told to end


@dataclass(eq=False)
class Member:
    """An explorer that has joined; `number` tells it from others of its name, before and after."""

    name: str
    number: int
    # proxy of its explorer; None: the launcher watches it, and its end is that of the run
    process: Any
    groups: int = 0  # that it generates, where they are counted
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""
    watch: asyncio.Task[None] | None = None
    going: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """What `work` gives.  Raises RunFailed once the explorer had to leave."""
        async with race(work, self.gone.wait()) as (task, _):
            if not task.done():
                raise self.had_to_leave()
            result: T = task.result()
            return result

    def had_to_leave(self) -> RunFailed:
        return RunFailed(f"explorer {self.name} had to leave: {self.why}")


class Membership:
    """`on_gone(member, why)` is awaited when one is gone, `on_failure` when watching them fails;
    `waits` hears of every change.
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
        # kept, or it might be collected before it ends
        self._failing: asyncio.Future[None] | None = None

    @property
    def names(self) -> list[str]:
        return sorted(self._members)

    def get(self, name: str, number: int) -> Member:
        """Raises RunFailed for one that does not belong to the run any more."""
        self._waits.raise_failure()
        member = self._members.get(name)
        if member is None or member.number != number:
            raise RunFailed(f"explorer {name} has left the run; start it again to rejoin")
        if member.gone.is_set():
            raise member.had_to_leave()
        return member

    def is_member(self, name: str, number: int) -> bool:
        return name in self._members and self._members[name].number == number

    async def check_alone(self) -> None:
        """Raises SetupError where there is a living explorer; those that have died are let go."""
        for name in self.names:
            await self.check_name(name)

    async def check_name(self, name: str) -> None:
        """Raises SetupError where a living explorer has the name; one that has died is let go."""
        if (other := self._members.get(name)) is None:
            return
        try:
            await asyncio.wait_for(other.process.lives(None), 1.0)
        except TimeoutError:
            raise _taken(name) from None
        except RftError as e:
            await self._let_go(other, str(e))

    @contextmanager
    def joining(self, name: str) -> Iterator[None]:
        """While the name is taken by one that is about to be added."""
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

    async def leave(self, name: str, why: str) -> None:
        """A member ends, well (`why` is empty) or not."""
        member = self._members[name]
        log.info("explorer %s leaves%s", name, f": {why}" if why else "")
        if why and member.process is not None:
            self.evict(name, why)  # `_watch` sees the end of its process
            return
        if member.watch is not None:
            member.watch.cancel()
        await self._let_go(member, why)

    def evict(self, name: str, why: str) -> None:
        """The explorer has to leave: whatever it waits for ends."""
        if (member := self._members.get(name)) is not None:
            member.why = why
            member.gone.set()

    async def _watch(self, member: Member) -> None:
        """Until its process is gone."""
        async with race(member.process.lives(self._stall_timeout_s), member.gone.wait()) as (
            lives,
            _,
        ):
            if not lives.done():  # it was told to end
                await asyncio.wait({lives}, timeout=END_S)
            why = member.why or (str(lives.exception()) if lives.done() else "")
            await member.process.kill()  # where it only hangs
            log.warning("explorer %s is gone: %s", member.name, why)
            await self._let_go(member, why)

    def _watched(self, watch: asyncio.Task[None]) -> None:
        """An error in watching ends the run: members that die would no longer be noticed."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._failing = asyncio.ensure_future(self._on_failure(error))

    async def _let_go(self, member: Member, why: str) -> None:
        async with member.going:  # its watch and one that wants its name may find it dead together
            if self._members.get(member.name) is not member:
                return
            member.why = member.why or why
            member.gone.set()
            await self._on_gone(member, why)
            del self._members[member.name]
        await self._waits.changed()


def _taken(name: str) -> SetupError:
    return SetupError(
        f"an explorer named {name} has joined this run already; give this one another explorer.name"
    )


# ------------------------------------------------------------ what the processes of a run must
# agree on

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
    "explorer.rollout_model.max_model_len",
    "explorer.rollout_model.max_prompt_tokens",
)
_OWN = ("synchronizer.sync_timeout",)  # of these sections, what each reads for itself
_TASKS = "buffer.explorer_input"


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(key, the joining side's value, sentence) of each key of `SHARED` that differs."""
    found = []
    # the process that trains need not name the tasks
    named = any(_at(ours, f"{_TASKS}.{key}") for key in ("taskset", "tasksets"))
    for key in SHARED if named else [k for k in SHARED if k != _TASKS]:
        for at, a, b in compare(_at(ours, key), _at(theirs, key), undotted(key)):
            if not (name := dotted(at)).startswith(_OWN):
                found.append(
                    (
                        name,
                        b,
                        f"is {b!r} here and {a!r} in the process that trains; both halves of a run "
                        f"need the same",
                    )
                )
    return found


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
