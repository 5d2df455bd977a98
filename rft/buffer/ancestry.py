"""Which facts count for a version, and what state they put each experience in.

A version (lineage, step) descends from every step of its own lineage up to `step`, from its lineage's parent up to the parent's
step, and so on.  `states` is the only definition of an experience's state: the ledger stores its result when a lineage starts, an
audit computes it anew from the files.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash
from sqlalchemy import (
    CTE,
    BigInteger,
    Column,
    Connection,
    Exists,
    Integer,
    Select,
    Text,
    and_,
    case,
    cast,
    column,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    values,
)

from rft.buffer.schema import experiences, explanations, lineages, uses
from rft.types.ids import Version

NO_LIMIT = 2**62  # newest step of the lineage that is being trained


def chain(connection: Connection, version: Version | None, *, whole: bool = False) -> dict[int, int]:
    """{lineage: newest step that counts} for `version`; `whole` = all steps of its own lineage, known and to come."""
    if version is None:
        return {}
    known = {r.lineage: r for r in connection.execute(select(lineages))}
    found = {version.lineage: NO_LIMIT if whole else version.step}
    row = known.get(version.lineage)
    while row is not None and row.parent_lineage is not None and row.parent_lineage not in found:
        found[row.parent_lineage] = row.parent_step
        row = known.get(row.parent_lineage)
    return found


def ancestors(ancestry: dict[int, int]) -> CTE:
    """The chain as a table; it is as long as a run has been resumed, so it goes in as rows, not as a long condition."""
    rows = list(ancestry.items()) or [(0, -1)]  # VALUES needs a row; no step is -1
    return values(column("lineage", Integer), column("step", BigInteger), name="ancestry").data(rows).cte("ancestry")


def counted_uses(ancestry: dict[int, int]) -> Select[tuple[str, int, int]]:
    """Every use that counts: (experience, lineage, step)."""
    a = ancestors(ancestry)
    return select(uses.c.experience, uses.c.lineage, uses.c.step).join(
        a, and_(uses.c.lineage == a.c.lineage, uses.c.step <= a.c.step)
    )


def digest(counted: Iterable[tuple[str, int, int]]) -> str:
    """xxh3-128, as hex, of the counted uses: ASCII lines "id@lineage:step", sorted, joined by a newline (none at the end).

    Example: digest([("0001.00.00000000.000000.0000.00.0000", 1, 1)]); no uses = digest of the empty string.
    """
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(f"{e}@{line}:{step}" for e, line, step in counted)).encode("ascii"))


def states(ancestry: dict[int, int], *, max_uses: int, resume_rows: str) -> Select[tuple[str, str, str | None]]:
    """(id, state, explained) of every experience, as `ancestry` sees it.

    In this order: used `max_uses` times; dropped when it came; orphaned (its group was written by weights outside the ancestry);
    explained by a counted step; else available.
    """
    a = ancestors(ancestry)
    count = (
        select(uses.c.experience, func.count().label("n"))
        .join(a, and_(uses.c.lineage == a.c.lineage, uses.c.step <= a.c.step))
        .group_by(uses.c.experience)
        .subquery("counted")
    )
    reasons = (
        select(explanations.c.experience, func.min(explanations.c.reason).label("reason"))
        .join(a, and_(explanations.c.lineage == a.c.lineage, explanations.c.step <= a.c.step))
        .group_by(explanations.c.experience)
        .subquery("reasons")
    )
    e = experiences
    outside = _outside(a).subquery("outside")
    used = count.c.n >= max_uses
    orphaned = outside.c.group_id.is_not(None) if resume_rows == "orphan" else literal(False)
    reason = case(
        (used, null()),
        (e.c.dropped.is_not(None), e.c.dropped),
        (orphaned, literal("orphaned", Text)),
        else_=reasons.c.reason,
    )
    state = case(
        (used, literal("used", Text)), (reason.is_not(None), literal("explained", Text)), else_=literal("available", Text)
    )
    return (
        select(e.c.id, state.label("state"), cast(reason, Text).label("explained"))
        .outerjoin(count, count.c.experience == e.c.id)
        .outerjoin(reasons, reasons.c.experience == e.c.id)
        .outerjoin(outside, outside.c.group_id == e.c.group_id)
    )


def _outside(a: CTE) -> Select[tuple[str]]:
    """Groups with a row that weights outside the ancestry wrote.  Rows without a version (demonstrations) are never orphaned."""
    e = experiences

    def inside(lineage: Column[int], step: Column[int]) -> Exists:
        return exists().where(and_(a.c.lineage == lineage, a.c.step >= step))

    return (
        select(e.c.group_id)
        .where(
            e.c.newest_lineage.is_not(None),
            or_(~inside(e.c.newest_lineage, e.c.newest_step), ~inside(e.c.oldest_lineage, e.c.oldest_step)),
        )
        .distinct()
    )


def orphaned_groups(ancestry: dict[int, int]) -> Select[tuple[str]]:
    """Ids of the groups that `states` calls orphaned."""
    return _outside(ancestors(ancestry))
