"""docs/reference/configuration.md and the JSON Schema, made from the schema: the one place where a
key is described.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from rft.config.describe import READ_BEFORE, default_text, type_text
from rft.config.extends import SECTIONS
from rft.config.schema.root import RunConfig
from rft.config.schema.source import undotted
from rft.config.schema.walk import Fields, extra, fields_of, models, owner
from rft.schema.base import ChosenBy

HEAD = """# Configuration reference

<!-- made by scripts/generate_docs.py from the sections; edit these instead -->

A run is described by one YAML file and `key.path=value` overrides on the command line:

```
rft check --config run.yaml algorithm.optimizer.lr=2e-5 buffer.explorer_input.eval_tasksets.0.split=test
```

- Unknown keys are errors. Names of choices ignore case. Numbers may be written `1e-6`.
- `${oc.env:NAME}` is an environment variable, `${oc.env:NAME,default}` the same with a default, `${model.model_path}` another key.
- Values of overrides are YAML: `stop=[a, b]`, `path=null`. List entries are written `list.0.key` or `list[0].key`.
- Relative paths of data, models, templates and plugins are looked up from the current folder, then beside the YAML file.
  `checkpoint_root_dir` is always relative to the current folder.
- A file may have 1 MB. Duplicate keys, tabs for indentation, tags and aliases that expand to a very large document are refused.
- `extends: base.yaml`, or a list of files, relative to the file it stands in: mappings are merged, lists and single values replaced;
  what the file writes wins over what it extends, and overrides win over both. At most 8 files deep.
- `stages` is a list of consecutive runs, see [below](#stages).
- On resume, keys marked *safe* may differ from the saved configuration; others are refused, because the run would be a different one.
- Precedence: a taskset's `rollout_args` win over `model`; a taskset's `repeat_times` over
  `algorithm.repeat_times`; written parts of `algorithm` over those of its `algorithm_type`; single `*_args` over the part's defaults.
"""
STAGES = f"""
## stages

Several runs in one file. Each entry has a `stage_name`, and any of {", ".join(f"`{s}`" for s in SECTIONS)}, which replace the whole
section for that stage; everything else is shared.

```yaml
stages:
  - stage_name: easy
    buffer: {{...}}
  - stage_name: hard
    buffer: {{...}}
    algorithm: {{...}}
```

- A stage runs in `<name>/<stage_name>`. The next one starts from the model that it exported (`save_hf_checkpoint` is at least `last`).
- Started again, the program skips the stages that are done and resumes the one that was stopped. A stage that fails stops it.
- `rft check` shows every stage. `rft status` and `rft export` take the program's folder or a stage's.
- Overrides apply to the shared sections; `stages.0.trainer.total_steps=5` changes a stage's own.
"""


def markdown() -> str:
    """docs/reference/configuration.md"""
    parts = [HEAD, "\n## Top level\n\n", _table(RunConfig.model_fields, "", own=True)]
    for name, field in RunConfig.model_fields.items():
        if classes := [model for model, _ in models(field.annotation)]:
            shared = classes[0].__mro__[1] if len(classes) > 1 else classes[0]
            parts.append(f"\n## {name}\n\n{(shared.__doc__ or '').strip()}\n\n")
            parts.append(_table(fields_of(field.annotation), f"{name}."))
    parts.append(STAGES)
    return "".join(parts)


def _table(fields: Fields, prefix: str, *, own: bool = False) -> str:
    rows = ["| Key | Type | Default | Unit | Meaning | On resume |\n|---|---|---|---|---|---|\n"]
    for key, field in _fields(fields, prefix, own):
        meaning = field.description
        if choice := owner(undotted(key.replace("[]", "").replace(".*", ""))):
            meaning = f"*With {choice}.*  {meaning}"
        cells = [
            f"`{key}`",
            type_text(field),
            default_text(field),
            extra(field, "unit"),
            meaning,
            extra(field, "on_resume"),
        ]
        rows.append(f"| {' | '.join(str(c) for c in cells)} |\n")
    return "".join(rows)


_SAME_KEYS = (  # as others that are listed
    "buffer.explorer_input.taskset",
    "buffer.explorer_input.eval_tasksets",
    "buffer.trainer_input.auxiliary_buffers",
    "data_processor.task_pipeline.output",
)


def _fields(fields: Fields, prefix: str, own: bool) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in fields.items():
        inner = list(models(field.annotation))
        if inner and own:
            continue
        if not inner:
            yield prefix + name, field
        for mark in {mark for _, mark in inner}:
            if prefix + name in _SAME_KEYS:
                yield prefix + name + mark, field
                continue
            yield from _fields(fields_of(field.annotation), f"{prefix}{name}{mark}.", False)


def json_schema() -> dict[str, Any]:
    """A JSON Schema for editors.  Values may also be interpolations, and choices are listed in
    lower case.
    """
    schema = RunConfig.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "rft run configuration"
    _pin_choices(schema)
    for definition in (schema, *schema.get("$defs", {}).values()):
        for name, value in definition.get("properties", {}).items():
            definition["properties"][name] = _or_interpolation(value)
    _read_before(schema)
    return schema


def _pin_choices(schema: dict[str, Any]) -> None:
    """Allow each class of a chosen section its value of the choosing key alone.

    Where the key is not written, every class but the first demands it.
    """
    for field in RunConfig.model_fields.values():
        for chosen in (m for m in field.metadata if isinstance(m, ChosenBy)):
            for number, (model, _) in enumerate(models(field.annotation)):
                definition = schema["$defs"][model.__name__]
                definition["properties"][chosen.name]["enum"] = [chosen.value_of(model)]
                if number:
                    definition["required"] = [chosen.name]


def _read_before(schema: dict[str, Any]) -> None:
    """Adds what is read before the schema: extends, stages."""
    own = schema["properties"]
    sections = {name: own[name] for name in SECTIONS if name in own}
    name = {"type": "string", "description": "Name of the stage; it runs in <name>/<stage_name>."}
    stage = {"type": "object", "additionalProperties": False, "required": ["stage_name"]}
    files = {"type": "string"}
    said = {key: text for key, (_, text) in READ_BEFORE.items()}
    own["extends"] = {
        "description": said["extends"],
        "anyOf": [files, {"type": "array", "items": files}],
    }
    own["stages"] = {
        "type": "array",
        "description": said["stages"],
        "items": {**stage, "properties": {"stage_name": name, **sections}},
    }


def _or_interpolation(value: dict[str, Any]) -> dict[str, Any]:
    plain_text = value.get("type") == "string" and "pattern" not in value and "enum" not in value
    if plain_text or "$ref" in value or value.get("type") in ("object", "array"):
        return value
    told: dict[str, Any] = {
        k: value.pop(k)
        for k in ("description", "default", "title", "unit", "on_resume")
        if k in value
    }
    choices = value.pop("anyOf", None) or [value]
    return {**told, "anyOf": [*choices, {"type": "string", "pattern": r"^\$\{.+\}"}]}
