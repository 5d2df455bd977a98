"""Rows that are nothing but seeds, for environments that make their own worlds: path `rft.taskset.seeds:seeds`.

Invariant: training seeds are even, held-out ones odd.
"""

from __future__ import annotations

from typing import Any, Literal


def seeds(*, split: Literal["train", "test"], count: int = 1000, first: int = 0) -> list[dict[str, Any]]:
    """Rows {prompt, seed}.  `first` leaves out so many."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is not known; use train or test")
    numbers = range(2 * first + (split == "test"), 2 * (first + count), 2)
    return [{"prompt": f"seed {n}", "seed": n} for n in numbers]
