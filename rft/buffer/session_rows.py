"""The ledger's tables of served sessions, and their operations inside a transaction.

    sessions   one row per session: owner, task, expiry, reward and outcome
    calls      one row per answered request; the caller defines its payload

The tables are created when a run first serves.  Invariant: answers acknowledged = waiting +
accepted + explained, and every accepted answer is a call of a row of its session's group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Column as Col
from sqlalchemy import Connection, LargeBinary, MetaData, Table, Text, func, inspect, select
from sqlalchemy import Float as Real
from sqlalchemy import Integer as Whole

from rft.buffer.schema import Id, ask, experiences, put_many
from rft.types.completion import Score
from rft.types.sessions import (
    WAITING,
    CallStored,
    Explained,
    Merged,
    Note,
    Rewarded,
    StoredCall,
    StoredSession,
)

R = TypeVar("R", StoredSession, StoredCall)
tables = MetaData()

sessions = Table(
    "sessions",
    tables,
    Col("id", Id, primary_key=True),
    *(Col(name, Text, nullable=False) for name in ("client", "key_hash", "task_id", "metadata")),
    *(Col(name, Real, nullable=False) for name in ("created", "expires")),
    Col("state", Text, nullable=False, index=True),
    Col("reason", Text, nullable=False),
    Col("score", Text),  # JSON, score of the run
    Col("rewarded", Real),
    Col("group_id", Id),  # group of an accepted session; `run`: its number in the group
    Col("run", Whole),
)

calls = Table(
    "calls",
    tables,
    Col("id", Id, primary_key=True),
    Col("session", Id, nullable=False, index=True),
    Col("number", Whole, nullable=False),
    *(Col(name, Text, nullable=False) for name in ("retry_key", "asked")),
    Col("created", Real, nullable=False),
    Col("answers", Whole, nullable=False),
    Col("score", Text),  # JSON, score of this call alone
    Col("turns", LargeBinary, nullable=False),
)
_WAITS = f"state IN ({', '.join(repr(s) for s in WAITING)})"


def all_wait(tx: Connection, ids: Sequence[str]) -> bool:
    if not ids:
        return True
    return bool(
        ask(
            tx, f"SELECT count(*) FROM sessions WHERE {_WAITS} AND id IN (??)", many=ids
        ).scalar_one()
        == len(ids)
    )


def accept(tx: Connection, group: str, runs: Sequence[str]) -> None:
    """Mark the sessions `runs`, in run order, as rows of `group`, which this transaction stores."""
    for run, session in enumerate(runs):
        ask(
            tx,
            "UPDATE sessions SET state = 'accepted', group_id = ?, run = ? WHERE id = ?",
            (group, run, session),
        )


class Answers(NamedTuple):
    """Answers that are no rows: waiting, or by reason never becoming rows; and problems."""

    waiting: int
    explained: Counter[str]
    problems: list[str]


def count_answers(tx: Connection) -> Answers:
    if not inspect(tx).has_table(sessions.name):
        return Answers(0, Counter(), [])
    s = sessions.c
    c = calls.c
    e = experiences.c
    explained: Counter[str] = Counter()
    waiting = 0
    accepted = {}
    counted = (
        select(
            s.id,
            s.state,
            s.reason,
            s.group_id,
            s.run,
            func.coalesce(func.sum(c.answers), 0).label("answers"),
        )
        .join(calls, c.session == s.id, isouter=True)
        .group_by(s.id, s.state, s.reason, s.group_id, s.run)
    )
    for r in tx.execute(counted):
        if r.state in WAITING:
            waiting += r.answers
        elif r.state == "explained":
            explained[r.reason] += r.answers
        elif r.state == "accepted":
            accepted[r.group_id, r.run] = r.answers
    rows = select(e.group_id, e.run, func.sum(e.num_turns).label("turns")).join(
        sessions, (s.group_id == e.group_id) & (s.run == e.run)
    )
    turns = {(r.group_id, r.run): r.turns for r in tx.execute(rows.group_by(e.group_id, e.run))}
    lost = [
        f"run {run} of {group}"
        for (group, run), n in accepted.items()
        if turns.get((group, run)) != n
    ]
    problems = (
        [
            f"{lost[0]} has not the answers that its session was acknowledged with ({len(lost)} "
            f"such runs)"
        ]
        if lost
        else []
    )
    return Answers(waiting, +explained, problems)


# ---------------------------------------------------------------- one note


def write(tx: Connection, note: Note) -> bool:
    match note:
        case StoredSession():
            _open(tx, note)
        case CallStored(session=session, call=call, opens=opens):
            if opens is not None:
                _open(tx, opens)
            elif not all_wait(tx, (session,)):
                return False
            put_many(tx, calls, [_call_values(session, call)])
        case Rewarded():
            return _reward(tx, note)
        case Merged(session=session, sources=others, task_id=task_id):
            return _merge(tx, session, others, task_id)
        case Explained(sessions=ids, reason=reason):
            done = ask(
                tx,
                f"UPDATE sessions SET state = 'explained', reason = ? WHERE {_WAITS} AND id IN "
                f"(??)",
                (reason,),
                many=ids,
            )
            return done.rowcount == len(ids)
    return True


def _open(tx: Connection, session: StoredSession) -> None:
    put_many(tx, sessions, [(*_values(session), None, None)])


def _reward(tx: Connection, note: Rewarded) -> bool:
    if not all_wait(tx, (note.session,)):
        return False
    score = _json(note.score)
    if note.call is not None:
        ask(
            tx,
            "UPDATE calls SET score = ? WHERE id = ? AND session = ?",
            (score, note.call, note.session),
        )
    elif score is not None:
        ask(tx, "UPDATE sessions SET score = ? WHERE id = ?", (score, note.session))
    if note.at is not None:
        ask(
            tx,
            "UPDATE sessions SET state = 'rewarded', rewarded = ? WHERE id = ? AND state = 'open'",
            (note.at, note.session),
        )
    return True


def _merge(tx: Connection, session: str, merged: Sequence[str], task_id: str) -> bool:
    if not all_wait(tx, (session, *merged)):
        return False
    ask(tx, "UPDATE sessions SET task_id = ? WHERE id = ?", (task_id, session))
    if merged:
        ask(
            tx,
            "UPDATE sessions SET state = 'merged', reason = ? WHERE id IN (??)",
            (session,),
            many=merged,
        )
        last = ask(
            tx, "SELECT coalesce(max(number), 0) FROM calls WHERE session = ?", (session,)
        ).scalar_one()
        moved = (
            ask(tx, "SELECT id FROM calls WHERE session IN (??) ORDER BY created, id", many=merged)
            .scalars()
            .all()
        )
        for number, call in enumerate(moved, last + 1):
            ask(
                tx, "UPDATE calls SET session = ?, number = ? WHERE id = ?", (session, number, call)
            )
    return True


def _values(s: StoredSession) -> tuple[Any, ...]:
    metadata = msgspec.json.encode(s.metadata).decode()
    return (
        s.id,
        s.client,
        s.key_hash,
        s.task_id,
        metadata,
        s.created,
        s.expires,
        s.state,
        s.reason,
        _json(s.score),
        s.rewarded,
    )


def _call_values(session: str, c: StoredCall) -> tuple[Any, ...]:
    return (
        c.id,
        session,
        c.number,
        c.retry_key,
        c.asked,
        c.created,
        c.answers,
        _json(c.score),
        c.turns,
    )


def _json(score: Score | None) -> str | None:
    return None if score is None else msgspec.json.encode(score).decode()


def to_session(r: Any) -> StoredSession:
    return _record(StoredSession, r, metadata=msgspec.json.decode(r.metadata))


def to_call(r: Any) -> StoredCall:
    return _record(StoredCall, r)


def _record(kind: type[R], r: Any, **parsed: Any) -> R:
    """Convert a table row, whose columns have the field names of `kind`."""
    parsed["score"] = None if r.score is None else msgspec.json.decode(r.score, type=Score)
    return kind(**{name: r._mapping[name] for name in kind.__struct_fields__} | parsed)
