"""A household of ALFWorld that needs none of its downloads: two receptacles and a mug."""

from __future__ import annotations

import json
from pathlib import Path

PROBLEM = """(define (problem tidy) (:domain alfred)
 (:objects agent1 - agent table1 - receptacle shelf1 - receptacle mug1 - object
   l1 - location l2 - location TableType - rtype ShelfType - rtype MugType - otype)
 (:init (= (total-cost) 0) (atLocation agent1 l1)
   (receptacleType table1 TableType) (receptacleType shelf1 ShelfType) (objectType mug1 MugType)
   (canContain TableType MugType) (canContain ShelfType MugType) (pickupable mug1)
   (receptacleAtLocation table1 l1) (receptacleAtLocation shelf1 l2) (objectAtLocation mug1 l1) (inReceptacle mug1 table1)
   (= (distance l1 l2) 1) (= (distance l2 l1) 1))
 (:goal (and (inReceptacle mug1 shelf1))))"""


def tidy_household(folder: Path) -> Path:
    """A game in the form of ALFWorld's own; it is won by putting the mug on the shelf."""
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    named = (
        PROBLEM.replace("table1", "DiningTable_bar__one")
        .replace("shelf1", "Shelf_bar__two")
        .replace("mug1", "Mug_bar__three")
    )
    parts = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": Path(ALFRED_TWL2_PATH)
        .read_text()
        .replace("UNKNOWN GOAL", "put a mug on the shelf"),
        "pddl_problem": named,
    }
    task = {
        "object_target": "Mug",
        "parent_target": "Shelf",
        "toggle_target": "",
        "mrecep_target": "",
        "object_sliced": False,
    }
    (folder / "traj_data.json").write_text(
        json.dumps({"task_type": "pick_and_place_simple", "pddl_params": task})
    )
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(parts))
    return path
