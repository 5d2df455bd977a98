"""Audit a buffer from its files: every acknowledged experience is accounted for, and none was
trained more than `max_uses` times.

Reads the ledger, the payload and the checkpoint manifests, during or after a run, without a running
program; writes nothing.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import msgspec
from sqlalchemy import Connection, Subquery, exists, func, select
from sqlalchemy.exc import SQLAlchemyError

from rft.buffer.base import Audit
from rft.buffer.database import cause
from rft.buffer.derived_state import (
    UseCounts,
    chain,
    count,
    count_states,
    count_uses,
    misplaced,
    states,
    strays,
)
from rft.buffer.image_files import problems as image_problems
from rft.buffer.location import Location, connect, find
from rft.buffer.mixing import MixedCounts
from rft.buffer.schema import FORMAT, experiences, groups, leases, lineages, meta, uses
from rft.buffer.storage.base import Storage
from rft.buffer.storage_choice import stored_by
from rft.errors import BufferFailed
from rft.types.block import UNREADABLE, decode_with_contents
from rft.types.ids import Version
from rft.types.ports import MANIFEST_FORMAT, Consumption

_RepeatedUses = dict[str, list[tuple[int, int]]]
_Counted = tuple[UseCounts, MixedCounts, _RepeatedUses]  # read once for all manifests


class _Manifest(msgspec.Struct):
    """The keys of a checkpoint's manifest.json that the audit needs."""

    format: int
    version: Version
    parent: Version | None
    consumption: Consumption


def audit_run(run_dir: Path | str, *, payload: bool = True, ledger_url: str | None = None) -> Audit:
    """Return the audit of a run folder (`run_dir/buffer`,
    `run_dir/checkpoints/global_step_N/manifest.json`) and its database.

    Counts the uses that made the weights in training now, like `rft buffer stats`; the result's
    `after_restart` counts those that made the newest checkpoint, from which a restart continues.
    The uses in every manifest are compared with its digest. `payload`: also read each available
    experience and compare its hash. `ledger_url`: see `rft.buffer.location.find`.  Raises
    BufferFailed if no ledger can be read.
    """
    run_dir = Path(run_dir)
    location = find(run_dir, ledger_url)
    manifests, problems = _manifests(run_dir / "checkpoints")
    engine = connect(location, read_only=True)
    try:
        with engine.connect() as connection, connection.begin():
            return _audit(connection, location, run_dir / "buffer", manifests, problems, payload)
    except SQLAlchemyError as e:
        raise BufferFailed(f"{location} cannot be read: {cause(e)}") from e
    finally:
        engine.dispose()


def _audit(
    tx: Connection,
    location: Location,
    folder: Path,
    manifests: list[_Manifest],
    problems: list[str],
    payload: bool,
) -> Audit:
    """Count every row again: by the uses that made the weights in training, and for a restart."""
    about_buffer = dict(tx.execute(select(meta.c.key, meta.c.value)).all())
    if about_buffer.get("format") != str(FORMAT):
        raise BufferFailed(
            f"{location} has format {about_buffer.get('format')}, this rft reads format {FORMAT}; use the "
            f"rft that wrote it"
        )
    max_uses = int(about_buffer["max_uses"])
    resume_rows = about_buffer["resume_rows"]
    counted = UseCounts(tx), MixedCounts(tx), _repeated_uses(tx, max_uses)  # for all manifests
    weights = _weights(tx)
    ancestry = chain(tx, weights, all_steps=True)
    audit, states_now = count(
        tx,
        ancestry,
        counted[0],
        max_uses=max_uses,
        resume_rows=resume_rows,
        version=str(weights or ""),
    )
    latest = manifests[-1].version if manifests else None
    at_checkpoint = count_states(
        tx, states(chain(tx, latest), max_uses=max_uses, resume_rows=resume_rows).subquery("then")
    )
    after_restart = {
        "used": at_checkpoint["used", None],
        "available": at_checkpoint["available", None],
        "orphaned": at_checkpoint["explained", "orphaned"],
    }
    for manifest in manifests:
        problems += _compare(tx, manifest, counted, max_uses)
    problems += [*misplaced(tx, states_now), *strays(tx)]
    storage = stored_by(about_buffer, location.name, folder)
    leased = _num_leased(tx, states_now)
    available = audit.available - leased
    discarded = dict(audit.discarded)
    if not storage.durable and audit.available:  # rows in another process's memory cannot be read
        discarded["not_durable"] = audit.available
        available = leased = 0
    elif payload:
        problems += [*_read_back(tx, storage, states_now), *image_problems(tx, storage)]
    return msgspec.structs.replace(
        audit,
        leased=leased,
        available=available,
        discarded=discarded,
        checkpoint=str(latest or ""),
        after_restart=after_restart,
        manifests=len(manifests),
        problems=(*audit.problems, *problems),
    )


def _weights(tx: Connection) -> Version | None:
    """Return the version now in training: the newest lineage and its newest step that used a row."""
    newest = tx.execute(select(lineages).order_by(lineages.c.lineage.desc()).limit(1)).one_or_none()
    if newest is None:
        return None
    step = tx.scalar(select(func.max(uses.c.step)).where(uses.c.lineage == newest.lineage))
    return Version(newest.lineage, step or newest.parent_step or 0)


def _num_leased(tx: Connection, states_now: Subquery) -> int:
    """Count the rows that the trainer has leased and not yet used, like the ledger's views."""
    settled = exists().where(
        uses.c.experience == leases.c.experience,
        uses.c.lineage == leases.c.lineage,
        uses.c.step == leases.c.step,
    )
    open_ = (
        select(func.count())
        .select_from(leases)
        .join(states_now, states_now.c.id == leases.c.experience)
    )
    return tx.scalar(open_.where(states_now.c.state == "available", ~settled)) or 0


def _manifests(folder: Path) -> tuple[list[_Manifest], list[str]]:
    valid = []
    problems = []
    for path in folder.glob("global_step_*/manifest.json"):
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
            if manifest.format != MANIFEST_FORMAT:
                raise ValueError(f"format {manifest.format} is not {MANIFEST_FORMAT}")
            valid.append(manifest)
        except (ValueError, msgspec.MsgspecError, OSError) as e:
            problems.append(f"{path} is not a valid manifest: {e}")
    return sorted(valid, key=lambda m: m.version), problems


def _repeated_uses(tx: Connection, max_uses: int) -> _RepeatedUses:
    """Return (lineage, step) of each use of experiences with over `max_uses` uses, also undone ones."""
    u = uses.c
    several = select(u.experience).group_by(u.experience).having(func.count() > max_uses)
    uses_by_experience: _RepeatedUses = {}
    for experience, line, step in tx.execute(
        select(u.experience, u.lineage, u.step).where(u.experience.in_(several))
    ):
        uses_by_experience.setdefault(experience, []).append((line, step))
    return uses_by_experience


def _compare(tx: Connection, manifest: _Manifest, counted: _Counted, max_uses: int) -> list[str]:
    """Return the differences between a manifest and the ledger."""
    version = manifest.version
    stated = manifest.consumption
    row = tx.execute(select(lineages).where(lineages.c.lineage == version.lineage)).one_or_none()
    if row is None:
        return [f"checkpoint {version}: the ledger knows no lineage {version.lineage}"]
    problems = []
    parent = None if row.parent_lineage is None else Version(row.parent_lineage, row.parent_step)
    if parent != manifest.parent:
        problems.append(
            f"checkpoint {version}: its lineage began at {manifest.parent}, the ledger says "
            f"{parent}"
        )
    ancestry = chain(tx, version)
    counts, mixed, repeated = counted
    num_uses, ledger_digest = count_uses(ancestry, counts)
    if (num_uses, ledger_digest) != (stated.num_uses, stated.digest):
        problems.append(
            f"checkpoint {version}: made after {stated.num_uses} uses (digest {stated.digest}), "
            f"the ledger counts {num_uses} ({ledger_digest})"
        )
    if (ledger_mixed := mixed.within(ancestry)) != stated.mixed:
        problems.append(
            f"checkpoint {version}: made after {stated.mixed} uses of mixed-in rows, the ledger "
            f"counts {ledger_mixed}"
        )
    twice = [
        x
        for x, at in repeated.items()
        if sum(step <= ancestry.get(line, -1) for line, step in at) > max_uses
    ]
    if twice:
        problems.append(
            f"checkpoint {version}: {len(twice)} experiences were trained more than {max_uses} "
            f"times, e.g. {twice[0]}"
        )
    return problems


def _read_back(tx: Connection, storage: Storage, states_now: Subquery) -> list[str]:
    """Return a problem for each payload whose available experiences differ from the stored ones."""
    e = experiences.c
    g = groups.c
    query = (
        select(g.locator, e.id, e.content_hash)
        .join(states_now, states_now.c.id == e.id)
        .join(groups, g.id == e.group_id)
    )
    rows = tx.execute(query.where(states_now.c.state == "available").order_by(g.locator))
    problems: list[str] = []
    for locator, of_block in groupby(rows, key=lambda r: r.locator):
        try:
            (block,) = storage.get([locator], tx)
            hashes = {
                str(x.id): content.hash
                for x, content in zip(*decode_with_contents(block), strict=True)
            }
        except (BufferFailed, *UNREADABLE) as error:
            problems.append(f"payload {locator}: {error}")
            continue
        bad = [r.id for r in of_block if hashes.get(r.id) != r.content_hash]
        problems += [f"payload {locator} does not hold {bad[0]} as it was stored"] if bad else []
    return problems


def as_json(audit: Audit) -> str:
    """Return the audit with its verdicts as one JSON object."""
    return json.dumps(
        {**msgspec.to_builtins(audit), "balanced": audit.balanced, "ok": audit.ok}, indent=2
    )
