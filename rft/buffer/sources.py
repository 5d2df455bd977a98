"""What can be mixed into train batches: demonstrations in memory, and what another run has stored.

It does not know which rows are taken when, see `mix`.  The one invariant: row i of a source stays the same while a run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from sqlalchemy import select

from rft.buffer.mix import row_id
from rft.buffer.query import Questions, locate
from rft.buffer.schema import experiences
from rft.types.block import contents, encode
from rft.types.experience import Demonstration, Experience


class Demonstrations:
    """Token sequences to imitate, see `rft.taskset.given`.  They have no reward and no log-probs of a sampling policy."""

    def __init__(self, rows: Sequence[Demonstration], *, taskset: str) -> None:
        self._rows = [_expert(x, i, taskset) for i, x in enumerate(rows)]

    @property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest("\n".join(c.hash for c in contents(encode(self._rows))).encode())

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Experience]:
        return [self._rows[i] for i in indices]


class StoredRows:
    """The experiences that another run stored and could have trained, by id; read only, a run that goes on adds none here."""

    def __init__(self, run_dir: Path, ledger_url: str | None = None) -> None:
        """Raises ConfigError where there is no ledger to read."""
        self._questions = Questions(locate(run_dir, ledger_url), run_dir)
        self._questions.open()
        e = experiences.c
        with self._questions.errors("RUN"), self._questions.reading() as tx:
            rows = tx.execute(select(e.id, e.content_hash).where(e.dropped.is_(None)).order_by(e.id)).all()
        self._ids = [r.id for r in rows]
        self.fingerprint = xxhash.xxh3_128_hexdigest("\n".join(f"{r.id}@{r.content_hash}" for r in rows).encode())

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, indices: Sequence[int]) -> list[Experience]:
        names = [self._ids[i] for i in indices]
        found = self._questions.payload(names)
        return [found[x] for x in names]

    def close(self) -> None:
        self._questions.close()


def _expert(x: Demonstration, index: int, taskset: str) -> Experience:
    return Experience(
        id=row_id(index),
        taskset=taskset,
        task_index=x.id.task,
        workflow="",
        status="complete",
        tokens=x.tokens,
        loss_mask=x.loss_mask,
        logprobs=np.zeros(len(x.tokens), np.float32),
        has_logprobs=False,
        is_expert=True,
        messages=x.messages,
    )
