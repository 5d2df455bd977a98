"""How much `${...}` unfolds to, counted before anything is unfolded.

Knows the syntax of references, not what resolves them.  Invariant: what passes is resolved in
seconds and fits into memory; a few lines that refer to each other ten times over are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft.config.schema.source import Loc, dotted, undotted
from rft.errors import ConfigError

MAX_EXPANSIONS = 10_000
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 64  # of references to values that refer to others
_REFERENCE = re.compile(r"\$\{(?P<key>[^${}:]*)(?P<end>[${}:]|$)")
_ARGUMENT = re.compile(
    r"\$\{\s*oc\.(?:select|dict\.keys|dict\.values)\s*:\s*(?P<key>[^${},]*)(?P<end>[${},]|$)"
)


@dataclass(frozen=True)
class _Size:
    expansions: int
    characters: int

    def __add__(self, other: _Size) -> _Size:
        return _Size(self.expansions + other.expansions, self.characters + other.characters)


def refuse_bombs(leaves: list[tuple[Loc, Any]], origins: Mapping[Loc, str]) -> None:
    """Raises ConfigError naming the key with which the references of `leaves` unfold to too much."""
    sizes = _Sizes(leaves)
    total = _Size(0, 0)
    for loc, leaf in leaves:
        if isinstance(leaf, str) and "${" in leaf:
            total += sizes.of(loc, leaf)
        if total.expansions > MAX_EXPANSIONS or total.characters > MAX_CHARACTERS:
            where = f"  ({origins[loc]})" if origins.get(loc) else ""
            raise ConfigError(
                f"its references unfold to more than {MAX_EXPANSIONS:,} values or "
                f"{MAX_CHARACTERS:,} characters; refer to fewer keys"
                f"{where}",
                key=dotted(loc),
            )


class _Sizes:
    def __init__(self, leaves: list[tuple[Loc, Any]]) -> None:
        # by every beginning of their place
        self._under: dict[tuple[str, ...], list[tuple[Loc, Any]]] = {}
        for at, leaf in leaves:
            names = tuple(map(str, at))
            for depth in range(len(names) + 1):
                self._under.setdefault(names[:depth], []).append((at, leaf))
        self._known: dict[Loc, _Size] = {}
        self._open: set[Loc] = set()

    def of(self, loc: Loc, leaf: Any) -> _Size:
        if not isinstance(leaf, str) or "${" not in leaf:
            return _Size(1, len(str(leaf)))
        if loc in self._known or loc in self._open:  # a circle is OmegaConf's to name
            return self._known.get(loc, _Size(1, 0))
        if len(self._open) == MAX_DEPTH:
            raise ConfigError(
                f"is reached through more than {MAX_DEPTH} references one after the other; refer "
                f"to it directly",
                key=dotted(loc),
            )
        self._open.add(loc)
        size = _Size(1, len(leaf))
        for match in (*_REFERENCE.finditer(leaf), *_ARGUMENT.finditer(leaf)):
            if match["end"] != ":":  # a resolver's name
                size += self._below(loc, match["key"].strip(), whole=match["end"] != "$")
            if size.expansions > MAX_EXPANSIONS or size.characters > MAX_CHARACTERS:
                break
        self._open.discard(loc)
        self._known[loc] = size
        return size

    def _below(self, loc: Loc, key: str, *, whole: bool) -> _Size:
        """Of everything that `key` may stand for; not `whole`: another reference goes on where it
        ends.
        """
        dots = len(key) - len(key.lstrip("."))
        target = (*loc[: len(loc) - dots], *undotted(key[dots:])) if dots else undotted(key)
        if not whole:
            target = target if key.endswith((".", "[")) else target[:-1]
        size = _Size(1, 0)
        for at, leaf in self._under.get(tuple(map(str, target)), ()):
            if at != loc:
                size += self.of(at, leaf)
                if size.expansions > MAX_EXPANSIONS or size.characters > MAX_CHARACTERS:
                    break
        return size
