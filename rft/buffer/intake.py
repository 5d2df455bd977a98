"""Turn a frame into rows of the ledger: decode it, refuse invalid experiences, fill the columns.

Does not know which experiences are stored.  Invariant: an accepted group can be decoded again, has
one id, and was written by versions that the caller names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from hashlib import sha256
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import xxhash

from rft.buffer.row_selectors import ReadyRow
from rft.buffer.settings import BufferSettings
from rft.errors import Fenced, FrameRejected
from rft.types.block import UNREADABLE, Content, decode_with_contents
from rft.types.experience import Experience
from rft.types.ids import MAX_REWARD, GroupId, Version
from rft.types.ports import NO_IMAGES

Writers = Mapping[int, int]  # lineage -> newest step whose rows are accepted
MAX_INTEGER = 2**31 - 1  # largest value of the ledger's integer columns


class IncomingGroup(msgspec.Struct, frozen=True):
    """A group, ready to be stored."""

    id: str
    numbers: GroupId
    accepted: bool
    reason: str
    content_hash: str
    created: float
    rows: list[tuple[Any, ...]]  # of table experiences
    texts: list[tuple[str, str, str]]  # of table texts
    ready: list[ReadyRow]  # trainable rows, by id
    frame: bytes
    shown: frozenset[str] = frozenset()  # names of the images in the rows
    images: Mapping[str, bytes] = NO_IMAGES  # files of them

    @property
    def num_bytes(self) -> int:
        return len(self.frame) + sum(map(len, self.images.values()))

    @property
    def key(self) -> tuple[int, int]:
        """(batch, explorer)"""
        return self.numbers.batch, self.numbers.explorer

    def header(self, locator: str) -> tuple[Any, ...]:
        """Return the group's row of table groups."""
        n = self.numbers
        return (
            self.id,
            n.lineage,
            n.explorer,
            n.batch,
            n.task,
            self.accepted,
            self.reason,
            len(self.rows),
            len(self.ready),
            locator,
            len(self.frame),
            self.content_hash,
            self.created,
            True,
        )


def parse_group(
    frame: bytes,
    settings: BufferSettings,
    lineage: int,
    writers: Writers,
    *,
    accepted: bool,
    reason: str,
    images: Mapping[str, bytes] = NO_IMAGES,
) -> IncomingGroup:
    """Decode and check a frame, and the files of its `images`.

    Raises FrameRejected("reason: detail") with a fixed set of reasons, which are counted; Fenced
    for another lineage.
    """
    if not accepted and not reason:
        raise FrameRejected("no_reason: a group that is not accepted needs the reason")
    rows, contents = _decode(frame)
    if not rows:
        raise FrameRejected("empty: a group has at least one row; failed runs are header rows")
    group = rows[0].group
    _check_group(group, rows)
    if group.lineage != lineage:
        raise Fenced(
            f"group {group} is of lineage {group.lineage}, but lineage {lineage} owns the buffer"
        )
    for row in rows:
        _check_versions(row, writers)
        _check_numbers(row, settings.vocab_size)
    now = time.time()
    group_reason = clean(reason)
    values = []
    texts = []
    ready = []
    lines = []
    for position, (row, content) in enumerate(zip(rows, contents, strict=True)):
        if content.size > settings.max_row_bytes:
            raise FrameRejected(
                f"too_large: {row.id} has {content.size} bytes, at most {settings.max_row_bytes}"
            )
        row_id = str(row.id)
        dropped = _dropped(row) if accepted else group_reason
        oldest = row.oldest_version
        values.append(
            _values(row, row_id, str(group), position, content.hash, now, dropped, oldest)
        )
        texts.append((row_id, clean(row.prompt_text), clean(row.response_text)))
        lines.append(f"{row_id}@{content.hash}")
        if dropped is None:
            ready.append(
                ReadyRow(row_id, position, oldest.step if oldest else None, reward=row.reward)
            )
    return IncomingGroup(
        id=str(group),
        numbers=group,
        accepted=accepted,
        reason="" if accepted else group_reason,
        content_hash=xxhash.xxh3_128_hexdigest("\n".join(lines).encode()),
        created=now,
        rows=values,
        texts=texts,
        ready=sorted(ready, key=attrgetter("id")),
        frame=frame,
        shown=frozenset(place.sha256 for row in rows for place in row.images),
        images=_checked_images(images),
    )


def _checked_images(images: Mapping[str, bytes]) -> Mapping[str, bytes]:
    for name, data in images.items():
        if sha256(data).hexdigest() != name:
            raise FrameRejected(f"invalid_image: a file of {len(data)} bytes is not image {name}")
    return images


def batch_of(frame: bytes) -> int | None:
    """Return the explore batch of a frame's group; None if it cannot be decoded."""
    try:
        rows, _ = _decode(frame)
    except FrameRejected:
        return None
    return rows[0].id.batch if rows else None


def _decode(frame: bytes) -> tuple[list[Experience], list[Content]]:
    try:
        return decode_with_contents(frame)
    except msgspec.ValidationError as e:  # the message begins with the field
        raise FrameRejected(f"invalid_{_field(str(e))}: {e}") from e
    except UNREADABLE as e:
        raise FrameRejected(f"damaged: {type(e).__name__}: {e}") from e


def _field(message: str) -> str:
    """Return the field of a validation error: "logprobs: not finite" or "Expected ... - at
    `$.reward`".
    """
    path = re.search(r"at `\$\.(\w+)", message)
    field = path[1] if path else message.split(":")[0]
    return field if field.isidentifier() else "row"


def _check_group(group: GroupId, rows: list[Experience]) -> None:
    first = rows[0]
    for row in rows:
        numbers = (
            row.id.explorer,
            row.id.batch,
            row.id.task,
            row.id.run,
            row.id.attempt,
            row.id.step,
        )
        if min(numbers) < 0 or max(numbers) > MAX_INTEGER:
            raise FrameRejected(
                f"invalid_id: {row.id} has a number that is negative or above {MAX_INTEGER}"
            )
        if not 0 <= row.task_index <= MAX_INTEGER:
            raise FrameRejected(
                f"invalid_task_index: {row.id} is of row {row.task_index}; rows count from 0 to "
                f"{MAX_INTEGER}"
            )
        if row.group != group:
            raise FrameRejected(
                f"mixed_groups: {row.id} is not of group {group}; a frame holds one group"
            )
        if (row.taskset, row.task_index) != (first.taskset, first.task_index):
            raise FrameRejected(
                f"mixed_tasks: {row.id} is of {row.taskset}[{row.task_index}], not "
                f"{first.taskset}[{first.task_index}]"
            )
    if len({row.id for row in rows}) != len(rows):
        raise FrameRejected(f"duplicate_ids: group {group} holds an experience id twice")


def _check_numbers(row: Experience, vocab_size: int | None) -> None:
    if vocab_size is not None and row.num_tokens:
        largest = int(np.maximum.reduce(row.tokens))
        if largest >= vocab_size:
            raise FrameRejected(
                f"invalid_tokens: {row.id} has token {largest}, and the model knows {vocab_size}"
            )
    if row.reward is not None and abs(row.reward) > MAX_REWARD:
        raise FrameRejected(
            f"invalid_reward: {row.id} has reward {row.reward:g}, at most {MAX_REWARD:g} in size"
        )


def _check_versions(row: Experience, writers: Writers) -> None:
    for span in row.version_spans:
        newest = writers.get(span.version.lineage)
        if newest is None:
            raise FrameRejected(
                f"unknown_version: {row.id} was written by {span.version}, of a lineage this run "
                f"does not descend from"
            )
        if span.version.step > newest:
            raise FrameRejected(
                f"future_version: {row.id} was written by {span.version}, but step {newest} is the "
                f"newest of its lineage"
            )


def clean(value: str) -> str:
    """Replace NUL characters, which PostgreSQL cannot store.  The payload keeps the original text."""
    return value.replace("\0", "\ufffd") if "\0" in value else value


def _values(
    row: Experience,
    name: str,
    group: str,
    position: int,
    hash: str,
    now: float,
    dropped: str | None,
    oldest: Version | None,
) -> tuple[Any, ...]:
    """Return a row of table experiences, in column order."""
    id = row.id
    newest = row.newest_version
    spans = [(s.version.lineage, s.version.step, s.start, s.end) for s in row.version_spans]
    return (
        *(name, group, position),
        *(id.lineage, id.explorer, id.batch, id.task, id.run, id.attempt, id.step),
        *(clean(row.taskset), row.task_index, clean(row.workflow)),
        *((oldest.lineage, oldest.step) if oldest else (None, None)),
        *((newest.lineage, newest.step) if newest else (None, None)),
        *(row.reward, row.credit, _json_sorted(row.reward_parts).decode()),
        *(len(row.tokens), row.num_response_tokens),
        *(row.status, clean(row.reason), clean(row.finish_reason)),
        *(row.temperature, row.is_expert, row.clipped_logprobs, hash),
        *(now, dropped),
        *_sampling_columns(row),
        *(row.has_logprobs, _json(spans).decode()),
        *(("available", None) if dropped is None else ("explained", dropped)),
    )


def _sampling_columns(row: Experience) -> tuple[Any, ...]:
    """Return num_turns, and top_p, top_k, min_p, seed, logprob_mode, engine of the first call."""
    if not row.sampling:
        return (0, None, None, None, None, None, None)
    first = row.sampling[0]
    s = first.sampling
    return (
        *(len(row.sampling), s.top_p, s.top_k, s.min_p, s.seed),
        *(first.logprob_mode, clean(first.engine)),
    )


_json = msgspec.json.Encoder().encode
_json_sorted = msgspec.json.Encoder(order="sorted").encode


def _dropped(row: Experience) -> str | None:
    """Return why a row of an accepted group can never be trained, or None."""
    if row.status == "failed":
        return "failed"
    if row.reason:  # set by the operator that dropped the row
        return "filtered"
    if row.reward is None:
        return "unscored"
    return None if row.trainable else "untrainable"
