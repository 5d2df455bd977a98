"""Which facts count for a version, what state they put each experience in, and that state as it is
written down and counted.

A version (lineage, step) descends from every step of its own lineage up to `step`, from its
lineage's parent up to the parent's step, and so on.  `states` is the only definition of an
experience's state: `derive_states` stores its result when a lineage starts (with `held` and
`leases`), `count` computes it anew for an audit.
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
from rft.buffer.row_selectors import DAMAGED, WaitingGroup, WaitingRow
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

_PART = 10_000  # uses that are read at once
_SUM = "sum:"  # begins a digest
NO_LIMIT = 2**62  # newest step of the lineage that is being trained
LOST = "not_durable"  # explained: its payload was in the memory of a process that has ended

# by their ids: with a plain state = 'available' SQLite reads all rows that are, instead of these
_MOVE = (
    "UPDATE experiences SET state = ?, explained = ? WHERE id IN (??) AND (state = "
    "'available') IS TRUE"
)


def chain(tx: Connection, version: Version | None, *, whole: bool = False) -> dict[int, int]:
    """{lineage: newest step that counts} for `version`; `whole` = all steps of its own lineage,
    known and to come.
    """
    if version is None:
        return {}
    known = {r.lineage: r for r in tx.execute(select(lineages))}
    found = {version.lineage: NO_LIMIT if whole else version.step}
    row = known.get(version.lineage)
    while row is not None and row.parent_lineage is not None and row.parent_lineage not in found:
        found[row.parent_lineage] = row.parent_step
        row = known.get(row.parent_lineage)
    return found


def ancestors(ancestry: dict[int, int]) -> CTE:
    """The chain as a table; it is as long as a run has been resumed, so it goes in as rows, not as
    a long condition.
    """
    rows = list(ancestry.items()) or [(0, -1)]  # VALUES needs a row; no step is -1
    given = (
        values(column("lineage", Integer), column("step", BigInteger), name="given")
        .data(rows)
        .cte("given")
        .c
    )
    # SQLite makes an index only of columns that have a type, and else reads all of them for each
    # row
    return select(
        cast(given.lineage, Integer).label("lineage"), cast(given.step, BigInteger).label("step")
    ).cte("ancestry")


def counted_uses(ancestry: dict[int, int]) -> Select[tuple[str, int, int]]:
    """Every use that counts: (experience, lineage, step)."""
    a = ancestors(ancestry)
    return select(uses.c.experience, uses.c.lineage, uses.c.step).join(
        a, and_(uses.c.lineage == a.c.lineage, uses.c.step <= a.c.step)
    )


class StepSums:
    """A number and a sum of facts, for any version."""

    def __init__(self) -> None:
        # by lineage: step, and number and sum up to it
        self._found: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, lineage: int, step: int, number: int, total: int = 0) -> None:
        """The facts of one step; those of a lineage come in its order."""
        mine = self._found.setdefault(lineage, [(-1, 0, 0)])
        mine.append((step, mine[-1][1] + number, mine[-1][2] + total))

    def of(self, ancestry: Mapping[int, int]) -> tuple[int, int]:
        """What counts."""
        known = [(mine, step) for line, step in ancestry.items() if (mine := self._found.get(line))]
        ends = [mine[bisect_right(mine, step, key=itemgetter(0)) - 1] for mine, step in known]
        return sum(n for _, n, _ in ends), sum(total for _, _, total in ends)


def beyond(table: Table, lineage: int | None, after: int) -> tuple[ColumnElement[bool], ...]:
    """Facts of one lineage later than a step; without a lineage all."""
    return () if lineage is None else (table.c.lineage == lineage, table.c.step > after)


class UseCounts(StepSums):
    """How many uses, and the sum of xxh3-128 over each, an ASCII line "id@lineage:step"; it grows
    with them, in any order.

    Of all, or of those of `lineage` beyond step `after`, read once.
    """

    def __init__(self, tx: Connection, lineage: int | None = None, after: int = 0) -> None:
        super().__init__()
        u = uses.c
        asked = (
            select(u.lineage, u.step, u.experience)
            .where(*beyond(uses, lineage, after))
            .order_by(u.lineage, u.step)
        )
        for (line, step), rows in groupby(
            tx.execute(asked, execution_options={"yield_per": _PART}), key=lambda r: r[:2]
        ):
            hashes = [
                xxhash.xxh3_128_intdigest(f"{experience}@{line}:{step}".encode())
                for _, _, experience in rows
            ]
            self.add(line, step, len(hashes), sum(hashes))


def digest(total: int) -> str:
    """As manifests state it."""
    return f"{_SUM}{total % (1 << 128):032x}"


def count_uses(ancestry: dict[int, int], known: UseCounts) -> tuple[int, str]:
    """(number, digest) of the uses that count."""
    num_uses, total = known.of(ancestry)
    return num_uses, digest(total)


def states(
    ancestry: dict[int, int], *, max_uses: int, resume_rows: str
) -> Select[tuple[str, str, str | None]]:
    """(id, state, explained) of every experience, as `ancestry` sees it.

    In this order: used `max_uses` times; dropped when it came; orphaned (its group was written by
    weights outside the ancestry); explained by a counted step; else available.
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


def _of_each(facts: Table, a: CTE, *found: ColumnElement[Any]) -> Select[tuple[Any, ...]]:
    """Of the facts that count, by experience."""
    f = facts.c
    return (
        select(f.experience, *found)
        .join(a, and_(f.lineage == a.c.lineage, f.step <= a.c.step))
        .group_by(f.experience)
    )


def _outside(a: CTE) -> Select[tuple[str]]:
    """Groups with a row that weights outside the ancestry wrote.  Rows without a version
    (demonstrations) are never orphaned.
    """
    e = experiences

    new = a.alias("new")  # joined, so that a row costs the same however often the run was resumed
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
    """Ids of the groups that `states` calls orphaned."""
    return _outside(ancestors(ancestry))


def move(tx: Connection, ids: Sequence[str], to: str, *, explained: str | None = None) -> None:
    """Write the state of rows that wait or are leased.  Repeating it is a no-op.

    Raises BufferFailed, and so stores nothing, for a row whose state must not become `to`.
    """
    e = experiences.c
    for part in parts(ids):
        if ask(tx, _MOVE, (to, explained), many=part).rowcount == len(part):
            continue
        found = {r.id: r.state for r in tx.execute(select(e.id, e.state).where(e.id.in_(part)))}
        wrong = [x for x in part if found.get(x) != to]
        if wrong:
            raise BufferFailed(
                f"experience {wrong[0]} is {found.get(wrong[0], 'not stored')} and cannot become "
                f"{to} ({len(wrong)} such rows); "
                "the buffer and its caller disagree: end the run and resume it"
            )


def derive_states(
    tx: Connection, ancestry: dict[int, int], max_uses: int, resume_rows: str
) -> None:
    """Write `state` and `explained` of every row, and `held` of every group, as `ancestry` sees
    them.
    """
    now = states(ancestry, max_uses=max_uses, resume_rows=resume_rows).subquery("now")
    e = experiences.c
    changed = or_(e.state != now.c.state, e.explained.is_distinct_from(now.c.explained))
    tx.execute(
        update(experiences)
        .where(e.id == now.c.id, changed)
        .values(state=now.c.state, explained=now.c.explained)
    )
    unwritten = not_(exists().where(and_(e.group_id == groups.c.id, e.newest_lineage.is_not(None))))
    # every run failed, or none got a reward: a new lineage tries the task again
    gone = and_(groups.c.num_eligible == 0, or_(unwritten, groups.c.reason == "unscored"))
    given_up = groups.c.id.in_(select(e.group_id).where(e.dropped == DAMAGED))
    gone = or_(gone, and_(given_up, ~has_used_rows()))  # see Ledger._given_up
    if resume_rows == "orphan":
        gone = or_(gone, groups.c.id.in_(orphaned_groups(ancestry)))
    tx.execute(update(groups).values(held=not_(gone)))
    tx.execute(delete(leases))
    last = _of_each(
        uses,
        ancestors(ancestry),
        *(func.max(uses.c[name]) for name in ("lineage", "step", "created")),
    )
    tx.execute(insert(leases).from_select(["experience", "lineage", "step", "created"], last))


def has_used_rows() -> Exists:
    """Of a group: it was trained on in part, so its task must not be explored again."""
    return exists().where(
        and_(experiences.c.group_id == groups.c.id, experiences.c.state == "used")
    )


def waiting_groups(tx: Connection, ancestry: dict[int, int], max_uses: int) -> list[WaitingGroup]:
    """Groups with rows that can be leased."""
    e = experiences.c
    g = groups.c
    counts: Counter[str] = Counter()
    if max_uses > 1:
        counts.update(u.experience for u in tx.execute(counted_uses(ancestry)))
    asked = select(
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
    asked = (
        asked.join(groups, g.id == e.group_id)
        .where(e.state == "available")
        .order_by(e.group_id, e.id)
    )
    found = []
    for name, members in groupby(tx.execute(asked), key=lambda r: r.group_id):
        first, *rest = members
        waiting = [
            WaitingRow(r.id, r.position, r.oldest_step, counts[r.id], r.reward)
            for r in (first, *rest)
        ]
        found.append(
            WaitingGroup(
                name,
                first.batch,
                first.explorer,
                first.task,
                first.locator,
                waiting,
                num_bytes=first.num_bytes,
            )
        )
    return found


def misplaced(tx: Connection, now: Subquery) -> list[str]:
    """Rows whose stored state is not the one that follows from the facts, `now` of `states`."""
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
    """What is wrong with the log-probs that trainers left: each belongs to a use."""
    k = token_logprobs.c
    u = uses.c
    of_a_use = exists().where(
        and_(u.experience == k.experience, u.lineage == k.lineage, u.step == k.step)
    )
    found = tx.scalars(select(k.experience).where(~of_a_use)).all()
    return (
        [f"trainer's log-probs of {found[0]} belong to no use ({len(found)} such rows)"]
        if found
        else []
    )


def count_states(tx: Connection, now: Subquery) -> Counter[tuple[str, str | None]]:
    """How many rows are in each (state, explained) of `now`, which is of `states`."""
    counted = select(now.c.state, now.c.explained, func.count()).group_by(
        now.c.state, now.c.explained
    )
    return Counter({(state, reason): n for state, reason, n in tx.execute(counted)})


def count(
    tx: Connection,
    ancestry: dict[int, int],
    known: UseCounts,
    *,
    max_uses: int,
    resume_rows: str,
    version: str,
) -> tuple[Audit, Subquery]:
    """The audit of what is stored, with nothing leased, and the derived (id, state, explained) of
    each row.
    """
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
    num_uses, total = known.of(ancestry)
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
