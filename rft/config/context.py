"""State shared by the parts of `resolve`: the configuration, facts of the machine, diagnostics.

Invariant: errors, warnings, notes and derived values are collected, so that all are reported at
once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rft.config.plan import Derived, Facts
from rft.config.save import home
from rft.config.schema.root import RunConfig
from rft.config.schema.source import dotted, is_secret, leaves, undotted
from rft.errors import ConfigError
from rft.plugins import REGISTRY, may_come
from rft.schema.base import Section
from rft.secrets import REDACTED
from rft.taskset.settings import FILES
from rft.types import modelfiles

T = TypeVar("T")
_DATA = (".py", ".jinja", *FILES)


def filled(settings: type[T], *sections: Section, **decided: Any) -> T:
    """Make `settings` from `decided` and the keys of the same names in `sections`; the last wins."""
    fields: Any = settings
    names = {f.name for f in dataclasses.fields(fields)} - decided.keys()
    keys = {
        name: getattr(s, name) for s in sections for name in type(s).model_fields if name in names
    }
    return settings(**keys, **decided)


class Problems:
    """Collects errors, warnings, notes and derived values."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.derived: list[Derived] = []

    def error(self, key: str, message: str, given: object = None) -> None:
        if not any(e.key == key and e.message == message for e in self.errors):
            self.errors.append(ConfigError(message, key=key, given=given))

    def add_errors(self, error: ConfigError) -> None:
        self.errors.extend(error.errors)

    @contextmanager
    def collect_errors(self, key: str = "") -> Iterator[None]:
        """Collect a ConfigError raised in the block; one that names no key is about `key`."""
        try:
            yield
        except ConfigError as e:
            for x in e.errors:
                self.add_errors(x if x.key else ConfigError(x.message, key=key, given=x.given))

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def derive(self, key: str, value: object, reason: str) -> None:
        self.derived.append(Derived(key=key, value=value, reason=reason))

    def chosen(self, key: str, written: T | None, value: T, reason: str) -> T:
        """Return what is written under `key`, or the derived `value` for null and auto."""
        if written is not None and written != "auto":
            return written
        self.derive(key, value, reason)
        return value


class Context(Problems):
    """A configuration while it is resolved.

    `written` is the user's; `config` has each value in the one place where it is read.
    """

    def __init__(self, written: RunConfig, facts: Facts, name: str = "") -> None:
        super().__init__()
        self.bound_cores = 0  # of engines on CPU that have several processes
        self.written = self.config = written
        self.facts = facts
        self.name = name or written.name
        self.config_dir = None if written.source.path is None else home(written.source.path)
        root = Path(written.checkpoint_root_dir).expanduser().absolute()
        self.run_dir = root / written.project / written.group / self.name
        for loc, value in leaves(dict(written.source.values)):
            is_path = isinstance(value, str) and re.search(
                r"(path|dirs?|file)(\[\d+\])?$", key := dotted(loc)
            )
            # a URL's password may hold one
            if is_path and re.match(r"[^:]*\$\w", value) and not facts.exists(self.find(value)):
                self.error(
                    key, "has a $, which only shells replace; write ${oc.env:NAME} for a variable"
                )
        self.plugin_dirs = tuple(
            dict.fromkeys(self.find(d) for d in (*written.plugin_dirs, *facts.plugin_dirs))
        )

    def can_check_plugin(self, kind: str, name: str) -> bool:
        """Return whether a plugin's name is decided now, not only once plugins are loaded."""
        return (
            self.facts.plugins_loaded
            or name in REGISTRY.names(kind)
            or not may_come(name, self.plugin_dirs)
        )

    def error(self, key: str, message: str, given: object = None) -> None:
        """Add an error; without `given`, show the value written under `key`."""
        super().error(key, message, self._value(key) if given is None else given)

    def _value(self, key: str) -> object:
        """Return the value written under `key`, secrets hidden; None for a section or no key."""
        place: Any = self.written
        for step in undotted(key):
            try:
                place = getattr(place, str(step)) if isinstance(place, Section) else place[step]
            except (AttributeError, KeyError, IndexError, TypeError):
                return None
            if is_secret(str(step), place):
                return REDACTED
        if isinstance(place, Section) or (
            isinstance(place, tuple) and any(isinstance(x, Section) for x in place)
        ):
            return None
        return list(place) if isinstance(place, tuple) else place

    def find(self, text: str) -> str:
        """Resolve a path from the current folder, else from the file's folder.

        Anything else (a hub id, a name) is returned unchanged.
        """
        path = text
        colon = ""
        attribute = ""
        if match := re.fullmatch(r"(.+\.py)(:)(\w+)", text):
            path, colon, attribute = match.groups()
        if not path or "://" in path:
            return text
        path = str(Path(path).expanduser()) if path.startswith("~") else path
        looks_local = "/" in path or path.endswith(_DATA) or path.startswith(".")
        for base in (Path.cwd(), self.config_dir):
            if base is None or not self.facts.exists(str(base / path)):
                continue
            if looks_local or base == self.config_dir or Path(base / path).is_dir():
                return f"{base / path}{colon}{attribute}"
        return f"{path}{colon}{attribute}"

    def find_model(self, text: str) -> str:
        """Resolve a model's path, or a hub id to its folder in the local cache."""
        path = self.find(text)
        snapshot = None if self.facts.exists(path) else modelfiles.snapshot(path)
        return path if snapshot is None else str(snapshot)
