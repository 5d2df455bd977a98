"""What extras know about keys and values of other tools that are not offered here.

The core knows no other tool: an extra names its functions in its manifest, see `rft.plugins`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from rft.errors import ConfigError
from rft.plugins import extra_entries, load_entry


def refuse_other_tools(keys: Collection[str], where: Callable[[str], str] = lambda key: "") -> None:
    """Raise ConfigError if the top-level `keys` are those of another tool's file.

    `where` returns the line of a key, "" if unknown.
    """
    for entry in extra_entries("file_hints").values():
        hints = load_entry(entry)
        if key := next((key for key in hints if key in keys), ""):
            line = f"  ({where(key)})" if where(key) else ""
            raise ConfigError(f"not a key here: {hints[key]}{line}", key=key)


def key_hint(key: str) -> str:
    """What to do about a key that is not in the schema; "" for a key that no extra knows."""
    hints = (load_entry(entry)(key) for entry in extra_entries("key_hint").values())
    return next(filter(None, hints), "")


def value_hint(key: str, value: object) -> str:
    """What to do about a value that a choice does not offer; "" otherwise."""
    hints = (load_entry(entry)(key, value) for entry in extra_entries("value_hint").values())
    return next(filter(None, hints), "")
