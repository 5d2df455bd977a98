"""In which order tasks are explored: a pure function of the batch number, so that a resumed run goes on exactly where it was.

It keeps no position.  Invariant: `batch(b)` and `spare(b, j)` give the same tasks whenever they are asked for, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash

from rft.errors import ConfigError
from rft.taskset.base import Taskset
from rft.types.task import Task

_BLOCK = 1000  # slots over which weights are apportioned that no smaller number of slots fits exactly


class Order:
    """Batches of `batch_size` tasks out of one or several tasksets.

    Slots 0, 1, 2 ... are cut into blocks; in each block every taskset gets its share of slots.  By `weight` they are spread evenly, so
    that after any number of tasks every taskset is within a task or two of its share; by length (no weights) they are shuffled, and a
    pass takes every row once.  A taskset's own slots are filled by its selector: `sequential` (in file order, again and again),
    `shuffle` (another permutation each epoch) or `random` (drawn per batch, without repetition inside a batch).
    """

    def __init__(self, tasksets: Sequence[Taskset], batch_size: int, seed: int) -> None:
        if not tasksets:
            raise ConfigError("there is no taskset to explore", key="buffer.explorer_input.tasksets")
        if batch_size < 1:
            raise ConfigError(f"{batch_size} is not allowed; at least 1", key="buffer.batch_size")
        names = [t.settings.name for t in tasksets]
        if len(set(names)) < len(names):
            raise ConfigError(f"taskset names must differ; given {', '.join(names)}", key="buffer.explorer_input.tasksets")
        for t in tasksets:
            if t.settings.selector not in ("sequential", "shuffle", "random"):
                raise ConfigError(
                    f"{t.settings.selector!r} is not known; use sequential, shuffle or random",
                    key=f"taskset {t.settings.name}.data_selector",
                )
        self.tasksets = tuple(tasksets)
        self.batch_size = batch_size
        self._seed = seed
        self._shares = _shares(tasksets)
        self._block_size = sum(self._shares)
        self._arrangement = lru_cache(maxsize=4)(self._arrange)
        self._permutation = lru_cache(maxsize=2 * len(tasksets) + 2)(self._permute)
        self._rows_of = lru_cache(maxsize=8)(self._rows)
        self._spares_of = lru_cache(maxsize=8)(self._spares)

    @property
    def fingerprint(self) -> str:
        """Changes when a taskset's rows, the mixture, the batch size or a seed change."""
        facts = [(t.settings.name, t.fingerprint, len(t), t.settings.selector, t.settings.seed) for t in self.tasksets]
        return xxhash.xxh3_128_hexdigest(repr((facts, self._shares, self.batch_size, self._seed)).encode())

    def num_batches(self, epochs: int) -> int:
        """Whole batches in `epochs` epochs.  Raises ConfigError if there is not even one."""
        return num_batches([len(t) for t in self.tasksets], self.batch_size, epochs)

    def batch(self, b: int) -> list[Task]:
        """The tasks of explore batch `b` (from 0), in task order."""
        return [self.tasksets[t].task(row) for t, row in self._rows_of(b)]

    def spare(self, b: int, j: int) -> Task:
        """The `j`-th replacement (from 0) for a rejected group of batch `b`: a row that is not in the batch, if possible."""
        spares = self._spares_of(b)
        t, row = spares[j % len(spares)]
        return self.tasksets[t].task(row)

    def _rows(self, b: int) -> list[tuple[int, int]]:
        """(taskset number, row) of each task of batch b."""
        slots = [self._slot(b * self.batch_size + i) for i in range(self.batch_size)]
        drawn: dict[int, list[int]] = {}
        for t, taskset in enumerate(self.tasksets):
            if taskset.settings.selector == "random" and (count := sum(s == t for s, _ in slots)):
                rng = self._rng("random", t, taskset.settings.seed, b)
                drawn[t] = [int(r) for r in rng.choice(len(taskset), size=count, replace=count > len(taskset))][::-1]
        return [(t, drawn[t].pop() if t in drawn else self._select(t, n)) for t, n in slots]

    def _slot(self, k: int) -> tuple[int, int]:
        """Which taskset fills slot k, and how many slots of that taskset come before it."""
        block, at = divmod(k, self._block_size)
        owners, ranks = self._arrangement(block)
        t = int(owners[at])
        return t, block * self._shares[t] + int(ranks[at])

    def _arrange(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        owners = np.repeat(np.arange(len(self._shares)), self._shares)
        if self.tasksets[0].settings.weight is not None:  # the j-th task of a taskset stands at (j + 1/2) / share of the block
            places = np.concatenate([(np.arange(share) + 0.5) / share for share in self._shares])
            owners = owners[np.argsort(places, kind="stable")]
        elif len(self._shares) > 1:
            self._rng("mixture", block).shuffle(owners)
        ranks = np.empty(len(owners), np.int64)
        for t, share in enumerate(self._shares):
            ranks[owners == t] = np.arange(share)
        return owners, ranks

    def _select(self, t: int, n: int) -> int:
        """Row of the n-th task taken from taskset t."""
        taskset = self.tasksets[t]
        epoch, at = divmod(n, len(taskset))
        return at if taskset.settings.selector == "sequential" else int(self._permutation(t, epoch)[at])

    def _permute(self, t: int, epoch: int) -> np.ndarray:
        return self._rng("shuffle", t, self.tasksets[t].settings.seed, epoch).permutation(len(self.tasksets[t]))

    def _spares(self, b: int) -> list[tuple[int, int]]:
        rng = self._rng("spare", b)
        used = set(self._rows_of(b))
        total = sum(len(t) for t in self.tasksets)
        want = min(total, len(used) + 16 * self.batch_size)
        starts = np.cumsum([0, *(len(t) for t in self.tasksets)])
        flat = rng.choice(total, size=want, replace=False)
        places = [(t := int(np.searchsorted(starts, f, side="right")) - 1, int(f - starts[t])) for f in flat]
        return [p for p in places if p not in used] or places

    def _rng(self, *what: str | int) -> np.random.Generator:
        return np.random.default_rng(xxhash.xxh3_64_intdigest(repr((self._seed, *what)).encode()))


def num_batches(lengths: Sequence[int], batch_size: int, epochs: int) -> int:
    """Whole batches in `epochs` epochs; an epoch is as many tasks as all tasksets have rows together, whatever their weights."""
    rows = sum(lengths)
    if (n := rows * epochs // batch_size) < 1:
        raise ConfigError(
            f"{rows} rows and {epochs} epochs do not fill one batch of {batch_size} tasks; "
            "raise buffer.total_epochs, set buffer.total_steps, or lower buffer.batch_size",
            key="buffer.batch_size",
            given=batch_size,
        )
    return n


def _shares(tasksets: Sequence[Taskset]) -> list[int]:
    """Slots of each taskset in one block: its length, or after `weight`, if need be by largest remainder."""
    weights = [t.settings.weight for t in tasksets]
    if all(w is None for w in weights):
        return [len(t) for t in tasksets]
    if any(w is None or w <= 0 for w in weights):
        given = ", ".join(f"{t.settings.name}: {t.settings.weight}" for t in tasksets)
        raise ConfigError(
            f"weights must be positive and given for all tasksets or for none; given {given}",
            key="buffer.explorer_input.tasksets",
        )
    numbers = np.array(weights, np.float64)
    exact = numbers / numbers.sum()
    for size in range(len(exact), _BLOCK):
        if np.allclose(rounded := np.rint(exact * size), exact * size, rtol=0, atol=1e-9) and rounded.min() > 0:
            return [int(s) for s in rounded]  # e.g. 3 and 1: exact in every four tasks
    shares = np.maximum(1, np.floor(exact * _BLOCK)).astype(np.int64)
    for t in np.argsort(shares - exact * _BLOCK, kind="stable")[: max(0, _BLOCK - int(shares.sum()))]:
        shares[t] += 1
    return [int(s) for s in shares]
