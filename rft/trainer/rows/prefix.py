"""Merge sequences into a prefix tree, so that a shared prefix is computed once.  Torch-free; knows
token ids only.

A causal model's state after a prefix depends on that prefix alone.  So a micro-batch computes the
system prompt once for all tasks, a task's prompt once for its group, and equal beginnings of two
answers once. `Tree` numbers the tree's nodes ("slots"); a row is the path of slots from the root to
its end.

Example: rows "a b c" and "a b d" have slots a=0 b=1 c=2 d=3; paths [0 1 2] and [0 1 3]; the second
row owns slot 3 only. Invariant: the tokens along a row's path are that row's tokens, and a slot's
position is its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Branch:
    """The slots path[start:] that a row adds to the tree.

    Each slot attends to all slots of `path` up to itself.
    """

    path: np.ndarray  # int64 [L]
    start: int

    @property
    def new_slots(self) -> np.ndarray:
        return self.path[self.start :]


@dataclass(frozen=True)
class Tree:
    """A prefix tree of T slots.  `branches` partition the slots; `paths` has the order of the rows."""

    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    branches: tuple[Branch, ...]
    paths: tuple[np.ndarray, ...]


MAX_MASK = 1 << 24  # entries of one branch's mask: 64 MiB in float32
NOTHING = -1  # as `max_mask`: rows share no prefix and are packed one after the other


def build(rows: Sequence[np.ndarray], *, max_mask: int = MAX_MASK) -> Tree:
    """Return the prefix tree of `rows`, int32 or int64 [L_i] each.

    A branch needs a mask of own x path entries.  A row whose mask would exceed `max_mask` shares no
    prefix, so plain causal attention computes it without a mask.
    """
    paths: list[np.ndarray] = [np.zeros(0, np.int64)] * len(rows)
    branches: list[Branch] = []
    tokens: list[np.ndarray] = []
    count = 0
    before = np.zeros(0, np.int32)
    path = np.zeros(0, np.int64)
    for i in _order(rows):
        row = rows[i]
        shared = _shared(before, row, max_mask)
        added = len(row) - shared
        path = np.concatenate([path[:shared], np.arange(count, count + added)])
        if added:
            branches.append(Branch(path, shared))
            tokens.append(row[shared:])
        paths[i] = path
        count = count + added
        before = row
    positions = [np.arange(b.start, len(b.path)) for b in branches]
    return Tree(_join(tokens), _join(positions), tuple(branches), tuple(paths))


def shared_length(rows: Sequence[np.ndarray], *, max_mask: int = MAX_MASK) -> int:
    """Return how many slots the prefix tree of `rows` has."""
    order = _order(rows)
    return sum(len(rows[i]) for i in order) - sum(
        _shared(rows[a], rows[b], max_mask) for a, b in pairwise(order)
    )


def _shared(before: np.ndarray, row: np.ndarray, max_mask: int) -> int:
    """Return how many slots `row` shares with the row before it."""
    common = _common(before, row)
    return common if (len(row) - common) * len(row) <= max_mask else 0


def _order(rows: Sequence[np.ndarray]) -> list[int]:
    """Return row indexes in lexicographic order: neighbours have the longest shared prefixes."""
    kind = ">i8" if any(row.dtype.itemsize > 4 for row in rows) else ">i4"
    keys = [row.astype(kind).tobytes() for row in rows]
    return sorted(range(len(rows)), key=keys.__getitem__)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
