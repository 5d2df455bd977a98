"""What the buffer keeps of sessions that are served: who asked, what was answered, what it was
worth, and what became of it.

    open ── reward ──> rewarded ── its group is appended ──> accepted
      └─ ttl, withdrawn ─┴─ no partner, weights, refused ──> explained(reason)

A call's payload are its turns, packed here; the buffer does not look into it.  Invariant: the
states open and rewarded wait, the others are final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Struct, field

from rft.types.completion import Score, Turn

SessionState = Literal["open", "rewarded", "accepted", "explained", "merged"]
WAITING: tuple[SessionState, ...] = ("open", "rewarded")


class StoredSession(Struct, frozen=True, kw_only=True):
    """One session.  Times are seconds since the epoch.  `merged`: its calls belong to the session
    `reason` since a feedback joined them.
    """

    id: str
    client: str
    key_hash: str  # SHA-256 of its key, as hex; empty: it has no key
    task_id: str
    metadata: dict[str, Any] = field(default_factory=dict)
    created: float
    expires: float
    state: SessionState = "open"
    reason: str = ""
    score: Score | None = None  # of the whole run
    rewarded: float | None = None  # when


class StoredCall(Struct, frozen=True, kw_only=True):
    """One answered request.  `id` is that of the answer's message, without its prefix."""

    id: str
    number: int  # in its session
    retry_key: str = ""  # the client's Idempotency-Key
    asked: str = ""  # hash of the request, where it has such a key
    created: float
    answers: int  # completions
    turns: bytes = b""  # see `pack_turns`
    score: Score | None = None  # of this call alone


class CallStored(Struct, frozen=True):
    """`opens`: the session, where it is of this one call and so is stored with it."""

    session: str
    call: StoredCall
    opens: StoredSession | None = None


class Rewarded(Struct, frozen=True, kw_only=True):
    """A reward of the session, or of its call `call`.  Without a `score` what its calls got is all:
    the session is complete.
    """

    session: str
    score: Score | None
    call: str | None = None
    at: float | None = None  # the session is complete since then; None: it goes on


class Merged(Struct, frozen=True):
    """The calls of `others` are the session's."""

    session: str
    others: tuple[str, ...]
    task_id: str


class Explained(Struct, frozen=True):
    sessions: tuple[str, ...]
    reason: str


Note = StoredSession | CallStored | Rewarded | Merged | Explained


class SessionStore(Protocol):
    """The service's view of the buffer, beside `BufferWriter`."""

    async def open_sessions(self) -> list[StoredSession]:
        """All that wait, oldest first."""
        ...

    async def note(self, note: Note) -> bool:
        """Store it; durable on return.  False: a session it is about does not wait any more, so
        nothing was stored.

        Raises DiskFull at once, Fenced.
        """
        ...

    async def find_session(self, id: str) -> StoredSession | None:
        """In whatever state; by its id, or by that of one of its calls."""
        ...

    async def session_calls(self, id: str) -> list[StoredCall]:
        """In order, with their payload."""
        ...


def pack_turns(turns: Sequence[Turn]) -> bytes:
    return _ENCODER.encode(turns)


def unpack_turns(packed: bytes) -> list[Turn]:
    """Raises msgspec.MsgspecError for damaged bytes."""
    return _DECODER.decode(packed)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot be stored")


def _made(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    raise TypeError(f"{kind} is not stored")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(list[Turn], dec_hook=_made)
