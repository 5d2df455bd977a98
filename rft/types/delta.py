"""Difference of two versions of 16-bit weights, most of which do not change in a step.

Depends on numpy only.  A change is a bitmap of the 16-bit words that differ, and their new values.
"""

from __future__ import annotations

import numpy as np


def pack(before: np.ndarray, now: np.ndarray) -> np.ndarray | None:
    """Pack the change from `before` to `now` (uint8 of one length) as uint8; empty if equal.

    None if that would not be shorter than `now`.
    """
    (old, last), (new, tail) = _words(before), _words(now)
    changed: np.ndarray = old != new
    count = np.count_nonzero(changed)
    if count == 0 and np.array_equal(last, tail):
        return np.empty(0, np.uint8)
    if _bitmap(len(new)) + 2 * count + len(tail) >= len(now):
        return None
    packed: np.ndarray = np.concatenate([np.packbits(changed), new[changed].view(np.uint8), tail])
    return packed


def apply(bytes: np.ndarray, packed: np.ndarray) -> None:
    """Turn `bytes` from `before` into `now` in place.

    Raises ValueError for another length.
    """
    if not len(packed):
        return
    words, tail = _words(bytes)
    size = _bitmap(len(words))
    end = len(packed) - len(tail)
    changed = np.unpackbits(packed[:size], count=len(words)).view(bool)
    words[changed] = packed[size:end].view(np.uint16)
    tail[:] = packed[end:]


def _words(bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split into 16-bit words and an odd last byte."""
    even = len(bytes) & ~1
    return bytes[:even].view(np.uint16), bytes[even:]


def _bitmap(words: int) -> int:
    return -(-words // 8)
