"""Pydantic's errors → sentences with key path, given value, allowed values, nearest name.

Knows the schema's classes, not what they mean.  Invariant: a secret's value never enters a message.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rft.config.known import advice, value_advice
from rft.config.schema.root import RunConfig
from rft.config.source import Loc, Source, dotted, is_secret
from rft.errors import ConfigError
from rft.logs import REDACTED, redact


def explain(error: ValidationError, source: Source) -> list[ConfigError]:
    """One ConfigError for each key that is wrong, in the order of the schema."""
    found: dict[str, ConfigError] = {}
    for e in error.errors(include_url=False):
        loc = _real(tuple(e["loc"]))
        key = dotted(loc)
        if key not in found:
            found[key] = ConfigError(_sentence(e, loc, source), key=key, given=_shown(loc, e.get("input")))
    return list(found.values())


def _sentence(e: Any, loc: Loc, source: Source) -> str:
    key, kind, given = dotted(loc), e["type"], e.get("input")
    where = f"  ({source.where(loc)})" if source.where(loc) else ""
    if kind == "extra_forbidden":
        return f"{_unknown(loc, given)}{where}"
    if kind == "missing":
        field = field_at(loc)
        return f"is required: {field.description if field and field.description else 'write it'}"
    got = f"given {_show(_shown(loc, _written(source, loc, given)))}"
    if hint := value_advice(key, given):
        return f"{got}: {hint}{where}"
    return f"{got}; {_allowed(e, loc)}{where}"


def _written(source: Source, loc: Loc, given: Any) -> Any:
    """The value before validators changed its case."""
    value: Any = source.values
    for part in loc:
        if isinstance(value, str):
            return value  # one name where a list may stand
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return given
    return value


def _unknown(loc: Loc, given: Any) -> str:
    key = dotted(loc)
    if text := advice(key):
        return text
    names = list(fields_at(loc[:-1]))
    near = [n for n in names if fields_at((*loc[:-1], n))] if isinstance(given, dict) else names
    return f"unknown key.{did_you_mean(loc, near)}  Known here: {', '.join(names) or 'nothing, it is a value'}"


def did_you_mean(loc: Loc, near: list[str]) -> str:
    """A question with the key of the same name elsewhere, the nearest of the names `near` at the same place, or the nearest of all."""
    key, last = dotted(loc), str(loc[-1])
    close = [k for k in all_keys() if k.rsplit(".", 1)[-1] == last]
    here = difflib.get_close_matches(last, near, n=1, cutoff=0.65) or [n for n in near if len(last) > 2 and last in n]
    close = close or _below(loc, last) or [dotted((*loc[:-1], n)) for n in here]
    close = close or [k for k in difflib.get_close_matches(key, all_keys(), n=1, cutoff=0.8) if not key.startswith(f"{k}.")]
    return f"  Did you mean {' or '.join(close[:2])}?" if close else ""


def _below(loc: Loc, last: str) -> list[str]:
    """A key deeper in the same section whose name is all but `last`: engine_nums → rollout_model.engine_num."""
    section = f"{dotted(loc[:-1])}." if len(loc) > 1 else ""
    inside = {k.rsplit(".", 1)[-1]: k for k in reversed(all_keys()) if section and k.startswith(section)}
    return [inside[n] for n in difflib.get_close_matches(last, inside, n=1, cutoff=0.9)]


def _allowed(e: Any, loc: Loc) -> str:
    kind, ctx = e["type"], e.get("ctx", {})
    bounds = {
        "greater_than": ("gt", "greater than"),
        "greater_than_equal": ("ge", "at least"),
        "less_than": ("lt", "less than"),
        "less_than_equal": ("le", "at most"),
    }
    if kind in bounds:
        name, word = bounds[kind]
        return f"must be {word} {_number(ctx[name])}{_unit(loc)}"
    if kind == "literal_error" or kind == "enum":
        return f"must be one of {ctx['expected']}{_close(e.get('input'), ctx['expected'])}"
    quoted = isinstance(e.get("input"), str) and kind not in ("string_type",)
    tail = "; remove the quotes" if quoted and _is_number(e["input"]) else ""
    if kind.startswith("int"):
        return f"must be a whole number{_unit(loc)}{tail}"
    if kind == "finite_number":
        return f"must be a finite number{_unit(loc)}"
    if kind.startswith("float"):
        return f"must be a number{_unit(loc)}{tail}"
    if kind.startswith("bool"):
        return f"must be true or false{'; remove the quotes' if quoted and _is_bool(e['input']) else ''}"
    if kind == "string_type":
        return "must be a text; put it in quotes" if not isinstance(e.get("input"), dict | list) else "must be a text"
    if kind in ("tuple_type", "list_type"):
        names = list(fields_at(loc))
        return (
            f"must be a list of mappings: [{{{names[0]}: ..., {names[1]}: ...}}]" if len(names) > 1 else "must be a list: [a, b]"
        )
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        names = list(fields_at(loc))
        return f"must be a mapping{' with keys such as ' + ', '.join(names[:5]) if names else ''}"
    if kind == "string_pattern_mismatch":
        return "must begin with a letter or digit and hold no slash, since it becomes part of a path"
    if kind in ("too_long", "too_short"):
        return f"must have {ctx.get('max_length', ctx.get('min_length'))} entries"
    if kind == "string_too_long":
        return f"must have at most {ctx['max_length']} characters"
    text = str(e["msg"]).removeprefix("Value error, ")
    return text[0].lower() + text[1:]


def _close(given: Any, expected: str) -> str:
    names = [n.strip(" '") for n in expected.replace(" or ", ", ").split(",")]
    near = difflib.get_close_matches(str(given).lower(), names, n=1)
    return f".  Did you mean {near[0]}?" if near else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_bool(text: str) -> bool:
    return text.strip().lower() in ("true", "false", "yes", "no", "on", "off")


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unit(loc: Loc) -> str:
    field = field_at(loc)
    extra = field.json_schema_extra if field else None
    unit = extra.get("unit") if isinstance(extra, dict) else None
    return f" ({unit})" if unit else ""


def _shown(loc: Loc, value: Any) -> Any:
    """`value` without secrets."""
    if any(is_secret(str(part), value) for part in loc):
        return REDACTED
    if isinstance(value, dict):
        return {k: _shown((*loc, str(k)), v) for k, v in value.items()}
    if isinstance(value, list):
        return [_shown(loc, v) for v in value]
    return redact(value) if isinstance(value, str) else value


def _show(value: Any) -> str:
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


# ---------------------------------------------------------------- walking the schema


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


def _real(loc: tuple[Any, ...]) -> Loc:
    """pydantic puts names of union members and validators into the path; only keys and indexes stay."""
    kept: list[str | int] = []
    for part in loc:
        if isinstance(part, int) or not (any(c in part for c in "[(- ") or (kept and part in ("str", "int", "float", "bool"))):
            kept.append(part)
    return tuple(kept)
