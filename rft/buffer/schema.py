"""The ledger's tables.  Facts are never changed; `state`, `explained`, `held` and `leases` are derived from them when a lineage starts.

A use or an explanation is a fact of one (lineage, step): it counts for a version iff that step is an ancestor of the version.
Ids are the sortable text forms of `rft.types.ids`.  Times are seconds since the epoch; for people, nothing is ordered by them.
The one exception among facts is `experiences.reward`: a person may change it until the row is leased (see `rft.buffer.views`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    CursorResult,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

FORMAT = 3  # 1: before typed sampling columns, leases, checkpoints, edits and views; 2: texts in the experiences' own rows
metadata = MetaData()
Id = Text().with_variant(Text(collation="C"), "postgresql")  # sorts by its characters, whatever the database's language

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

lineages = Table(
    "lineages",
    metadata,
    Column("lineage", Integer, primary_key=True, autoincrement=False),
    Column("parent_lineage", Integer),  # null = trained from the base model
    Column("parent_step", Integer),
    Column("cursor", Integer, nullable=False),  # explore batch the lineage began with
    Column("created", Float, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("id", Id, primary_key=True),  # lineage.explorer.batch.task
    Column("lineage", Integer, nullable=False),
    Column("explorer", Integer, nullable=False),
    Column("batch", Integer, nullable=False),
    Column("task", Integer, nullable=False),
    Column("accepted", Boolean, nullable=False),
    Column("reason", Text, nullable=False),  # why it was not accepted
    Column("num_rows", Integer, nullable=False),
    Column("num_eligible", Integer, nullable=False),  # rows that could be trained when they came
    Column("locator", Text, nullable=False),  # of the payload block
    Column("num_bytes", Integer, nullable=False),  # of the payload block
    Column("content_hash", Text, nullable=False),  # xxh3-128 over the rows' ids and hashes, in order
    Column("created", Float, nullable=False),
    Column("held", Boolean, nullable=False),  # for the current lineage: stands, so its task is not explored again
    Index("ix_groups_batch", "batch", "explorer", "task"),
)

experiences = Table(
    "experiences",
    metadata,
    Column("id", Id, primary_key=True),  # lineage.explorer.batch.task.run.attempt.step
    Column("group_id", Id, nullable=False),
    Column("position", Integer, nullable=False),  # in the group's block
    Column("lineage", Integer, nullable=False),
    Column("explorer", Integer, nullable=False),
    Column("batch", Integer, nullable=False),
    Column("task", Integer, nullable=False),
    Column("run", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("taskset", Text, nullable=False),
    Column("task_index", Integer, nullable=False),
    Column("workflow", Text, nullable=False),
    Column("oldest_lineage", Integer),  # weights that wrote the oldest and the newest token
    Column("oldest_step", Integer),
    Column("newest_lineage", Integer),
    Column("newest_step", Integer),
    Column("reward", Float),
    Column("reward_parts", Text, nullable=False),  # JSON
    Column("num_tokens", Integer, nullable=False),
    Column("num_response_tokens", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False),  # why a run failed
    Column("finish_reason", Text, nullable=False),
    Column("temperature", Float, nullable=False),
    Column("is_expert", Boolean, nullable=False),
    Column("clipped_logprobs", Integer, nullable=False),
    Column("content_hash", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("dropped", Text),  # fact: why it can never be trained
    # how it was made; null where a row of format 1 has lost its payload
    Column("num_turns", Integer),  # model calls
    Column("top_p", Float),  # this and the next four: of the first call
    Column("top_k", Integer),
    Column("min_p", Float),
    Column("seed", BigInteger),
    Column("logprob_mode", Text),
    Column("engine", Text),
    Column("has_logprobs", Boolean),
    Column("version_spans", Text),  # JSON [[lineage, step, first token, end], ...]
    Column("state", Text, nullable=False),  # available | used | explained, for the current lineage
    Column("explained", Text),  # reason, where state is explained
    Index("ix_experiences_group", "group_id"),
    Index("ix_experiences_state", "state", "batch"),
)

texts = Table(  # for people; away from `experiences`, whose rows every lease reads and every use writes
    "texts",
    metadata,
    Column("experience", Id, primary_key=True),
    Column("prompt_text", Text, nullable=False),
    Column("response_text", Text, nullable=False),
)

uses = Table(
    "uses",
    metadata,
    Column("experience", Id, nullable=False),
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("created", Float),  # null in rows of format 1
    PrimaryKeyConstraint("experience", "lineage", "step"),
    Index("ix_uses_step", "lineage", "step"),
)

mixed_uses = Table(  # of rows that are read from another source than this ledger
    "mixed_uses",
    metadata,
    Column("source", Text, nullable=False),
    Column("experience", Id, nullable=False),
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    PrimaryKeyConstraint("source", "experience", "lineage", "step"),
)

explanations = Table(
    "explanations",
    metadata,
    Column("experience", Id, nullable=False),
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    PrimaryKeyConstraint("experience", "lineage", "step"),
    Index("ix_explanations_step", "lineage", "step"),
)

batches = Table(
    "batches",
    metadata,
    Column("lineage", Integer, nullable=False),
    Column("explorer", Integer, nullable=False),
    Column("batch", Integer, nullable=False),
    Column("accepted", Integer, nullable=False),
    Column("wanted", Integer, nullable=False),
    Column("reasons", Text, nullable=False),  # JSON: rejected groups by reason
    PrimaryKeyConstraint("lineage", "explorer", "batch"),
)

rejections = Table(
    "rejections",
    metadata,
    Column("lineage", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("count", Integer, nullable=False),
    PrimaryKeyConstraint("lineage", "reason"),
)

leases = Table(  # the last lease of each row that counts in the current lineage; such a row's reward is not changed any more
    "leases",
    metadata,
    Column("experience", Id, primary_key=True),
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("created", Float),
)

checkpoints = Table(  # what a trainer asked for to write a manifest; `rft buffer audit` tells which manifests there are
    "checkpoints",
    metadata,
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("num_uses", Integer, nullable=False),
    Column("digest", Text, nullable=False),
    Column("cursor", Integer, nullable=False),
    Column("created", Float, nullable=False),
    PrimaryKeyConstraint("lineage", "step"),
)

reward_edits = Table(  # written by a trigger
    "reward_edits",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("experience", Id, nullable=False),
    Column("old_reward", Float),
    Column("new_reward", Float),
    Column("edited", Float, nullable=False),
    Index("ix_reward_edits_experience", "experience"),
)

payloads = Table("payloads", metadata, Column("id", Integer, primary_key=True), Column("block", LargeBinary, nullable=False))


def put_meta(tx: Connection, key: str, value: str) -> None:
    """Set one entry of `meta`."""
    tx.execute(_PUT_META, {"key": key, "value": value})


_PUT_META = text("INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value")


def put_many(tx: Connection, table: Table, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]], *, again: str = "") -> None:
    """One statement for many rows.  `again`: an ON CONFLICT clause.

    It goes to the driver as it is: building each row through Core costs more than storing it.
    """
    if not rows:
        return
    key = (table.name, columns, again, tx.dialect.paramstyle)
    if (sql := _SQL.get(key)) is None:
        names = ", ".join(f'"{c}"' for c in columns)
        places = ", ".join([place(tx)] * len(columns))
        sql = _SQL[key] = f"INSERT INTO {table.name} ({names}) VALUES ({places}) {again}"
    tx.exec_driver_sql(sql, list(rows))


def ask(tx: Connection, sql: str, values: Sequence[Any] = (), *, many: Sequence[Any] = ()) -> CursorResult[*tuple[Any, ...]]:
    """A statement as it is written, with "?" for each of `values`, and "(??)" for all of `many`, which come last.

    For what every train step asks: putting such a statement together through Core costs more than its answer.
    """
    mark = place(tx)
    key = (sql, len(many), mark)
    if (whole := _ASKED.get(key)) is None:
        if len(_ASKED) >= _MOST_ASKED:
            _ASKED.clear()
        whole = _ASKED[key] = sql.replace("(??)", f"({', '.join('?' * len(many))})").replace("?", mark)
    return tx.exec_driver_sql(whole, (*values, *many))


def place(tx: Connection) -> str:
    """The driver's mark for a bound value."""
    return "?" if tx.dialect.paramstyle == "qmark" else "%s"


_ASKED: dict[tuple[str, int, str], str] = {}
_MOST_ASKED = 1000
_SQL: dict[tuple[str, tuple[str, ...], str, str], str] = {}
