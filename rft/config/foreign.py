"""What related tools call our keys: the hook by which a table of foreign names takes part in
reading a configuration.

Knows no such table: extras add them.  Invariant: without any
of them a configuration in our own spelling is read in the same way.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

from rft.config.schema.source import Loc, dotted
from rft.errors import ConfigError
from rft.plugins import extra_entries, load_entry

Origins = dict[Loc, str]


class ForeignKeys:
    """The names of one tool.  Patterns are dotted keys, in which `*` stands for one part or list
    index.
    """

    instead: ClassVar[Mapping[str, str]] = {}
    """Keys that people know and that are not in the schema: what to do about each."""
    files: ClassVar[Mapping[str, str]] = {}
    """Keys at the top of a file that is another tool's as a whole: what to do about it."""
    ignored: ClassVar[Mapping[str, str]] = {}
    """Keys that are taken out with a warning, because what they ask for is so anyway or is decided
    elsewhere: why.
    """
    values: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Values of a choice that are not offered: key → value → what to do."""

    def expand(
        self, values: dict[str, Any], origins: Origins, same_layer: Callable[[Loc], bool]
    ) -> list[str]:
        """Moves what is spelled differently to our keys, before anything is validated; warnings.

        A key that is written in both spellings is an error if `same_layer` says that both stand in
        the same file.
        """
        return []


@cache
def tables() -> tuple[ForeignKeys, ...]:
    return tuple(load_entry(entry)() for entry in extra_entries("foreign_keys").values())


def expand(
    values: dict[str, Any], origins: Origins, same_layer: Callable[[Loc], bool] = lambda _: True
) -> list[str]:
    """Every tool's spellings in `values` and `origins` become ours.  Raises ConfigError or
    ConfigErrors.
    """
    if key := next((key for table in tables() for key in table.files if key in values), ""):
        where = next((f"  ({o})" for at, o in origins.items() if at[0] == key), "")
        raise ConfigError(f"{advice(key)}{where}", key=key)
    moved = [warning for table in tables() for warning in table.expand(values, origins, same_layer)]
    return [*moved, *_without_ignored(values, origins)]


def ignored() -> dict[str, str]:
    return {key: why for table in tables() for key, why in table.ignored.items()}


def _without_ignored(values: dict[str, Any], origins: Origins) -> list[str]:
    """Takes out the ignored keys, and those not offered whose value asks for nothing (null, false,
    empty); a warning for each.
    """
    warnings = []
    for place, loc in list(mappings(values, ())):
        for name, value in list(place.items()):
            key = dotted((*loc, name))
            found = _which().fullmatch(key)
            off = value is None or value is False or value in ("", {}, [])
            why = (
                list(ignored().values())[found.lastindex - 1]
                if found and found.lastindex
                else "it is off here too"
                if off
                else ""
            )
            if not why or not advice(key):
                continue
            where = next((o for at, o in origins.items() if at[: len(loc) + 1] == (*loc, name)), "")
            warnings.append(f"{key} has no effect: {why}{f'  ({where})' if where else ''}")
            del place[name]
            for at in [at for at in origins if at[: len(loc) + 1] == (*loc, name)]:
                del origins[at]
    return warnings


@cache
def _which() -> re.Pattern[str]:
    """Group i matches what the i-th ignored pattern matches."""
    return re.compile("|".join(f"({fnmatch.translate(pattern)})" for pattern in ignored()))


def mappings(value: Any, loc: Loc) -> Iterator[tuple[dict[str, Any], Loc]]:
    """Every mapping in `value`, the outer ones first."""
    if isinstance(value, dict):
        yield value, loc
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, item in inner:
        yield from mappings(item, (*loc, name))


def instead() -> dict[str, str]:
    return {
        key: text
        for table in tables()
        for key, text in (*table.instead.items(), *table.files.items())
    }


def not_offered() -> dict[str, Mapping[str, str]]:
    return {key: found for table in tables() for key, found in table.values.items()}


def advice(key: str) -> str:
    """What to do about a key that is not in the schema; "" for one that nobody knows."""
    said = {
        **{k: f"has no effect: {why}" for k, why in ignored().items()},
        **{k: f"not a key here: {v}" for k, v in instead().items()},
    }
    return next((text for pattern, text in said.items() if fnmatch.fnmatchcase(key, pattern)), "")


def value_advice(key: str, value: object) -> str:
    """What to do about a value of a choice that is not offered; "" otherwise."""
    name = str(value).strip().lower()
    return next(
        (
            v[name]
            for pattern, v in not_offered().items()
            if fnmatch.fnmatchcase(key, pattern) and name in v
        ),
        "",
    )
