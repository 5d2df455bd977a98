"""Named places where a test can make the real system fail.  Off unless the variable RFT_FAULT is set.

`RFT_FAULT=point[:nth][,point[:nth] ...]`: without a number the point fires every time it is reached, with `:n` only the n-th time
(from 1) in each process.  The one invariant: without the variable `fault` is false and costs one dictionary look-up.
"""

from __future__ import annotations

import os

from rft.errors import ConfigError

VARIABLE = "RFT_FAULT"
SYNC_POINTS = (
    "sync.skip",  # the load claims success and does nothing
    "sync.missing_tensor",  # one tensor never arrives
    "sync.stale_head",  # a tied output layer keeps its old packed copy
    "sync.corrupt_byte",  # one byte of the staged weights is flipped
    "sync.wrong_version",  # the weights are loaded under another version's name
)

_seen: dict[tuple[str, str], int] = {}


def fault(point: str) -> bool:
    """Whether the place called `point` has to fail this time; counts the visits of each point."""
    setting = os.environ.get(VARIABLE)
    if not setting:
        return False
    _seen[setting, point] = visit = _seen.get((setting, point), 0) + 1
    return any(nth in (0, visit) for nth in _planned(setting).get(point, ()))


def _planned(setting: str) -> dict[str, list[int]]:
    """{point: [visits at which it fires]}, 0 = always."""
    plan: dict[str, list[int]] = {}
    for entry in setting.split(","):
        point, colon, nth = entry.strip().partition(":")
        if not point or (colon and not (nth.isdecimal() and int(nth) > 0)):
            raise ConfigError(f"{VARIABLE}={setting!r}: {entry!r} is not point or point:nth with nth from 1")
        plan.setdefault(point, []).append(int(nth) if colon else 0)
    return plan
