"""What an operator may return.  A result that breaks a rule is not used: the fault is told, and the run stops.

Invariant: an operator never makes, copies, renames or rewrites an experience; it only judges those it was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import numpy as np

from rft.buffer.operators.base import Result, Stage
from rft.types.experience import Experience, check
from rft.types.metrics import Metric, Reduction

_ARRAYS = ("tokens", "loss_mask", "logprobs", "token_rewards", "teacher_logprobs")
_MAY_CHANGE: dict[Stage, set[str]] = {
    "reward": {"info", "metrics", "reward", "reward_parts", "token_rewards"},
    "statistics": {"info", "metrics"},
    "drop": {"info", "metrics", "loss_mask", "logprobs"},
}


def freeze(row: Experience) -> None:
    """Writing into the row's arrays raises from now on."""
    for name in _ARRAYS:
        if (array := getattr(row, name)) is not None:
            array.setflags(write=False)


def mark(row: Experience) -> tuple[Any, ...]:
    """Changes when what no operator may change in place is changed (a record's own fields cannot be)."""
    arrays = [getattr(row, name) for name in _ARRAYS]
    return (*(a is not None and a.flags.writeable for a in arrays), *row.reward_parts.items())


def broken(stage: Stage, before: Sequence[Experience], marks: Sequence[tuple[Any, ...]], result: Any) -> str:
    """What is wrong with `result`, as the rest of a sentence about the operator; "" if nothing.

    `before` are the rows it was given, `marks` what `mark` said of them then.
    """
    if not isinstance(result, Result):
        return f"returned {type(result).__name__}; it must return Result(rows, metrics) of rft.buffer.operators.base"
    for row, then in zip(before, marks, strict=True):
        if mark(row) != then:
            return f"changed {row.id} in place; use msgspec.structs.replace(row, ...)"
    given = {r.id: r for r in before}
    seen = set()
    for row in _listed(result.rows):
        if not isinstance(row, Experience):
            return f"returned a {type(row).__name__} among its rows; they must be the experiences it was given"
        if row.id not in given:
            return f"returned {row.id}, which it was not given in this call; operators neither make nor rename experiences"
        if row.id in seen:
            return f"returned {row.id} twice; rows are never copied (see max_uses for training them more often)"
        seen.add(row.id)
        if fault := _changed(stage, given[row.id], row) or _invalid(row):
            return fault
    if stage != "drop" and len(seen) < len(given):
        missing = next(i for i in given if i not in seen)
        return f"left out {missing}; only operators of stage drop may, and its stage is {stage}"
    return _numbers(result)


def _listed(rows: Any) -> Sequence[Any]:
    return rows if isinstance(rows, list | tuple) else [rows]


def _changed(stage: Stage, old: Experience, new: Experience) -> str:
    if new is old:
        return ""
    may = _MAY_CHANGE[stage]
    for name in old.__struct_fields__:
        was, now = getattr(old, name), getattr(new, name)
        if was is now or name in may:
            continue
        same = np.array_equal(was, now) if name in _ARRAYS and was is not None and now is not None else was == now
        if not bool(same):
            return f"changed {name} of {old.id}; an operator of stage {stage} may change {', '.join(sorted(may))}"
    if bool(np.any(new.loss_mask & ~old.loss_mask)):
        return f"trains tokens of {old.id} that were not to be trained; a loss_mask may only be cleared"
    if not np.array_equal(new.logprobs[new.loss_mask], old.logprobs[new.loss_mask]):
        return f"changed log-probs of {old.id}; they are the sampling policy's"
    return ""


def _invalid(row: Experience) -> str:
    """Rows check themselves when they are made; `info` and `metrics` may also be written in place."""
    if not row.info and not row.metrics:
        return ""
    try:
        check(row)
        msgspec.convert(row.metrics, dict[str, float], strict=True)
    except (ValueError, TypeError, RecursionError) as e:
        return f"made {row.id} invalid: {e}"
    wild = [name for name, value in row.metrics.items() if not math.isfinite(value)]
    return f"made {row.id} invalid: metrics {', '.join(wild)} are not finite" if wild else ""


def _numbers(result: Result) -> str:
    for m in _listed(result.metrics):
        if not (
            isinstance(m, Metric)
            and isinstance(m.name, str)
            and isinstance(m.value, int | float)
            and math.isfinite(m.value)
            and m.reduction in get_args(Reduction)
        ):
            return f"reported {m!r}; metrics are Metric(name, finite number, {' or '.join(get_args(Reduction))})"
    return ""
