"""Keys that are accepted and not active: which of them a configuration uses, and the whole lists.

The marks stand in the schema: `Later` for what comes later, `Moot` for what related tools have and what can have no meaning here.
Invariant: a configuration that uses none of them means what it says in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from rft.algorithm.args import ARGS, KINDS, RENAMED
from rft.algorithm.catalog import algorithm_defaults
from rft.config.messages import models
from rft.config.outside import LATER_OUTSIDE
from rft.config.schema.algorithm import AlgorithmConfig
from rft.config.schema.base import Section
from rft.config.schema.root import RunConfig
from rft.errors import ConfigError

GPUS_IN_TURNS = "give engines and trainer GPUs of their own with mode: both; on a machine without GPUs they take turns"


@dataclass(frozen=True, kw_only=True)
class NotActive:
    """One written value that does not do what it says."""

    key: str
    value: Any
    instead: str
    harmless: bool = False  # the run may start: speed, memory or an extra file, never other weights
    moot: bool = False  # it can have no meaning here; else it comes later

    def __str__(self) -> str:
        return f"{self.key} {self.value!r} is accepted, not active yet: {self.instead}"


def used(config: Section, key: str = "") -> Iterator[NotActive]:
    """What `config` uses of it, in the order of the schema.  A value that equals the default is not used."""
    for name, field in type(config).model_fields.items():
        value, here = getattr(config, name), f"{key}.{name}" if key else name
        mark = marked(field)
        if mark and not mark.get("values"):
            if value != field.get_default(call_default_factory=True):
                yield from _leaves(value, here, mark)
            continue
        if mark and value in mark["values"]:
            yield _told(here, value, mark)
        if isinstance(value, Section):
            yield from used(value, here)
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                if isinstance(item, Section):
                    yield from used(item, f"{here}[{i}]")
    if isinstance(config, AlgorithmConfig):
        yield from _arguments(config, key)


def listed() -> list[tuple[str, str]]:
    """(key or key: value, what happens today) of everything that is not active yet, for `rft doctor --keys`."""
    later = [(key, mark["instead"]) for key, mark in _marks() if not mark.get("moot")]
    return [
        *later,
        ("mode: colocate on GPUs", GPUS_IN_TURNS),
        *LATER_OUTSIDE.items(),
    ]


def meaningless() -> list[tuple[str, str, bool]]:
    """(key or key: value, reason, whether a run that writes it starts) of everything that can have no meaning here."""
    return [(key, mark["instead"], mark.get("harmless", False)) for key, mark in _marks() if mark.get("moot")]


def _marks() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from _listed(RunConfig, "")
    for (kind, part), model in ARGS.items():
        for name, field in model.model_fields.items():
            if mark := marked(field):
                yield f"algorithm.{kind}_args.{name} of {part}", mark


def _arguments(a: AlgorithmConfig, key: str) -> Iterator[NotActive]:
    """Single arguments of parts."""
    try:
        base = algorithm_defaults(a.algorithm_type)
    except ConfigError:
        return  # told by `resolve`
    for kind in KINDS:
        part = getattr(a, kind) or getattr(base, kind)
        part = RENAMED.get((kind, part), part)
        fields = ARGS[kind, part].model_fields if (kind, part) in ARGS else {}
        for name, value in getattr(a, f"{kind}_args").items():
            if name in fields and (mark := marked(fields[name])) and value != fields[name].default:
                here = f"{key}.{kind}_args.{name}"
                yield _told(here, value, mark)


def _listed(model: type[Section], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in model.model_fields.items():
        here, mark = f"{key}.{name}" if key else name, marked(field)
        if mark and not mark.get("values"):
            yield here, mark
            continue
        if mark:
            yield f"{here}: {', '.join(map(str, mark['values']))}", mark
        for inner, many in models(field.annotation):
            if issubclass(inner, Section):
                yield from _listed(inner, here + many.replace("[]", "[i]"))


def marked(field: FieldInfo) -> dict[str, Any]:
    """The mark of a key, or of a part's argument, that is not active: {instead, harmless, values, moot}; empty for one that is."""
    extra = field.json_schema_extra
    found = extra.get("not_active") if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else {}


def _leaves(value: Any, key: str, mark: dict[str, Any]) -> Iterator[NotActive]:
    """The written leaves of a section that is not active as a whole."""
    if isinstance(value, Section):
        for name, field in type(value).model_fields.items():
            inner = getattr(value, name)
            if inner != field.get_default(call_default_factory=True):
                yield from _leaves(inner, f"{key}.{name}", marked(field) or mark)
        return
    if isinstance(value, dict) and any(isinstance(v, Section) for v in value.values()):
        for name, item in value.items():
            yield from _entry(item, f"{key}.{name}", mark)
        return
    if value == ():
        return  # an empty list says as much as null
    if isinstance(value, tuple) and isinstance(value[0], Section):
        for i, item in enumerate(value):
            yield from _entry(item, f"{key}[{i}]", mark)
        return
    yield _told(key, value, mark)


def _entry(item: Section, key: str, mark: dict[str, Any]) -> Iterator[NotActive]:
    """An entry of a list or mapping is there even if all its values are defaults."""
    found = list(_leaves(item, key, mark))
    yield from found or [_told(key, {}, mark)]


def _told(key: str, value: Any, mark: dict[str, Any]) -> NotActive:
    return NotActive(
        key=key, value=value, instead=mark["instead"], harmless=mark.get("harmless", False), moot=mark.get("moot", False)
    )
