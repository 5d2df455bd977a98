"""Where each experience stands when a lineage starts: written down from the facts, and what waits read back for the order in memory.

It takes no decision of its own: `rft.buffer.ancestry.states` is the definition.  The one invariant: after `derive_states` the stored
states, `held` and `leases` are what the facts say for that ancestry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from sqlalchemy import Connection, Exists, and_, delete, exists, func, insert, not_, or_, select, update

from rft.buffer.ancestry import counted_uses, orphaned_groups, states
from rft.buffer.order import DAMAGED, Group, Row
from rft.buffer.schema import ask, experiences, groups, leases, uses
from rft.errors import BufferFailed

_PART = 500  # bound values of one IN (...)
# by their ids: with a plain state = 'available' SQLite reads all rows that are, instead of these
_MOVE = "UPDATE experiences SET state = ?, explained = ? WHERE id IN (??) AND (state = 'available') IS TRUE"
TRANSITIONS: dict[str, frozenset[str]] = {
    "available": frozenset({"leased", "explained"}),
    "leased": frozenset({"available", "used", "explained"}),
    "used": frozenset(),
    "explained": frozenset(),
}
"""What may become of an experience inside a lineage.  A new lineage takes no transition: it derives every state from the facts."""


def move(tx: Connection, ids: Sequence[str], to: str, *, explained: str | None = None) -> None:
    """Write the state of rows that wait or are leased.  Repeating it is a no-op.

    Raises BufferFailed, and so stores nothing, for a row whose state must not become `to` (see TRANSITIONS).
    """
    e = experiences.c
    for part in parts(ids):
        if ask(tx, _MOVE, (to, explained), many=part).rowcount == len(part):
            continue
        found = {r.id: r.state for r in tx.execute(select(e.id, e.state).where(e.id.in_(part)))}
        wrong = [x for x in part if found.get(x) != to]
        if wrong:
            raise BufferFailed(
                f"experience {wrong[0]} is {found.get(wrong[0], 'not stored')} and cannot become {to} ({len(wrong)} such rows); "
                "the buffer and what asks it disagree: end the run and resume it"
            )


def derive_states(tx: Connection, ancestry: dict[int, int], max_uses: int, resume_rows: str) -> None:
    """Write `state` and `explained` of every row, and `held` of every group, as `ancestry` sees them."""
    now = states(ancestry, max_uses=max_uses, resume_rows=resume_rows).subquery("now")
    e = experiences.c
    changed = or_(e.state != now.c.state, e.explained.is_distinct_from(now.c.explained))
    tx.execute(update(experiences).where(e.id == now.c.id, changed).values(state=now.c.state, explained=now.c.explained))
    unwritten = not_(exists().where(and_(e.group_id == groups.c.id, e.newest_lineage.is_not(None))))
    gone = and_(groups.c.num_eligible == 0, unwritten)  # every run failed: a new lineage tries the task again
    given_up = groups.c.id.in_(select(e.group_id).where(e.dropped == DAMAGED))
    gone = or_(gone, and_(given_up, ~has_used_rows()))  # see Ledger._given_up
    if resume_rows == "orphan":
        gone = or_(gone, groups.c.id.in_(orphaned_groups(ancestry)))
    tx.execute(update(groups).values(held=not_(gone)))
    tx.execute(delete(leases))
    counted = counted_uses(ancestry).with_only_columns(
        uses.c.experience, func.max(uses.c.lineage), func.max(uses.c.step), func.max(uses.c.created)
    )
    tx.execute(insert(leases).from_select(["experience", "lineage", "step", "created"], counted.group_by(uses.c.experience)))


def has_used_rows() -> Exists:
    """Of a group: it was trained on in part, so its task must not be explored again."""
    return exists().where(and_(experiences.c.group_id == groups.c.id, experiences.c.state == "used"))


def waiting_groups(tx: Connection, ancestry: dict[int, int], max_uses: int) -> list[Group]:
    """Groups with rows that can be leased."""
    e, g = experiences.c, groups.c
    counts: Counter[str] = Counter()
    if max_uses > 1:
        counts.update(u.experience for u in tx.execute(counted_uses(ancestry)))
    rows = tx.execute(
        select(e.id, e.group_id, e.position, e.oldest_step, e.reward, g.batch, g.explorer, g.task, g.locator, g.num_bytes)
        .join(groups, g.id == e.group_id)
        .where(e.state == "available")
        .order_by(e.group_id, e.id)
    )
    found = []
    for name, members in groupby(rows, key=lambda r: r.group_id):
        first, *rest = members
        waiting = [Row(r.id, r.position, r.oldest_step, counts[r.id], r.reward) for r in (first, *rest)]
        found.append(Group(name, first.batch, first.explorer, first.task, first.locator, waiting, num_bytes=first.num_bytes))
    return found


def parts(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """`values` in pieces that fit into one statement."""
    for start in range(0, len(values), _PART):
        yield values[start : start + _PART]
