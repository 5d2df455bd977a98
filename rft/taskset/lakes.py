"""Small frozen lakes to cross: maps with one start, one goal and some holes, no map in both splits.

A taskset of it has the path `rft.taskset.lakes:lakes`; `frozen_lake_workflow` plays it.  Invariant: every map has a way from start to
goal that touches no hole.
"""

from __future__ import annotations

import random
from typing import Any, Literal

_HELD_OUT = 0.3


def lakes(
    *,
    split: Literal["train", "test"],
    size: int = 3,
    holes: int = 2,
    distance: int | None = None,
    corners: bool = False,
    count: int | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows {prompt, desc}: `desc` are the map's lines of S (start), F (ice), H (hole), G (goal).

    `corners`: the start is the upper left and the goal the lower right one; else both are anywhere.  Three of ten different maps are
    the test split.  `distance`: moves of the shortest way at most.  `count`: so many rows; None: all (at most 2000 are drawn).
    """
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is not known; use train or test")
    if not 2 <= size <= 8 or not 0 <= holes <= size * size - 2:
        raise ValueError(f"size {size}, holes {holes}: need 2 <= size <= 8 and room for a start and a goal")
    rng = random.Random(f"{seed}-{size}-{holes}-{distance}-{corners}")
    maps: dict[tuple[str, ...], None] = {}
    for _ in range(6000):
        made = _draw(rng, size, holes, corners)
        if (way := moves(made)) is not None and (distance is None or way <= distance):
            maps[made] = None
        if len(maps) >= 2000:
            break
    if len(maps) < 2:
        raise ValueError(
            f"size {size} with {holes} holes has too few lakes that can be crossed; use fewer holes or a longer distance"
        )
    ordered = list(maps)
    held_out = max(1, round(_HELD_OUT * len(ordered)))
    mine = ordered[:held_out] if split == "test" else ordered[held_out:]
    return [{"prompt": "\n".join(lake), "desc": list(lake)} for lake in mine[:count]]


def moves(lake: tuple[str, ...]) -> int | None:
    """Moves of the shortest way from start to goal; None where there is none."""
    cells = {(r, c): cell for r, line in enumerate(lake) for c, cell in enumerate(line)}
    here, seen, count = [at for at, cell in cells.items() if cell == "S"], set[tuple[int, int]](), 0
    while here:
        if any(cells[at] == "G" for at in here):
            return count
        seen.update(here)
        near = {(r + dr, c + dc) for r, c in here for dr, dc in ((0, -1), (1, 0), (0, 1), (-1, 0))}
        here = [at for at in near if cells.get(at, "H") != "H" and at not in seen]
        count += 1
    return None


def _draw(rng: random.Random, size: int, holes: int, corners: bool) -> tuple[str, ...]:
    cells = ["F"] * (size * size)
    places = list(range(size * size))
    if corners:
        start, goal = 0, size * size - 1
        taken = rng.sample(places[1:-1], holes)
    else:
        start, goal, *taken = rng.sample(places, holes + 2)
    cells[start], cells[goal] = "S", "G"
    for place in taken:
        cells[place] = "H"
    return tuple("".join(cells[i : i + size]) for i in range(0, size * size, size))
