"""What may become of an experience inside a lineage: every pair of states, tried on a real ledger."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, update

from rft.buffer import derived_state, explorer_side, trainer_side
from rft.buffer.buffer import Buffer
from rft.buffer.derived_state import move
from rft.buffer.schema import experiences
from rft.buffer.settings import BufferSettings
from rft.errors import BufferFailed
from rft.testing.storage_contract import fill

TRANSITIONS: dict[str, frozenset[str]] = {
    "available": frozenset({"leased", "explained"}),
    "leased": frozenset({"available", "used", "explained"}),
    "used": frozenset(),
    "explained": frozenset(),
}
"""What may become of an experience inside a lineage.  A new lineage takes no transition: it derives
every state from the facts.
"""
STATES = tuple(TRANSITIONS)


@pytest.mark.parametrize("to", ["used", "explained"])
@pytest.mark.parametrize("state", ["available", "used", "explained"])
async def test_a_stored_state_changes_only_as_the_table_says(
    state: str, to: str, tmp_path: Path
) -> None:
    """In the ledger a leased row is available and stands in table leases."""
    buffer = Buffer(BufferSettings(folder=tmp_path))
    await buffer.open()
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, 0)
    legal = (
        state == to
        or to in TRANSITIONS[state] | TRANSITIONS["leased" if state == "available" else state]
    )

    def attempt(tx: Connection) -> None:
        names = list(tx.scalars(select(experiences.c.id)))
        tx.execute(update(experiences).where(experiences.c.id == names[0]).values(state=state))
        move(tx, names, to, explained="why" if to == "explained" else None)

    database = buffer._ledger.database
    if legal:
        await buffer._run(database.run, attempt)
    else:
        with pytest.raises(BufferFailed, match=f"is {state} and cannot become {to}"):
            await buffer._run(database.run, attempt)
        states = await buffer._run(
            database.run, lambda tx: set(tx.scalars(select(experiences.c.state)))
        )
        assert states == {"available"}, "nothing of the refused call is stored"
    await buffer.close()


def test_the_table_names_every_state() -> None:
    assert (
        {to for found in TRANSITIONS.values() for to in found}
        <= set(STATES)
        == {"available", "leased", "used", "explained"}
    )


@pytest.mark.parametrize(
    ("sql", "index"),
    [
        (derived_state._MOVE, "sqlite_autoindex_experiences_1 (id=?)"),
        (trainer_side._HEADERS, "ix_experiences_group (group_id=?)"),
        (explorer_side._COUNT_GOOD, "ix_groups_batch (batch=? AND explorer=?)"),
    ],
)
async def test_what_each_step_asks_reads_its_own_rows_only(
    sql: str, index: str, tmp_path: Path
) -> None:
    """However many others there are: an index of ids, not of all rows that are available."""
    buffer = Buffer(BufferSettings(folder=tmp_path))
    await buffer.open()
    await buffer.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "experience_buffer.db")) as raw:
        whole = sql.replace("(??)", f"({', '.join(['?'] * 64)})")
        plan = [
            row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {whole}", ["x"] * whole.count("?"))
        ]
    assert any(index in line for line in plan), plan
