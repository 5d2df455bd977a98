"""What two processes of one run must agree on: which keys, and in words what differs.  Knows configurations as plain values only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHARED = (  # sections and keys that say what is learnt, and how the two halves keep in step
    "project",
    "group",
    "name",
    "seed",
    "deterministic",
    "algorithm",
    "model",
    "buffer",
    "data_processor",
    "synchronizer",
    "explorer.rollout_model.dtype",
    "explorer.rollout_model.max_model_len",
    "explorer.rollout_model.max_prompt_tokens",
    "explorer.eval_interval",
    "explorer.eval_on_startup",
    "explorer.eval_at_end",
    "explorer.max_inflight_batches",
    "explorer.over_rollout",
)
_OWN = ("algorithm.optimizer", "buffer.trainer_input")  # of these sections, what only the trainer reads


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(key, the joining side's value, sentence) of each key of `SHARED` that differs."""
    found = []
    for key in SHARED:
        for name, a, b in _compare(_at(ours, key), _at(theirs, key), key):
            if not name.startswith(_OWN):
                found.append((name, b, f"is {b!r} here and {a!r} in the process that trains; both halves of a run need the same"))
    return found


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _compare(a: Any, b: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in dict.fromkeys([*a, *b]):
            yield from _compare(a.get(name), b.get(name), f"{key}.{name}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _compare(x, y, f"{key}[{i}]")
    elif a != b:
        yield key, a, b
