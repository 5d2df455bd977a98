"""Whether an answer calls the right tools with the right arguments, by data of BFCL's shape.

The gold answer is a list of {function: {argument: [allowed values]}}; "" among them says that the
argument may be left out.  A list of {"name", "arguments"} will do, also in OpenAI's form
{"function": {"name", "arguments": JSON text}}: then every value is the only one. The calls are read
by whoever asks; knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rft.reward.spelling import normalized

Call = tuple[str, Mapping[str, Any]]
Wanted = tuple[str, dict[str, list[Any]]]


def wanted(truth: Any) -> list[Wanted]:
    """The gold calls.  Raises ValueError for other shapes."""
    if isinstance(truth, str):
        truth = json.loads(truth)
    if isinstance(truth, Mapping):
        truth = [truth]
    calls: list[Wanted] = []
    for item in truth if isinstance(truth, Sequence) else [None]:
        if not isinstance(item, Mapping):
            raise ValueError(f"a gold call must be a mapping, not {item!r}")
        # a table gives each call the keys of all
        given = {k: v for k, v in item.items() if v is not None}
        function = given.get("function")
        named = (
            function
            if isinstance(function, Mapping) and isinstance(function.get("name"), str)
            else given
        )
        if isinstance(named.get("name"), str):
            calls.append((named["name"], _only(_arguments(named.get("arguments"), item))))
        elif len(given) == 1:
            ((name, arguments),) = given.items()
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


def _arguments(given: Any, item: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, a mapping or its JSON text, which may be empty.  Raises ValueError."""
    try:
        read = json.loads(given or "{}") if isinstance(given, str) else given or {}
    except json.JSONDecodeError as e:
        raise ValueError(f"the arguments of a gold call are no JSON ({e}): {item!r}") from None
    if not isinstance(read, Mapping):
        raise ValueError(
            f"the arguments of a gold call must be a mapping, or its JSON text, not {given!r}: "
            f"{item!r}"
        )
    return dict(read)


def _only(value: Any) -> Any:
    """Every argument, however deep, with the one value that it may have."""
    if isinstance(value, Mapping):
        return {k: [_only(v)] for k, v in value.items()}
    return [_only(v) for v in value] if isinstance(value, list) else value


def matches(made: Sequence[Call], gold: Sequence[Wanted]) -> str:
    """ "" if `made` are the `gold` calls in any order, else what is wrong."""
    if len(made) != len(gold):
        return f"{len(made)} calls instead of {len(gold)}"
    taken: dict[int, int] = {}  # index of a gold call -> of the call that it is matched with
    for i, (name, arguments) in enumerate(made):
        if not _matched(i, made, gold, taken, set()):
            differences = [
                _differs(arguments, allowed) for gold_name, allowed in gold if gold_name == name
            ]
            why = next(filter(None, differences), "made once too often")
            return f"{name}: {why}" if differences else f"{name} is not wanted"
    return ""


def _matched(
    call: int, calls: Sequence[Call], gold: Sequence[Wanted], taken: dict[int, int], tried: set[int]
) -> bool:
    """Whether the call gets a gold call, those before it moving to others where they can: an
    augmenting path of a bipartite matching.
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
        # or a list as a whole
        return not _differs(a, {k: v if len(v) == 1 else [*v, v] for k, v in allowed.items()})
    return bool(a == b)
