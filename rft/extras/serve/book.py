"""All sessions that wait: opened, rewarded, joined, withdrawn, given up.  Every change is in the
store before it is here.

Depends on no HTTP and no batches.  Invariant: a session is here exactly as long as it waits in the
store; one of a single call also while that is under way, and is stored with its answer.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec
import xxhash

from rft.errors import DiskFull
from rft.explorer.service_settings import ServeRuntime
from rft.extras.serve.live_session import LiveSession
from rft.extras.serve.session_groups import SessionGroup, SessionGroups
from rft.types.completion import Score
from rft.types.ports import ChatModel
from rft.types.sessions import Explained, Merged, Rewarded, SessionStore, StoredSession
from rft.types.task import Task
from rft.workflow.base import RunContext
from rft.workflow.endpoint_sessions import hashed, new_key
from rft.workflow.endpoint_wire import ApiError

T = TypeVar("T")
log = logging.getLogger(__name__)
TASKSET = "serve"  # of the rows
WORKFLOW = "session"
_DISK_RETRY_S = 1.0


def steady_clock() -> Callable[[], float]:
    """The time of day as it is now, and from then on as seconds pass: no session ends because a
    clock is set.
    """
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


async def patient(call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`, which no client waits for: on a full disk, where it changes nothing, it
    is made again.
    """
    while True:
        try:
            return await call()
        except DiskFull as e:
            log.error("%s", e)
            await asyncio.sleep(_DISK_RETRY_S)


class SessionBook:
    """`on_open`, `on_over`: who answers for a session hears of it."""

    def __init__(
        self,
        settings: ServeRuntime,
        model: ChatModel,
        store: SessionStore,
        on_open: Callable[[LiveSession], Any],
        on_over: Callable[[LiveSession], Any],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._store = store
        self.clock = clock or steady_clock()
        self._on_open = on_open
        self.on_over = on_over
        self.sessions: dict[str, LiveSession] = {}
        # of one call that may be sent again, by client and retry key
        self._alone: dict[tuple[str, str], LiveSession] = {}
        self.groups = SessionGroups(settings.num_runs, settings.config.group_deadline)
        # a group closed, or a deadline is earlier than the ones before
        self.changed = asyncio.Event()
        # of what became of sessions, since this process began
        self.counts: Counter[str] = Counter()
        self._per_client: Counter[str] = Counter()
        self._expiries: list[tuple[float, str]] = []

    async def restore(self) -> None:
        """The sessions that waited when the run ended."""
        stored = await self._store.open_sessions()
        for s in stored:
            self._enter(s, fresh=False)
        for s in sorted(
            (s for s in stored if s.state == "rewarded"), key=lambda s: s.rewarded or 0.0
        ):
            self.groups.add(s.client, s.task_id, s.id, s.rewarded or s.created)
        self.changed.set()

    async def open(
        self, client: str, task_id: str, metadata: dict[str, Any], ttl_s: float | None = None
    ) -> LiveSession:
        """A new session.  Raises ApiError 429 where the client has too many."""
        key = new_key()
        stored = self._new_session(client, hashed(key), task_id, metadata, ttl_s)
        await self._store.note(stored)
        self.counts["opened"] += 1
        return self._enter(stored, fresh=True, key=key)

    def alone(self, client: str, retry_key: str) -> LiveSession:
        """A session for one call of a client.  The same call, sent again, has the same one.  Raises
        ApiError 429 as `open` does.
        """
        if (session := self._alone.get((client, retry_key))) is not None:
            return session
        stored = self._new_session(
            client, "", "", {"retry_key": retry_key} if retry_key else {}, None
        )
        self.counts["opened"] += 1
        return self._enter(stored, fresh=True)

    async def abandon(self, session: LiveSession) -> None:
        """A call failed.  A session of this call alone ends, whether the call reached the store or
        not.
        """
        if not session.opening or session.under_way or session.id not in self.sessions:
            return
        self._no_more_alone(session)  # its call, sent again meanwhile, opens another one
        if not await self.explain([session.id], "failed") and session.id in self.sessions:
            self.counts["failed"] += 1
            self._leave(session)

    def _new_session(
        self,
        client: str,
        key_hash: str,
        task_id: str,
        metadata: dict[str, Any],
        ttl_s: float | None,
    ) -> StoredSession:
        if self._per_client[client] >= self._settings.config.max_sessions:
            reason = f"{self._settings.config.max_sessions} sessions of this client wait"
            raise ApiError(429, reason, code="too_many_sessions", retry_s=10)
        now = self.clock()
        ttl_s = (
            self._settings.config.session_ttl
            if ttl_s is None
            else min(ttl_s, self._settings.config.session_ttl)
        )
        id = f"s{secrets.token_hex(12)}"
        expires = now + ttl_s
        return StoredSession(
            id=id,
            client=client,
            key_hash=key_hash,
            task_id=task_id,
            metadata=metadata,
            created=now,
            expires=expires,
        )

    def _enter(self, stored: StoredSession, *, fresh: bool, key: str = "") -> LiveSession:
        task = task_of(self._settings, stored.task_id)
        ctx = RunContext(self._model, task, run=0, request_id=stored.id)
        session = LiveSession(stored, ctx, task, self._store, fresh=fresh, key=key)
        self.sessions[stored.id] = session
        self._per_client[stored.client] += 1
        if (of_call := _of_call(stored)) is not None:
            self._alone[of_call] = session
        heapq.heappush(self._expiries, (stored.expires, stored.id))
        if self._expiries[0][1] == stored.id:
            self.changed.set()
        self._on_open(session)
        return session

    async def reward(
        self, session: LiveSession, score: Score, call: str | None, final: bool
    ) -> str:
        """ok | duplicate | replaced.  Raises ApiError where there is nothing to reward."""
        await session.load()
        async with session.scoring:
            return await self._rewarded(session, score, call, final)

    async def _rewarded(
        self, session: LiveSession, score: Score, call: str | None, final: bool
    ) -> str:
        if session.under_way:
            raise ApiError(
                409,
                "calls of this session are under way; wait for their answers",
                code="calls_under_way",
                retry_s=1.0,
            )
        if call is not None and call not in session.calls:
            raise ApiError(
                404,
                f"message {call!r} is none of this session's",
                param="message",
                code="unknown_message",
            )
        if not session.calls and (score.value is None or score.value > 0):
            reason = (
                "the session has no answer that could have earned that; one whose first call "
                "failed takes a reward of 0 or less"
            )
            raise ApiError(400, reason, code="no_calls")
        if call is not None and session.calls[call].answers > 1:
            raise ApiError(
                400,
                "this message has several answers (n); reward the session",
                param="message",
                code="several_answers",
            )
        before = session.stored.score if call is None else session.scores.get(call)
        completes = (final or call is None) and session.stored.state == "open"
        if before == score and not completes:
            return "duplicate"
        if session.forming:
            raise over("rewarded", "its group is being stored")
        now = self.clock()
        note = Rewarded(session=session.id, score=score, call=call, at=now if completes else None)
        if not await self._store.note(note):
            raise over("explained", "its group was formed, or it was given up")
        if call is None:
            session.stored = msgspec.structs.replace(session.stored, score=score)
        else:
            session.scores[call] = score
        if completes:
            session.stored = msgspec.structs.replace(session.stored, state="rewarded", rewarded=now)
            self.groups.add(session.stored.client, session.stored.task_id, session.id, now)
            self.counts["rewarded"] += 1
            self.changed.set()
        return "ok" if before is None else "replaced"

    async def join(self, session: LiveSession, joined: list[LiveSession], task_id: str) -> None:
        """The calls of `others` become those of `session`, of task `task_id`."""
        if not await self._store.note(Merged(session.id, tuple(s.id for s in joined), task_id)):
            raise over("explained", "one of these messages was rewarded or given up already")
        await session.load()
        session.stored = msgspec.structs.replace(session.stored, task_id=task_id)
        for other in joined:
            await session.take(other)
            self._leave(other)

    async def explain(self, ids: list[str], reason: str) -> bool:
        """These sessions are never trained.  False: one of them did not wait any more, and is what
        it was.
        """
        recorded = not ids or await self._store.note(Explained(tuple(ids), reason))
        for id in ids if recorded else [id for id in ids if await self._is_explained(id)]:
            self.groups.remove(id)
            if (session := self.sessions.get(id)) is not None:
                self.counts[reason] += 1
                self._leave(session)
        return recorded

    async def _is_explained(self, id: str) -> bool:
        stored = await self._store.find_session(id)
        return stored is not None and stored.state == "explained"

    def accepted(self, ids: list[str]) -> None:
        """The store has them as rows."""
        self.counts["accepted"] += len(ids)
        for id in ids:
            self._leave(self.sessions[id])

    def _leave(self, session: LiveSession) -> None:
        del self.sessions[session.id]
        self._per_client[session.stored.client] -= 1
        self._no_more_alone(session)
        self.on_over(session)

    def _no_more_alone(self, session: LiveSession) -> None:
        of_call = _of_call(session.stored)
        if of_call is not None and self._alone.get(of_call) is session:
            del self._alone[of_call]

    @property
    def waiting(self) -> str:
        """For people: sessions that wait for a reward, and those that wait for others of their
        task.
        """
        rewarded = sum(s.stored.state == "rewarded" for s in self.sessions.values())
        return (
            f"{len(self.sessions) - rewarded} sessions without a reward, {rewarded} rewarded "
            f"ones in groups that are not full"
        )

    # ------------------------------------------------------------ deadlines

    async def next_group(self) -> SessionGroup:
        """Waits for a closed group; meanwhile sessions and groups whose time is over end."""
        while True:
            self.changed.clear()
            await self._end_overdue()
            if (group := self.groups.take()) is not None:
                return group
            times = [t for t in (self.groups.next_deadline, self._next_expiry()) if t is not None]
            try:
                async with asyncio.timeout(max(0.0, min(times) - self.clock()) if times else None):
                    await self.changed.wait()
            except TimeoutError:
                continue

    async def _end_overdue(self) -> None:
        now = self.clock()
        await patient(partial(self.explain, self.groups.expire(now), "too_few"))
        overdue = [self.sessions[id] for id in self._overdue(now)]
        await patient(partial(self.explain, [s.id for s in overdue if not s.opening], "unrewarded"))
        for session in overdue:
            await self.abandon(session)
            if session.id in self.sessions:  # its call was sent again meanwhile
                heapq.heappush(self._expiries, (now + 1.0, session.id))

    def _overdue(self, now: float) -> Iterator[str]:
        while self._expiries and self._expiries[0][0] <= now:
            _, id = heapq.heappop(self._expiries)
            session = self.sessions.get(id)
            if session is None or session.stored.state != "open":
                continue
            # an answer that is being written may still be rewarded
            if session.under_way or session.scoring.locked():
                heapq.heappush(self._expiries, (now + 1.0, id))
                return
            yield id

    def _next_expiry(self) -> float | None:
        while self._expiries and self._expiries[0][1] not in self.sessions:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    async def find(self, id: str) -> LiveSession | StoredSession | None:
        """A session by its id or by that of one of its calls; one that does not wait any more as it
        is stored.
        """
        if (
            session := self.sessions.get(id) or self.sessions.get(id.rpartition("-")[0])
        ) is not None:
            return session
        stored = await self._store.find_session(id)
        return None if stored is None else self.sessions.get(stored.id, stored)


def _of_call(stored: StoredSession) -> tuple[str, str] | None:
    """Client and retry key of a session of one call that may be sent again."""
    retry_key = "" if stored.key_hash else stored.metadata.get("retry_key", "")
    return (stored.client, retry_key) if retry_key else None


def task_of(settings: ServeRuntime, task_id: str) -> Task:
    """What the rows of a session say of its task."""
    index = xxhash.xxh32_intdigest(task_id.encode()) & 0x7FFFFFFF
    row = {"task_id": task_id}
    return Task(
        taskset=TASKSET,
        index=index,
        row=row,
        workflow=WORKFLOW,
        sampling=settings.sampling,
        num_runs=settings.num_runs,
    )


def over(state: str, reason: str) -> ApiError:
    return ApiError(409, f"the session is over ({state}): {reason}", code="session_over")
