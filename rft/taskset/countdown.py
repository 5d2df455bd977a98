"""Countdown tasks: numbers and a target that can be reached with + - * /; no set of numbers is in both splits.

A taskset of it has the path `rft.taskset.countdown:countdown`.  Invariant: every task has a solution with whole numbers.
"""

from __future__ import annotations

import random
from typing import Any, Literal

PROMPT = (
    "Use each of the numbers {numbers} once with + - * / and brackets to get {target}. "
    "Give the equation between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)


def countdown(
    *, split: Literal["train", "test"], count: int = 1000, size: int = 3, highest: int = 20, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows {prompt, response: {numbers, target}} with `size` numbers from 1 to `highest`."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is not known; use train or test")
    if not 2 <= size <= 6 or highest < size:
        raise ValueError(f"size {size}, highest {highest}: need 2 <= size <= 6 and highest >= size")
    rng = random.Random(f"{seed}-{split}-{size}-{highest}")
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        numbers = [rng.randint(1, highest) for _ in range(size)]
        if _held_out(numbers) != (split == "test"):
            continue
        target = _reach(rng, numbers)
        rows.append(
            {
                "prompt": PROMPT.format(numbers=", ".join(map(str, numbers)), target=target),
                "response": {"numbers": numbers, "target": target},
            }
        )
    return rows


def _reach(rng: random.Random, numbers: list[int]) -> int:
    """A number that these reach."""
    left = list(numbers)
    rng.shuffle(left)
    while len(left) > 1:
        a, b = left.pop(), left.pop()
        ways = [a + b, a * b, abs(a - b), *([a // b] if b and a % b == 0 else [])]
        left.append(rng.choice(ways))
    return left[0]


def _held_out(numbers: list[int]) -> bool:
    """Whether these numbers, in any order, belong to the test split: about a fifth of all sets."""
    return random.Random(str(sorted(numbers))).random() < 0.2
