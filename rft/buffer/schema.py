"""The ledger's tables.  Facts are never changed; `state` and `explained` are derived from them whenever a lineage starts.

A use or an explanation is a fact of one (lineage, step): it counts for a version iff that step is an ancestor of the version.
Ids are the sortable text forms of `rft.types.ids`.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, PrimaryKeyConstraint, Table, Text

FORMAT = 1
metadata = MetaData()

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

lineages = Table(
    "lineages",
    metadata,
    Column("lineage", Integer, primary_key=True, autoincrement=False),
    Column("parent_lineage", Integer),  # null = trained from the base model
    Column("parent_step", Integer),
    Column("cursor", Integer, nullable=False),  # explore batch the lineage began with
    Column("created", Float, nullable=False),  # seconds since the epoch; for people, nothing is ordered by it
)

groups = Table(
    "groups",
    metadata,
    Column("id", Text, primary_key=True),  # lineage.explorer.batch.task
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
    Column("id", Text, primary_key=True),  # lineage.explorer.batch.task.run.attempt.step
    Column("group_id", Text, nullable=False),
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
    Column("prompt_text", Text, nullable=False),
    Column("response_text", Text, nullable=False),
    Column("content_hash", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("dropped", Text),  # fact: why it can never be trained
    Column("state", Text, nullable=False),  # available | used | explained, for the current lineage
    Column("explained", Text),  # reason, where state is explained
    Index("ix_experiences_group", "group_id"),
    Index("ix_experiences_state", "state", "batch"),
)

uses = Table(
    "uses",
    metadata,
    Column("experience", Text, nullable=False),
    Column("lineage", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    PrimaryKeyConstraint("experience", "lineage", "step"),
    Index("ix_uses_step", "lineage", "step"),
)

explanations = Table(
    "explanations",
    metadata,
    Column("experience", Text, nullable=False),
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

payloads = Table("payloads", metadata, Column("id", Integer, primary_key=True), Column("block", LargeBinary, nullable=False))
