"""Single-digit sums, with whole digit pairs held out: a task that a small pretrained model learns in minutes.

The 55 unordered digit pairs are divided once per `seed`: 15 of them (2 doubles such as 4+4, 13 others) are the test split and are
never trained in either order.  Both splits use both orders, so there are 28 test prompts and 72 train prompts.
"""

from __future__ import annotations

import random
from typing import Any, Literal

HELD_OUT_DOUBLES, HELD_OUT_OTHERS = 2, 13


def digit_sums(*, split: Literal["train", "test"], seed: int = 0) -> list[dict[str, Any]]:
    """Rows {prompt, response}, e.g. {"prompt": "What is 3+4? Reply with the number only.", "response": "7"}."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is not known; use train or test")
    rng = random.Random(seed)
    doubles = [(a, a) for a in range(10)]
    others = [(a, b) for a in range(10) for b in range(a + 1, 10)]
    rng.shuffle(doubles)
    rng.shuffle(others)
    held_out = {*doubles[:HELD_OUT_DOUBLES], *others[:HELD_OUT_OTHERS]}
    ordered = [(a, b) for a in range(10) for b in range(10) if ((min(a, b), max(a, b)) in held_out) == (split == "test")]
    rng.shuffle(ordered)
    return [{"prompt": f"What is {a}+{b}? Reply with the number only.", "response": str(a + b)} for a, b in ordered]
