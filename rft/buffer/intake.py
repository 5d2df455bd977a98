"""From a frame to what the ledger stores: decode, refuse what a trainer could not rely on, and
write the typed columns.

It knows the form of experiences, not which ones are stored.  The one invariant: what passes can be
decoded again, belongs to one group, and was written by weights that the caller names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import xxhash

from rft.buffer.row_selectors import WaitingRow
from rft.buffer.settings import BufferSettings
from rft.errors import Fenced, FrameRejected
from rft.types.block import UNREADABLE, Content
from rft.types.block import read as read_block
from rft.types.experience import Experience
from rft.types.ids import MAX_REWARD, GroupId, Version

Writers = Mapping[int, int]  # lineage -> newest step of it whose rows are stored
MAX_INTEGER = 2**31 - 1  # of the ledger's columns


MADE_COLUMNS = (
    "num_turns",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logprob_mode",
    "engine",
    "has_logprobs",
    "version_spans",
)


class IncomingGroup(msgspec.Struct, frozen=True):
    """One group, ready to be stored."""

    id: str
    numbers: GroupId
    accepted: bool
    reason: str
    content_hash: str
    created: float
    rows: list[tuple[Any, ...]]  # of table experiences
    texts: list[tuple[str, str, str]]  # of table texts
    waiting: list[WaitingRow]  # those that can be trained, by their ids
    frame: bytes

    @property
    def key(self) -> tuple[int, int]:
        """(batch, explorer)"""
        return self.numbers.batch, self.numbers.explorer

    def header(self, locator: str) -> tuple[Any, ...]:
        """Its row of table groups."""
        n = self.numbers
        counts = (len(self.rows), len(self.waiting), locator, len(self.frame))
        whole = (self.content_hash, self.created, True)
        return (
            self.id,
            n.lineage,
            n.explorer,
            n.batch,
            n.task,
            self.accepted,
            self.reason,
            *counts,
            *whole,
        )


def read(
    frame: bytes,
    settings: BufferSettings,
    lineage: int,
    writers: Writers,
    *,
    accepted: bool,
    reason: str,
) -> IncomingGroup:
    """Raises FrameRejected("reason: detail"), with few and fixed reasons so that they can be
    counted; Fenced for another lineage.
    """
    if not accepted and not reason:
        raise FrameRejected("no_reason: a group that is not accepted needs the reason")
    rows, held = _decode(frame)
    if not rows:
        raise FrameRejected("empty: a group has at least one row; failed runs are header rows")
    group = rows[0].group
    _check_group(group, rows)
    if group.lineage != lineage:
        raise Fenced(
            f"group {group} is of lineage {group.lineage}, but lineage {lineage} owns the buffer"
        )
    vocab_size = settings.vocab_size
    for row in rows:
        _check_versions(row, writers)
        if (
            vocab_size is not None
            and row.num_tokens
            and (largest := int(np.maximum.reduce(row.tokens))) >= vocab_size
        ):
            raise FrameRejected(
                f"invalid_tokens: {row.id} has token {largest}, and the model knows {vocab_size}"
            )
        if row.reward is not None and abs(row.reward) > MAX_REWARD:
            raise FrameRejected(
                f"invalid_reward: {row.id} has reward {row.reward:g}, at most {MAX_REWARD:g} in "
                f"size"
            )
    name = str(group)
    now = time.time()
    why = clean(reason)
    values = []
    texts = []
    waiting = []
    lines = []
    for position, (row, content) in enumerate(zip(rows, held, strict=True)):
        if content.size > settings.max_row_bytes:
            raise FrameRejected(
                f"too_large: {row.id} has {content.size} bytes, at most {settings.max_row_bytes}"
            )
        of = str(row.id)
        dropped = _dropped(row) if accepted else why
        oldest = row.oldest_version
        values.append(_values(row, of, name, position, content.hash, now, dropped, oldest))
        texts.append((of, clean(row.prompt_text), clean(row.response_text)))
        lines.append(f"{of}@{content.hash}")
        if dropped is None:
            waiting.append(
                WaitingRow(of, position, oldest.step if oldest else None, reward=row.reward)
            )
    whole = xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
    waiting.sort(key=attrgetter("id"))
    return IncomingGroup(
        name, group, accepted, "" if accepted else why, whole, now, values, texts, waiting, frame
    )


def batch_of(frame: bytes) -> int | None:
    """The explore batch of a frame's group; None when it cannot be read (`read` says why)."""
    try:
        rows, _ = _decode(frame)
    except FrameRejected:
        return None
    return rows[0].id.batch if rows else None


def _decode(frame: bytes) -> tuple[list[Experience], list[Content]]:
    try:
        return read_block(frame)
    except (
        msgspec.ValidationError
    ) as e:  # a value that `Experience` refuses; its message begins with the field
        raise FrameRejected(f"invalid_{_field(str(e))}: {e}") from e
    except UNREADABLE as e:
        raise FrameRejected(f"damaged: {type(e).__name__}: {e}") from e


def _field(message: str) -> str:
    """The field that a validation error is about: "logprobs: not finite", or "Expected ... - at
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
    """For people's columns: PostgreSQL stores no NUL character.  The payload keeps the text as it
    was.
    """
    return value.replace("\0", "\ufffd") if "\0" in value else value


def made(row: Experience) -> tuple[Any, ...]:
    """MADE_COLUMNS, which say how a row was made; those of sampling are of its first model call."""
    first = row.sampling[0] if row.sampling else None
    spans = _json(
        [(s.version.lineage, s.version.step, s.start, s.end) for s in row.version_spans]
    ).decode()
    if first is None:
        return (0, None, None, None, None, None, None, row.has_logprobs, spans)
    given = first.sampling
    drawn = (
        given.top_p,
        given.top_k,
        given.min_p,
        given.seed,
        first.logprob_mode,
        clean(first.engine),
    )
    return (len(row.sampling), *drawn, row.has_logprobs, spans)


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
    """A row of table experiences, in the order of its columns."""
    id = row.id
    newest = row.newest_version
    numbers = (position, id.lineage, id.explorer, id.batch, id.task, id.run, id.attempt, id.step)
    task = (clean(row.taskset), row.task_index, clean(row.workflow))
    first = (oldest.lineage, oldest.step) if oldest else (None, None)
    last = (newest.lineage, newest.step) if newest else (None, None)
    earned = (row.reward, row.credit, _json_sorted(row.reward_parts).decode())
    ended = (row.status, clean(row.reason), clean(row.finish_reason))
    form = (row.temperature, row.is_expert, row.clipped_logprobs, hash)
    state = ("available", None) if dropped is None else ("explained", dropped)
    sizes = (len(row.tokens), row.num_response_tokens)
    return (
        name,
        group,
        *numbers,
        *task,
        *first,
        *last,
        *earned,
        *sizes,
        *ended,
        *form,
        now,
        dropped,
        *made(row),
        *state,
    )


_json = msgspec.json.Encoder().encode
_json_sorted = msgspec.json.Encoder(order="sorted").encode


def _dropped(row: Experience) -> str | None:
    """Why a row of an accepted group can never be trained."""
    if row.status == "failed":
        return "failed"
    if row.reason:  # the operator that dropped it
        return "filtered"
    if row.reward is None:
        return "unscored"
    return None if row.trainable else "untrainable"
