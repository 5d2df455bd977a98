"""Serve the rows of another run's steps as leases, for `mode: train` with `replay_run` and `rft
debug step`.

Depends on that run's ledger and payload, read-only, on no trainer.  Invariant: step n gets the rows
of that run's step n, in their order and with their groups' statistics of that time, so an identical
trainer gets the same weights.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from rft.buffer.given_rows import GivenRows
from rft.buffer.image_files import files_of
from rft.buffer.ledger import verify
from rft.buffer.query import Questions, open_run
from rft.errors import ConfigError, PayloadDamaged
from rft.types.block import bundle
from rft.types.credit import ScoredRow, group_statistics
from rft.types.ports import Consumption, EndOfData, GroupStats, Lease

KEY = "buffer.trainer_input.replay_run"
# include rows of a skipped or rejected step: the same step skips or rejects them again
_ROWS = """SELECT e.id, e.group_id, e.position, e.reward, g.locator, e.content_hash
FROM experiences e JOIN groups g ON g.id = e.group_id
WHERE e.id IN (SELECT l.id FROM v_lineage l WHERE l.counts = 1 AND l.train_step = {0})
   OR e.id IN (SELECT x.id FROM v_experiences x WHERE x.explained IN ('nonfinite', 'rejected') AND x.leased_step = {0})
ORDER BY g.batch, g.explorer, g.task, e.id"""
_MEMBERS = (
    "SELECT reward, run, step, num_response_tokens, credit, reward_parts FROM experiences WHERE "
    "group_id = {0} AND reward IS NOT NULL ORDER BY id"
)
_LAST = "SELECT max(train_step) FROM v_lineage WHERE counts = 1"


class ReplayReader(GivenRows):
    """The counted steps of a run that has ended or is paused.  A context manager."""

    key = KEY

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._run_dir = run_dir
        self._open = ExitStack()
        self._questions: Questions | None = None
        self.last = 0  # last step of that run

    def __enter__(self) -> Self:
        """Open the run's ledger.  Raises ConfigError if the run does not exist or kept no rows."""
        try:
            questions = self._open.enter_context(open_run(self._run_dir))
        except ConfigError as e:
            raise ConfigError(e.message, key=KEY, given=str(self._run_dir)) from e
        if not questions.storage.durable:
            self._open.close()
            raise ConfigError(
                "kept its rows in memory only (path: none)", key=KEY, given=str(self._run_dir)
            )
        self._questions = questions
        if mixed := self._query("SELECT DISTINCT source FROM mixed_uses"):
            self._open.close()
            text = (
                f"its steps had rows of {mixed[0][0]} too, which its ledger does not hold; they "
                f"cannot be trained again"
            )
            raise ConfigError(text, key=KEY, given=str(self._run_dir))
        self.last = int(self._query(_LAST)[0][0] or 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def rows_of(self, step: int) -> Lease:
        """Return the rows of `step`.

        Raises EndOfData after that run's last step, PayloadDamaged if rows are lost.
        """
        if step > self.last:
            raise EndOfData(f"the run in {self._run_dir} trained {self.last} steps")
        step_rows = self._query(_ROWS, step)
        if not step_rows:
            raise PayloadDamaged(f"the ledger of {self._run_dir} has no rows of step {step}")
        locators = list(dict.fromkeys(r[4] for r in step_rows))
        stats = [self._statistics(group) for group in dict.fromkeys(r[1] for r in step_rows)]
        chosen = []
        for locator, block in zip(locators, self._blocks(locators), strict=True):
            rows = [r for r in step_rows if r[4] == locator]
            verify(locator, block, [(r[0], r[2], r[5]) for r in rows])
            chosen.append((block, [r[2] for r in rows], [r[3] for r in rows]))
        groups = [stat.group for stat in stats]
        with self._ledger.errors(KEY), self._ledger.reading() as tx:
            files = files_of(tx, self._ledger.storage, groups)
        return Lease(step=step, frame=bundle(chosen), images=files, groups=tuple(stats))

    def consumed(self, step: int) -> Consumption:
        """Return that run's uses up to `step`, in the order of their ids."""
        ids = self._query(
            "SELECT id FROM v_lineage WHERE counts = 1 AND train_step <= {0} ORDER BY train_step, "
            "id",
            step,
        )
        digest = hashlib.sha256("\n".join(r[0] for r in ids).encode()).hexdigest()
        return Consumption(num_uses=len(ids), digest=digest, cursor=step)

    def _statistics(self, group: str) -> GroupStats:
        members = self._query(_MEMBERS, group)
        return group_statistics(
            group, [ScoredRow._make([*m[:-1], json.loads(m[-1])]) for m in members]
        )

    def _blocks(self, locators: list[str]) -> list[bytes]:
        with self._ledger.errors(KEY), self._ledger.reading() as tx:
            return self._ledger.blocks(locators, tx)

    def _query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        mark = "?" if self._ledger.sqlite else "%s"
        many = values * max(sql.count("{0}"), 1) if values else ()
        with self._ledger.errors(KEY), self._ledger.reading() as tx:
            return [tuple(row) for row in tx.exec_driver_sql(sql.format(mark), many)]

    @property
    def _ledger(self) -> Questions:
        assert self._questions is not None, "asked before it was opened"
        return self._questions
