"""The schema as a tree: which keys there are, and what is declared for each.

Invariant: what is found follows from the classes alone; nothing is listed twice.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from rft.config.schema.root import RunConfig
from rft.config.schema.source import Loc


def models(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """The section classes inside a type, with "" for a plain one, "[]" for a list and ".*" for a
    mapping of names to them.
    """
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


def place(loc: Loc) -> tuple[str, FieldInfo | None, type[BaseModel] | None]:
    """Our spelling of a key, lists written as name[], mappings as name.*; its field; the section
    below it.  Nothing for what is no key.
    """
    below: type[BaseModel] | None = RunConfig
    key = ""
    mark = ""
    field = None
    named = False
    for part in loc:
        if isinstance(part, int):
            continue
        name = next(
            (
                n
                for n, f in (below.model_fields if below else {}).items()
                if n == part or part in aliases(f)
            ),
            None,
        )
        if below is None or (name is None and not named):
            return "", None, None
        if name is None:
            named = False  # it was one that the user chose
            continue
        field = below.model_fields[name]
        key = f"{key}{mark}.{name}".lstrip(".")
        below, mark = next(models(field.annotation), (None, ""))
        named = mark == ".*"
    return key, field, below


def fields_at(loc: Loc) -> dict[str, FieldInfo]:
    """The keys below `loc`; none if it is a value or does not exist."""
    below = place(loc)[2] if loc else RunConfig
    return dict(below.model_fields) if below else {}


def field_at(loc: Loc) -> FieldInfo | None:
    return place(loc)[1]


def declared(field: FieldInfo) -> Iterator[FieldInfo]:
    """`field`, and what is declared inside its type: `Tokens | None` has its bounds and its unit
    there.
    """
    yield field
    parts: list[Any] = [field.annotation]
    while parts:
        parts += get_args(part := parts.pop())
        if get_origin(part) is Annotated:
            yield from (m for m in part.__metadata__ if isinstance(m, FieldInfo))


def extra(field: FieldInfo | None, name: str) -> str:
    """What a key says of itself besides its type ("unit", "on_resume"); "" for nothing."""
    for part in declared(field) if field else ():
        if isinstance(said := part.json_schema_extra, dict) and name in said:
            return str(said[name])
    return ""


def aliases(field: FieldInfo) -> list[str]:
    """Every name under which a key may be written, its own first; none if it has only one."""
    given = field.validation_alias
    return [str(name) for name in given.choices] if isinstance(given, AliasChoices) else []


@cache
def all_keys() -> tuple[str, ...]:
    """Every key of the schema, lists written as name[], mappings as name.*, e.g.
    buffer.explorer_input.tasksets[].split.
    """

    def below(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            yield prefix + name
            for inner, mark in models(field.annotation):
                yield from below(inner, f"{prefix}{name}{mark}.")

    return tuple(below(RunConfig, ""))


def literals(annotation: Any) -> tuple[Any, ...]:
    """The names an enum allows."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return (
        tuple(v for part in get_args(annotation) for v in literals(part))
        if get_args(annotation)
        else ()
    )
