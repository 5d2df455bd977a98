"""Derive the state of each experience for a version from its ancestry's facts, store it and count
it.

A version (lineage, step) descends from every step of its own lineage up to `step`, from its
lineage's parent up to the parent's step, and so on.  `states` is the only definition of an
experience's state: `derive_states` stores its result when a lineage starts (with `held` and
`leases`), `count` recomputes it for an audit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import xxhash
from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Exists,
    Integer,
    Select,
    Subquery,
    Table,
    Text,
    and_,
    case,
    cast,
    column,
    delete,
    exists,
    func,
    insert,
    literal,
    not_,
    null,
    or_,
    select,
    update,
    values,
)

from rft.buffer.base import Audit
from rft.buffer.row_selectors import DAMAGED, ReadyGroup, ReadyRow
from rft.buffer.schema import (
    ask,
    experiences,
    explanations,
    groups,
    leases,
    lineages,
    parts,
    token_logprobs,
    uses,
)
from rft.buffer.session_rows import count_answers
from rft.errors import BufferFailed
from rft.types.ids import Version

_PART = 10_000  # uses read at once
_SUM = "sum:"  # prefix of a digest
NO_LIMIT = 2**62  # newest step of the lineage in training
LOST = "not_durable"  # reason: the payload was in the memory of a process that ended

# (…) IS TRUE makes SQLite search by id; with a bare state = 'available' it reads all available rows
_MOVE = (
    "UPDATE experiences SET state = ?, explained = ? WHERE id IN (??) AND (state = "
    "'available') IS TRUE"
)


def chain(tx: Connection, version: Version | None, *, all_steps: bool = False) -> dict[int, int]:
    """Return {lineage: newest step that counts} for `version`; `all_steps`: all steps of its own
    lineage, present and future.
    """
    if version is None:
        return {}
    rows = {r.lineage: r for r in tx.execute(select(lineages))}
    ancestry = {version.lineage: NO_LIMIT if all_steps else version.step}
    row = rows.get(version.lineage)
    while row is not None and row.parent_lineage is not None and row.parent_lineage not in ancestry:
        ancestry[row.parent_lineage] = row.parent_step
        row = rows.get(row.parent_lineage)
    return ancestry


def ancestors(ancestry: dict[int, int]) -> CTE:
    """Return the chain as a table of rows, because it grows with every resume."""
    rows = list(ancestry.items()) or [(0, -1)]  # VALUES needs a row; no step is -1
    listed = (
        values(column("lineage", Integer), column("step", BigInteger), name="given")
        .data(rows)
        .cte("given")
        .c
    )
    # SQLite builds an automatic index only for typed columns; without types it scans all rows each
    # time
    return select(
        cast(listed.lineage, Integer).label("lineage"), cast(listed.step, BigInteger).label("step")
    ).cte("ancestry")


def counted_uses(ancestry: dict[int, int]) -> Select[tuple[str, int, int]]:
    """Select every use that counts: (experience, lineage, step)."""
    a = ancestors(ancestry)
    return select(uses.c.experience, uses.c.lineage, uses.c.step).join(
        a, and_(uses.c.lineage == a.c.lineage, uses.c.step <= a.c.step)
    )


class StepSums:
    """Prefix sums (count, total) of facts by lineage and step, for any version."""

    def __init__(self) -> None:
        # lineage -> [(step, count and total up to this step)]
        self._by_lineage: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, lineage: int, step: int, number: int, total: int = 0) -> None:
        """Add the facts of one step; steps of a lineage must be added in order."""
        sums = self._by_lineage.setdefault(lineage, [(-1, 0, 0)])
        sums.append((step, sums[-1][1] + number, sums[-1][2] + total))

    def within(self, ancestry: Mapping[int, int]) -> tuple[int, int]:
        """Return number and total of the facts inside the ancestry."""
        number = total = 0
        for lineage, step in ancestry.items():
            if sums := self._by_lineage.get(lineage):
                _, n, part = sums[bisect_right(sums, step, key=itemgetter(0)) - 1]
                number += n
                total += part
        return number, total


def beyond(table: Table, lineage: int | None, after: int) -> tuple[ColumnElement[bool], ...]:
    """Return conditions for facts of one lineage after a step; without a lineage none."""
    return () if lineage is None else (table.c.lineage == lineage, table.c.step > after)


class UseCounts(StepSums):
    """Count of uses, and the sum of xxh3-128 over each use's ASCII line "id@lineage:step".

    The sum does not depend on the order.  Covers all uses, or those of `lineage` after step
    `after`, read once.
    """

    def __init__(self, tx: Connection, lineage: int | None = None, after: int = 0) -> None:
        super().__init__()
        u = uses.c
        query = (
            select(u.lineage, u.step, u.experience)
            .where(*beyond(uses, lineage, after))
            .order_by(u.lineage, u.step)
        )
        for (line, step), rows in groupby(
            tx.execute(query, execution_options={"yield_per": _PART}), key=lambda r: r[:2]
        ):
            hashes = [
                xxhash.xxh3_128_intdigest(f"{experience}@{line}:{step}".encode())
                for _, _, experience in rows
            ]
            self.add(line, step, len(hashes), sum(hashes))


def digest(total: int) -> str:
    """Format a sum as in manifests."""
    return f"{_SUM}{total % (1 << 128):032x}"


def count_uses(ancestry: dict[int, int], counts: UseCounts) -> tuple[int, str]:
    """Return (number, digest) of the uses that count."""
    num_uses, total = counts.within(ancestry)
    return num_uses, digest(total)


def states(
    ancestry: dict[int, int], *, max_uses: int, resume_rows: str
) -> Select[tuple[str, str, str | None]]:
    """Select (id, state, explained) of every experience for `ancestry`.

    In this order: used `max_uses` times; dropped on arrival; orphaned (weights outside the ancestry
    wrote its group); explained by a counted step; else available.
    """
    a = ancestors(ancestry)
    e = experiences
    count = _of_each(uses, a, func.count().label("n")).subquery("counted")
    reasons = _of_each(explanations, a, func.min(explanations.c.reason).label("reason")).subquery(
        "reasons"
    )
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
        (used, literal("used", Text)),
        (reason.is_not(None), literal("explained", Text)),
        else_=literal("available", Text),
    )
    return (
        select(e.c.id, state.label("state"), cast(reason, Text).label("explained"))
        .outerjoin(count, count.c.experience == e.c.id)
        .outerjoin(reasons, reasons.c.experience == e.c.id)
        .outerjoin(outside, outside.c.group_id == e.c.group_id)
    )


def _of_each(facts: Table, a: CTE, *aggregates: ColumnElement[Any]) -> Select[tuple[Any, ...]]:
    """Select aggregates of the counted facts by experience."""
    f = facts.c
    return (
        select(f.experience, *aggregates)
        .join(a, and_(f.lineage == a.c.lineage, f.step <= a.c.step))
        .group_by(f.experience)
    )


def _outside(a: CTE) -> Select[tuple[str]]:
    """Select groups with a row written by weights outside the ancestry.

    Rows without a version (demonstrations) are never orphaned.
    """
    e = experiences

    new = a.alias("new")  # joined, so that a row's cost does not grow with the number of resumes
    old = a.alias("old")
    return (
        select(e.c.group_id)
        .outerjoin(new, and_(new.c.lineage == e.c.newest_lineage, new.c.step >= e.c.newest_step))
        .outerjoin(old, and_(old.c.lineage == e.c.oldest_lineage, old.c.step >= e.c.oldest_step))
        .where(
            e.c.newest_lineage.is_not(None), or_(new.c.lineage.is_(None), old.c.lineage.is_(None))
        )
        .distinct()
    )


def orphaned_groups(ancestry: dict[int, int]) -> Select[tuple[str]]:
    """Select ids of the groups that `states` marks as orphaned."""
    return _outside(ancestors(ancestry))


def move(tx: Connection, ids: Sequence[str], to: str, *, explained: str | None = None) -> None:
    """Set the state of ready or leased rows; idempotent.

    Raises BufferFailed, storing nothing, for a row whose state must not become `to`.
    """
    e = experiences.c
    for part in parts(ids):
        if ask(tx, _MOVE, (to, explained), many=part).rowcount == len(part):
            continue
        stored_states = {
            r.id: r.state for r in tx.execute(select(e.id, e.state).where(e.id.in_(part)))
        }
        wrong = [x for x in part if stored_states.get(x) != to]
        if wrong:
            raise BufferFailed(
                f"experience {wrong[0]} is {stored_states.get(wrong[0], 'not stored')} and cannot become "
                f"{to} ({len(wrong)} such rows); "
                "the buffer and its caller disagree: end the run and resume it"
            )


def derive_states(
    tx: Connection, ancestry: dict[int, int], max_uses: int, resume_rows: str
) -> None:
    """Write `state` and `explained` of every row, and `held` of every group, for `ancestry`."""
    now = states(ancestry, max_uses=max_uses, resume_rows=resume_rows).subquery("now")
    e = experiences.c
    changed = or_(e.state != now.c.state, e.explained.is_distinct_from(now.c.explained))
    tx.execute(
        update(experiences)
        .where(e.id == now.c.id, changed)
        .values(state=now.c.state, explained=now.c.explained)
    )
    unwritten = not_(exists().where(and_(e.group_id == groups.c.id, e.newest_lineage.is_not(None))))
    # every run failed, or none got a reward: the new lineage tries the task again
    explore_again = and_(groups.c.num_eligible == 0, or_(unwritten, groups.c.reason == "unscored"))
    given_up = groups.c.id.in_(select(e.group_id).where(e.dropped == DAMAGED))
    explore_again = or_(explore_again, and_(given_up, ~has_used_rows()))  # see Ledger._given_up
    if resume_rows == "orphan":
        explore_again = or_(explore_again, groups.c.id.in_(orphaned_groups(ancestry)))
    tx.execute(update(groups).values(held=not_(explore_again)))
    tx.execute(delete(leases))
    last = _of_each(
        uses,
        ancestors(ancestry),
        *(func.max(uses.c[name]) for name in ("lineage", "step", "created")),
    )
    tx.execute(insert(leases).from_select(["experience", "lineage", "step", "created"], last))


def has_used_rows() -> Exists:
    """Condition on a group: some of its rows were trained, so its task must not be explored again."""
    return exists().where(
        and_(experiences.c.group_id == groups.c.id, experiences.c.state == "used")
    )


def ready_groups(tx: Connection, ancestry: dict[int, int], max_uses: int) -> list[ReadyGroup]:
    """Return the groups with rows that can be leased."""
    e = experiences.c
    g = groups.c
    counts: Counter[str] = Counter()
    if max_uses > 1:
        counts.update(u.experience for u in tx.execute(counted_uses(ancestry)))
    query = select(
        e.id,
        e.group_id,
        e.position,
        e.oldest_step,
        e.reward,
        g.batch,
        g.explorer,
        g.task,
        g.locator,
        g.num_bytes,
    )
    query = (
        query.join(groups, g.id == e.group_id)
        .where(e.state == "available")
        .order_by(e.group_id, e.id)
    )
    group_list = []
    for name, members in groupby(tx.execute(query), key=lambda r: r.group_id):
        first, *rest = members
        ready = [
            ReadyRow(r.id, r.position, r.oldest_step, counts[r.id], r.reward)
            for r in (first, *rest)
        ]
        group_list.append(
            ReadyGroup(
                name,
                first.batch,
                first.explorer,
                first.task,
                first.locator,
                ready,
                num_bytes=first.num_bytes,
            )
        )
    return group_list


def misplaced(tx: Connection, now: Subquery) -> list[str]:
    """Return problems of rows whose stored state differs from `now`, the result of `states`."""
    e = experiences.c
    differs = or_(e.state != now.c.state, e.explained.is_distinct_from(now.c.explained))
    both = select(e.id, e.state, e.explained, now.c.state, now.c.explained).join(
        now, now.c.id == e.id
    )
    wrong = tx.execute(both.where(differs, e.explained.is_distinct_from(LOST))).all()
    if not wrong:
        return []
    row, *both_states = wrong[0]
    return [
        f"{row} is stored as {tuple(both_states[:2])}, but is {tuple(both_states[2:])} "
        f"({len(wrong)} such rows)"
    ]


def strays(tx: Connection) -> list[str]:
    """Return problems of trainers' log-probs that belong to no use."""
    k = token_logprobs.c
    u = uses.c
    of_a_use = exists().where(
        and_(u.experience == k.experience, u.lineage == k.lineage, u.step == k.step)
    )
    rows = tx.scalars(select(k.experience).where(~of_a_use)).all()
    return (
        [f"trainer's log-probs of {rows[0]} belong to no use ({len(rows)} such rows)"]
        if rows
        else []
    )


def count_states(tx: Connection, now: Subquery) -> Counter[tuple[str, str | None]]:
    """Count rows by (state, explained) of `now`, a result of `states`."""
    counted = select(now.c.state, now.c.explained, func.count()).group_by(
        now.c.state, now.c.explained
    )
    return Counter({(state, reason): n for state, reason, n in tx.execute(counted)})


def count(
    tx: Connection,
    ancestry: dict[int, int],
    counts: UseCounts,
    *,
    max_uses: int,
    resume_rows: str,
    version: str,
) -> tuple[Audit, Subquery]:
    """Return the audit with nothing leased, and the derived (id, state, explained) of each row."""
    e = experiences.c
    g = groups.c
    now = states(ancestry, max_uses=max_uses, resume_rows=resume_rows).subquery("now")
    of_rows = [(*key, n) for key, n in count_states(tx, now).items()]
    used = counted_uses(ancestry).subquery("counted")
    lost = select(func.count(used.c.experience.distinct())).outerjoin(
        experiences, e.id == used.c.experience
    )
    problems = [
        f"{n} uses are of experiences that are not stored"
        for n in [tx.scalar(lost.where(e.id.is_(None)))]
        if n
    ]
    stored = select(e.group_id, func.count().label("n")).group_by(e.group_id).subquery("stored")
    short = tx.scalars(
        select(g.id)
        .outerjoin(stored, stored.c.group_id == g.id)
        .where(func.coalesce(stored.c.n, 0) != g.num_rows)
    ).all()
    problems += (
        [f"group {short[0]} has not the rows it was acknowledged with ({len(short)} such groups)"]
        if short
        else []
    )
    served = count_answers(tx)
    problems += served.problems
    discarded = (
        Counter({reason or "": n for state, reason, n in of_rows if state == "explained"})
        + served.explained
    )
    often = (
        select(used.c.experience)
        .group_by(used.c.experience)
        .having(func.count() > max_uses)
        .subquery("often")
    )
    num_uses, total = counts.within(ancestry)
    audit = Audit(
        acked=(tx.scalar(select(func.sum(g.num_rows))) or 0)
        + served.waiting
        + served.explained.total(),
        used=sum(n for state, _, n in of_rows if state == "used"),
        leased=0,
        available=sum(n for state, _, n in of_rows if state == "available"),
        waiting=served.waiting,
        discarded=dict(sorted(discarded.items())),
        used_twice=tx.scalar(select(func.count()).select_from(often)) or 0,
        num_uses=num_uses,
        digest=digest(total),
        version=version,
        problems=tuple(problems),
    )
    return audit, now
