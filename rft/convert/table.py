"""veRL's keys as a converter needs them: by name within the sections of a program, with defaults as values, and the nearest name.

Knows the table, not how to convert.  Invariant: a default is what the row says, read as YAML; one that follows another key is None.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import Any

from rft.config import verlkeys, yamlfile
from rft.config.verlkeys import Row

MAIN = frozenset(range(1, 17))
"""Sections of the ordinary trainer."""


@cache
def by_name(sections: frozenset[int] = MAIN) -> dict[str, Row]:
    """Rows of some sections; a name with a remark, such as "data.path (evaluation)", counts without it.  FSDP's form holds."""
    found: dict[str, Row] = {}
    for row in verlkeys.rows():
        if row.section in sections and "(Megatron)" not in row.name:
            found.setdefault(row.path, row)
    return found


def default(key: str, sections: frozenset[int] = MAIN) -> Any:
    """veRL's default of a key; None if it has none."""
    found = by_name(sections).get(key)
    return _value(found.default) if found else None


def nearest(key: str, known: list[str]) -> str:
    """The known key that was probably meant: the same last name elsewhere, or a similar one; "" if none is near."""
    last = key.rsplit(".", 1)[-1]
    if moved := [k for k in known if k.rsplit(".", 1)[-1] == last]:
        close = difflib.get_close_matches(key, moved, n=1, cutoff=0.3)
    else:  # the groups alone may not make two keys similar
        alike = set(difflib.get_close_matches(last, sorted({k.rsplit(".", 1)[-1] for k in known}), n=20, cutoff=0.6))
        close = difflib.get_close_matches(key, [k for k in known if k.rsplit(".", 1)[-1] in alike], n=1, cutoff=0.6)
    return close[0] if close else ""


@cache
def _value(text: str) -> Any:
    if text.startswith("—"):
        return None
    text = re.sub(r"\s*(later|\(overwritten\))$", "", text.rpartition("; ")[2]).partition(" (")[0].strip()
    if not text or text[0] == "=" or text.startswith(("same as", "HF ", "null /")) or text in ("unset", "on"):
        return None
    return yamlfile.scalar(text)
