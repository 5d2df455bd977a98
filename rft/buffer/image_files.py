"""Image files of rows: each is one block of the payload storage, named by its sha256.

The ledger notes which groups show an image (table `image_uses`), so that a file is stored once and
freed with the last group that shows it.  Independent of image formats.  Invariant: a group's images are stored
before or with its rows, in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

from sqlalchemy import Connection, select

from rft.buffer.schema import ask, image_uses, images, parts, put_many
from rft.buffer.storage.base import REMEDY, Storage
from rft.errors import BufferFailed, PayloadDamaged

_STORED = "SELECT sha256 FROM images WHERE sha256 IN (??)"
_SHOWN = (
    "SELECT i.sha256, i.locator FROM images i WHERE i.sha256 IN "
    "(SELECT u.sha256 FROM image_uses u WHERE u.group_id IN (??)) ORDER BY i.sha256"
)
_NAMES = "SELECT DISTINCT sha256 FROM image_uses WHERE group_id IN (??)"
_UNUSED = (
    "SELECT i.sha256, i.locator FROM images i WHERE NOT EXISTS "
    "(SELECT 1 FROM image_uses u WHERE u.sha256 = i.sha256) AND i.sha256 IN (??)"
)
_ALL = "SELECT i.sha256, i.locator, i.num_bytes, (SELECT count(*) FROM image_uses u WHERE u.sha256 = i.sha256) FROM images i"


def any_stored(tx: Connection) -> bool:
    return ask(tx, "SELECT 1 FROM images LIMIT 1").first() is not None


def stored(tx: Connection, names: Iterable[str]) -> set[str]:
    """Return the names whose files are stored."""
    return {name for part in parts(sorted(names)) for (name,) in ask(tx, _STORED, many=part).all()}


def note(
    tx: Connection, new: Sequence[tuple[str, str, int]], shown: Iterable[tuple[str, str]]
) -> None:
    """Note new files (name, locator, bytes), and the images that groups show (name, group)."""
    put_many(tx, images, list(new))
    put_many(tx, image_uses, sorted(set(shown)), again="ON CONFLICT DO NOTHING")


def files_of(tx: Connection, storage: Storage, groups: Sequence[str]) -> dict[str, bytes]:
    """Return the files of the images that `groups` show.  Raises PayloadDamaged."""
    rows = [row for part in parts(groups) for row in ask(tx, _SHOWN, many=part).all()]
    return _read(tx, storage, dict(tuple(row) for row in rows))


def _read(tx: Connection, storage: Storage, locators: dict[str, str]) -> dict[str, bytes]:
    files = dict(zip(locators, storage.get(list(locators.values()), tx), strict=True))
    for name, data in files.items():
        if sha256(data).hexdigest() != name:
            raise PayloadDamaged(
                f"payload {locators[name]} is not image {name} as it was stored. {REMEDY}"
            )
    return files


def file_of(tx: Connection, storage: Storage, name: str) -> bytes | None:
    """Return one file; None if no row shows it.  Raises PayloadDamaged."""
    row = tx.execute(select(images.c.locator).where(images.c.sha256 == name)).one_or_none()
    return None if row is None else _read(tx, storage, {name: row.locator})[name]


def release(tx: Connection, groups: Sequence[str]) -> list[str]:
    """Forget that `groups` show images; return the locators of files that no group shows now."""
    names: set[str] = set()
    for part in parts(groups):
        names |= {name for (name,) in ask(tx, _NAMES, many=part).all()}
        ask(tx, "DELETE FROM image_uses WHERE group_id IN (??)", many=part)
    unused = [row for part in parts(sorted(names)) for row in ask(tx, _UNUSED, many=part).all()]
    for part in parts([name for name, _ in unused]):
        ask(tx, "DELETE FROM images WHERE sha256 IN (??)", many=part)
    return [locator for _, locator in unused]


def keep_only(tx: Connection, groups: Iterable[str]) -> list[str]:
    """`release` all groups except these."""
    every = {group for (group,) in ask(tx, "SELECT DISTINCT group_id FROM image_uses").all()}
    return release(tx, sorted(every - set(groups)))


def problems(tx: Connection, storage: Storage) -> list[str]:
    """Return a problem for each file that is damaged, or that no group shows."""
    texts = []
    for name, locator, num_bytes, uses in ask(tx, _ALL).all():
        try:
            (data,) = storage.get([locator], tx)
        except BufferFailed as error:
            texts.append(f"image {name}: {error}")
            continue
        if len(data) != num_bytes or sha256(data).hexdigest() != name:
            texts.append(f"image {name}: payload {locator} is not the file as it was stored")
        if not uses:
            texts.append(f"image {name}: no group shows it")
    return texts
