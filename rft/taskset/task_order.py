"""In which order tasks are explored: a function of the batch number, and of the outcomes of earlier
batches where a selector learns.

It keeps no position.  Invariant: `batch(b)` and `spare(b, j)` give the same tasks whenever they are
asked for, in any order; where a selector learns, they do so after the outcomes of exactly the
batches below `horizon(b)`, so a run that learns the same outcomes again continues exactly where it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import xxhash

from rft.errors import ConfigError, PluginError
from rft.plugins import REGISTRY, checked_args
from rft.taskset.base import Taskset
from rft.taskset.selectors import TaskSelector, View
from rft.taskset.settings import TasksetSettings
from rft.types.ports import TaskOutcome
from rft.types.task import Task

# slots over which weights are apportioned that no smaller number of slots fits exactly
_BLOCK = 1000


class TaskOrder:
    """Batches of `batch_size` tasks out of one or several tasksets.

    Slots 0, 1, 2 ... are cut into blocks; in each block every taskset gets its share of slots.  By
    `weight` they are spread evenly, so that after any number of tasks every taskset is within a
    task or two of its share; by length (no weights) they are shuffled, and a pass takes every row
    once.  A taskset's own slots are filled by its selector, see `rft.taskset.selectors`.  `lag` is
    how many batches may be under way whose outcomes a choice does not wait for.
    """

    def __init__(
        self, tasksets: Sequence[Taskset], batch_size: int, seed: int, *, lag: int = 0
    ) -> None:
        if not tasksets:
            raise ConfigError(
                "there is no taskset to explore", key="buffer.explorer_input.tasksets"
            )
        self.tasksets = tuple(tasksets)
        self.batch_size = batch_size
        self.lag = lag
        self.learned = 0  # first batch whose outcomes are not known yet
        self._seed = seed
        self._selectors = [
            make_selector(t, partial(self._of_taskset, n)) for n, t in enumerate(tasksets)
        ]
        self._shares = _shares(tasksets)
        self._block_size = sum(self._shares)
        self._arrangement = lru_cache(maxsize=4)(self._arrange)
        # where a selector learns: batches that are not learnt yet
        self._chosen: dict[int, list[tuple[int, int]]] = {}
        self._rows_of = lru_cache(maxsize=8)(self._rows)
        self._spares_of = lru_cache(maxsize=8)(self._spares)

    @property
    def fingerprint(self) -> str:
        """Changes when a taskset's rows, the mixture, the batch size or a seed change."""
        facts = [
            (
                t.settings.name,
                t.fingerprint,
                len(t),
                t.settings.selector,
                t.settings.seed,
                t.settings.feature_keys,
                args,
            )
            for t in self.tasksets
            for args in [sorted(t.settings.selector_args.items())]
        ]
        return xxhash.xxh3_128_hexdigest(
            repr((facts, self._shares, self.batch_size, self._seed)).encode()
        )

    @property
    def learns(self) -> bool:
        """Whether a selector goes by outcomes."""
        return any(s.learns for s in self._selectors)

    def horizon(self, b: int) -> int:
        """How many batches must be learnt, no more and no fewer, when batch `b` is chosen; 0 where
        no selector learns.
        """
        return max(0, b - self.lag) if self.learns else 0

    def learn(self, batch: int, outcomes: Sequence[TaskOutcome]) -> None:
        """What became of the tasks of `batch`, which is closed; batches come in order.  Tasks
        without a score are not in it.
        """
        if batch != self.learned:
            raise ValueError(f"batch {self.learned} is to be learnt next, not {batch}")
        for taskset, chooser in zip(self.tasksets, self._selectors, strict=True):
            found: dict[int, list[float]] = {}
            for o in outcomes:
                if (
                    chooser.learns
                    and o.taskset == taskset.settings.name
                    and (row := taskset.place(o.index)) is not None
                ):
                    found.setdefault(row, []).append(min(max(o.pass_rate, 0.0), 1.0))
            if found:
                chooser.learn(
                    np.fromiter(found, np.int64),
                    np.array([np.mean(rates) for rates in found.values()]),
                )
        self.learned += 1
        self._chosen.pop(batch, None)

    def batch(self, b: int) -> list[Task]:
        """The tasks of explore batch `b` (from 0), in task order."""
        return [self.tasksets[t].task(row) for t, row in self._places(b)]

    def spare(self, b: int, j: int) -> Task:
        """The `j`-th replacement (from 0) for a rejected group of batch `b`: a row that is not in
        the batch, if possible.
        """
        spares = self._spares_of(b)
        t, row = spares[j % len(spares)]
        return self.tasksets[t].task(row)

    def _places(self, b: int) -> list[tuple[int, int]]:
        """(taskset number, row) of each task of batch b."""
        if not self.learns:
            return self._rows_of(b)
        if b not in self._chosen:
            if self.learned != self.horizon(b):
                raise ValueError(
                    f"batch {b} is chosen after {self.horizon(b)} batches are learnt, not after "
                    f"{self.learned}"
                )
            self._chosen[b] = self._rows(b)
        return self._chosen[b]

    def _rows(self, b: int) -> list[tuple[int, int]]:
        slots = [self._slot(b * self.batch_size + i) for i in range(self.batch_size)]
        rows = {}
        for t, chooser in enumerate(self._selectors):
            if numbers := [n for s, n in slots if s == t]:  # they follow each other
                rows[t] = iter(_chosen(self.tasksets[t], chooser, b, numbers[0], len(numbers)))
        return [(t, next(rows[t])) for t, _ in slots]

    def _slot(self, k: int) -> tuple[int, int]:
        """Which taskset fills slot k, and how many slots of that taskset come before it."""
        block, at = divmod(k, self._block_size)
        owners, ranks = self._arrangement(block)
        t = int(owners[at])
        return t, block * self._shares[t] + int(ranks[at])

    def _arrange(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        owners = np.repeat(np.arange(len(self._shares)), self._shares)
        # the j-th task of a taskset stands at (j + 1/2) / share of the block
        if self.tasksets[0].settings.weight is not None:
            places = np.concatenate([(np.arange(share) + 0.5) / share for share in self._shares])
            owners = owners[np.argsort(places, kind="stable")]
        elif len(self._shares) > 1:
            self._rng("mixture", block).shuffle(owners)
        ranks = np.empty(len(owners), np.int64)
        for t, share in enumerate(self._shares):
            ranks[owners == t] = np.arange(share)
        return owners, ranks

    def _spares(self, b: int) -> list[tuple[int, int]]:
        rng = self._rng("spare", b)
        used = set(self._places(b))
        total = sum(len(t) for t in self.tasksets)
        want = min(total, len(used) + 16 * self.batch_size)
        starts = np.cumsum([0, *(len(t) for t in self.tasksets)])
        flat = rng.choice(total, size=want, replace=False)
        places = [
            (t := int(np.searchsorted(starts, f, side="right")) - 1, int(f - starts[t]))
            for f in flat
        ]
        return [p for p in places if p not in used] or places

    def _of_taskset(self, t: int, what: str, *more: str | int) -> np.random.Generator:
        return self._rng(what, t, self.tasksets[t].settings.seed, *more)

    def _rng(self, *what: str | int) -> np.random.Generator:
        return generator(self._seed, *what)


def generator(*what: str | int) -> np.random.Generator:
    """Random numbers that belong to these words."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest(repr(what).encode()))


def evaluation_order(taskset: Taskset) -> list[int]:
    """The rows of an evaluation taskset in the order of its selector, each once; the same in every
    evaluation.
    """
    seed = taskset.settings.seed
    chooser = make_selector(taskset, lambda what, *more: generator(what, "eval", seed, *more))
    return _chosen(taskset, chooser, 0, 0, len(taskset))


def _chosen(
    taskset: Taskset, chooser: TaskSelector, batch: int, first: int, count: int
) -> list[int]:
    """What a selector answers.  Raises ConfigError unless these are so many rows of the taskset."""
    rows = [int(row) for row in chooser.rows(batch, first, count)]
    if len(rows) != count or not all(0 <= row < len(taskset) for row in rows):
        s = taskset.settings
        wanted = f"{count} numbers from 0 to {len(taskset) - 1} were asked for"
        text = f"{s.selector} gave {len(rows)} rows, {rows!r:.60}; {wanted}"
        raise ConfigError(
            text, key=f"taskset {s.name}.data_selector.selector_type", given=s.selector
        )
    return rows


def make_selector(taskset: Taskset, rng: Callable[..., np.random.Generator]) -> TaskSelector:
    """The taskset's selector.  Raises ConfigError for arguments or feature_keys that it does not
    take, PluginError for its name.
    """
    s = taskset.settings
    key = f"taskset {taskset.settings.name}.data_selector"
    args = check_selector(s, key, is_eval=s.is_eval)
    made: TaskSelector = REGISTRY.get("selector", s.selector).obj(
        View(len(taskset), taskset.features(s.feature_keys), rng), **args
    )
    return made


def check_selector(settings: TasksetSettings, key: str, *, is_eval: bool) -> dict[str, Any]:
    """The arguments of the selector that `settings` name; raises ConfigError under `key`."""
    name = settings.selector
    keys = settings.feature_keys
    try:
        found = REGISTRY.get("selector", name)
    except PluginError as e:
        raise ConfigError(e.message, key=f"{key}.selector_type", given=name) from None
    if not (isinstance(found.obj, type) and issubclass(found.obj, TaskSelector)):
        raise ConfigError(
            f"{name} must be a subclass of rft.taskset.selectors.TaskSelector",
            key=f"{key}.selector_type",
            given=name,
        )
    if is_eval and found.obj.learns:
        raise ConfigError(
            f"{name} uses pass rates of training; evaluation takes every row once: use sequential "
            f"or shuffle",
            key=f"{key}.selector_type",
            given=name,
        )
    least, most = found.obj.num_features
    if len(keys) < least or (most is not None and len(keys) > most):
        wanted = f"exactly {least}" if least == most else f"at least {least}"
        wanted = "none" if most == 0 else wanted
        raise ConfigError(
            f"{name} takes {wanted} (columns of numbers by which it chooses rows); given "
            f"{', '.join(keys) or 'none'}",
            key=f"{key}.feature_keys",
            given=list(keys),
        )
    return checked_args(found, settings.selector_args, key=f"{key}.kwargs")


def num_batches(lengths: Sequence[int], batch_size: int, epochs: int) -> int:
    """Whole batches in `epochs` epochs; an epoch is as many tasks as all tasksets have rows
    together, whatever their weights.
    """
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
    """Slots of each taskset in one block: its length, or after `weight`, if need be by largest
    remainder.
    """
    if tasksets[0].settings.weight is None:  # for all of them, or for none
        return [len(t) for t in tasksets]
    numbers = np.array([t.settings.weight for t in tasksets], np.float64)
    exact = numbers / numbers.sum()
    for size in range(len(exact), _BLOCK):
        if (
            np.allclose(rounded := np.rint(exact * size), exact * size, rtol=0, atol=1e-9)
            and rounded.min() > 0
        ):
            return [int(s) for s in rounded]  # e.g. 3 and 1: exact in every four tasks
    shares = np.maximum(1, np.floor(exact * _BLOCK)).astype(np.int64)
    for t in np.argsort(shares - exact * _BLOCK, kind="stable")[
        : max(0, _BLOCK - int(shares.sum()))
    ]:
        shares[t] += 1
    return [int(s) for s in shares]
