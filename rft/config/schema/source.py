"""Where a configuration came from: the file as written, the overrides, and which of them set each
key.

Depends on no schema.  Keys are tuples of mapping keys and list indexes, e.g. ("buffer",
"explorer_input", "eval_tasksets", 0, "split").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from rft.secrets import REDACTED, is_free_map, is_harmless, is_secret_name, redact

Loc = tuple[str | int, ...]


@dataclass(frozen=True)
class Source:
    """The written form of a configuration.  Empty for one that was made in Python."""

    path: Path | None = None
    text: str = ""
    overrides: tuple[str, ...] = ()
    # file and overrides merged, interpolations replaced
    values: Mapping[str, Any] = field(default_factory=dict)
    # leaf -> "line 12", "override", "line 12, from the environment"
    origins: Mapping[Loc, str] = field(default_factory=dict)
    # leaves that came as text: overrides and interpolations
    raw_texts: Mapping[Loc, str] = field(default_factory=dict)
    files: tuple[tuple[str, str], ...] = ()  # (path, sha256) of the file and of what it extends
    warnings: tuple[str, ...] = ()  # what was read and has no effect
    stage: str = ""  # the stage of a staged configuration that this is
    # section -> where the stage wrote it, e.g. "stages[1].algorithm"
    sections: Mapping[str, str] = field(default_factory=dict)

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


def leaves(value: Any, loc: Loc = (), *, lists: bool = True) -> Iterator[tuple[Loc, Any]]:
    """What holds no other values, an empty mapping or list too; without `lists` a list counts as
    one value but for mappings in it.
    """
    if isinstance(value, dict) and value:
        for k, v in value.items():
            yield from leaves(v, (*loc, k), lists=lists)
    elif isinstance(value, list) and value and (lists or isinstance(value[0], dict)):
        for i, v in enumerate(value):
            yield from leaves(v, (*loc, i), lists=lists)
    else:
        yield loc, value


STEP = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")


def undotted(key: str) -> Loc:
    """The steps of a key: a[0].b is ("a", 0, "b")."""
    return tuple(int(i) if i else k for k, i in STEP.findall(key))


def is_secret(key: str, value: object) -> bool:
    """Whether `value` under `key` must not be shown; a count of tokens is no secret."""
    counted = isinstance(value, int | float) and key.lower().endswith(("token", "tokens"))
    return value not in (None, "") and is_secret_name(key) and not counted


def hidden(loc: Loc, value: object) -> bool:
    """Whether the value at `loc` must not be shown: it has a secret's name, or is an environment
    variable or header not known as harmless.

    Names of environment variables (`header_envs`) are no secrets.
    """
    names = [part for part in loc if isinstance(part, str)]
    if not names or any(name.endswith("_envs") for name in names[:-1]):
        return False
    free = any(is_free_map(name) for name in names[:-1]) and not isinstance(
        value, dict | list | tuple
    )
    return is_secret(names[-1], value) or (
        free and value not in (None, "") and not is_harmless(names[-1], value)
    )


def plain(value: Any, loc: Loc = ()) -> Any:
    """Dataclasses, structs, paths → JSON values, secrets redacted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: plain(getattr(value, f.name), (*loc, f.name)) for f in dataclasses.fields(value)
        }
    if isinstance(value, BaseModel):
        return {name: plain(item, (*loc, name)) for name, item in value}
    if isinstance(value, msgspec.Struct):
        return {n: plain(getattr(value, n), (*loc, n)) for n in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(k): plain(v, (*loc, str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, loc) for v in value]
    if hidden(loc, value):
        return REDACTED
    if isinstance(value, str | Path):
        return redact(str(value))
    return value if value is None or isinstance(value, bool | int | float) else redact(str(value))
