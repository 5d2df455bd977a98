"""The session side of the buffer: store answers and rewards of served sessions before the client
gets a response.  See `rft.types.sessions.SessionStore`.

Depends on no HTTP and no groups.  Invariant: a returned note is durable, and notes are stored in
order of arrival.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from rft.buffer.core import BufferCore
from rft.buffer.session_rows import calls, sessions, tables, to_call, to_session, write
from rft.fault_injection import fault
from rft.types.sessions import WAITING, CallStored, Note, StoredCall, StoredSession

_TOGETHER = 64  # most notes per transaction


class SessionSide(BufferCore):
    """See `rft.types.sessions.SessionStore`.  Every method names the caller's lineage and explorer."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._notes: list[tuple[Note, asyncio.Future[bool]]] = []
        self._noting: asyncio.Task[None] | None = None

    async def open_sessions(self, lineage: int, *, explorer: int = 0) -> list[StoredSession]:
        def work(tx: Connection) -> list[StoredSession]:
            tables.create_all(tx)
            s = sessions.c
            return [
                to_session(r)
                for r in tx.execute(
                    select(sessions).where(s.state.in_(WAITING)).order_by(s.created, s.id)
                )
            ]

        return await self._run_fenced(lineage, work)

    async def find_session(
        self, lineage: int, id: str, *, explorer: int = 0
    ) -> StoredSession | None:
        def work(tx: Connection) -> StoredSession | None:
            owner = select(calls.c.session).where(calls.c.id == id).scalar_subquery()
            row = tx.execute(
                select(sessions).where(sessions.c.id == func.coalesce(owner, id))
            ).one_or_none()
            if row is not None and row.state == "merged":
                row = tx.execute(select(sessions).where(sessions.c.id == row.reason)).one()
            return None if row is None else to_session(row)

        return await self._run_fenced(lineage, work)

    async def session_calls(self, lineage: int, id: str, *, explorer: int = 0) -> list[StoredCall]:
        query = select(calls).where(calls.c.session == id).order_by(calls.c.number)
        return await self._run_fenced(lineage, lambda tx: [to_call(r) for r in tx.execute(query)])

    async def note(self, lineage: int, note: Note, *, explorer: int = 0) -> bool:
        self._fence(lineage)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._notes.append((note, answer))
        if self._noting is None or self._noting.done():
            self._noting = asyncio.create_task(self._note_all(lineage), name="buffer-sessions")
        return await answer

    async def _note_all(self, lineage: int) -> None:
        """Store notes; those that arrive during a transaction share the next one.

        A full disk raises at once, because a client waits.
        """
        loop = asyncio.get_running_loop()
        while self._notes:
            now, self._notes = self._notes[:_TOGETHER], self._notes[_TOGETHER:]
            work = functools.partial(self._write_notes, lineage, [note for note, _ in now])
            try:
                done = await loop.run_in_executor(self._thread, work)
            except Exception as e:  # concerns every note of the transaction
                for _, answer in now:
                    if not answer.done():
                        answer.set_exception(e)
                continue
            for (_, answer), stored in zip(now, done, strict=True):
                if not answer.done():
                    answer.set_result(stored)

    def _write_notes(self, lineage: int, notes: Sequence[Note]) -> list[bool]:
        self._reserve.fill()

        def work(tx: Connection) -> list[bool]:
            fault("buffer.sessions.before")
            return [write(tx, note) for note in notes]

        size = sum(len(n.call.turns) for n in notes if isinstance(n, CallStored))
        stored = self._ledger.run_for(lineage, work, size=size)
        fault("buffer.sessions.after")
        return stored
