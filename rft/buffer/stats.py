"""What a buffer holds, counted: by state, reason, taskset and weight version.  All numbers of one answer are of one moment."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from rft.buffer.query import Questions

_TOTAL = "SELECT count(*), count(DISTINCT group_id), min(created), max(created) FROM v_experiences"
_STATES = "SELECT state, count(*) FROM v_experiences GROUP BY state ORDER BY state"
_REASONS = "SELECT explained, count(*) FROM v_experiences WHERE state = 'explained' GROUP BY explained ORDER BY 2 DESC, 1"
_TASKSETS = """
    SELECT taskset, count(*), count(DISTINCT task_index), avg(reward), avg(num_response_tokens),
           sum(CASE WHEN state = 'available' THEN 1 ELSE 0 END)
    FROM v_experiences GROUP BY taskset ORDER BY taskset"""
_VERSIONS = """
    SELECT oldest_lineage, oldest_step, count(*), avg(reward), sum(CASE WHEN state = 'available' THEN 1 ELSE 0 END)
    FROM v_experiences GROUP BY oldest_lineage, oldest_step ORDER BY oldest_lineage, oldest_step"""
_WAITING = """
    SELECT count(DISTINCT group_id), count(*), sum(num_tokens), min(batch), max(batch)
    FROM v_experiences WHERE state = 'available'"""
_USES = "SELECT count(*), count(DISTINCT experience) FROM uses"
_LAST = "SELECT lineage, max(step) FROM uses WHERE lineage = (SELECT max(lineage) FROM uses) GROUP BY lineage"
_REJECTED = "SELECT reason, sum(count) FROM rejections GROUP BY reason ORDER BY reason"
_EDITS = "SELECT count(*) FROM reward_edits"

_PAYLOAD = "SELECT sum(num_bytes) FROM groups"
_TABLES = """
    SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relkind = 'r'"""


def collect(questions: Questions) -> dict[str, Any]:
    """Counts, as plain values.  Raises ConfigError where the ledger cannot be read."""
    with questions.errors("RUN"), questions.reading() as tx:

        def rows(sql: str) -> list[tuple[Any, ...]]:
            return [tuple(r) for r in tx.exec_driver_sql(sql)]

        (total,), (waiting,) = rows(_TOTAL), rows(_WAITING)
        (uses,), last = rows(_USES), rows(_LAST)
        return {
            "run_dir": str(questions.run_dir),
            "buffer": questions.where.name,
            "ledger": str(questions.where),
            "storage": questions.about["storage_type"],
            "experiences": total[0],
            "groups": total[1],
            "first": total[2],
            "newest": total[3],
            "states": dict(rows(_STATES)),
            "reasons": dict(rows(_REASONS)),
            "tasksets": [
                {
                    "taskset": r[0],
                    "experiences": r[1],
                    "tasks": r[2],
                    "reward": _mean(r[3]),
                    "response_tokens": _mean(r[4]),
                    "available": int(r[5]),
                }
                for r in rows(_TASKSETS)
            ],
            "versions": [
                {
                    "version": None if r[0] is None else f"{r[0]}:{r[1]}",
                    "experiences": r[2],
                    "reward": _mean(r[3]),
                    "available": int(r[4]),
                }
                for r in rows(_VERSIONS)
            ],
            "waiting": {
                "groups": waiting[0],
                "experiences": waiting[1],
                "tokens": int(waiting[2] or 0),
                "first_batch": waiting[3],
                "last_batch": waiting[4],
            },
            "uses": {"uses": uses[0], "experiences": uses[1], "last": f"{last[0][0]}:{last[0][1]}" if last else None},
            "rejected": {reason: int(n) for reason, n in rows(_REJECTED)},
            "edits": rows(_EDITS)[0][0],
            "bytes": {"payload": int(rows(_PAYLOAD)[0][0] or 0), **_sizes(questions, tx)},
        }


def _sizes(questions: Questions, tx: Connection) -> dict[str, int]:
    """Bytes of the database; of SQLite also of its write-ahead log, which grows while a reader is slow."""
    path = questions.where.path
    if path is None:
        return {"database": int(tx.exec_driver_sql(_TABLES).scalar() or 0)}
    log = path.with_name(path.name + "-wal")
    return {"database": path.stat().st_size, "log": log.stat().st_size if log.exists() else 0}


def _mean(value: Any) -> float | None:
    return None if value is None else float(value)
