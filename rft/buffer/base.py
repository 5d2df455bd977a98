"""The records that the buffer's parts exchange, and the base class of payload storages.

A storage keeps blocks of bytes and nothing else: ids, states, uses and every column a person
filters by are the ledger's. The one invariant: a locator that the ledger committed can be read back
unchanged for as long as the storage promises durability.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from sqlalchemy import Connection

from rft.buffer.settings import BufferSettings
from rft.errors import ConfigError
from rft.plugins import REGISTRY, Plugin, checked_args, derived, kind

storage = kind("storage")
STORAGE_KEY = "buffer.trainer_input.experience_buffer"
REMEDY = (  # of payload that is missing or damaged
    "Restore it from a copy and resume, or resume with "
    "buffer.trainer_input.experience_buffer.on_damaged_payload: explain "
    "to leave these groups out (counted as payload_damaged)"
)


class Storage:
    """Payload of experiences, one block (an encoded frame, see `rft.types.block`) per group.
    Subclass it; `put` and `get` are a must.

    All methods are called on the buffer's one worker thread.  `connection` is the ledger's open
    transaction: a storage in the same database writes into it, the others ignore it and must be as
    durable as asked when `put` returns. `__init__` takes the settings and, as keyword arguments,
    the `storage_args` that its pydantic model `Args` has checked.  It touches nothing: an audit
    makes one and calls `get` without `open`.
    """

    durable: bool = True  # whether blocks survive the process

    def __init__(self, settings: BufferSettings) -> None: ...

    def open(self) -> None:
        """Get ready to `put`."""

    def put(self, blocks: Sequence[bytes], connection: Connection) -> list[str]:
        """Store blocks; one locator each."""
        raise NotImplementedError

    def get(self, locators: Sequence[str], connection: Connection) -> list[bytes]:
        """Blocks in the order asked for.  Raises PayloadDamaged, naming where it should be, when
        one is missing or damaged.
        """
        raise NotImplementedError

    def drop(self, locators: Sequence[str], connection: Connection) -> None:
        """These blocks will not be asked for again."""

    def close(self) -> None:
        """Let go of everything.  May be called twice, and without `open`."""


# environment: references, with commas between, that a ledger may name as its storage
TRUSTED = "RFT_STORAGE_CODE"
_CONFIGURED: set[str] = set()


def make_storage(settings: BufferSettings) -> Storage:
    """The payload storage that the settings name.  Raises PluginError for an unknown one,
    ConfigError for wrong arguments.
    """
    plugin = _storage_plugin(settings.storage_type)
    if not inspect.isclass(plugin.obj):
        raise ConfigError(
            f"storage {plugin.name!r} must be a class X(Storage) of rft.buffer.base",
            key=f"{STORAGE_KEY}.storage_type",
        )
    args = checked_args(plugin, settings.storage_args, key=f"{STORAGE_KEY}.storage_args")
    _CONFIGURED.add(storage_reference(settings.storage_type))
    try:
        return derived(plugin.obj, Storage)(settings, **args)
    except TypeError as e:
        raise ConfigError(
            f"storage {plugin.name!r} cannot be made: {e}; its __init__ takes the settings and "
            f"each field of its Args by name",
            key=f"{STORAGE_KEY}.storage_type",
        ) from e


def stored_by(about: Mapping[str, str], name: str, folder: Path) -> Storage:
    """The storage of a ledger that says `about` itself (its table `meta`), for reading.

    A ledger is untrusted input: code that it names is run only if a configuration of this process,
    or TRUSTED, names it too.  Raises ConfigError.
    """
    kind = about.get("storage", about["storage_type"])
    if ":" in kind and kind not in _CONFIGURED | set(os.environ.get(TRUSTED, "").split(",")):
        raise ConfigError(
            f"the ledger of {folder.parent} names code as its storage, which is not run by itself; "
            f"if it is yours, set {TRUSTED}={kind}",
            key="RUN",
            given=kind,
        )
    try:
        args = json.loads(about.get("storage_args", "{}"))
        path = about["storage_path"] or None
    except (ValueError, KeyError) as e:
        raise ConfigError(
            f"the ledger of {folder.parent} does not say how its payload is stored: {e}", key="RUN"
        ) from None
    return make_storage(
        BufferSettings(
            name=name, folder=folder, storage_type=kind, storage_args=args, storage_path=path
        )
    )


def storage_reference(name: str) -> str:
    """A name by which another process, in any folder, finds the storage `name` without its
    configuration.
    """
    plugin = _storage_plugin(name)
    if not plugin.source.endswith(".py") or Path(plugin.source).resolve().is_relative_to(
        Path(__file__).parent
    ):
        return name
    return f"{Path(plugin.source).expanduser().resolve()}:{plugin.obj.__name__}"


def _storage_plugin(name: str) -> Plugin:
    REGISTRY.scan_package("rft.buffer.storage")
    return REGISTRY.get("storage", name)


class LineageStart(Struct, frozen=True, kw_only=True):
    """What a trainer learns when it takes the buffer over."""

    lineage: int
    orphaned: int  # rows written by weights that the loaded manifest does not descend from
    available: int  # rows ready to be leased
    cursor: int  # explore batch to continue with


class Audit(Struct, frozen=True, kw_only=True):
    """Where every acknowledged experience is: acked = used + leased + available + waiting +
    discarded.

    Answers of sessions that are served count one by one as long as they wait for a reward
    (`waiting`), and when they never become rows (`discarded`: unrewarded, withdrawn, ...); those of
    an accepted session are the rows of its group.

    Example: Audit(acked=10, used=4, leased=2, available=3, discarded={"failed": 1}, ...).balanced
    is True
    """

    acked: int  # by the groups' headers, counted when they were acknowledged
    used: int  # rows with `max_uses` counted uses
    leased: int
    available: int
    # by reason; as JSON and in the ledger it is called explained
    discarded: dict[str, int] = field(name="explained")
    used_twice: int  # rows with more than `max_uses` counted uses; must be 0
    num_uses: int  # counted uses
    digest: str  # of the counted uses, see `rft.buffer.derived_state.digest`
    version: str = ""  # "lineage:step" of the weights that the uses are counted for
    # "lineage:step" of the newest one, with which a restart begins; "" = there is none
    checkpoint: str = ""
    # rows by what they are then: used, available, orphaned
    after_restart: dict[str, int] = field(default_factory=dict)
    manifests: int = 0  # how many checkpoint manifests were compared
    problems: tuple[str, ...] = field(default_factory=tuple)
    waiting: int = 0  # answers of sessions that may still be rewarded

    @property
    def balanced(self) -> bool:
        return self.acked == self.used + self.leased + self.available + self.waiting + sum(
            self.discarded.values()
        )

    @property
    def ok(self) -> bool:
        return self.balanced and not self.used_twice and not self.problems
