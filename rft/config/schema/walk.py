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
    """The section classes inside a type, with "" for a plain one, "[]" for a list and ".*" for a mapping of names to them."""
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


def fields_at(loc: Loc) -> dict[str, FieldInfo]:
    """The keys below `loc`; none if it is a value or does not exist."""
    model: type[BaseModel] | None = RunConfig
    named = False
    for part in loc:
        if isinstance(part, int):
            continue
        field = _field(model, part)
        if field is None and named:
            named = False  # a name that the user chose
            continue
        model, mark = next(models(field.annotation), (None, "")) if field else (None, "")
        named = mark == ".*"
        if model is None:
            return {}
    return dict(model.model_fields) if model else {}


def field_at(loc: Loc) -> FieldInfo | None:
    names = [p for p in loc if isinstance(p, str)]
    return fields_at(tuple(names[:-1])).get(names[-1]) if names else None


def _field(model: type[BaseModel] | None, name: str) -> FieldInfo | None:
    if model is None:
        return None
    return model.model_fields.get(name) or next((f for f in model.model_fields.values() if name in aliases(f)), None)


def aliases(field: FieldInfo) -> list[str]:
    """Every name under which a key may be written, its own first; none if it has only one."""
    given = field.validation_alias
    return [str(name) for name in given.choices] if isinstance(given, AliasChoices) else []


@cache
def all_keys() -> tuple[str, ...]:
    """Every key of the schema, lists written as name[], mappings as name.*, e.g. buffer.explorer_input.tasksets[].split."""

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
    return tuple(v for part in get_args(annotation) for v in literals(part)) if get_args(annotation) else ()
