"""Find near-duplicate sequences by MinHash (Broder 1997) and banding.

Uses only numpy, so that the answers of a step take a fraction of a second.  Depends on numbers and
texts, on no tasks.
Invariant: the same sequences give the same result in every process.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

_FEW = 4  # earlier sequences of a bucket to compare with
_WORD = re.compile(r"\w+|[^\w\s]")


def signatures(sequences: Sequence[np.ndarray], *, size: int = 64, shingle: int = 5) -> np.ndarray:
    """Return MinHash signatures, uint64 [N, size], of N integer sequences over their runs of
    `shingle` neighbours; a shorter sequence is one run.
    """
    draw = np.random.default_rng(20261123)
    a, b = draw.integers(0, 1 << 64, (2, size), dtype=np.uint64)
    a |= np.uint64(1)
    out = np.empty((len(sequences), size), np.uint64)
    for i, sequence in enumerate(sequences):
        runs = _hashed(np.asarray(sequence, np.uint64), shingle)
        # multiply-shift hash; overflow is intended
        out[i] = ((runs[:, None] * a + b) >> np.uint64(16)).min(axis=0) if len(runs) else 0
    return out


def _hashed(numbers: np.ndarray, shingle: int) -> np.ndarray:
    """Return one hash for each distinct run of `shingle` neighbours."""
    width = min(shingle, len(numbers))
    mixed = np.zeros(max(0, len(numbers) - width + 1), np.uint64)
    for k in range(width):
        # overflow is intended
        mixed = (mixed ^ numbers[k : k + len(mixed)]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


def earlier(
    sketches: np.ndarray, *, threshold: float, rows: int = 4, labels: Sequence[object] | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (i, j), j < i, for each sequence similar to an earlier one: Jaccard index of the runs
    about `threshold` or more.

    At most one j per i: the most similar among those sharing a band of `rows` signature values.
    Sequences with equal `labels` are not compared.
    """
    bands = sketches.shape[1] // rows
    buckets: list[defaultdict[bytes, list[int]]] = [defaultdict(list) for _ in range(bands)]
    for i, sketch in enumerate(sketches):
        near: set[int] = set()
        for band in range(bands):
            bucket = buckets[band][sketch[band * rows : (band + 1) * rows].tobytes()]
            near.update(j for j in bucket if labels is None or labels[j] != labels[i])
            if len(bucket) < _FEW and (
                labels is None or labels[i] not in [labels[j] for j in bucket]
            ):
                bucket.append(i)
        if not near:
            continue
        alike, j = max((float((sketches[j] == sketch).mean()), -j) for j in near)
        if alike >= threshold:
            yield i, -int(j)


def words(text: str) -> np.ndarray:
    """Hash the words and punctuation marks of a text in lower case; white space is ignored."""
    import xxhash

    return np.array(
        [xxhash.xxh64_intdigest(w.encode("utf-8", "replace")) for w in _WORD.findall(text.lower())],
        np.uint64,
    )
