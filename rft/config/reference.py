"""The reference page and the JSON Schema, made from the schema: the one place where a key is described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rft.config.known import INSTEAD, LATER, VALUES
from rft.config.messages import aliases, literals, models
from rft.config.schema.root import RunConfig

HEAD = """# Configuration reference

<!-- made by scripts/generate_docs.py from rft/config/schema; edit the schema instead -->

A run is described by one YAML file and `key.path=value` overrides on the command line:

```
rft check --config run.yaml algorithm.optimizer.lr=2e-5 buffer.explorer_input.eval_tasksets.0.split=test
```

- Unknown keys are errors. Names of choices ignore case. Numbers may be written `1e-6`.
- `${oc.env:NAME}` is an environment variable, `${oc.env:NAME,default}` the same with a default, `${model.model_path}` another key.
- Values of overrides are YAML: `stop=[a, b]`, `path=null`. List entries are written `list.0.key` or `list[0].key`.
- Relative paths of data, models, templates and plugins are looked up from the current folder, then beside the YAML file.
  `checkpoint_root_dir` is always relative to the current folder.
- A file may have 1 MB. Duplicate keys, tabs for indentation, tags and aliases that unfold to very much are refused.
- On resume, keys marked *safe* may differ from the saved configuration; others are refused, since that would be another run.
- What takes values from where: a taskset's `rollout_args` win over `model`; a taskset's `repeat_times` (or `rollout_args.n`) over
  `algorithm.repeat_times`; written parts of `algorithm` over those of its `algorithm_type`; single `*_args` over the part's defaults.
"""


def markdown() -> str:
    """docs/reference/configuration.md"""
    parts = [HEAD, "\n## Top level\n\n", _table(RunConfig, "", own=True)]
    for name, field in RunConfig.model_fields.items():
        for model, _ in models(field.annotation):
            parts.append(f"\n## {name}\n\n{(model.__doc__ or '').strip()}\n\n{_table(model, f'{name}.')}")
    parts.append(
        "\n## Known keys that are not supported yet\n\nThey are refused with this advice.\n\n| Key | What to do |\n|---|---|\n"
    )
    parts += [f"| `{_pattern(k)}` | {v} |\n" for k, v in LATER.items()]
    parts.append("\n## Keys of related tools that are not offered\n\n| Key | What to do |\n|---|---|\n")
    parts += [f"| `{_pattern(k)}` | {v} |\n" for k, v in INSTEAD.items()]
    parts.append("\n## Values that come later or are not offered\n\n| Key | Value | What to do |\n|---|---|---|\n")
    parts += [f"| `{_pattern(k)}` | `{value}` | {text} |\n" for k, values in VALUES.items() for value, text in values.items()]
    return "".join(parts)


def _table(model: type[BaseModel], prefix: str, *, own: bool = False) -> str:
    rows = ["| Key | Type | Default | Unit | Meaning | On resume |\n|---|---|---|---|---|---|\n"]
    for key, field in _fields(model, prefix, own):
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        later = extra.get("not_active")
        meaning = field.description if not isinstance(later, dict) else f"{field.description}  {_later(later)}"
        cells = [f"`{key}`", _type(field), _default(field), extra.get("unit", ""), meaning, extra.get("on_resume", "")]
        rows.append(f"| {' | '.join(str(c) for c in cells)} |\n")
    return "".join(rows)


def _later(mark: dict[str, Any]) -> str:
    which = ", ".join(f"`{v}`" for v in mark.get("values", ()))
    return f"*{f'{which} not' if which else 'Not'} active yet: {mark['instead']}*"


def _fields(model: type[BaseModel], prefix: str, own: bool) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = list(models(field.annotation))
        if inner and own:
            continue
        if not inner:
            yield prefix + name, field
        for sub, mark in inner:
            if prefix + name == "buffer.explorer_input.taskset":
                yield prefix + name, field
                continue  # its keys are those of tasksets[]
            if prefix + name == "buffer.explorer_input.eval_tasksets":
                yield f"{prefix}{name}[]", field
                continue
            yield from _fields(sub, f"{prefix}{name}{mark}.", False)


def _type(field: FieldInfo) -> str:
    inner = list(models(field.annotation))
    if inner:
        return "list of tasksets, keys as in `tasksets[]`" if inner[0][1] else "a taskset, keys as in `tasksets[]`"
    if names := [n for n in literals(field.annotation) if n != ""]:
        many = "one or more of " if "tuple" in str(field.annotation) else ""
        return many + ", ".join(f"`{n}`" for n in names)
    text = str(field.annotation)
    many = "list of " if "tuple" in text else ""
    words = (("dict", "mapping"), ("bool", "true, false"), ("float", "number"), ("int", "whole number"), ("str", "text"))
    word = next((w for t, w in words if t in text), "text")
    signs = {Gt: ">", Ge: "≥", Lt: "<", Le: "≤"}
    bounds = [f"{signs[type(m)]} {getattr(m, type(m).__name__.lower()):g}" for m in field.metadata if type(m) in signs]
    return f"{many}{word}{' ' + ', '.join(bounds) if bounds else ''}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value != "" else '`""`'


def _pattern(text: str) -> str:
    return text.replace("[[]*]", "[]").replace("*tasksets[]", "tasksets[]").replace("*taskset*", "tasksets[]")


def json_schema() -> dict[str, Any]:
    """A JSON Schema for editors.  Values may also be interpolations, and choices are listed in lower case."""
    schema = RunConfig.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "rft run configuration"
    for definition in (schema, *schema.get("$defs", {}).values()):
        for name, value in definition.get("properties", {}).items():
            definition["properties"][name] = _or_interpolation(value)
        for own, others in _other_names(RunConfig).items():
            if own in definition.get("properties", {}):
                definition["properties"] |= dict.fromkeys(others, definition["properties"][own])
    return schema


def _other_names(model: type[BaseModel]) -> dict[str, list[str]]:
    """Keys of `model` and below that may be written under other names, and those names."""
    found = {name: aliases(field)[1:] for name, field in model.model_fields.items() if aliases(field)}
    for field in model.model_fields.values():
        for inner, _ in models(field.annotation):
            found |= _other_names(inner)
    return found


def _or_interpolation(value: dict[str, Any]) -> dict[str, Any]:
    plain_text = value.get("type") == "string" and "pattern" not in value and "enum" not in value
    if plain_text or "$ref" in value or value.get("type") in ("object", "array"):
        return value
    told: dict[str, Any] = {k: value.pop(k) for k in ("description", "default", "title", "unit", "on_resume") if k in value}
    choices = value.pop("anyOf", None) or [value]
    return {**told, "anyOf": [*choices, {"type": "string", "pattern": r"^\$\{.+\}"}]}
