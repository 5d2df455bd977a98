"""SQLite's `instr`, `replace` and `trim` in linear time.

The deadline of a query is checked between two steps, and a function call is one step; SQLite's own
`instr` on two texts of a megabyte takes minutes.  Invariant: results equal SQLite's.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any

# for LIKE and GLOB, which take up to text x pattern time
MAX_PATTERN_BYTES = 1000
MAX_TEXT = 1 << 26  # characters of a result, which Python computes before SQLite sees its length


def install(connection: sqlite3.Connection) -> None:
    """Replace SQLite's functions on this connection, and limit the patterns of LIKE and GLOB."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN_BYTES)
    functions: list[tuple[str, Callable[..., Any], int]] = [
        ("instr", _instr, 2),
        ("replace", _replace, 3),
    ]
    for name, method in (("trim", str.strip), ("ltrim", str.lstrip), ("rtrim", str.rstrip)):
        functions += [(name, partial(_trim, method), count) for count in (1, 2)]
    for name, function, count in functions:
        connection.create_function(name, count, function, deterministic=True)


def _text(value: Any) -> str:
    """Cast the value to text, like SQLite."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float) and math.isfinite(value):
        digits, _, exponent = f"{value:.15g}".partition("e")
        return (digits if "." in digits else f"{digits}.0") + (f"e{exponent}" if exponent else "")
    return str(value)


def _instr(text: Any, part: Any) -> int | None:
    if text is None or part is None:
        return None
    if isinstance(text, bytes) and isinstance(part, bytes):
        return text.find(part) + 1
    return _text(text).find(_text(part)) + 1


def _replace(text: Any, part: Any, by: Any) -> str | None:
    if text is None or part is None or by is None:
        return None
    old = _text(part)
    new = _text(by)
    result = _text(text)
    if not old:
        return result
    if len(result) + result.count(old) * (len(new) - len(old)) > MAX_TEXT:
        raise OverflowError  # SQLite says "string or blob too big"
    return result.replace(old, new)


def _trim(method: Callable[[str, str], str], text: Any, chars: Any = " ") -> str | None:
    if text is None or chars is None:
        return None
    # `strip` would compare every repetition of a character
    return method(_text(text), "".join(dict.fromkeys(_text(chars))))
