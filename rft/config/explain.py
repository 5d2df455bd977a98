"""A resolved configuration in words: every value with where it came from, and when weights move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rft.config.plan import Plan, schedule
from rft.config.resolve import shown
from rft.config.schema.root import RunConfig
from rft.config.source import Loc, dotted


def values(config: RunConfig, plan: Plan) -> list[tuple[str, str, str]]:
    """(key, value, where from) of every key: a line of the file, an override, "default", or what it was derived from."""
    derived = {d.key: d for d in plan.derived}
    rows = []
    for loc, value in _leaves(shown(config), ()):
        key = dotted(loc)
        where = config.source.where(loc)
        if key in derived and (not where or value in (None, "auto", 0)):
            rows.append((key, str(derived.pop(key).value), f"derived: {plan_why(plan, key)}"))
        elif key in derived:
            rows.append((key, f"{value} → {derived[key].value}", f"{where}; {plan_why(plan, key)}"))
        else:
            rows.append((key, _text(value), where or "default"))
    return rows


def plan_why(plan: Plan, key: str) -> str:
    return next((d.why for d in plan.derived if d.key == key), "")


def timeline(plan: Plan) -> str:
    """The first steps of the schedule in one line."""
    s, sync = schedule(plan.sync), plan.sync
    if sync.style != "fixed":
        return _asynchronous(plan)
    parts, last = [], -1
    for batch in range(2 * sync.interval + sync.offset + 1):
        need = s.required_step(batch)
        if need != last:
            parts.append(f"explore {batch} waits for weights {need}" if need else "explore 0 starts with the untrained weights")
            last = need
    every = "every train step" if sync.interval == 1 else f"every {sync.interval} train steps"
    return f"by {sync.method} after {every}; {', '.join(parts[:3])} ..."


def _asynchronous(plan: Plan) -> str:
    s, sync = schedule(plan.sync), plan.sync
    steps = "every train step" if sync.interval == 1 else f"every {sync.interval} train steps"
    if sync.style == "explorer_driven":
        batches = "explore step" if sync.interval == 1 else f"{sync.interval} explore steps"
        when = f"when the explorer asks, after every {batches} from explore step {sync.offset + sync.interval} on"
    else:
        when = f"after {steps}"
    if s.quota is not None:
        unit = "tasks" if plan.trainer.batch_rows is None else "experiences"
        window = s.interval * s.step_units
        limit = f"; a window takes {window} {unit}, and {s.quota} may have begun and not been trained at its start"
    else:
        limit = ""
    if sync.max_staleness is not None:
        limit += f"; the explorer waits where rows would get older than {sync.max_staleness} steps"
    return f"by {sync.method} {when}{limit}" + ("" if sync.partial_rollout else "; tasks under way are waited for")


def _leaves(value: Any, loc: Loc) -> Iterator[tuple[Loc, Any]]:
    if isinstance(value, dict) and value:
        for k, v in value.items():
            yield from _leaves(v, (*loc, k))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, v in enumerate(value):
            yield from _leaves(v, (*loc, i))
    else:
        yield loc, value


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
