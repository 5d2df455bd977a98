"""The ledger's tables, the SQL views for users, and the rule for changing a reward.

Facts are never changed; `state`, `explained`, `held` and `leases` are derived from them when a
lineage starts.  A use or an explanation is a fact of one (lineage, step): it counts for a version
iff that step is an ancestor of the version.  Ids are the sortable text forms of `rft.types.ids`.
Times are seconds since the epoch, for display; nothing is ordered by them.

    v_experiences  one row per experience, all typed columns, its state and its newest lease and use
    v_runs         one row per run: its reward, by the rule of `rft.types.credit`, and lengths over its experiences
    v_groups       one row per group: rewards and lengths of its runs, states counted over its experiences
    v_tokens       one row per span of tokens that one weight version wrote, or per token if the trainer's log-probs are kept
                   (the tokens themselves are packed: `rft buffer sample`)
    v_lineage      weight version -> experience -> optimizer step -> checkpoint, one row per experience and use

`experiences.reward` is the only mutable fact: `UPDATE experiences SET reward = ...` changes it
until its row is leased.  Triggers refuse changes without effect and non-finite numbers, and write
each change into `reward_edits`. Invariant: training uses the changed reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

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
    Table,
    Text,
    text,
)
from sqlalchemy.schema import SchemaItem

from rft.types.ids import MAX_REWARD

FORMAT = 7  # of the ledger; other formats are refused
T = TypeVar("T")
metadata = MetaData()
# sorts by code points, whatever the database's locale
Id = Text().with_variant(Text(collation="C"), "postgresql")


def _all(kind: Any, *names: str, key: bool = False) -> list[Column[Any]]:
    """Return non-null columns of one type."""
    return [
        Column(name, kind, nullable=False, primary_key=key, autoincrement=False) for name in names
    ]


def _table(name: str, *parts: list[Column[Any]] | SchemaItem) -> Table:
    return Table(
        name,
        metadata,
        *(item for part in parts for item in (part if isinstance(part, list) else [part])),
    )


meta = _table("meta", _all(Text, "key", key=True), _all(Text, "value"))

lineages = _table(
    "lineages",
    _all(Integer, "lineage", key=True),
    Column("parent_lineage", Integer),  # null = trained from the base model
    Column("parent_step", Integer),
    _all(Integer, "cursor"),  # explore batch the lineage began with
    _all(Float, "created"),
)

groups = _table(
    "groups",
    _all(Id, "id", key=True),  # lineage.explorer.batch.task
    _all(Integer, "lineage", "explorer", "batch", "task"),
    _all(Boolean, "accepted"),
    _all(Text, "reason"),  # why it was not accepted
    # number of rows, and of trainable rows on arrival
    _all(Integer, "num_rows", "num_eligible"),
    _all(Text, "locator"),  # of the payload block
    _all(Integer, "num_bytes"),  # of the payload block
    _all(Text, "content_hash"),  # xxh3-128 over the rows' ids and hashes, in order
    _all(Float, "created"),
    _all(Boolean, "held"),  # valid for the current lineage, so its task is not explored again
    Index("ix_groups_batch", "batch", "explorer", "task"),
)

experiences = _table(
    "experiences",
    _all(Id, "id", key=True),  # lineage.explorer.batch.task.run.attempt.step
    _all(Id, "group_id"),
    _all(Integer, "position"),  # in the group's block
    _all(Integer, "lineage", "explorer", "batch", "task", "run", "attempt", "step"),
    _all(Text, "taskset"),
    _all(Integer, "task_index"),
    _all(Text, "workflow"),
    Column("oldest_lineage", Integer),  # versions of the oldest and the newest token
    Column("oldest_step", Integer),
    Column("newest_lineage", Integer),
    Column("newest_step", Integer),
    Column("reward", Float),
    # what the reward is of: the whole run, or the row's own calls (step)
    Column("credit", Text, nullable=False, server_default="run"),
    _all(Text, "reward_parts"),  # JSON
    _all(Integer, "num_tokens", "num_response_tokens"),
    _all(Text, "status", "reason", "finish_reason"),  # reason: why a run failed
    _all(Float, "temperature"),
    _all(Boolean, "is_expert"),
    _all(Integer, "clipped_logprobs"),
    _all(Text, "content_hash"),
    _all(Float, "created"),
    Column("dropped", Text),  # fact: why it can never be trained
    # sampling
    Column("num_turns", Integer),  # model calls
    Column("top_p", Float),  # this and the next four: of the first call
    Column("top_k", Integer),
    Column("min_p", Float),
    Column("seed", BigInteger),
    Column("logprob_mode", Text),
    Column("engine", Text),
    Column("has_logprobs", Boolean),
    Column("version_spans", Text),  # JSON [[lineage, step, first token, end], ...]
    _all(Text, "state"),  # available | used | explained, for the current lineage
    Column("explained", Text),  # reason, if state is explained
    Index("ix_experiences_group", "group_id"),
    Index("ix_experiences_state", "state", "batch"),
)

# for display; separate from `experiences`, whose rows every lease reads and every use writes
texts = _table(
    "texts", _all(Id, "experience", key=True), _all(Text, "prompt_text", "response_text")
)

uses = _table(
    "uses",
    _all(Id, "experience", key=True),
    _all(Integer, "lineage", "step", key=True),
    Column("created", Float),
    Index("ix_uses_step", "lineage", "step"),
)

# of the first use that counts, see `rft.types.token_logprobs`; with monitor.keep_trainer_logprobs
token_logprobs = _table(
    "token_logprobs",
    _all(Id, "experience", key=True),
    _all(Integer, "lineage", "step", "token_start"),
    _all(Text, "pairs"),
)

mixed_uses = _table(  # of rows from another source than this ledger
    "mixed_uses",
    _all(Text, "source", key=True),
    _all(Id, "experience", key=True),
    _all(Integer, "lineage", "step", key=True),
    Index("ix_mixed_uses_step", "lineage", "step"),
)

explanations = _table(
    "explanations",
    _all(Id, "experience", key=True),
    _all(Integer, "lineage", "step", key=True),
    _all(Text, "reason"),
    Index("ix_explanations_step", "lineage", "step"),
)

batches = _table(
    "batches",
    _all(Integer, "lineage", "explorer", "batch", key=True),
    _all(Integer, "accepted", "wanted"),
    _all(Text, "reasons"),  # JSON: rejected groups by reason
)

rejections = _table(
    "rejections",
    _all(Integer, "lineage", key=True),
    _all(Text, "reason", key=True),
    _all(Integer, "count"),
)

# the last counted lease of each row in the current lineage; it makes the row's reward immutable
leases = _table(
    "leases",
    _all(Id, "experience", key=True),
    _all(Integer, "lineage", "step"),
    Column("created", Float),
)

# statements made before a manifest was written; `rft buffer audit` compares the existing manifests
checkpoints = _table(
    "checkpoints",
    _all(Integer, "lineage", "step", key=True),
    _all(Integer, "num_uses"),
    _all(Text, "digest"),
    _all(Integer, "cursor"),
    _all(Float, "created"),
)

reward_edits = _table(  # written by a trigger
    "reward_edits",
    Column("id", Integer, primary_key=True),
    _all(Id, "experience"),
    Column("old_reward", Float),
    Column("new_reward", Float),
    _all(Float, "edited"),
    Index("ix_reward_edits_experience", "experience"),
)

# files that rows show, each once
images = _table(
    "images", _all(Id, "sha256", key=True), _all(Text, "locator"), _all(Integer, "num_bytes")
)

image_uses = _table(
    "image_uses",
    _all(Id, "sha256", "group_id", key=True),
    Index("ix_image_uses_group", "group_id"),
)

payloads = _table("payloads", Column("id", Integer, primary_key=True), _all(LargeBinary, "block"))


def put_meta(tx: Connection, key: str, value: str) -> None:
    """Set one entry of `meta`."""
    put_many(tx, meta, [(key, value)], replace=True)


def put_many(
    tx: Connection,
    table: Table,
    rows: Sequence[tuple[Any, ...]],
    *,
    replace: bool = False,
    again: str = "",
) -> None:
    """Insert many complete rows with one statement.

    For existing rows, `again` is an ON CONFLICT clause, and `replace` replaces them. The statement
    goes to the driver unchanged: building each row through Core costs more than storing it.
    """
    if not rows:
        return
    key = (table.name, replace, again, tx.dialect.paramstyle)
    if (sql := _SQL.get(key)) is None:
        names = table.columns.keys()
        if replace:
            unique = list(table.primary_key.columns.keys())
            changed = ", ".join(f"{n} = excluded.{n}" for n in names if n not in unique)
            again = f"ON CONFLICT ({', '.join(unique)}) DO UPDATE SET {changed}"
        columns = ", ".join(f'"{n}"' for n in names)
        places = ", ".join([placeholder(tx)] * len(names))
        sql = _SQL[key] = f"INSERT INTO {table.name} ({columns}) VALUES ({places}) {again}"
    tx.exec_driver_sql(sql, list(rows))


def ask(
    tx: Connection, sql: str, values: Sequence[Any] = (), *, many: Sequence[Any] = ()
) -> CursorResult[*tuple[Any, ...]]:
    """Run a literal statement, with "?" for each of `values`, and "(??)" for all of `many`, which
    come last.

    For the queries of every train step: building such a statement through Core costs more than its
    execution.
    """
    mark = placeholder(tx)
    key = (sql, len(many), mark)
    if (statement := _ASKED.get(key)) is None:
        if len(_ASKED) >= _MOST_ASKED:
            _ASKED.clear()
        statement = _ASKED[key] = sql.replace("(??)", f"({', '.join('?' * len(many))})").replace(
            "?", mark
        )
    return tx.exec_driver_sql(statement, (*values, *many))


def parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield `values` in pieces that fit into one statement."""
    for start in range(0, len(values), _MOST_BOUND):
        yield values[start : start + _MOST_BOUND]


def tables_size(tx: Connection) -> int:
    """Return bytes of the tables and indexes of a PostgreSQL schema."""
    sizes = (
        "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON "
        "n.oid = c.relnamespace"
    )
    return int(
        tx.exec_driver_sql(
            f"{sizes} WHERE n.nspname = current_schema() AND c.relkind = 'r'"
        ).scalar()
        or 0
    )


def placeholder(tx: Connection) -> str:
    """Return the driver's mark for a bound value."""
    return "?" if tx.dialect.paramstyle == "qmark" else "%s"


_ASKED: dict[tuple[str, int, str], str] = {}
_MOST_ASKED = 1000
_MOST_BOUND = 500  # values of one IN (...): SQLite allows a limited number
_SQL: dict[tuple[str, bool, str, str], str] = {}


VIEWS = ("v_experiences", "v_runs", "v_groups", "v_tokens", "v_lineage")

_COLUMNS = """e.group_id, e.lineage, e.explorer, e.batch, e.task, e.run, e.attempt, e.step,
  e.taskset, e.task_index, e.workflow, e.status, e.reason, e.finish_reason,
  e.reward, e.credit, e.reward_parts, e.num_tokens, e.num_response_tokens, e.num_turns,
  e.oldest_lineage, e.oldest_step, e.newest_lineage, e.newest_step,
  e.temperature, e.top_p, e.top_k, e.min_p, e.seed, e.logprob_mode, e.engine, e.has_logprobs, e.clipped_logprobs, e.is_expert,
  x.prompt_text, x.response_text, e.content_hash"""

_RUN = "(SELECT value FROM meta WHERE key = 'run') AS run_name"
_STATE = (
    "CASE WHEN e.state = 'available' AND l.experience IS NOT NULL AND u.experience IS NULL "
    "THEN 'leased' ELSE e.state END"
)
_NEWEST = """LEFT JOIN leases l ON l.experience = e.id
LEFT JOIN uses u ON u.experience = l.experience AND u.lineage = l.lineage AND u.step = l.step"""

V_EXPERIENCES = f"""CREATE VIEW v_experiences AS SELECT e.id, {_RUN}, {_COLUMNS},
  {_STATE} AS state, e.explained, e.created,
  l.step AS leased_step, l.created AS leased, u.step AS used_step, u.created AS used
FROM experiences e LEFT JOIN texts x ON x.experience = e.id {_NEWEST}"""

RUN_REWARD = """coalesce(
    CASE WHEN min(CASE WHEN credit = 'run' THEN reward END) = max(CASE WHEN credit = 'run' THEN reward END) THEN
      min(CASE WHEN credit = 'run' THEN reward END) ELSE avg(CASE WHEN credit = 'run' THEN reward END) END, sum(reward))"""
"""`rft.types.credit.run_rewards`, over the rows of one run."""

V_RUNS = f"""CREATE VIEW v_runs AS SELECT group_id, run, {_RUN}, min(lineage) AS lineage, min(explorer) AS explorer, min(batch) AS batch,
  min(task) AS task, max(attempt) AS attempt, min(taskset) AS taskset, min(task_index) AS task_index, min(workflow) AS workflow,
  CASE WHEN max(status) = 'truncated' THEN 'truncated' ELSE min(status) END AS status, {RUN_REWARD} AS reward, min(credit) AS credit,
  count(*) AS num_rows, sum(num_turns) AS num_turns, sum(num_tokens) AS num_tokens, sum(num_response_tokens) AS num_response_tokens
FROM experiences GROUP BY group_id, run"""

V_GROUPS = f"""CREATE VIEW v_groups AS SELECT g.id, {_RUN}, g.lineage, g.explorer, g.batch, g.task,
  s.taskset, s.task_index, s.workflow, g.accepted, g.reason, g.num_rows, g.num_eligible,
  r.num_runs, r.num_scored, r.reward_mean, r.reward_min, r.reward_max,
  (SELECT sum((o.reward - r.reward_mean) * (o.reward - r.reward_mean)) / (r.num_scored - 1)
   FROM (SELECT {RUN_REWARD} AS reward FROM experiences WHERE group_id = g.id GROUP BY run) o WHERE r.num_scored > 1)
   AS reward_variance,
  r.num_failed, r.num_truncated, s.num_available, s.num_leased, s.num_used, s.num_explained,
  s.num_tokens, r.mean_response_tokens, g.num_bytes, g.created
FROM groups g JOIN (
  SELECT e.group_id, min(e.taskset) AS taskset, min(e.task_index) AS task_index, min(e.workflow) AS workflow,
    sum(CASE WHEN {_STATE} = 'available' THEN 1 ELSE 0 END) AS num_available,
    sum(CASE WHEN {_STATE} = 'leased' THEN 1 ELSE 0 END) AS num_leased,
    sum(CASE WHEN e.state = 'used' THEN 1 ELSE 0 END) AS num_used,
    sum(CASE WHEN e.state = 'explained' THEN 1 ELSE 0 END) AS num_explained,
    sum(e.num_tokens) AS num_tokens
  FROM experiences e {_NEWEST} GROUP BY e.group_id
) s ON s.group_id = g.id
JOIN (
  SELECT group_id, count(*) AS num_runs, count(reward) AS num_scored, avg(reward) AS reward_mean, min(reward) AS reward_min,
    max(reward) AS reward_max, sum(CASE WHEN status = 'failed' THEN 1 ELSE 0 END) AS num_failed,
    sum(CASE WHEN status = 'truncated' THEN 1 ELSE 0 END) AS num_truncated,
    avg(CAST(num_response_tokens AS DOUBLE PRECISION)) AS mean_response_tokens
  FROM v_runs GROUP BY group_id
) r ON r.group_id = g.id"""

_TOKENS = """CREATE VIEW v_tokens AS SELECT e.id, e.group_id, e.batch, e.taskset, e.engine, {span} AS span,
  {lineage} AS version_lineage, {step} AS version_step,
  coalesce({token}, {start}) AS token_start, coalesce({token} + 1, {end}) AS token_end,
  CASE WHEN {token} IS NULL THEN {end} - {start} ELSE 1 END AS num_tokens,
  {theirs} AS logprob, {ours} AS trainer_logprob, {advantage} AS advantage, k.lineage AS train_lineage, k.step AS train_step
FROM experiences e CROSS JOIN {spans} LEFT JOIN token_logprobs k ON k.experience = e.id
LEFT JOIN {pairs} ON {token} >= {start} AND {token} < {end}"""

_LINEAGE = """CREATE VIEW v_lineage AS
WITH RECURSIVE counted(lineage, step) AS (
  SELECT max(lineage), 2147483647 FROM lineages
  UNION ALL
  SELECT n.parent_lineage, n.parent_step FROM lineages n JOIN counted c ON c.lineage = n.lineage WHERE n.parent_lineage IS NOT NULL
)
SELECT e.id, e.group_id, e.batch, e.taskset, e.reward,
  e.oldest_lineage, e.oldest_step, e.newest_lineage, e.newest_step,
  u.lineage AS train_lineage, u.step AS train_step, u.step - 1 - e.oldest_step AS staleness, u.created AS trained,
  CASE WHEN u.step IS NULL THEN NULL
    WHEN EXISTS (SELECT 1 FROM counted c WHERE c.lineage = u.lineage AND u.step <= c.step) THEN 1 ELSE 0 END AS counts,
  (SELECT min(k.step) FROM checkpoints k WHERE k.lineage = u.lineage AND k.step >= u.step) AS checkpoint_step
FROM experiences e LEFT JOIN uses u ON u.experience = e.id"""

_LEASED = (
    "is leased or was trained, its reward cannot be changed any more: change rewards of rows "
    "that are available in v_experiences"
)
_NUMBER = (
    f"a reward must be a finite number of at most {MAX_REWARD:g} in size; a row cannot be "
    f"taken out by its reward"
)

_SQLITE = (
    f"""CREATE TRIGGER reward_edit AFTER UPDATE OF reward ON experiences WHEN OLD.reward IS NOT NEW.reward BEGIN
  SELECT RAISE(ABORT, 'this experience {_LEASED}') FROM leases WHERE experience = OLD.id;
  SELECT RAISE(ABORT, '{_NUMBER}')
    WHERE NEW.reward IS NULL OR typeof(NEW.reward) NOT IN ('real', 'integer') OR abs(NEW.reward) > {MAX_REWARD!r};
  INSERT INTO reward_edits (experience, old_reward, new_reward, edited)
    VALUES (OLD.id, OLD.reward, NEW.reward, (julianday('now') - 2440587.5) * 86400.0);
END""",
)
# the function runs with the rights of the ledger's owner and in its schema, whatever user and
# schema the edit comes from
_POSTGRES = (
    f"""CREATE FUNCTION reward_edit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$ BEGIN
  IF EXISTS (SELECT 1 FROM leases WHERE experience = OLD.id) THEN
    RAISE EXCEPTION 'experience % {_LEASED}', OLD.id;
  END IF;
  IF NEW.reward IS NULL OR NOT (abs(NEW.reward) <= {MAX_REWARD!r}) OR NEW.reward = 'NaN' THEN
    RAISE EXCEPTION '{_NUMBER}';
  END IF;
  INSERT INTO reward_edits (experience, old_reward, new_reward, edited)
    VALUES (OLD.id, OLD.reward, NEW.reward, extract(epoch FROM clock_timestamp()));
  RETURN NEW;
END $$""",
    """CREATE TRIGGER reward_edit BEFORE UPDATE OF reward ON experiences FOR EACH ROW
  WHEN (OLD.reward IS DISTINCT FROM NEW.reward) EXECUTE FUNCTION reward_edit()""",
)


def create_views(tx: Connection) -> None:
    """Create the views and triggers of a new ledger."""
    for statement in (
        V_EXPERIENCES,
        V_RUNS,
        V_GROUPS,
        v_tokens(tx),
        _LINEAGE,
        *(_SQLITE if tx.dialect.name == "sqlite" else _POSTGRES),
    ):
        tx.execute(text(statement))


def v_tokens(tx: Connection) -> str:
    """Return the statement that creates view v_tokens."""
    names = ("lineage", "step", "start", "end")
    if tx.dialect.name == "sqlite":
        part = "json_extract({0}.value, '$[{1}]')"
        more = {
            "span": "s.key",
            "spans": "json_each(e.version_spans) s",
            "pairs": "json_each(k.pairs) t",
            "token": "(k.token_start + t.key)",
        }
    else:
        part = "({0}.value ->> {1})::integer"
        listed = "LATERAL jsonb_array_elements({}::jsonb) WITH ORDINALITY AS {}(value, number)"
        more = {
            "span": "(s.number - 1)::integer",
            "spans": listed.format("e.version_spans", "s"),
            "pairs": listed.format("k.pairs", "t"),
        }
        more["token"] = "(k.token_start + t.number - 1)::integer"
    numbers = part.replace("integer", "double precision")
    more |= {name: numbers.format("t", i) for i, name in enumerate(("theirs", "ours", "advantage"))}
    return _TOKENS.format(**more, **{name: part.format("s", i) for i, name in enumerate(names)})
