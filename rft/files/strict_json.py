"""JSON of files that others have written: read without surprises, or refused in one sentence.

Knows nothing of what the values mean.  Invariant: what comes out can be nested, printed and written
again; every key counted once.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 100
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """The value of a JSON text.  Raises ValueError (JSONDecodeError with its place, where the text
    is no JSON).
    """
    try:
        value = json.loads(text, object_pairs_hook=no_key_twice)
    except RecursionError:
        raise ValueError(f"nested too deeply; at most {MAX_DEPTH} levels are allowed") from None
    except json.JSONDecodeError:
        raise
    except ValueError as e:
        raise ValueError("a number has too many digits" if "digits" in str(e) else str(e)) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _refuse_depth(value)
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            raise ValueError(
                f"holds half of a character (\\u{ord(e.object[e.start]):04x})"
            ) from None
    return value


def _refuse_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            below
            for v in level
            if isinstance(v, dict | list)
            for below in (v.values() if isinstance(v, dict) else v)
        ]
        if not level:
            return
    raise ValueError(f"nested too deeply; at most {MAX_DEPTH} levels are allowed")


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The hook of `json.loads` for objects.  Raises ValueError where a key is written twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is written twice")
    return made
