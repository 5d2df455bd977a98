"""The tree of all keys, and the declaration of each, read from the classes of the sections."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rft.config.schema.root import RunConfig
from rft.config.schema.source import Loc
from rft.schema.base import ChosenBy


def models(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the section classes inside a type, each with "", "[]" for a list, or ".*" for a mapping."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from models(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from models(part)
    elif origin is tuple:
        yield from ((m, "[]") for m, _ in models(get_args(annotation)[0]))
    elif origin is dict:
        yield from ((m, ".*") for m, _ in models(get_args(annotation)[1]))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""


Fields = dict[str, FieldInfo]


def fields_of(annotation: Any) -> Fields:
    """Return the keys of the section classes inside a type; those of a union together."""
    fields: Fields = {}
    for model, _ in models(annotation):
        fields = model.model_fields | fields
    return fields


def place(loc: Loc) -> tuple[str, FieldInfo | None, Fields]:
    """Return the schema path of a key, its field, and the keys below it; nothing for no key.

    Lists are written as name[], mappings as name.*.
    """
    below = dict(RunConfig.model_fields)
    key = ""
    mark = ""
    field = None
    free_name = False  # the next part is a name that the user chose
    for part in loc:
        if isinstance(part, int):
            continue
        name = part if part in below else None
        if name is None and not free_name:
            return "", None, {}
        if name is None:
            free_name = False
            continue
        field = below[name]
        key = f"{key}{mark}.{name}".lstrip(".")
        below = fields_of(field.annotation)
        mark = next((mark for _, mark in models(field.annotation)), "")
        free_name = mark == ".*"
    return key, field, below


def fields_at(loc: Loc) -> Fields:
    """Return the keys below `loc`; none if it is a value or does not exist."""
    return place(loc)[2]


def field_at(loc: Loc) -> FieldInfo | None:
    return place(loc)[1]


def choice(field: FieldInfo | None, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the key that chooses the class of a section, and its values that have the key `name`.

    Both are empty for a key that every class has.
    """
    for chosen in field.metadata if field else ():
        if not field or not isinstance(chosen, ChosenBy):
            continue
        classes = [model for model, _ in models(field.annotation)]
        values = tuple(chosen.value_of(c) for c in classes if name in c.model_fields)
        if len(values) < len(classes):
            return chosen.name, values
    return "", ()


def owner(loc: Loc) -> str:
    """Return the choice that a key belongs to, "sync_style fixed and explorer_driven"; "" for none."""
    key, values = choice(field_at(loc[:-1]), str(loc[-1])) if loc else ("", ())
    return f"{key} {' and '.join(values)}" if values else ""


def declared(field: FieldInfo) -> Iterator[FieldInfo]:
    """Yield `field` and the declarations inside its type, as the bounds of `Tokens | None`."""
    yield field
    parts: list[Any] = [field.annotation]
    while parts:
        parts += get_args(part := parts.pop())
        if get_origin(part) is Annotated:
            yield from (m for m in part.__metadata__ if isinstance(m, FieldInfo))


def extra(field: FieldInfo | None, name: str) -> str:
    """Return a declared property of a key ("unit", "on_resume"), or ""."""
    for part in declared(field) if field else ():
        if isinstance(extras := part.json_schema_extra, dict) and name in extras:
            return str(extras[name])
    return ""


@cache
def all_keys() -> tuple[str, ...]:
    """Return every key, e.g. buffer.explorer_input.tasksets[].split; mappings as name.*."""

    def below(fields: Fields, prefix: str) -> Iterator[str]:
        for name, field in fields.items():
            yield prefix + name
            mark = next((mark for _, mark in models(field.annotation)), "")
            yield from below(fields_of(field.annotation), f"{prefix}{name}{mark}.")

    return tuple(below(RunConfig.model_fields, ""))


def literals(annotation: Any) -> tuple[Any, ...]:
    """Return the allowed names of an enum."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return (
        tuple(v for part in get_args(annotation) for v in literals(part))
        if get_args(annotation)
        else ()
    )
