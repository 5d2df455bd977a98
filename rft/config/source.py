"""Where a configuration came from: the file as written, the overrides, and which of them set each key.

Knows no schema.  Keys are tuples of mapping keys and list indexes, e.g. ("buffer", "explorer_input", "eval_tasksets", 0, "split").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.logs import is_secret_name

Loc = tuple[str | int, ...]


@dataclass(frozen=True)
class Source:
    """The written form of a configuration.  Empty for one that was made in Python."""

    path: Path | None = None
    text: str = ""
    overrides: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)  # file and overrides merged, interpolations replaced
    origins: Mapping[Loc, str] = field(default_factory=dict)  # leaf -> "line 12", "override", "line 12, from the environment"
    raw_texts: Mapping[Loc, str] = field(default_factory=dict)  # leaves that came as text: overrides and interpolations
    files: tuple[tuple[str, str], ...] = ()  # (path, sha256) of the file and of what it extends
    warnings: tuple[str, ...] = ()  # what was read and has no effect
    stage: str = ""  # the stage of a staged configuration that this is
    sections: Mapping[str, str] = field(default_factory=dict)  # section -> where the stage wrote it, e.g. "stages[1].algorithm"

    def where(self, loc: Loc) -> str:
        """Which line or override set `loc`; "" for a default."""
        if loc in self.origins:
            return self.origins[loc]
        return next((o for at, o in self.origins.items() if at[: len(loc)] == loc), "")


def dotted(loc: Loc) -> str:
    """("a", 0, "b") as "a[0].b"."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


STEP = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")


def undotted(key: str) -> Loc:
    """The steps of a key: a[0].b is ("a", 0, "b")."""
    return tuple(int(i) if i else k for k, i in STEP.findall(key))


def is_secret(key: str, value: object) -> bool:
    """Whether `value` under `key` must not be shown; a count of tokens is no secret."""
    counted = isinstance(value, int | float) and key.lower().endswith(("token", "tokens"))
    return value not in (None, "") and is_secret_name(key) and not counted
