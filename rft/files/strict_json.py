"""Strict parsing of JSON from foreign files.

Depends on no meaning of values.  Invariant: parsed values have bounded depth, unique keys, and can
be written again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

MAX_DEPTH = 100
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises ValueError (JSONDecodeError with its position for a syntax error).
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
    """Hook of `json.loads` for objects.

    Raises ValueError for a repeated key.
    """
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key in counts if counts[key] > 1)
        raise ValueError(f"the key {twice!r} is written twice")
    return result
