"""docs/reference/configuration.md and the JSON Schema, made from the schema: the one place where a
key is described.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rft.config.describe import READ_BEFORE, default_text, type_text
from rft.config.extends import SECTIONS
from rft.config.foreign import ignored, instead, not_offered
from rft.config.inert import Inert, inert
from rft.config.schema.root import RunConfig
from rft.config.schema.walk import aliases, extra, models

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
- A file may have 1 MB. Duplicate keys, tabs for indentation, tags and aliases that expand to a very large document are refused.
- `extends: base.yaml`, or a list of files, relative to the file it stands in: mappings are merged, lists and single values replaced;
  what the file writes wins over what it extends, and overrides win over both. At most 8 files deep.
- `stages` is a list of consecutive runs, see [below](#stages).
- `trainer.trainer_config.<veRL path>`, such as `trainer.trainer_config.actor_rollout_ref.actor.grad_clip`, is another spelling of the
  native key (`rft explain` says which). `actor`, `model`, `ref` and `rollout` may stand without `actor_rollout_ref`. Writing both
  spellings with different values is an error; `ppo_mini_batch_size` is refused (`buffer.batch_size` and `train_batch_size` say it).
- On resume, keys marked *safe* may differ from the saved configuration; others are refused, because the run would be a different one.
- Precedence: a taskset's `rollout_args` win over `model`; a taskset's `repeat_times` (or `rollout_args.n`) over
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
    parts = [HEAD, "\n## Top level\n\n", _table(RunConfig, "", own=True)]
    for name, field in RunConfig.model_fields.items():
        for model, _ in models(field.annotation):
            parts.append(
                f"\n## {name}\n\n{(model.__doc__ or '').strip()}\n\n{_table(model, f'{name}.')}"
            )
    parts.append(STAGES)
    parts.append(
        "\n## Keys of related tools that are not offered\n\n| Key | What to do |\n|---|---|\n"
    )
    parts += [f"| `{_pattern(k)}` | {v} |\n" for k, v in instead().items()]
    parts.append(
        "\n## Keys of related tools that are left out with a warning\n\n| Key | Why |\n|---|---|\n"
    )
    parts += [f"| `{_pattern(k)}` | {v} |\n" for k, v in ignored().items()]
    parts.append(
        "\n## Values that are planned or not offered\n\n| Key | Value | What to do "
        "|\n|---|---|---|\n"
    )
    parts += [
        f"| `{_pattern(k)}` | `{value}` | {text} |\n"
        for k, values in not_offered().items()
        for value, text in values.items()
    ]
    return "".join(parts)


def _table(model: type[BaseModel], prefix: str, *, own: bool = False) -> str:
    rows = ["| Key | Type | Default | Unit | Meaning | On resume |\n|---|---|---|---|---|---|\n"]
    for key, field in _fields(model, prefix, own):
        entry = None if inert(key.rpartition(".")[0]) else inert(key)
        meaning = field.description if entry is None else f"{field.description}  {_inert(entry)}"
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


def _inert(entry: Inert) -> str:
    refused = ", refused" if entry.level == "refused" else ""
    return f"*No meaning here{refused}: {entry.why}*"


_SAME_KEYS = (  # as others that are listed
    "buffer.explorer_input.taskset",
    "buffer.explorer_input.eval_tasksets",
    "buffer.trainer_input.auxiliary_buffers",
    "data_processor.task_pipeline.output",
)


def _fields(model: type[BaseModel], prefix: str, own: bool) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = list(models(field.annotation))
        if inner and own:
            continue
        if not inner:
            yield prefix + name, field
        for sub, mark in inner:
            if prefix + name in _SAME_KEYS:
                yield prefix + name + mark, field
                continue
            yield from _fields(sub, f"{prefix}{name}{mark}.", False)


def _pattern(text: str) -> str:
    return (
        text.replace("[[]*]", "[]")
        .replace("*tasksets[]", "tasksets[]")
        .replace("*taskset*", "tasksets[]")
    )


def json_schema() -> dict[str, Any]:
    """A JSON Schema for editors.  Values may also be interpolations, and choices are listed in
    lower case.
    """
    schema = RunConfig.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "rft run configuration"
    for definition in (schema, *schema.get("$defs", {}).values()):
        for name, value in definition.get("properties", {}).items():
            definition["properties"][name] = _or_interpolation(value)
        for own, others in _other_names(RunConfig).items():
            if own in definition.get("properties", {}):
                definition["properties"] |= dict.fromkeys(others, definition["properties"][own])
    _read_before(schema)
    return schema


def _read_before(schema: dict[str, Any]) -> None:
    """Adds what is read before the schema: extends, stages, trainer_config."""
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
    trainer = schema["$defs"][own["trainer"]["$ref"].rpartition("/")[2]]
    trainer["properties"]["trainer_config"] = {
        "type": "object",
        "description": said["trainer.trainer_config"],
    }


def _other_names(model: type[BaseModel]) -> dict[str, list[str]]:
    """Keys of `model` and below that may be written under other names, and those names."""
    found = {
        name: aliases(field)[1:] for name, field in model.model_fields.items() if aliases(field)
    }
    for field in model.model_fields.values():
        for inner, _ in models(field.annotation):
            found |= _other_names(inner)
    return found


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
