"""What selectors of tasks learn from, out of the ledger: pass rates of the tasks that were tried, and whose rows these were.

Knows no selector.  Invariant: the same standing rows give the same outcomes, whichever process asks and however often.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from sqlalchemy import Connection, delete, insert, select

from rft.buffer.schema import experiences, groups, lineages, meta
from rft.errors import ConfigError
from rft.types.ports import TaskOutcome


def outcomes(tx: Connection, explorer: int, first_batch: int, end_batch: int) -> list[TaskOutcome]:
    """Of every scored group of `explorer` in batches [first_batch, end_batch) that stands, accepted or not, by batch and task."""
    e, g = experiences.c, groups.c
    rows = tx.execute(
        select(g.id, g.batch, g.task, e.taskset, e.task_index, e.reward)
        .join(experiences, e.group_id == g.id)
        .where(g.explorer == explorer, g.batch >= first_batch, g.batch < end_batch, g.held, e.reward.is_not(None))
        .order_by(g.batch, g.task, g.id, e.id)
    )
    found = []
    for _, members in groupby(rows, key=lambda r: r.id):
        first, *rest = members
        rewards = [r.reward for r in (first, *rest)]
        rate = sum(rewards) / len(rewards)
        found.append(TaskOutcome(first.batch, first.task, first.taskset, first.task_index, rate, len(rewards)))
    return found


def same_tasksets(tx: Connection, lineage: int, explorer: int, fingerprints: Mapping[str, str]) -> None:
    """Write down the rows that `explorer` explores.  Raises ConfigError when `lineage` goes on from a checkpoint and had others."""
    prefix = f"taskset:{explorer}:"
    mine = meta.c.key.startswith(prefix, autoescape=True)
    before = {r.key.removeprefix(prefix): r.value for r in tx.execute(select(meta).where(mine))}
    goes_on = tx.scalar(select(lineages.c.parent_lineage).where(lineages.c.lineage == lineage)) is not None
    if goes_on and before and before != dict(fingerprints):
        changed = sorted(n for n in {*before, *fingerprints} if before.get(n) != fingerprints.get(n))
        raise ConfigError(
            f"the rows of {', '.join(changed)} are not those that the checkpoint was trained on (another file, filter or function result), "
            "so the run cannot go on where it was.  Bring the old rows back, or give the run another name to begin anew",
            key="buffer.explorer_input.tasksets",
            given=changed,
        )
    tx.execute(delete(meta).where(mine))
    if fingerprints:
        tx.execute(insert(meta), [{"key": prefix + name, "value": value} for name, value in sorted(fingerprints.items())])
