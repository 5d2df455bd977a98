"""From a frame to what the ledger stores: decode, refuse what a trainer could not rely on, and write the typed columns.

It knows the form of experiences, not which ones are stored.  The one invariant: what passes can be decoded again, belongs to one
group, and was written by weights that exist in the current ancestry.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from rft.errors import Fenced, FrameRejected
from rft.types.block import content_hash, decode
from rft.types.experience import Experience
from rft.types.ids import GroupId

Ancestry = Mapping[int, int]  # lineage -> newest step of it that counts


class Intake(msgspec.Struct, frozen=True):
    """One group, ready to be stored."""

    group: dict[str, Any]  # columns of table groups, without the locator
    rows: list[dict[str, Any]]  # columns of table experiences
    frame: bytes


def read(frame: bytes, *, lineage: int, accepted: bool, reason: str, ancestry: Ancestry, max_row_bytes: int) -> Intake:
    """Raises FrameRejected("reason: detail"), with few and fixed reasons so that they can be counted; Fenced for another lineage."""
    if not accepted and not reason:
        raise FrameRejected("no_reason: a group that is not accepted needs the reason")
    rows = _decode(frame)
    if not rows:
        raise FrameRejected("empty: a group has at least one row; failed runs are header rows")
    if len(frame) > max_row_bytes * len(rows):
        raise FrameRejected(f"too_large: {len(frame)} bytes for {len(rows)} experiences, at most {max_row_bytes} each")
    group = rows[0].group
    _check_group(group, rows)
    if group.lineage != lineage:
        raise Fenced(f"group {group} is of lineage {group.lineage}, but lineage {lineage} owns the buffer")
    for row in rows:
        _check_versions(row, ancestry)
    now = time.time()
    columns = [_columns(row, position, accepted, reason, now) for position, row in enumerate(rows)]
    whole = xxhash.xxh3_128_hexdigest("\n".join(f"{c['id']}@{c['content_hash']}" for c in columns).encode())
    header = {
        "id": str(group),
        "lineage": group.lineage,
        "explorer": group.explorer,
        "batch": group.batch,
        "task": group.task,
        "accepted": accepted,
        "reason": "" if accepted else reason,
        "num_rows": len(rows),
        "num_eligible": sum(c["dropped"] is None for c in columns),
        "content_hash": whole,
        "num_bytes": len(frame),
        "created": now,
        "held": True,
    }
    return Intake(header, columns, frame)


def _decode(frame: bytes) -> list[Experience]:
    try:
        return decode(frame)
    except msgspec.ValidationError as e:  # a value that `Experience` refuses; its message begins with the field
        raise FrameRejected(f"invalid_{_field(str(e))}: {e}") from e
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgspec.MsgspecError) as e:
        raise FrameRejected(f"damaged: {type(e).__name__}: {e}") from e


def _field(message: str) -> str:
    """The field that a validation error is about: "logprobs: not finite", or "Expected ... - at `$.reward`"."""
    path = re.search(r"at `\$\[\d+\]\.(\w+)", message)
    field = path[1] if path else message.split(":")[0]
    return field if field.isidentifier() else "row"


def _check_group(group: GroupId, rows: list[Experience]) -> None:
    first = rows[0]
    for row in rows:
        if min(row.id.group.explorer, row.id.batch, row.id.task, row.id.run, row.id.attempt, row.id.step) < 0:
            raise FrameRejected(f"invalid_id: {row.id} has a negative number")
        if row.group != group:
            raise FrameRejected(f"mixed_groups: {row.id} is not of group {group}; a frame holds one group")
        if (row.taskset, row.task_index) != (first.taskset, first.task_index):
            raise FrameRejected(
                f"mixed_tasks: {row.id} is of {row.taskset}[{row.task_index}], not {first.taskset}[{first.task_index}]"
            )
    if len({row.id for row in rows}) != len(rows):
        raise FrameRejected(f"duplicate_ids: group {group} holds an experience id twice")


def _check_versions(row: Experience, ancestry: Ancestry) -> None:
    for span in row.version_spans:
        newest = ancestry.get(span.version.lineage)
        if newest is None:
            raise FrameRejected(
                f"unknown_version: {row.id} was written by {span.version}, of a lineage this run does not descend from"
            )
        if span.version.step > newest:
            raise FrameRejected(
                f"future_version: {row.id} was written by {span.version}, but step {newest} is the newest of its lineage"
            )


def _columns(row: Experience, position: int, accepted: bool, reason: str, now: float) -> dict[str, Any]:
    oldest, newest = row.oldest_version, row.newest_version
    dropped = _dropped(row) if accepted else reason
    return {
        "id": str(row.id),
        "group_id": str(row.group),
        "position": position,
        "lineage": row.id.lineage,
        "explorer": row.id.explorer,
        "batch": row.id.batch,
        "task": row.id.task,
        "run": row.id.run,
        "attempt": row.id.attempt,
        "step": row.id.step,
        "taskset": row.taskset,
        "task_index": row.task_index,
        "workflow": row.workflow,
        "oldest_lineage": oldest.lineage if oldest else None,
        "oldest_step": oldest.step if oldest else None,
        "newest_lineage": newest.lineage if newest else None,
        "newest_step": newest.step if newest else None,
        "reward": row.reward,
        "reward_parts": msgspec.json.encode(row.reward_parts, order="sorted").decode(),
        "num_tokens": row.num_tokens,
        "num_response_tokens": row.num_response_tokens,
        "status": row.status,
        "reason": row.reason,
        "finish_reason": row.finish_reason,
        "temperature": row.temperature,
        "is_expert": row.is_expert,
        "clipped_logprobs": row.clipped_logprobs,
        "prompt_text": row.prompt_text,
        "response_text": row.response_text,
        "content_hash": content_hash(row),
        "created": now,
        "dropped": dropped,
        "state": "available" if dropped is None else "explained",
        "explained": dropped,
    }


def _dropped(row: Experience) -> str | None:
    """Why a row of an accepted group can never be trained."""
    if row.status == "failed":
        return "failed"
    if row.reason:  # the operator that dropped it
        return "filtered"
    if row.reward is None:
        return "unscored"
    return None if row.trainable else "untrainable"
