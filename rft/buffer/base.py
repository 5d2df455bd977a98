"""What the buffer's parts say to each other, and the seam for payload storages.

A storage keeps blocks of bytes and nothing else: ids, states, uses and every column a person filters by are the ledger's.
The one invariant: a locator that the ledger committed can be read back unchanged for as long as the storage promises durability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct, field
from sqlalchemy import Connection

from rft.buffer.settings import BufferSettings
from rft.plugins import kind

storage = kind("storage")
REMEDY = (  # of payload that is missing or damaged
    "Restore it from a copy and resume, or resume with buffer.trainer_input.experience_buffer.on_damaged_payload: explain "
    "to leave these groups out (counted as payload_damaged)"
)


class Storage(Protocol):
    """Payload of experiences, one block (an encoded frame, see `rft.types.block`) per group.

    Five methods; all are called on the buffer's one worker thread.  `connection` is the ledger's open transaction: a storage in
    the same database writes into it, the others ignore it and must be as durable as asked when `put` returns.
    `__init__` takes the settings and touches nothing, so that an audit can `get` without `open`.
    """

    durable: bool  # whether blocks survive the process

    def __init__(self, settings: BufferSettings) -> None: ...

    def open(self) -> None:
        """Get ready to `put`."""
        ...

    def put(self, blocks: Sequence[bytes], connection: Connection) -> list[str]:
        """Store blocks; one locator each."""
        ...

    def get(self, locators: Sequence[str], connection: Connection) -> list[bytes]:
        """Blocks in the order asked for.  Raises PayloadDamaged, naming where it should be, when one is missing or damaged."""
        ...

    def drop(self, locators: Sequence[str], connection: Connection) -> None:
        """These blocks will not be asked for again."""
        ...

    def close(self) -> None: ...


class LineageStart(Struct, frozen=True, kw_only=True):
    """What a trainer learns when it takes the buffer over."""

    lineage: int
    orphaned: int  # rows written by weights that the loaded manifest does not descend from
    available: int  # rows ready to be leased
    cursor: int  # explore batch to go on with


class Audit(Struct, frozen=True, kw_only=True):
    """Where every acknowledged experience is: acked = used + leased + available + explained.

    Example: Audit(acked=10, used=4, leased=2, available=3, explained={"failed": 1}, ...).balanced is True
    """

    acked: int  # by the groups' headers, counted when they were acknowledged
    used: int  # rows with `max_uses` counted uses
    leased: int
    available: int
    explained: dict[str, int]  # by reason
    used_twice: int  # rows with more than `max_uses` counted uses; must be 0
    num_uses: int  # counted uses
    digest: str  # of the counted uses, see `rft.buffer.ledger.digest`
    version: str = ""  # "lineage:step" that the uses are counted for; "" = no checkpoint
    manifests: int = 0  # how many checkpoint manifests were compared
    problems: tuple[str, ...] = field(default_factory=tuple)

    @property
    def balanced(self) -> bool:
        return self.acked == self.used + self.leased + self.available + sum(self.explained.values())

    @property
    def ok(self) -> bool:
        return self.balanced and not self.used_twice and not self.problems
