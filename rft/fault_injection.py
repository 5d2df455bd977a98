"""Named points where a test makes the real system fail.  Off unless RFT_FAULT is set.

`RFT_FAULT=point[:nth][=action][,point ...]`.  nth: `:n` fires at the n-th visit (from 1) in each
process, `:n-m` from the n-th to the m-th, `:n-` from the n-th on, none at every visit.  action: one
of ACTIONS; the default of KILL_POINTS is kill, other points fail in their own way.  Invariant:
without the variable `fault` is false and costs one dictionary look-up.

Example: RFT_FAULT=buffer.append.after:3=kill,storage.put:5-9=enospc
"""

from __future__ import annotations

import errno
import os
import re
import signal
from typing import NamedTuple

from rft.errors import ConfigError

VARIABLE = "RFT_FAULT"
SYNC_POINTS = (
    "sync.skip",  # the load claims success and does nothing
    "sync.missing_tensor",  # one tensor never arrives
    "sync.stale_head",  # a tied output layer keeps its old packed copy
    "sync.corrupt_byte",  # one byte of the staged weights is flipped
    "sync.wrong_version",  # the weights are loaded under another version's name
)
BUFFER_POINTS = (
    "buffer.append.before",  # the groups of one transaction were offered, nothing is written
    "buffer.append.stored",  # payload and headers are written, the transaction is still open
    "buffer.append.after",  # committed, the explorer does not know it yet
    "buffer.close_batch",  # all groups are stored, the batch is still open
    "buffer.lease",  # rows were chosen, their payload is not read yet
    "buffer.use.before",  # the optimizer step is done, its uses are not written
    "buffer.use.after",  # the uses are committed, the trainer does not know it yet
    "buffer.explain",  # as buffer.use.before, for a step that is never trained
    "buffer.lineage",  # a new trainer takes over, nothing is written
    "buffer.drop",  # payload that nothing needs any more is about to be deleted
    "storage.put",  # before a payload block is written
    "storage.put.torn",  # half of a block's bytes are written
    "storage.put.aside",  # a segment is whole under its temporary name, not renamed
)
TRAINER_POINTS = (
    "trainer.leased",  # a step has its rows, nothing is computed
    "trainer.update.before",  # gradients are there, weights are those before the step
    "trainer.update.after",  # weights have changed, the rows do not count as used
    "trainer.used",  # the rows count as used, the new weights are nowhere but in memory
    "trainer.staged",  # a version is ready for the engines, none of them serves it
    "trainer.published",  # every engine serves it
    "checkpoint.taken",  # what a checkpoint will hold is fixed, none of its files is written
    "checkpoint.files",  # some of its files are written
    "checkpoint.renamed",  # all files are in place, the manifest is not
    "checkpoint.committed",  # the manifest is in place, older checkpoints are still there
    "checkpoint.removing",  # an older one has lost its manifest, not its files
)
BROADCAST_POINTS = (
    "sync.received",  # an engine worker has one bucket of a version, perhaps not the last
    "sync.sent",  # the trainer has sent one
)
SERVE_POINTS = (
    "buffer.sessions.before",  # answers and rewards of clients are about to be written
    "buffer.sessions.after",  # they are committed, the service does not know it yet
)
# a step is saved again: the old checkpoint is out of the way, the new one is not in its place
REPLACING = "checkpoint.replacing"
KILL_POINTS = (*BUFFER_POINTS, *SERVE_POINTS, *TRAINER_POINTS, *BROADCAST_POINTS, REPLACING)
_ERRORS = {"enospc": errno.ENOSPC, "edquot": errno.EDQUOT, "eio": errno.EIO}
# SIGKILL or SIGSTOP of this process, or an OSError with that number
ACTIONS = ("kill", "stop", *_ERRORS)
_ENTRY = re.compile(
    r"(?P<point>[^\s:=,]+)(:(?P<first>\d+)(?P<range>-(?P<last>\d*))?)?(=(?P<action>\w+))?"
)

_visits: dict[tuple[str, str], int] = {}


class _Entry(NamedTuple):
    first: int
    last: float
    action: str | None


def fault(point: str) -> bool:
    """Count a visit of `point`, perform its action, and return whether it has to fail.

    Raises OSError for an action that is the name of an error.
    """
    setting = os.environ.get(VARIABLE)
    if not setting:
        return False
    _visits[setting, point] = visit = _visits.get((setting, point), 0) + 1
    fires = [
        entry for entry in _planned(setting).get(point, ()) if entry.first <= visit <= entry.last
    ]
    for entry in fires:
        _act(point, entry.action)
    return bool(fires)


def planned(point: str) -> bool:
    """Whether `point` may fail at some visit; counts none."""
    setting = os.environ.get(VARIABLE)
    return bool(setting) and point in _planned(setting or "")


def _act(point: str, action: str | None) -> None:
    action = action or ("kill" if point in KILL_POINTS else None)
    if action in _ERRORS:
        raise OSError(_ERRORS[action], f"{os.strerror(_ERRORS[action])} ({VARIABLE} at {point})")
    if action is not None:
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def _planned(setting: str) -> dict[str, list[_Entry]]:
    plan: dict[str, list[_Entry]] = {}
    for entry in setting.split(","):
        m = _ENTRY.fullmatch(entry.strip())
        first = int(m["first"] or 1) if m else 0
        if m is None or first < 1 or (m["action"] or "kill") not in ACTIONS:
            raise ConfigError(
                f"{VARIABLE}={setting!r}: {entry!r} is not point[:nth][=action], with nth from 1 "
                f"(or n-m, n-), "
                f"action one of {', '.join(ACTIONS)}"
            )
        last = (
            float("inf")
            if m["first"] is None
            else first
            if m["range"] is None
            else float(m["last"] or "inf")
        )
        plan.setdefault(m["point"], []).append(_Entry(first, last, m["action"]))
    return plan
