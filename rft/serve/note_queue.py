"""Notes on their way to the store: those that come while the store is busy go to it together.

Invariant: notes are stored in the order in which they came, and `note` returns when its note is durable.
"""

from __future__ import annotations

import asyncio

from rft.types.sessions import Note, SessionStore

_TOGETHER = 64  # notes of one call


class NoteQueue:
    """One call of the store at a time."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._notes: list[tuple[Note, asyncio.Future[bool]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def note(self, note: Note) -> bool:
        """False: a session it is about does not wait any more, so nothing was stored.  Raises what the store raises."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._notes.append((note, answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="session-notes")
        return await answer

    async def _send(self) -> None:
        while self._notes:
            now, self._notes = self._notes[:_TOGETHER], self._notes[_TOGETHER:]
            try:
                stored = await self._store.note([note for note, _ in now])
            except Exception as e:  # belongs to every note of the call
                for _, answer in now:
                    if not answer.done():
                        answer.set_exception(e)
                continue
            for (_, answer), done in zip(now, stored, strict=True):
                if not answer.done():
                    answer.set_result(done)
