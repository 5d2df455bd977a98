"""Collect a buffer's counts, and single experiences with their lineage, for display.

Does not know terminals.  Invariant: lineage comes from the ledger's view v_lineage.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from sqlalchemy import Connection

from rft.buffer.query import Order, Questions
from rft.buffer.schema import RUN_REWARD, tables_size
from rft.errors import ConfigError, PayloadDamaged
from rft.types.experience import Experience
from rft.types.ids import Version
from rft.types.images import names_in
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
_IMAGES = "SELECT CAST(coalesce(sum(num_bytes), 0) AS BIGINT) FROM images"
_PAYLOAD = "SELECT CAST(coalesce(sum(num_bytes), 0) AS BIGINT) FROM groups"


def collect(questions: Questions) -> dict[str, Any]:
    """Return counts of a buffer's content as plain values of one snapshot.

    Raises ConfigError if the ledger cannot be read.
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
                    {"trainer_logprobs": num_bytes}
                    if (num_bytes := tx.exec_driver_sql(_KEPT).scalar())
                    else {}
                ),
                **({"images": files} if (files := tx.exec_driver_sql(_IMAGES).scalar()) else {}),
                **_sizes(questions, tx),
            },
        }


def _sizes(questions: Questions, tx: Connection) -> dict[str, int]:
    """Return bytes of the database, and of SQLite's write-ahead log, which grows during slow reads."""
    path = questions.where.path
    if path is None:
        return {"database": tables_size(tx)}
    log = path.with_name(path.name + "-wal")
    return {"database": path.stat().st_size, "log": log.stat().st_size if log.exists() else 0}


class Use(msgspec.Struct, frozen=True):
    """An optimizer step that trained an experience."""

    version: Version  # lineage and step
    # False: the run resumed from an earlier checkpoint, so no weights depend on this use
    counts: bool
    checkpoint: str | None  # folder of the first checkpoint after the use; None: none yet
    exists: bool  # whether that folder still exists


class Shown(msgspec.Struct, frozen=True):
    """An experience: row of v_experiences, payload (None if lost, see `missing_reason`) and uses."""

    row: dict[str, Any]
    payload: Experience | None
    missing_reason: str
    uses: tuple[Use, ...]
    trainer: TrainerTokens | None  # of its first use, if kept
    group_mean: float | None = None  # mean reward of its group's runs; None without rewards
    group_scored: int = 0  # number of scored runs


def look(
    questions: Questions,
    *,
    num: int = 3,
    id: str | None = None,
    where: str = "",
    step: int | None = None,
    order: Order = "random",
) -> list[Shown]:
    """Return the experience `id`, or `num` of those that fulfil `where` and were trained in `step`.

    Raises ConfigError for an unknown id.
    """
    rows = questions.draw(where, num, step=step, order=order) if id is None else questions.row(id)
    if id is not None and not rows:
        raise ConfigError(
            f'{id!r} is not in {questions.where}; `rft buffer query RUN "SELECT id FROM '
            f'v_experiences LIMIT 5"` shows some ids',
            key="--id",
            given=id,
        )
    trainer_tokens = questions.trainer_tokens([row["id"] for row in rows])
    return [
        Shown(
            row,
            *_payload(questions, id := row["id"]),
            _uses(questions, id),
            trainer_tokens.get(id),
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
    uses = []
    for row in questions.lineage(id):
        name = None if row["checkpoint_step"] is None else f"global_step_{row['checkpoint_step']}"
        exists = (
            name is not None
            and (questions.run_dir / "checkpoints" / name / "manifest.json").is_file()
        )
        uses.append(
            Use(Version(row["train_lineage"], row["train_step"]), bool(row["counts"]), name, exists)
        )
    return tuple(uses)


def written_by(row: dict[str, Any]) -> str:
    """Return the versions that wrote the row, "oldest" or "oldest to newest"; "" if not sampled."""
    if row["newest_step"] is None:
        return ""
    oldest, newest = (f"{row[f'{k}_lineage']}:{row[f'{k}_step']}" for k in ("oldest", "newest"))
    return oldest if oldest == newest else f"{oldest} to {newest}"


def equation(x: Shown) -> str:
    """Return the reward as its parts, " = 0.2 × brief 0.186 + 1 × rule 0 (rule/right 0)"; parts that
    do not add up to it are listed without a sign.
    """
    parts: dict[str, float] = json.loads(x.row["reward_parts"] or "{}")
    stored = {} if x.payload is None else x.payload.info.get("reward_weights")
    weights = stored if isinstance(stored, dict) and stored.keys() <= parts.keys() else {}
    terms = weights or dict.fromkeys(parts, 1.0)
    total = math.fsum(weight * parts[name] for name, weight in terms.items())
    reward = x.row["reward"]
    adds_up = reward is not None and math.isclose(total, reward, rel_tol=1e-5, abs_tol=1e-6)
    if not parts:
        return ""
    if not adds_up:
        return "; its parts: " + ", ".join(f"{name} {v:g}" for name, v in parts.items())
    factors = {name: f"{weight:g} × " if weights else "" for name, weight in terms.items()}
    inner = ", ".join(f"{name} {v:g}" for name, v in parts.items() if name not in terms)
    text = " + ".join(f"{factor}{name} {parts[name]:g}" for name, factor in factors.items())
    return f" = {text}" + (f" ({inner})" if inner else "")


def judge_exchanges(info: dict[str, Any]) -> list[dict[str, Any]]:
    """Remove from `info` the judges' exchanges (`rft.reward.exchanges`) and return them with all
    keys; another value of that name stays.
    """
    value = info.get("judge")
    if not isinstance(value, list) or not all(map(_is_exchange, value)):
        return []
    del info["judge"]
    blank = {"judge": "the judge", "why": "nothing"}
    return [
        {
            **blank,
            **e,
            "question": [
                {"role": str(m.get("role")), "content": str(m.get("content"))}
                for m in e["question"]
            ],
        }
        for e in value
    ]


def _is_exchange(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("reply"), str)
        and isinstance(value.get("question"), list)
        and all(isinstance(m, dict) for m in value["question"])
    )


def conversation(x: Shown) -> list[dict[str, Any]]:
    """Return messages as role, text, tool calls and names of images; for a row without payload, prompt and response."""
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
            "images": list(names_in([m])),
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
            else f"[image {str(p.get('image'))[:12]}]"
            if isinstance(p, dict) and p.get("type") == "image"
            else plain_text(p)
            for p in content
        )
    return plain_text(content)


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return plain_text(call)
    arguments = function.get("arguments")
    return f"{function.get('name')}({arguments if isinstance(arguments, str) else plain_text(arguments)})"


def plain_text(value: Any) -> str:
    """Return any value of a record as text."""
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, indent=1, ensure_ascii=False, default=str)
    )
