"""What the pages about rollouts show, asked of the ledger: a page of the table, one rollout, a
group, a task across weights.

Depends on the views of the ledger, on neither addresses nor HTML.  Invariant: every number of a row
is the one in v_experiences, v_groups or v_lineage.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from rft.buffer.inspect import Shown, Use, look, written_by
from rft.buffer.query import Questions
from rft.buffer.schema import ask
from rft.extras.view.filters import ORDERS, Filters, pattern
from rft.extras.view.opened_run import PAGE_TIMEOUT_S
from rft.extras.view.rollout_index import RolloutIndex
from rft.types.credit import ScoredRow, run_rewards

PAGE = 50  # rows
SEARCH_S = 0.08  # a page of a text search ends after this time, and says where it can go on
_SEARCHED = 500  # rows of a search that are read at once
_COLUMNS = """id, group_id, batch, task, run, taskset, task_index, status, reason, finish_reason, reward, credit, step,
  num_tokens, num_response_tokens,
  newest_lineage, newest_step, oldest_lineage, oldest_step, engine, state, explained, used_step, leased_step, created,
  substr(prompt_text, 1, 160) AS prompt, substr(response_text, 1, 240) AS response"""
_FATES = {  # see docs/concepts/buffer.md
    "failed": "the run ended without a usable sequence",
    "unscored": "the reward did not score it",
    "untrainable": "it has no token to train",
    "filtered": "an operator dropped it",
    "too_few": "too few runs of its group could be trained",
    "rejected": "the buffer refused its group",
    "operator": "an operator raised an error on its group",
    "orphaned": "weights wrote it that the resumed checkpoint does not descend from",
    "stale": "it was older than synchronizer.max_staleness when its step was leased",
    "evicted": "more groups waited for another use than the buffer's capacity",
    "nonfinite": "the gradient of its step was not finite, and the step was skipped",
    "payload_damaged": "its payload is gone or changed",
    "not_durable": "its payload was in memory only and was lost with the process",
}


@dataclass(frozen=True)
class TablePage:
    """A part of the table.  `after`: where the next one begins, "" at the end; `total` None: not
    counted.
    """

    rows: list[dict[str, Any]]
    total: int | None
    after: str
    searched: int = 0  # rows that a text search has looked at


def table(questions: Questions, index: RolloutIndex | None, f: Filters, after: str) -> TablePage:
    """The rows behind `after`.  Without an index, or where an index of the ledger leads to few
    rows, the database chooses them.
    """
    if index is None or f.few:
        return _by_database(questions, f, int(after or 0))
    begin = int(after) if after else None
    if f.text:
        return _search(questions, index, f, begin)
    chosen = index.choose(f, PAGE, begin)
    rows = by_ids(questions, index.ids(chosen.positions))
    return TablePage(rows, chosen.total, str(chosen.positions[-1]) if chosen.more else "")


def newest(questions: Questions) -> TablePage:
    """The first page without any filter, which needs no index."""
    order = "rowid DESC" if questions.sqlite else "created DESC"
    ids = [
        r["id"]
        for r in select(questions, f"SELECT id FROM experiences ORDER BY {order} LIMIT {PAGE}")
    ]
    return TablePage(by_ids(questions, ids), None, "")


def by_ids(questions: Questions, ids: Sequence[str]) -> list[dict[str, Any]]:
    """These rows of v_experiences, in this order."""
    if not ids:
        return []
    by_id = {
        r["id"]: r
        for r in select(
            questions, f"SELECT {_COLUMNS} FROM v_experiences WHERE id IN (??)", many=ids
        )
    }
    return [by_id[x] for x in ids if x in by_id]


def select(
    questions: Questions, sql: str, values: Sequence[Any] = (), *, many: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Run one of the viewer's statements in its own transaction; return its rows."""
    with questions.errors("RUN", PAGE_TIMEOUT_S), questions.reading(PAGE_TIMEOUT_S) as tx:
        return [dict(r) for r in ask(tx, sql, values, many=many).mappings()]


def _by_database(questions: Questions, f: Filters, skipped: int) -> TablePage:
    clauses, values = f.conditions(like="LIKE" if questions.sqlite else "ILIKE")
    if f.step is not None:  # the same rows, by an index: used_step alone would read all
        clauses.append(
            "id IN (SELECT experience FROM uses WHERE lineage IN (SELECT lineage FROM lineages) "
            "AND step = ?)"
        )
        values.append(f.step)
    if f.batch is not None:
        clauses.append("group_id IN (SELECT id FROM groups WHERE batch = ?)")
        values.append(f.batch)
    where = f"WHERE {' AND '.join(clauses)}" if clauses else ""
    sql = (
        f"SELECT id FROM v_experiences {where} ORDER BY {ORDERS[f.order]} LIMIT {PAGE + 1} "
        f"OFFSET {skipped}"
    )
    ids = [r["id"] for r in select(questions, sql, values)]
    total = (
        select(questions, f"SELECT count(*) AS n FROM v_experiences {where}", values)[0]["n"]
        if f.few
        else None
    )
    rows = by_ids(questions, ids[:PAGE])
    return TablePage(rows, total, str(skipped + PAGE) if len(ids) > PAGE else "")


def _search(questions: Questions, index: RolloutIndex, f: Filters, after: int | None) -> TablePage:
    """Rows whose texts hold `f.text`, among those that the other filters leave, until a page is
    full or its time is over.
    """
    like = pattern(f.text)
    sql = (
        r"SELECT experience FROM texts WHERE experience IN (??) AND (prompt_text LIKE ? ESCAPE "
        r"'\' OR response_text LIKE ? ESCAPE '\')"
    )
    ends = time.monotonic() + SEARCH_S
    matching_ids = list[int]()
    searched = 0
    while len(matching_ids) < PAGE:
        chosen = index.choose(f, _SEARCHED, after)
        ids = index.ids(chosen.positions)
        sql_of_part = sql.replace("(??)", f"({', '.join('?' * len(ids))})")
        holds = (
            {r["experience"] for r in select(questions, sql_of_part, [*ids, like, like])}
            if ids
            else set()
        )
        for at, id in zip(chosen.positions.tolist(), ids, strict=True):
            after = at
            searched = searched + 1
            if id in holds:
                matching_ids.append(at)
            if len(matching_ids) == PAGE:
                break
        if not chosen.more and (not ids or after == chosen.positions[-1]):
            return TablePage(
                by_ids(questions, index.ids(np.array(matching_ids, np.int64))), None, "", searched
            )
        if time.monotonic() > ends:
            break
    return TablePage(
        by_ids(questions, index.ids(np.array(matching_ids, np.int64))), None, str(after), searched
    )


# ------------------------------------------------------------ one rollout


@dataclass(frozen=True)
class RolloutPage:
    """One experience and what is around it."""

    x: Shown
    group: dict[str, Any]  # of v_groups
    siblings: list[dict[str, Any]]
    # reward − mean of the group, and the largest in size of the group
    advantage: tuple[float, float] | None
    fate: str
    path: list[tuple[str, str, str]]  # station, what, filters of the rollouts that share it


def rollout(questions: Questions, id: str) -> RolloutPage:
    """Raises ConfigError where there is no such experience."""
    (x,) = look(questions, id=id)
    group, siblings = group_page(questions, x.row["group_id"])
    mean = group.get("reward_mean")
    scored = (
        [] if mean is None else [s["reward"] - mean for s in siblings if s["reward"] is not None]
    )
    difference = None if mean is None or x.row["reward"] is None else x.row["reward"] - mean
    advantage = None if difference is None else (difference, max(map(abs, scored)))
    return RolloutPage(
        x, group, siblings, advantage, fate(x.row, x.uses, group), path(x.row, x.uses)
    )


def group_page(questions: Questions, group_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of v_groups, {} where there is none, and the rows of its experiences by run."""
    group_rows = select(questions, "SELECT * FROM v_groups WHERE id = ?", (group_id,))
    ids = [
        r["id"]
        for r in select(
            questions, "SELECT id FROM experiences WHERE group_id = ? ORDER BY id", (group_id,)
        )
    ]
    return (group_rows[0] if group_rows else {}), by_ids(questions, ids)


def fate(row: dict[str, Any], uses: Sequence[Use], group: dict[str, Any]) -> str:
    """Return one sentence: trained in which step, or not, with the reason."""
    if row["state"] == "explained":
        reason = str(row["explained"])
        more = row["reason"] or group.get("reason") or ""
        text = _FATES.get(reason, "")
        return (
            f"Not trained, {reason}"
            + (f": {text}" if text else "")
            + (f" ({more})" if more and more != reason else "")
            + "."
        )
    equal = (
        row["credit"] == "run"
        and group.get("num_scored", 0) > 1
        and group.get("reward_min") == group.get("reward_max")
    )
    flat = (
        " All rewards of its group are equal, so compared with its group it teaches nothing."
        if equal
        else ""
    )
    counted = [u for u in uses if u.counts]
    if counted:
        return "Trained in step " + ", ".join(str(u.version) for u in counted) + "." + flat
    if uses:
        return (
            f"Trained in step {uses[-1].version}, of which no current weights know: the run "
            f"resumed from before it."
        )
    if row["state"] == "leased":
        return (
            f"Handed to the trainer for step {row['leased_step']}; the step is not recorded yet."
            + flat
        )
    return "Waits for a train step." + flat


def path(row: dict[str, Any], uses: Sequence[Use]) -> list[tuple[str, str, str]]:
    """weights → engine → row → lease → step → checkpoint."""
    shared = "" if row["newest_step"] is None else Filters(version=row["newest_step"]).query()
    stages = [
        ("weights", written_by(row) or "none: it was not sampled", shared),
        ("engine", str(row["engine"] or "not recorded"), ""),
        ("row", f"batch {row['batch']}, {row['state']}", Filters(batch=row["batch"]).query()),
    ]
    if row["leased_step"] is not None:
        stages.append(("lease", f"step {row['leased_step']}", ""))
    for use in uses:
        stages.append(
            (
                "step",
                str(use.version) + ("" if use.counts else ", left behind"),
                Filters(step=use.version.step).query(),
            )
        )
        if use.checkpoint:
            stages.append(("checkpoint", use.checkpoint + ("" if use.exists else ", deleted"), ""))
        elif use.counts:
            stages.append(("checkpoint", "none yet", ""))
    return stages


def has_advantages(x: Shown) -> bool:
    """Whether the run has kept the trainer's advantages of this row."""
    p = x.payload
    return (
        p is not None
        and x.trainer is not None
        and bool(np.isfinite(x.trainer.advantages[p.loss_mask]).any())
    )


# ------------------------------------------------------------ a task


def task(
    questions: Questions, index: RolloutIndex | None, taskset: str, number: int
) -> list[dict[str, Any]]:
    """Group the newest rollouts of one task by weight version, each with its mean reward."""
    f = Filters(taskset=taskset, task=number)
    if index is None:
        sql = (
            "SELECT id FROM v_experiences WHERE taskset = ? AND task_index = ? ORDER BY created "
            "DESC, id DESC LIMIT 200"
        )
        ids = [r["id"] for r in select(questions, sql, (taskset, number))]
    else:
        ids = index.ids(index.choose(f, 200).positions)
    by_version: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in by_ids(questions, ids):
        step = -1 if row["newest_step"] is None else row["newest_step"]
        by_version.setdefault((row["newest_lineage"] or 0, step), []).append(row)
    versions = []
    for (lineage, step), rows in sorted(by_version.items()):
        name = "none" if step < 0 else f"{lineage}:{step}"
        versions.append({"version": name, "rows": rows, "mean": _mean_of_runs(rows)})
    return versions


def _mean_of_runs(rows: Sequence[dict[str, Any]]) -> float | None:
    """The mean reward of the runs that have one."""
    runs: dict[tuple[str, int], list[ScoredRow]] = defaultdict(list)
    for r in rows:
        if r["reward"] is not None:
            runs[r["group_id"], r["run"]].append(
                ScoredRow(
                    *[r[n] for n in ("reward", "run", "step", "num_response_tokens", "credit")]
                )
            )
    rewards = [reward for members in runs.values() for reward in run_rewards(members).values()]
    return fmean(rewards) if rewards else None
