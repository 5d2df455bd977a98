"""Compare an answer's tool calls with gold calls in the format of BFCL.

The gold answer is a list of {function: {argument: [allowed values]}}; "" among the values makes the
argument optional.  A list of {"name", "arguments"} is accepted, too, also in OpenAI's form
{"function": {"name", "arguments": JSON text}}: then each value is the only allowed one. The caller
parses the calls; depends on no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rft.reward.spelling import normalized

Call = tuple[str, Mapping[str, Any]]
GoldCall = tuple[str, dict[str, list[Any]]]


def gold_calls(truth: Any) -> list[GoldCall]:
    """Return the gold calls.  Raises ValueError for other formats."""
    if isinstance(truth, str):
        truth = json.loads(truth)
    if isinstance(truth, Mapping):
        truth = [truth]
    calls: list[GoldCall] = []
    for item in truth if isinstance(truth, Sequence) else [None]:
        if not isinstance(item, Mapping):
            raise ValueError(f"a gold call must be a mapping, not {item!r}")
        # a table gives each call the keys of all calls
        fields = {k: v for k, v in item.items() if v is not None}
        function = fields.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            fields = dict(function)
        if isinstance(fields.get("name"), str):
            calls.append((fields["name"], _only(_arguments(fields.get("arguments"), item))))
        elif len(fields) == 1:
            ((name, arguments),) = fields.items()
            allowed = {
                k: v if isinstance(v, list) else [v]
                for k, v in _arguments(arguments, item).items()
                if v is not None
            }
            calls.append((str(name), allowed))
        else:
            raise ValueError(
                f"a gold call must be {{function: {{argument: [values]}}}} or {{name, arguments}}, "
                f"not {item!r}"
            )
    return calls


def _arguments(arguments: Any, item: Mapping[str, Any]) -> dict[str, Any]:
    """Read a call's arguments, a mapping or its JSON text, which may be empty.  Raises ValueError."""
    try:
        read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except json.JSONDecodeError as e:
        raise ValueError(f"the arguments of a gold call are no JSON ({e}): {item!r}") from None
    if not isinstance(read, Mapping):
        raise ValueError(
            f"the arguments of a gold call must be a mapping, or its JSON text, not {arguments!r}: "
            f"{item!r}"
        )
    return dict(read)


def _only(value: Any) -> Any:
    """Return every argument, at any depth, with its single allowed value."""
    if isinstance(value, Mapping):
        return {k: [_only(v)] for k, v in value.items()}
    return [_only(v) for v in value] if isinstance(value, list) else value


def mismatch(calls: Sequence[Call], gold: Sequence[GoldCall]) -> str:
    """Return the fault of the calls; "" for the gold calls, in any order."""
    if len(calls) != len(gold):
        return f"{len(calls)} calls instead of {len(gold)}"
    taken: dict[int, int] = {}  # index of a gold call -> index of its matched call
    for i, (name, arguments) in enumerate(calls):
        if not _matched(i, calls, gold, taken, set()):
            differences = [
                _differs(arguments, allowed) for gold_name, allowed in gold if gold_name == name
            ]
            reason = next(filter(None, differences), "made once too often")
            return f"{name}: {reason}" if differences else f"{name} is not wanted"
    return ""


def _matched(
    call: int,
    calls: Sequence[Call],
    gold: Sequence[GoldCall],
    taken: dict[int, int],
    tried: set[int],
) -> bool:
    """Return whether the call gets a gold call, possibly by rematching earlier calls: an augmenting
    path of a bipartite matching.
    """
    name, arguments = calls[call]
    for n, (gold_name, allowed) in enumerate(gold):
        if n in tried or gold_name != name or _differs(arguments, allowed):
            continue
        tried.add(n)
        if n not in taken or _matched(taken[n], calls, gold, taken, tried):
            taken[n] = call
            return True
    return False


def _differs(arguments: Mapping[str, Any], allowed: Mapping[str, list[Any]]) -> str:
    for name, value in arguments.items():
        if name not in allowed:
            return f"argument {name} is not wanted"
        if not any(_same(value, v) for v in allowed[name]):
            return f"{name} is {value!r}"
    missing = [
        name for name, values in allowed.items() if name not in arguments and "" not in values
    ]
    return f"{missing[0]} is missing" if missing else ""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, str) and isinstance(b, str):
        return normalized(a).casefold() == normalized(b).casefold()
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        allowed = {k: v if isinstance(v, list) else [v] for k, v in b.items()}
        # or the complete list as value
        return not _differs(a, {k: v if len(v) == 1 else [*v, v] for k, v in allowed.items()})
    return bool(a == b)
