"""Keys that are accepted and not active yet: which of them a configuration uses, and the whole list.

The marks stand in the schema (`Later`).  Invariant: a configuration that uses none of them means what it says in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from rft.config.messages import models
from rft.config.schema.base import Section
from rft.config.schema.root import RunConfig


@dataclass(frozen=True, kw_only=True)
class NotActive:
    """One written value whose feature comes later."""

    key: str
    value: Any
    instead: str
    harmless: bool = False  # the run may start: speed, memory or an extra file, never other weights

    def __str__(self) -> str:
        return f"{self.key} {self.value!r} is accepted, not active yet: {self.instead}"


def used(config: Section, key: str = "") -> Iterator[NotActive]:
    """What `config` uses of it, in the order of the schema.  A value that equals the default is not used."""
    for name, field in type(config).model_fields.items():
        value, here = getattr(config, name), f"{key}.{name}" if key else name
        mark = _mark(field)
        if mark and not mark.get("values"):
            if value != field.get_default(call_default_factory=True):
                yield from _leaves(value, here, mark)
            continue
        if mark and value in mark["values"]:
            yield NotActive(key=here, value=value, instead=mark["instead"], harmless=mark.get("harmless", False))
        if isinstance(value, Section):
            yield from used(value, here)
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                if isinstance(item, Section):
                    yield from used(item, f"{here}[{i}]")


def listed() -> list[tuple[str, str]]:
    """(key or key: value, what happens today) of everything that is not active yet, for `rft doctor --keys`."""
    return list(_listed(RunConfig, ""))


def _listed(model: type[Section], key: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        here, mark = f"{key}.{name}" if key else name, _mark(field)
        if mark and not mark.get("values"):
            yield here, mark["instead"]
            continue
        if mark:
            yield f"{here}: {', '.join(map(str, mark['values']))}", mark["instead"]
        for inner, many in models(field.annotation):
            if issubclass(inner, Section):
                yield from _listed(inner, f"{here}[i]" if many else here)


def _mark(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    found = extra.get("not_active") if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else {}


def _leaves(value: Any, key: str, mark: dict[str, Any]) -> Iterator[NotActive]:
    """The written leaves of a section that is not active as a whole."""
    if isinstance(value, Section):
        for name, field in type(value).model_fields.items():
            inner = getattr(value, name)
            if inner != field.get_default(call_default_factory=True):
                yield from _leaves(inner, f"{key}.{name}", _mark(field) or mark)
        return
    if isinstance(value, tuple) and value and isinstance(value[0], Section):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{key}[{i}]", mark)
        return
    yield NotActive(key=key, value=value, instead=mark["instead"], harmless=mark.get("harmless", False))
