"""Counting: every acknowledged experience in exactly one state, and no use too many, for one ancestry."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Connection, func, select

from rft.buffer.ancestry import counted_uses, digest, states
from rft.buffer.base import Audit
from rft.buffer.schema import experiences, groups


def count(
    tx: Connection, ancestry: dict[int, int], *, max_uses: int, resume_rows: str, version: str
) -> tuple[Audit, dict[str, tuple[str, str | None]]]:
    """The audit of what is stored, with nothing leased, and the derived (state, explained) of each row."""
    derived = {r.id: (r.state, r.explained) for r in tx.execute(states(ancestry, max_uses=max_uses, resume_rows=resume_rows))}
    counted = [(u.experience, u.lineage, u.step) for u in tx.execute(counted_uses(ancestry))]
    times = Counter(u[0] for u in counted)
    by_state = Counter(state for state, _ in derived.values())
    problems = [f"{n} uses are of experiences that are not stored" for n in [sum(x not in derived for x in times)] if n]
    stored: dict[str, int] = dict(tx.execute(select(experiences.c.group_id, func.count()).group_by(experiences.c.group_id)).all())
    short = [g.id for g in tx.execute(select(groups.c.id, groups.c.num_rows)) if stored.get(g.id) != g.num_rows]
    problems += [f"group {short[0]} has not the rows it was acknowledged with ({len(short)} such groups)"] if short else []
    audit = Audit(
        acked=tx.scalar(select(func.sum(groups.c.num_rows))) or 0,
        used=by_state["used"],
        leased=0,
        available=by_state["available"],
        explained=dict(sorted(Counter(reason or "" for state, reason in derived.values() if state == "explained").items())),
        used_twice=sum(n > max_uses for n in times.values()),
        num_uses=len(counted),
        digest=digest(counted),
        version=version,
        problems=tuple(problems),
    )
    return audit, derived
