"""What two processes of one run must agree on: which keys, and in words what differs.  Knows configurations as plain values only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHARED = (  # sections and keys that both halves read
    "project",
    "group",
    "name",
    "seed",
    "deterministic",
    "algorithm.algorithm_type",
    "algorithm.repeat_times",
    "algorithm.advantage_fn",
    "model",
    "buffer.batch_size",
    "buffer.train_batch_size",
    "buffer.max_refill",
    "buffer.on_short_batch",
    "buffer.explorer_input",
    "synchronizer",
    "explorer.max_inflight_batches",
    "explorer.rollout_model.dtype",
    "explorer.rollout_model.max_model_len",
    "explorer.rollout_model.max_prompt_tokens",
)
_OWN = ("synchronizer.sync_timeout",)  # of these sections, what each reads for itself
_TASKS = "buffer.explorer_input"


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(key, the joining side's value, sentence) of each key of `SHARED` that differs."""
    found = []
    named = any(
        _at(ours, f"{_TASKS}.{key}") for key in ("taskset", "tasksets")
    )  # the process that trains need not name the tasks
    for key in SHARED if named else [k for k in SHARED if k != _TASKS]:
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
