"""Generated tasksets, with paths such as `rft.taskset.generated_tasks:seeds`.

Invariant: no task is in both splits.
"""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

Split = Literal["train", "test"]
HELD_OUT_DOUBLES = 2  # digit pairs
HELD_OUT_OTHERS = 13
_HELD_OUT_MAPS = 0.3
_MOST_DRAWS = 10_000  # draws of number sets until one belongs to the split
COUNTDOWN_PROMPT = (
    "Use each of the numbers {numbers} once with + - * / and brackets to get {target}. "
    "Give the equation between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)


def seeds(*, split: Split, count: int = 1000, first: int = 0) -> list[dict[str, Any]]:
    """Rows {prompt, seed} for environments that generate worlds: training seeds are even, test
    seeds odd.

    `first`: number of seeds to skip.
    """
    test = _is_test(split)
    numbers = range(2 * first + test, 2 * (first + count), 2)
    return [{"prompt": f"seed {n}", "seed": n} for n in numbers]


def digit_sums(*, split: Split, seed: int = 0) -> list[dict[str, Any]]:
    """Rows {prompt, response}, e.g. {"prompt": "What is 3+4? Reply with the number only.",
    "response": "7"}.

    A small pretrained model learns them in minutes.  The 55 unordered digit pairs are divided once
    per `seed`: 15 of them (2 doubles such as 4+4, 13 others) are the test split and are never
    trained in either order.  Both splits use both orders, which gives 28 test prompts and 72 train
    prompts.
    """
    test = _is_test(split)
    rng = random.Random(seed)
    doubles = [(a, a) for a in range(10)]
    mixed = [(a, b) for a in range(10) for b in range(a + 1, 10)]
    rng.shuffle(doubles)
    rng.shuffle(mixed)
    held_out = {*doubles[:HELD_OUT_DOUBLES], *mixed[:HELD_OUT_OTHERS]}
    ordered = [
        (a, b) for a in range(10) for b in range(10) if ((min(a, b), max(a, b)) in held_out) == test
    ]
    rng.shuffle(ordered)
    return [
        {"prompt": f"What is {a}+{b}? Reply with the number only.", "response": str(a + b)}
        for a, b in ordered
    ]


def countdown(
    *, split: Split, count: int = 1000, size: int = 3, highest: int = 20, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows {prompt, response: {numbers, target}} with `size` numbers from 1 to `highest`, which
    reach the target with + - * /.

    No set of numbers is in both splits, and every task has a solution with whole numbers.
    """
    test = _is_test(split)
    if not 2 <= size <= 6 or highest < size:
        raise ValueError(f"size {size}, highest {highest}: need 2 <= size <= 6 and highest >= size")
    rng = random.Random(f"{seed}-{split}-{size}-{highest}")
    rows: list[dict[str, Any]] = []
    draws = 0
    while len(rows) < count:
        draws += 1
        numbers = [rng.randint(1, highest) for _ in range(size)]
        # the split depends on the set, not on its order
        if (random.Random(str(sorted(numbers))).random() < 0.2) != test:
            if not rows and draws > _MOST_DRAWS:
                raise ValueError(
                    f"size {size}, highest {highest}: no set of numbers belongs to the split "
                    f"{split}; raise highest"
                )
            continue
        target = _reach(rng, numbers)
        rows.append(
            {
                "prompt": COUNTDOWN_PROMPT.format(
                    numbers=", ".join(map(str, numbers)), target=target
                ),
                "response": {"numbers": numbers, "target": target},
            }
        )
    return rows


def _reach(rng: random.Random, numbers: list[int]) -> int:
    pool = list(numbers)
    rng.shuffle(pool)
    while len(pool) > 1:
        a = pool.pop()
        b = pool.pop()
        ways = [a + b, a * b, abs(a - b), *([a // b] if b and a % b == 0 else [])]
        pool.append(rng.choice(ways))
    return pool[0]


def frozen_lake_maps(
    *,
    split: Split,
    size: int = 3,
    holes: int = 2,
    distance: int | None = None,
    corners: bool = False,
    count: int | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows {prompt, desc} for `frozen_lake_workflow`: `desc` holds the map's lines of S (start), F
    (ice), H (hole), G (goal).

    Every map has a path from start to goal that touches no hole.  `corners`: start at the upper
    left, goal at the lower right; else anywhere.  The test split is 30 % of the different maps.
    `distance`: maximum moves of the shortest path.  `count`: number of rows; None = all (at most
    2000 are drawn).
    """
    test = _is_test(split)
    if not 2 <= size <= 8 or not 0 <= holes <= size * size - 2:
        raise ValueError(
            f"size {size}, holes {holes}: need 2 <= size <= 8 and room for a start and a goal"
        )
    rng = random.Random(f"{seed}-{size}-{holes}-{distance}-{corners}")
    maps: dict[tuple[str, ...], None] = {}
    for _ in range(6000):
        lake = _draw_map(rng, size, holes, corners)
        if (way := moves(lake)) is not None and (distance is None or way <= distance):
            maps[lake] = None
        if len(maps) >= 2000:
            break
    if len(maps) < 2:
        raise ValueError(
            f"size {size} with {holes} holes has too few lakes that can be crossed; use fewer "
            f"holes or a longer distance"
        )
    ordered = list(maps)
    held_out = max(1, round(_HELD_OUT_MAPS * len(ordered)))
    chosen = ordered[:held_out] if test else ordered[held_out:]
    return [{"prompt": "\n".join(lake), "desc": list(lake)} for lake in chosen[:count]]


def moves(lake: tuple[str, ...]) -> int | None:
    """Return the moves of the shortest path from start to goal; None without a path."""
    cells = {(r, c): cell for r, line in enumerate(lake) for c, cell in enumerate(line)}
    here = [at for at, cell in cells.items() if cell == "S"]
    visited = set[tuple[int, int]]()
    count = 0
    while here:
        if any(cells[at] == "G" for at in here):
            return count
        visited.update(here)
        near = {(r + dr, c + dc) for r, c in here for dr, dc in ((0, -1), (1, 0), (0, 1), (-1, 0))}
        here = [at for at in near if cells.get(at, "H") != "H" and at not in visited]
        count += 1
    return None


def _draw_map(rng: random.Random, size: int, holes: int, corners: bool) -> tuple[str, ...]:
    cells = ["F"] * (size * size)
    places = list(range(size * size))
    if corners:
        start = 0
        goal = size * size - 1
        taken = rng.sample(places[1:-1], holes)
    else:
        start, goal, *taken = rng.sample(places, holes + 2)
    cells[start], cells[goal] = "S", "G"
    for place in taken:
        cells[place] = "H"
    return tuple("".join(cells[i : i + size]) for i in range(0, size * size, size))


def _is_test(split: str) -> bool:
    if split not in get_args(Split):
        raise ValueError(f"split {split!r} is not known; use {' or '.join(get_args(Split))}")
    return split == "test"
