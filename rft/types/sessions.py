"""Sessions of a service, as the buffer stores them: client, calls, reward and outcome.

    open ── reward ──> rewarded ── its group is appended ──> accepted
      └─ ttl, withdrawn ─┴─ no partner, weights, refused ──> explained(reason)

A call's payload are its packed turns, opaque to the buffer.  Invariant: open and rewarded sessions
wait, other states are final.
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
    """One session.

    Times are seconds since the epoch.  State `merged`: a feedback moved its calls to the session
    named by `reason`.
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
    """One answered request.

    `id` is that of the answer's message, without its prefix.
    """

    id: str
    number: int  # in its session
    retry_key: str = ""  # the client's Idempotency-Key
    asked: str = ""  # hash of the request, where it has such a key
    created: float
    answers: int  # completions
    turns: bytes = b""  # see `pack_turns`
    score: Score | None = None  # of this call alone


class CallStored(Struct, frozen=True):
    """`opens`: a new session to store together with the call."""

    session: str
    call: StoredCall
    opens: StoredSession | None = None


class Rewarded(Struct, frozen=True, kw_only=True):
    """A reward of the session, or of its call `call`.

    No `score`: its calls' rewards are all.
    """

    session: str
    score: Score | None
    call: str | None = None
    at: float | None = None  # time of its completion; None: it is still open


class Merged(Struct, frozen=True):
    """Moves the calls of `sources` to the session."""

    session: str
    sources: tuple[str, ...]
    task_id: str


class Explained(Struct, frozen=True):
    sessions: tuple[str, ...]
    reason: str


Note = StoredSession | CallStored | Rewarded | Merged | Explained


class SessionStore(Protocol):
    """The service's view of the buffer, in addition to `BufferWriter`."""

    async def open_sessions(self) -> list[StoredSession]:
        """Return waiting sessions, oldest first."""
        ...

    async def note(self, note: Note) -> bool:
        """Store the note; durable on return.

        Returns False, storing nothing, if one of its sessions is no longer waiting.

        Raises DiskFull (without waiting for space) and Fenced.
        """
        ...

    async def find_session(self, id: str) -> StoredSession | None:
        """Find a session in any state by its id, or by the id of one of its calls."""
        ...

    async def session_calls(self, id: str) -> list[StoredCall]:
        """Return the calls of a session in order, with their payload."""
        ...


def pack_turns(turns: Sequence[Turn]) -> bytes:
    return _ENCODER.encode(turns)


def unpack_turns(packed: bytes) -> list[Turn]:
    """Decode turns.  Raises msgspec.MsgspecError for damaged bytes."""
    return _DECODER.decode(packed)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot be stored")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    raise TypeError(f"{kind} is not stored")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER = msgspec.msgpack.Decoder(list[Turn], dec_hook=_decode_array)
