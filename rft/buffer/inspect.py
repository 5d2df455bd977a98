"""What people want to know of a buffer: what it holds, counted; and single experiences with their
lineage.

It does not know terminals.  The one invariant: what it says of lineage is the ledger's view
v_lineage.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from sqlalchemy import Connection

from rft.buffer.query import Order, Questions
from rft.buffer.schema import RUN_REWARD, tables_size
from rft.errors import ConfigError, PayloadDamaged
from rft.types.experience import Experience
from rft.types.ids import Version
from rft.types.token_logprobs import TrainerTokens

_AVAILABLE = "CAST(sum(available) AS BIGINT) AS available"
_REWARD = "CAST(avg(reward) AS DOUBLE PRECISION) AS reward"
_OF_RUNS = f"""count(*) AS rows, {RUN_REWARD} AS reward, sum(num_response_tokens) AS num_response_tokens,
           sum(CASE WHEN state = 'available' THEN 1 ELSE 0 END) AS available FROM v_experiences GROUP BY group_id, run"""
_TOTAL = """
    SELECT count(*) AS experiences, count(DISTINCT group_id) AS groups, min(created) AS first, max(created) AS newest
    FROM v_experiences"""
_STATES = "SELECT state, count(*) FROM v_experiences GROUP BY state ORDER BY state"
_REASONS = (
    "SELECT explained, count(*) FROM v_experiences WHERE state = 'explained' GROUP BY "
    "explained ORDER BY 2 DESC, 1"
)
_TASKSETS = f"""
    SELECT taskset, CAST(sum(rows) AS BIGINT) AS experiences, count(DISTINCT task_index) AS tasks, {_REWARD},
           CAST(avg(num_response_tokens) AS DOUBLE PRECISION) AS response_tokens, {_AVAILABLE}
    FROM (SELECT min(taskset) AS taskset, min(task_index) AS task_index, {_OF_RUNS}) runs GROUP BY taskset ORDER BY taskset"""
_VERSIONS = f"""
    SELECT oldest_lineage || ':' || oldest_step AS version, CAST(sum(rows) AS BIGINT) AS experiences, {_REWARD}, {_AVAILABLE}
    FROM (SELECT oldest_lineage, oldest_step, {_OF_RUNS}, oldest_lineage, oldest_step) runs
    GROUP BY oldest_lineage, oldest_step ORDER BY oldest_lineage, oldest_step"""
_WAITING = """
    SELECT count(DISTINCT group_id) AS groups, count(*) AS experiences, CAST(coalesce(sum(num_tokens), 0) AS BIGINT) AS tokens,
           min(batch) AS first_batch, max(batch) AS last_batch
    FROM v_experiences WHERE state = 'available'"""
_USES = """
    SELECT count(*) AS uses, count(DISTINCT experience) AS experiences,
           (SELECT lineage || ':' || max(step) FROM uses WHERE lineage = (SELECT max(lineage) FROM uses) GROUP BY lineage) AS last
    FROM uses"""
_KEPT = "SELECT CAST(sum(length(pairs)) AS BIGINT) FROM token_logprobs"
_REJECTED = (
    "SELECT reason, CAST(sum(count) AS BIGINT) FROM rejections GROUP BY reason ORDER BY reason"
)
_EDITS = "SELECT count(*) FROM reward_edits"
_PAYLOAD = "SELECT CAST(coalesce(sum(num_bytes), 0) AS BIGINT) FROM groups"


def collect(questions: Questions) -> dict[str, Any]:
    """What a buffer holds, counted, as plain values of one moment.  Raises ConfigError where the
    ledger cannot be read.
    """
    with questions.errors("RUN"), questions.reading() as tx:

        def rows(sql: str) -> list[dict[str, Any]]:
            return [dict(r) for r in tx.exec_driver_sql(sql).mappings()]

        def counts(sql: str) -> dict[str, int]:
            return dict(tx.exec_driver_sql(sql).all())

        return {
            "run_dir": str(questions.run_dir),
            "buffer": questions.where.name,
            "ledger": str(questions.where),
            "storage": questions.about["storage_type"],
            **rows(_TOTAL)[0],
            "states": counts(_STATES),
            "reasons": counts(_REASONS),
            "tasksets": rows(_TASKSETS),
            "versions": rows(_VERSIONS),
            "waiting": rows(_WAITING)[0],
            "uses": rows(_USES)[0],
            "rejected": counts(_REJECTED),
            "edits": tx.exec_driver_sql(_EDITS).scalar(),
            "bytes": {
                "payload": tx.exec_driver_sql(_PAYLOAD).scalar(),
                **(
                    {"trainer_logprobs": kept}
                    if (kept := tx.exec_driver_sql(_KEPT).scalar())
                    else {}
                ),
                **_sizes(questions, tx),
            },
        }


def _sizes(questions: Questions, tx: Connection) -> dict[str, int]:
    """Bytes of the database; of SQLite also of its write-ahead log, which grows while a reader is
    slow.
    """
    path = questions.where.path
    if path is None:
        return {"database": tables_size(tx)}
    log = path.with_name(path.name + "-wal")
    return {"database": path.stat().st_size, "log": log.stat().st_size if log.exists() else 0}


class Use(msgspec.Struct, frozen=True):
    """One optimizer step that trained an experience."""

    version: Version  # lineage and step
    # False: the run went on from a checkpoint before it, no weights rest on this use any more
    counts: bool
    checkpoint: str | None  # folder of the first checkpoint that rests on it; None: none does yet
    there: bool  # whether that folder is still there


class Shown(msgspec.Struct, frozen=True):
    """One experience: its row of v_experiences, its payload (None where it is gone, `gone` says
    why) and its uses.
    """

    row: dict[str, Any]
    payload: Experience | None
    gone: str
    uses: tuple[Use, ...]
    trainer: TrainerTokens | None  # of its first use, where they are kept
    group_mean: float | None = None  # reward of its group's runs; None where they have none
    group_scored: int = 0  # those that have one


def look(
    questions: Questions,
    *,
    num: int = 3,
    id: str | None = None,
    where: str = "",
    step: int | None = None,
    order: Order = "random",
) -> list[Shown]:
    """The experience `id`, or `num` of those that fulfil `where` and were trained in `step`.
    ConfigError where there is no such id.
    """
    rows = questions.draw(where, num, step=step, order=order) if id is None else questions.row(id)
    if id is not None and not rows:
        raise ConfigError(
            f'{id!r} is not in {questions.where}; `rft buffer query RUN "SELECT id FROM '
            f'v_experiences LIMIT 5"` shows some ids',
            key="--id",
            given=id,
        )
    kept = questions.trainer_tokens([row["id"] for row in rows])
    return [
        Shown(
            row,
            *_payload(questions, id := row["id"]),
            _uses(questions, id),
            kept.get(id),
            *questions.group_reward(row["group_id"]),
        )
        for row in rows
    ]


def _payload(questions: Questions, id: str) -> tuple[Experience | None, str]:
    if not questions.storage.durable:
        return None, "kept in memory only (path: none)"
    try:
        return questions.payload([id])[id], ""
    except PayloadDamaged as e:
        return None, str(e)


def _uses(questions: Questions, id: str) -> tuple[Use, ...]:
    found = []
    for row in questions.lineage(id):
        name = None if row["checkpoint_step"] is None else f"global_step_{row['checkpoint_step']}"
        there = (
            name is not None
            and (questions.run_dir / "checkpoints" / name / "manifest.json").is_file()
        )
        found.append(
            Use(Version(row["train_lineage"], row["train_step"]), bool(row["counts"]), name, there)
        )
    return tuple(found)


def written_by(row: dict[str, Any]) -> str:
    """The versions of the weights that wrote it, from the oldest to the newest; "" for what was not
    sampled.
    """
    if row["newest_step"] is None:
        return ""
    oldest, newest = (f"{row[f'{k}_lineage']}:{row[f'{k}_step']}" for k in ("oldest", "newest"))
    return oldest if oldest == newest else f"{oldest} to {newest}"


def conversation(x: Shown) -> list[dict[str, str]]:
    """Messages as role and text, with the calls of tools; of a row without a payload prompt and
    response.
    """
    if x.payload is None or not x.payload.messages:
        return [
            {"role": "prompt", "text": x.row["prompt_text"] or ""},
            {"role": "response", "text": x.row["response_text"] or ""},
        ]
    return [
        {
            "role": str(m.get("role", "?")) + (f" {m['name']}" if m.get("name") else ""),
            "text": _content_text(m.get("content")),
            "calls": "\n".join(_call_text(c) for c in m.get("tool_calls") or ()),
        }
        for m in x.payload.messages
    ]


def _content_text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list):
        return "\n".join(
            str(p["text"])
            if isinstance(p, dict) and isinstance(p.get("text"), str)
            else plain_text(p)
            for p in content
        )
    return plain_text(content)


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return plain_text(call)
    given = function.get("arguments")
    return f"{function.get('name')}({given if isinstance(given, str) else plain_text(given)})"


def plain_text(value: Any) -> str:
    """Any value of a record as text."""
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, indent=1, ensure_ascii=False, default=str)
    )
