"""What people see of a ledger with SQL: four views, and the rule by which a reward may be changed.  The same on SQLite and PostgreSQL.

    v_experiences  one row per experience, all typed columns, its state and its newest lease and use
    v_groups       one row per group: rewards, lengths and states counted over its experiences
    v_tokens       one row per span of tokens that one weight version wrote (the tokens themselves are packed: `rft buffer sample`)
    v_lineage      weight version -> experience -> optimizer step -> checkpoint, one row per experience and use

A reward is changed by `UPDATE experiences SET reward = ...` until its row is leased: triggers refuse what would have no effect and
what is no finite number, and write each change into `reward_edits`.  The one invariant: a reward that was changed is what is trained.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

VIEWS = ("v_experiences", "v_groups", "v_tokens", "v_lineage")
MAX_REWARD = 1e18  # its square is still a float32

_COLUMNS = """e.group_id, e.lineage, e.explorer, e.batch, e.task, e.run, e.attempt, e.step,
  e.taskset, e.task_index, e.workflow, e.status, e.reason, e.finish_reason,
  e.reward, e.reward_parts, e.num_tokens, e.num_response_tokens, e.num_turns,
  e.oldest_lineage, e.oldest_step, e.newest_lineage, e.newest_step,
  e.temperature, e.top_p, e.top_k, e.min_p, e.seed, e.logprob_mode, e.engine, e.has_logprobs, e.clipped_logprobs, e.is_expert,
  x.prompt_text, x.response_text, e.content_hash"""

_RUN = "(SELECT value FROM meta WHERE key = 'run') AS run_name"
_STATE = "CASE WHEN e.state = 'available' AND l.experience IS NOT NULL AND u.experience IS NULL THEN 'leased' ELSE e.state END"
_NEWEST = """LEFT JOIN leases l ON l.experience = e.id
LEFT JOIN uses u ON u.experience = l.experience AND u.lineage = l.lineage AND u.step = l.step"""

EXPERIENCES = f"""CREATE VIEW v_experiences AS SELECT e.id, {_RUN}, {_COLUMNS},
  {_STATE} AS state, e.explained, e.created,
  l.step AS leased_step, l.created AS leased, u.step AS used_step, u.created AS used
FROM experiences e LEFT JOIN texts x ON x.experience = e.id {_NEWEST}"""

_GROUPS = f"""CREATE VIEW v_groups AS SELECT g.id, {_RUN}, g.lineage, g.explorer, g.batch, g.task,
  s.taskset, s.task_index, s.workflow, g.accepted, g.reason, g.num_rows, g.num_eligible,
  s.num_scored, s.reward_mean, s.reward_min, s.reward_max,
  (SELECT sum((e.reward - s.reward_mean) * (e.reward - s.reward_mean)) / (s.num_scored - 1)
   FROM experiences e WHERE e.group_id = g.id AND s.num_scored > 1) AS reward_variance,
  s.num_failed, s.num_truncated, s.num_available, s.num_leased, s.num_used, s.num_explained,
  s.num_tokens, s.mean_response_tokens, g.num_bytes, g.created
FROM groups g JOIN (
  SELECT e.group_id, min(e.taskset) AS taskset, min(e.task_index) AS task_index, min(e.workflow) AS workflow,
    count(e.reward) AS num_scored, avg(e.reward) AS reward_mean, min(e.reward) AS reward_min, max(e.reward) AS reward_max,
    sum(CASE WHEN e.status = 'failed' THEN 1 ELSE 0 END) AS num_failed,
    sum(CASE WHEN e.status = 'truncated' THEN 1 ELSE 0 END) AS num_truncated,
    sum(CASE WHEN {_STATE} = 'available' THEN 1 ELSE 0 END) AS num_available,
    sum(CASE WHEN {_STATE} = 'leased' THEN 1 ELSE 0 END) AS num_leased,
    sum(CASE WHEN e.state = 'used' THEN 1 ELSE 0 END) AS num_used,
    sum(CASE WHEN e.state = 'explained' THEN 1 ELSE 0 END) AS num_explained,
    sum(e.num_tokens) AS num_tokens, avg(CAST(e.num_response_tokens AS DOUBLE PRECISION)) AS mean_response_tokens
  FROM experiences e {_NEWEST} GROUP BY e.group_id
) s ON s.group_id = g.id"""

_TOKENS = """CREATE VIEW v_tokens AS SELECT e.id, e.group_id, e.batch, e.taskset, e.engine, {span} AS span,
  {lineage} AS version_lineage, {step} AS version_step, {start} AS token_start, {end} AS token_end, {end} - {start} AS num_tokens
FROM experiences e CROSS JOIN {spans}"""

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
    "is leased or was trained, its reward cannot be changed any more: change rewards of rows that are available in v_experiences"
)
_NUMBER = f"a reward must be a finite number of at most {MAX_REWARD:g} in size; a row cannot be taken out by its reward"

_SQLITE = (
    f"""CREATE TRIGGER reward_edit AFTER UPDATE OF reward ON experiences WHEN OLD.reward IS NOT NEW.reward BEGIN
  SELECT RAISE(ABORT, 'this experience {_LEASED}') FROM leases WHERE experience = OLD.id;
  SELECT RAISE(ABORT, '{_NUMBER}')
    WHERE NEW.reward IS NULL OR typeof(NEW.reward) NOT IN ('real', 'integer') OR abs(NEW.reward) > {MAX_REWARD!r};
  INSERT INTO reward_edits (experience, old_reward, new_reward, edited)
    VALUES (OLD.id, OLD.reward, NEW.reward, (julianday('now') - 2440587.5) * 86400.0);
END""",
)
_POSTGRES = (  # the function runs with the rights and in the schema of the ledger, whoever edits from wherever
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


def create(tx: Connection) -> None:
    """Views and triggers of a ledger that has none."""
    sqlite = tx.dialect.name == "sqlite"
    if sqlite:
        part, spans, number = "json_extract(s.value, '$[{}]')", "json_each(e.version_spans) s", "s.key"
    else:
        part, number = "(s.value ->> {})::integer", "(s.number - 1)::integer"
        spans = "LATERAL jsonb_array_elements(e.version_spans::jsonb) WITH ORDINALITY AS s(value, number)"
    names = ("lineage", "step", "start", "end")
    tokens = _TOKENS.format(span=number, spans=spans, **{name: part.format(i) for i, name in enumerate(names)})
    for statement in (EXPERIENCES, _GROUPS, tokens, _LINEAGE, *(_SQLITE if sqlite else _POSTGRES)):
        tx.execute(text(statement))
