"""The order in which tasks are explored: a function of the batch number, and of earlier outcomes if
a selector learns.

It stores no position.
Invariant: `batch(b)` and `spare(b, j)` return the same tasks in any order of calls.  With a
learning selector this holds after learning exactly the batches below `horizon(b)`, so a run that
learns the same outcomes again continues exactly.
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

# slots per block for weights that no smaller number of slots fits exactly
_BLOCK = 1000


class TaskOrder:
    """Batches of `batch_size` tasks from one or several tasksets.

    Slots 0, 1, 2 ... are cut into blocks; in each block every taskset gets its share of slots.
    With `weight` the slots are spread evenly, so that every taskset is always within a task or two
    of its share; without weights shares follow the lengths and are shuffled, and a pass takes every
    row once.  A taskset's slots are filled by its selector, see `rft.taskset.selectors`.  `lag`:
    number of batches in progress whose outcomes a choice does not wait for.
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
        # with a learning selector: places of batches that are not learnt yet
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
        """Whether a selector uses outcomes."""
        return any(s.learns for s in self._selectors)

    def horizon(self, b: int) -> int:
        """Return how many batches must be learnt, exactly, when batch `b` is chosen; 0 if no
        selector learns.
        """
        return max(0, b - self.lag) if self.learns else 0

    def learn(self, batch: int, outcomes: Sequence[TaskOutcome]) -> None:
        """Learn the outcomes of the closed `batch`; batches come in order.  Tasks without a score
        are absent.
        """
        if batch != self.learned:
            raise ValueError(f"batch {self.learned} is to be learnt next, not {batch}")
        for taskset, chooser in zip(self.tasksets, self._selectors, strict=True):
            rates_by_row: dict[int, list[float]] = {}
            for o in outcomes:
                if (
                    chooser.learns
                    and o.taskset == taskset.settings.name
                    and (row := taskset.place(o.index)) is not None
                ):
                    rates_by_row.setdefault(row, []).append(min(max(o.pass_rate, 0.0), 1.0))
            if rates_by_row:
                chooser.learn(
                    np.fromiter(rates_by_row, np.int64),
                    np.array([np.mean(rates) for rates in rates_by_row.values()]),
                )
        self.learned += 1
        self._chosen.pop(batch, None)

    def batch(self, b: int) -> list[Task]:
        """Return the tasks of explore batch `b` (from 0), in task order."""
        return [self.tasksets[t].task(row) for t, row in self._places(b)]

    def spare(self, b: int, j: int) -> Task:
        """Return replacement `j` (from 0) for a rejected group of batch `b`: a row outside the
        batch, if possible.
        """
        spares = self._spares_of(b)
        t, row = spares[j % len(spares)]
        return self.tasksets[t].task(row)

    def _places(self, b: int) -> list[tuple[int, int]]:
        """Return (taskset number, row) of each task of batch b."""
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
            if numbers := [n for s, n in slots if s == t]:  # the numbers are consecutive
                rows[t] = iter(_chosen(self.tasksets[t], chooser, b, numbers[0], len(numbers)))
        return [(t, next(rows[t])) for t, _ in slots]

    def _slot(self, k: int) -> tuple[int, int]:
        """Return (taskset of slot k, number of slots of that taskset before k)."""
        block, at = divmod(k, self._block_size)
        owners, ranks = self._arrangement(block)
        t = int(owners[at])
        return t, block * self._shares[t] + int(ranks[at])

    def _arrange(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        owners = np.repeat(np.arange(len(self._shares)), self._shares)
        # the j-th task of a taskset is placed at (j + 1/2) / share of the block
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
    """Return a random generator seeded by these words."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest(repr(what).encode()))


def evaluation_order(taskset: Taskset) -> list[int]:
    """Return the rows of an evaluation taskset in its selector's order, each once; equal in every
    evaluation.
    """
    seed = taskset.settings.seed
    chooser = make_selector(taskset, lambda what, *more: generator(what, "eval", seed, *more))
    return _chosen(taskset, chooser, 0, 0, len(taskset))


def _chosen(
    taskset: Taskset, chooser: TaskSelector, batch: int, first: int, count: int
) -> list[int]:
    """Return a selector's rows.  Raises ConfigError unless they are `count` rows of the taskset."""
    rows = [int(row) for row in chooser.rows(batch, first, count)]
    if len(rows) != count or not all(0 <= row < len(taskset) for row in rows):
        s = taskset.settings
        expected = f"{count} numbers from 0 to {len(taskset) - 1} were asked for"
        text = f"{s.selector} gave {len(rows)} rows, {rows!r:.60}; {expected}"
        raise ConfigError(
            text, key=f"taskset {s.name}.data_selector.selector_type", given=s.selector
        )
    return rows


def make_selector(taskset: Taskset, rng: Callable[..., np.random.Generator]) -> TaskSelector:
    """Create the taskset's selector.  Raises ConfigError for invalid arguments or feature_keys,
    PluginError for its name.
    """
    s = taskset.settings
    key = f"taskset {taskset.settings.name}.data_selector"
    args = check_selector(s, key, is_eval=s.is_eval)
    selector: TaskSelector = REGISTRY.get("selector", s.selector).obj(
        View(len(taskset), taskset.features(s.feature_keys), rng), **args
    )
    return selector


def check_selector(settings: TasksetSettings, key: str, *, is_eval: bool) -> dict[str, Any]:
    """Return the checked arguments of the selector in `settings`; raises ConfigError under `key`."""
    name = settings.selector
    keys = settings.feature_keys
    try:
        plugin = REGISTRY.get("selector", name)
    except PluginError as e:
        raise ConfigError(e.message, key=f"{key}.selector_type", given=name) from None
    if not (isinstance(plugin.obj, type) and issubclass(plugin.obj, TaskSelector)):
        raise ConfigError(
            f"{name} must be a subclass of rft.taskset.selectors.TaskSelector",
            key=f"{key}.selector_type",
            given=name,
        )
    if is_eval and plugin.obj.learns:
        raise ConfigError(
            f"{name} uses pass rates of training; evaluation takes every row once: use sequential "
            f"or shuffle",
            key=f"{key}.selector_type",
            given=name,
        )
    least, most = plugin.obj.num_features
    if len(keys) < least or (most is not None and len(keys) > most):
        expected = f"exactly {least}" if least == most else f"at least {least}"
        expected = "none" if most == 0 else expected
        raise ConfigError(
            f"{name} takes {expected} (columns of numbers by which it chooses rows); given "
            f"{', '.join(keys) or 'none'}",
            key=f"{key}.feature_keys",
            given=list(keys),
        )
    return checked_args(plugin, settings.selector_args, key=f"{key}.kwargs")


def num_batches(lengths: Sequence[int], batch_size: int, epochs: int) -> int:
    """Return the number of full batches in `epochs` epochs; an epoch is as many tasks as all
    tasksets have rows together, whatever their weights.
    """
    rows = sum(lengths)
    if (n := rows * epochs // batch_size) < 1:
        raise ConfigError(
            f"{rows} row{'s' * (rows != 1)} in {epochs} epoch{'s' * (epochs != 1)} "
            f"do{'es' * (rows == 1)} not fill one batch of {batch_size} tasks; "
            "raise buffer.total_epochs, set buffer.total_steps, or lower buffer.batch_size",
            key="buffer.batch_size",
            given=batch_size,
        )
    return n


def _shares(tasksets: Sequence[Taskset]) -> list[int]:
    """Return the slots of each taskset in one block: its length, or by `weight` with largest
    remainders.
    """
    if tasksets[0].settings.weight is None:  # all tasksets have weights, or none
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
