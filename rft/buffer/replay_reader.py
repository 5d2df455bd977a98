"""The rows of another run's steps, as leases: what `mode: train` with `replay_run` and `rft debug
step` train on.

Knows that run's ledger and payload, read-only; no trainer.  Invariant: step n gets the rows that
step n of that run had, in their order and with the statistics of their groups at the time, so that
a trainer that computes the same way gets the same weights.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from rft.buffer.given_rows import GivenRows
from rft.buffer.ledger import verify
from rft.buffer.query import Questions, open_run
from rft.errors import ConfigError, PayloadDamaged
from rft.types.block import bundle
from rft.types.credit import ScoredRow, group_statistics
from rft.types.ports import Consumption, EndOfData, GroupStats, Lease

KEY = "buffer.trainer_input.replay_run"
# rows of a step that was skipped or rejected count too: the same step skips or rejects them again
_ROWS = """SELECT e.id, e.group_id, e.position, e.reward, g.locator, e.content_hash
FROM experiences e JOIN groups g ON g.id = e.group_id
WHERE e.id IN (SELECT l.id FROM v_lineage l WHERE l.counts = 1 AND l.train_step = {0})
   OR e.id IN (SELECT x.id FROM v_experiences x WHERE x.explained IN ('nonfinite', 'rejected') AND x.leased_step = {0})
ORDER BY g.batch, g.explorer, g.task, e.id"""
_MEMBERS = (
    "SELECT reward, run, step, num_response_tokens, credit FROM experiences WHERE group_id "
    "= {0} AND reward IS NOT NULL ORDER BY id"
)
_LAST = "SELECT max(train_step) FROM v_lineage WHERE counts = 1"


class ReplayReader(GivenRows):
    """The counted steps of a run that has ended or stands still.  A context manager."""

    key = KEY

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._run_dir = run_dir
        self._open = ExitStack()
        self._questions: Questions | None = None
        self.last = 0  # step of that run

    def __enter__(self) -> Self:
        """Raises ConfigError where there is no such run, or none whose rows were kept."""
        try:
            found = self._open.enter_context(open_run(self._run_dir))
        except ConfigError as e:
            raise ConfigError(e.message, key=KEY, given=str(self._run_dir)) from e
        if not found.storage.durable:
            self._open.close()
            raise ConfigError(
                "kept its rows in memory only (path: none)", key=KEY, given=str(self._run_dir)
            )
        self._questions = found
        if mixed := self._asked("SELECT DISTINCT source FROM mixed_uses"):
            self._open.close()
            text = (
                f"its steps had rows of {mixed[0][0]} too, which its ledger does not hold; they "
                f"cannot be trained again"
            )
            raise ConfigError(text, key=KEY, given=str(self._run_dir))
        self.last = int(self._asked(_LAST)[0][0] or 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def rows_of(self, step: int) -> Lease:
        """The rows of `step`.  Raises EndOfData after that run's last step, PayloadDamaged where
        rows are gone.
        """
        if step > self.last:
            raise EndOfData(f"the run in {self._run_dir} trained {self.last} steps")
        found = self._asked(_ROWS, step)
        if not found:
            raise PayloadDamaged(f"the ledger of {self._run_dir} has no rows of step {step}")
        locators = list(dict.fromkeys(r[4] for r in found))
        stats = [self._statistics(group) for group in dict.fromkeys(r[1] for r in found)]
        chosen = []
        for locator, block in zip(locators, self._blocks(locators), strict=True):
            rows = [r for r in found if r[4] == locator]
            verify(locator, block, [(r[0], r[2], r[5]) for r in rows])
            chosen.append((block, [r[2] for r in rows], [r[3] for r in rows]))
        return Lease(step=step, frame=bundle(chosen), groups=tuple(stats))

    def consumed(self, step: int) -> Consumption:
        """Uses of that run up to `step`, in the order of their ids."""
        ids = self._asked(
            "SELECT id FROM v_lineage WHERE counts = 1 AND train_step <= {0} ORDER BY train_step, "
            "id",
            step,
        )
        digest = hashlib.sha256("\n".join(r[0] for r in ids).encode()).hexdigest()
        return Consumption(num_uses=len(ids), digest=digest, cursor=step)

    def _statistics(self, group: str) -> GroupStats:
        return group_statistics(group, [ScoredRow(*r) for r in self._asked(_MEMBERS, group)])

    def _blocks(self, locators: list[str]) -> list[bytes]:
        with self._there.errors(KEY), self._there.reading() as tx:
            return self._there.blocks(locators, tx)

    def _asked(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        mark = "?" if self._there.sqlite else "%s"
        many = values * max(sql.count("{0}"), 1) if values else ()
        with self._there.errors(KEY), self._there.reading() as tx:
            return [tuple(row) for row in tx.exec_driver_sql(sql.format(mark), many)]

    @property
    def _there(self) -> Questions:
        assert self._questions is not None, "asked before it was opened"
        return self._questions
