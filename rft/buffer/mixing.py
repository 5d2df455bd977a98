"""Add rows of another source than the explorer, e.g. an expert's demonstrations, to each train
batch.

The rows of a step follow from the step's number alone, so a resumed run takes the same rows; the
ledger records the step and source of each use.  Invariant: every train batch has exactly `rows`
mixed-in rows, no row twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import xxhash
from sqlalchemy import Connection, func, select

from rft.buffer.derived_state import StepSums, beyond
from rft.buffer.given_rows import expert_row
from rft.buffer.schema import lineages, meta, mixed_uses, put_meta
from rft.buffer.settings import MixSettings
from rft.errors import ConfigError
from rft.types.block import contents, encode
from rft.types.experience import Demonstration, Experience
from rft.types.ids import ExperienceId

KEY = "buffer.trainer_input.auxiliary_buffers"


class Mix:
    """The rows of `source` in each train batch."""

    def __init__(
        self,
        settings: MixSettings,
        source: Sequence[Experience],
        files: Callable[[Sequence[int]], Mapping[str, bytes]] = lambda indices: {},
    ) -> None:
        """`files`: the images of rows of `source`, by name."""
        settings.fits(len(source))
        self.settings = settings
        self._source = source
        self._files = files
        self.name = settings.name
        hashes = "\n".join(c.hash for c in contents(encode(source)))
        # changes with the rows; compared on resume
        self.fingerprint = xxhash.xxh3_128_hexdigest(hashes.encode())
        self._epoch = -1
        self._order = np.zeros(0, np.int64)

    def indices(self, step: int) -> list[int]:
        """Return the rows of train step `step` (from 1).

        Sequential: continue after the previous step, wrapping around.  Shuffled: a new permutation
        in each pass; the last rows of a pass are skipped if too few for a batch.
        """
        n = len(self._source)
        k = self.settings.rows
        if not self.settings.shuffle:
            return [((step - 1) * k + i) % n for i in range(k)]
        epoch, batch = divmod(step - 1, n // k)
        if epoch != self._epoch:
            self._epoch, self._order = (
                epoch,
                np.random.default_rng([self.settings.seed, epoch]).permutation(n),
            )
        return [int(i) for i in self._order[batch * k : (batch + 1) * k]]

    def ids(self, step: int) -> list[str]:
        return [str(row_id(i)) for i in self.indices(step)]

    def block(self, step: int) -> tuple[bytes, list[float | None], Mapping[str, bytes]]:
        """Return the rows of `step` as a block, their rewards and the files of their images."""
        indices = self.indices(step)
        rows = [msgspec.structs.replace(self._source[i], id=row_id(i)) for i in indices]
        return encode(rows), [x.reward for x in rows], self._files(indices)


def remember(tx: Connection, lineage: int, name: str, fingerprint: str) -> None:
    """Record which rows are mixed in.

    Raises ConfigError if `lineage` continues a checkpoint that had other rows.
    """
    before = tx.scalar(select(meta.c.value).where(meta.c.key == f"mixed:{name}"))
    goes_on = (
        tx.scalar(select(lineages.c.parent_lineage).where(lineages.c.lineage == lineage))
        is not None
    )
    if goes_on and before not in (None, fingerprint):
        raise ConfigError(
            "its rows are not those that the checkpoint was trained on.  Bring the old ones back, "
            "or give the run another name",
            key=f"{KEY}.{name}",
        )
    put_meta(tx, f"mixed:{name}", fingerprint)


class MixedCounts:
    """Counts of mixed-in uses by source; reads the same uses as
    `rft.buffer.derived_state.UseCounts`.
    """

    def __init__(self, tx: Connection, lineage: int | None = None, after: int = 0) -> None:
        self._by_source: dict[str, StepSums] = {}
        u = mixed_uses.c
        by_step = (u.lineage, u.step, u.source)
        query = (
            select(*by_step, func.count())
            .where(*beyond(mixed_uses, lineage, after))
            .group_by(*by_step)
            .order_by(*by_step)
        )
        for line, step, source, n in tx.execute(query):
            self._by_source.setdefault(source, StepSums()).add(line, step, n)

    def within(self, ancestry: Mapping[int, int]) -> dict[str, int]:
        """Return the uses that count for the ancestry, by source."""
        return {
            source: n
            for source, steps in sorted(self._by_source.items())
            if (n := steps.within(ancestry)[0])
        }


def row_id(index: int) -> ExperienceId:
    """Return the id of a mixed-in row: lineage 0, which no explored row has."""
    return ExperienceId(0, 0, 0, index, 0)


def demonstrations(rows: Sequence[Demonstration], *, taskset: str) -> list[Experience]:
    """Return token sequences to imitate, see `rft.taskset.offline_data`."""
    return [
        expert_row(
            row_id(i),
            x.tokens,
            x.loss_mask,
            taskset=taskset,
            task_index=x.id.task,
            messages=x.messages,
            images=x.images,
        )
        for i, x in enumerate(rows)
    ]
