"""Which of many sequences are nearly the same, by MinHash (Broder 1997) and banding.

numpy alone, so that the answers of a step take a fraction of a second.

Knows numbers and texts; no tasks.  Invariant: the same sequences give the same answer in every
process.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

_FEW = 4  # earlier ones of a bucket that one is compared with
_WORD = re.compile(r"\w+|[^\w\s]")


def signatures(sequences: Sequence[np.ndarray], *, size: int = 64, shingle: int = 5) -> np.ndarray:
    """uint64 [N, size]: of N sequences of integers, over their runs of `shingle` neighbours; a
    shorter one is one run.
    """
    draw = np.random.default_rng(20261123)
    a, b = draw.integers(0, 1 << 64, (2, size), dtype=np.uint64)
    a |= np.uint64(1)
    out = np.empty((len(sequences), size), np.uint64)
    for i, sequence in enumerate(sequences):
        runs = _hashed(np.asarray(sequence, np.uint64), shingle)
        # wraps around: multiply and shift
        out[i] = ((runs[:, None] * a + b) >> np.uint64(16)).min(axis=0) if len(runs) else 0
    return out


def _hashed(numbers: np.ndarray, shingle: int) -> np.ndarray:
    """One number for each different run of `shingle` neighbours."""
    width = min(shingle, len(numbers))
    mixed = np.zeros(max(0, len(numbers) - width + 1), np.uint64)
    for k in range(width):
        # wraps around
        mixed = (mixed ^ numbers[k : k + len(mixed)]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


def earlier(
    found: np.ndarray, *, threshold: float, rows: int = 4, labels: Sequence[object] | None = None
) -> Iterator[tuple[int, int]]:
    """(i, j), j < i, for each sequence that is like an earlier one: about `threshold` or more of
    their runs are in both.

    One j for each i, the most alike of those that share a band of `rows` signature values.
    `labels`: those with equal ones are not compared.
    """
    bands = found.shape[1] // rows
    seen: list[defaultdict[bytes, list[int]]] = [defaultdict(list) for _ in range(bands)]
    for i, mine in enumerate(found):
        near: set[int] = set()
        for band in range(bands):
            bucket = seen[band][mine[band * rows : (band + 1) * rows].tobytes()]
            near.update(j for j in bucket if labels is None or labels[j] != labels[i])
            if len(bucket) < _FEW and (
                labels is None or labels[i] not in [labels[j] for j in bucket]
            ):
                bucket.append(i)
        if not near:
            continue
        alike, j = max((float((found[j] == mine).mean()), -j) for j in near)
        if alike >= threshold:
            yield i, -int(j)


def words(text: str) -> np.ndarray:
    """A text as numbers: its words and signs in lower case, hashed; white space does not count."""
    import xxhash

    return np.array(
        [xxhash.xxh64_intdigest(w.encode("utf-8", "replace")) for w in _WORD.findall(text.lower())],
        np.uint64,
    )
