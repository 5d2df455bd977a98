"""Rewards that people of this family know by name and that are not offered: what to do about each.

Invariant: none of these names is registered.
"""

from __future__ import annotations

INSTEAD: dict[str, str] = {
    "openjudge_reward": "graders of OpenJudge are not offered: use rubric_judge, reference_judge or pairwise_judge",
    "rlcr": "calibration rewards are not offered: write a function that reads the stated confidence (docs/howto/reward.md)",
}


def advice(name: str) -> str:
    """What to do about a reward that is not offered; "" for one that nobody knows."""
    return INSTEAD.get(name, "")
