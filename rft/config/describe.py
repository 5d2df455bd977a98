"""One key explained: meaning, type, default, who reads it; and a resolved configuration in words:
where each value came from.

Depends on the schema.  Invariant: everything said is read from it; nothing is described twice.
What related tools call a key is added by an extra.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rft.algorithm.catalog import shipped
from rft.config.extends import SECTIONS
from rft.config.hints import key_hint
from rft.config.load import did_you_mean
from rft.config.plan import Plan
from rft.config.schema.root import RunConfig
from rft.config.schema.source import dotted, leaves
from rft.config.schema.walk import (
    all_keys,
    declared,
    extra,
    fields_at,
    fields_of,
    literals,
    models,
    owner,
    place,
)
from rft.errors import ConfigError

READ_BY = (  # longest beginning first: who does what with a key
    ("algorithm.repeat_times", "explorer: size of a group"),
    ("algorithm.optimizer", "trainer: optimizer and learning rate"),
    ("algorithm.sample_strategy", "trainer: which experiences a step reads"),
    ("algorithm", "trainer: advantages and loss"),
    ("model.critic_model_path", "trainer: critic"),
    (
        "model.temperature",
        "explorer: sampling of every taskset; trainer: log-probs at the same temperature",
    ),
    ("model.external_model", "engines of rft bench"),
    ("model.lora_configs", "trainer: what is trained"),
    ("model", "engines and trainer"),
    ("cluster", "launcher: placement on machines"),
    ("buffer.explorer_input.eval_tasksets", "explorer: evaluation"),
    ("buffer.explorer_input", "explorer: tasks, workflows, rewards"),
    ("buffer.trainer_input", "buffer: where experiences wait; trainer: how they are read"),
    ("buffer.total", "explorer and trainer: length of the run"),
    ("buffer", "explorer, buffer and trainer: size of a step"),
    ("data_processor.experience_pipeline", "buffer: operators on experiences"),
    ("data_processor", "launcher: preparation of tasks before the run"),
    ("explorer.rollout_model", "engines of the policy"),
    ("explorer.auxiliary_models", "engines of judges, teachers and reward models"),
    ("explorer", "explorer"),
    ("trainer.critic", "trainer: critic"),
    ("trainer.ref", "trainer: reference model"),
    ("trainer", "trainer"),
    ("synchronizer", "synchronizer: when and how weights move"),
    ("monitor", "monitor: trackers"),
    ("log", "every process: log files"),
    ("seed", "explorer, engines and trainer: everything random"),
    ("deterministic", "explorer, engines and trainer"),
    ("", "launcher: the run and its folder"),
)


READ_BEFORE = {  # key -> (type, meaning) of what is gone before the schema sees the values
    "extends": (
        "text, or list of texts",
        "A file, or several, whose keys apply where this one sets none; relative to this file.",
    ),
    "stages": (
        "list of sections",
        "Consecutive runs; each starts from the model of the one before, its sections replace the "
        "common ones.",
    ),
}

_MOST = 5  # most keys that an error about an unknown key names


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `rft explain` says about one key, ready to print."""

    key: str
    asked: str = ""  # how it was called, where that was another name
    meaning: str
    type: str
    default: str
    unit: str = ""
    allowed: tuple[str, ...] = ()  # of a choice
    used_by: str = ""
    belongs_to: str = ""  # the choice that has the key
    on_resume: str = ""
    verl: tuple[str, ...] = ()
    trinity: str = "none"
    note: str = ""  # about the other name
    below: tuple[str, ...] = ()  # keys of a section, arguments of a part

    def to_json(self) -> dict[str, Any]:
        """What does not apply is left out."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {k: v for k, v in values.items() if v not in ("", []) or k == "default"}


def _nearest(loc: tuple[str, ...]) -> str:
    """What to say about an unknown name: the nearest keys, else what there is."""
    if len(loc[-1]) <= 120 and (near := did_you_mean(loc, list(fields_at(loc[:-1])))):
        return near
    if own(".".join(loc[:-1])) and not fields_at(loc[:-1]):
        return f"  {dotted(loc[:-1])} is a value; there are no keys below it"
    parent = loc[:-1] if fields_at(loc[:-1]) else ()
    if not parent and (keys := _about(loc[-1])):
        return f"  Keys that mean something like it: {', '.join(keys[:_MOST])}"
    return (
        f"  Known {f'below {dotted(parent)}' if parent else 'at the top'}: "
        f"{', '.join(fields_at(parent))}"
    )


def _about(name: str) -> list[str]:
    """Return keys that have all words of `name` in their name and meaning, or else its longest
    word; shortest keys first.
    """
    words = re.findall(r"[a-z]{3,}", name.lower())
    about = {key: f"{key} {_field(key).description}".lower() for key in all_keys()}
    for required in (words, sorted(words, key=len)[-1:]):
        starts = [re.compile(f"(?<![a-z]){word}") for word in required]
        keys = [key for key in about if starts and all(s.search(about[key]) for s in starts)]
        if keys:
            return sorted(keys, key=lambda key: (key.count("."), len(key)))
    return []


def described(name: str) -> Description | None:
    """The key called `name`, with or without list indexes; None where nothing is called so."""
    if before := _before_the_schema(name):
        return before
    # a stage's sections have the keys of the common ones
    inner = re.sub(r"^stages(\[\w*\]|\.\d+)\.", "", name)
    key = own(inner)
    if key is not None and (inner == name or key.split(".")[0] in SECTIONS):
        return _described(key, "" if key == listed(name) else name)
    return _argument(name)


def describe(name: str) -> list[Description]:
    """The key called `name`.  Raises ConfigError naming the nearest key."""
    if (key := described(name.strip().removeprefix("--"))) is None:
        raise unknown(name)
    return [key]


def unknown(name: str) -> ConfigError:
    """What to do about a key that is not offered, or the nearest keys."""
    hint = key_hint(re.sub(r"\[\]", "[0]", listed(name)))
    loc = _parts_of(name)
    return ConfigError(
        hint or f"unknown key.{_nearest(loc)}", key=name if len(name) <= 120 else f"{name[:117]}..."
    )


def _before_the_schema(name: str) -> Description | None:
    """extends and stages, which are gone before the schema sees the values."""
    key = listed(name).removesuffix("[]")
    if key not in READ_BEFORE:
        return None
    kind, meaning = READ_BEFORE[key]
    return Description(
        key=key,
        meaning=meaning,
        type=kind,
        default="none",
        used_by="the loader, before keys are checked; its rules: docs/reference/configuration.md",
        below=("stage_name", *SECTIONS) if key == "stages" else (),
    )


def listed(name: str) -> str:
    """a.0.b, a[3].b and a[i].b as a[].b."""
    return re.sub(r"\[\w*\]|\.\d+(?=\.|$)", "[]", name)


def own(name: str) -> str | None:
    """The schema's spelling of a key, or None."""
    return place(_parts_of(name))[0] or None


def _parts_of(name: str) -> tuple[str, ...]:
    return tuple(listed(name).replace("[]", "").split("."))


def _described(key: str, alias: str) -> Description:
    field = _field(key)
    inner = fields_of(field.annotation)
    return Description(
        key=key,
        asked=alias,
        meaning=field.description or "",
        type=_type(field),
        default="" if inner else default_text(field).strip("`*"),
        unit=extra(field, "unit"),
        allowed=tuple(_choices(field)),
        used_by=next(text for beginning, text in READ_BY if key.startswith(beginning)),
        belongs_to=owner(_parts_of(key)),
        on_resume={"safe": "may be changed", "refuse": "may not be changed"}.get(
            extra(field, "on_resume"), ""
        ),
        below=tuple(inner) if inner else _parts(key),
    )


def _field(key: str) -> FieldInfo:
    field = place(_parts_of(key))[1]
    assert field is not None, key
    return field


def _type(field: FieldInfo) -> str:
    marks = [m for _, m in models(field.annotation)]
    if marks:
        return {"": "section", "[]": "list of sections"}.get(marks[0], "section for each name")
    return "choice" if _choices(field) else type_text(field).replace("`", "")


def _choices(field: FieldInfo) -> list[str]:
    return [str(n) for n in literals(field.annotation) if n != ""]


def _argument(name: str) -> Description | None:
    """algorithm.policy_loss_fn_args.clip_range: an argument of one or more parts."""
    match = re.fullmatch(r"algorithm\.(\w+)_args\.(\w+)", name)
    if match is None:
        # of a workflow or a reward: the plugin's own
        found = re.fullmatch(r"(.+_args)\.\w+", listed(name))
        if (
            found is None
            or (key := own(found[1])) is None
            or next(models(_field(key).annotation), None)
        ):
            return None  # a section such as rollout_args has its own keys, and no others
        return Description(
            key=listed(name),
            meaning="argument of the workflow or reward that is named beside it",
            type="argument",
            default="of the plugin",
            used_by=_described(key, "").used_by,
            on_resume="may not change",
        )
    kind, word = match.groups()
    takers = {
        part: m.model_fields[word]
        for (k, part), m in shipped().items()
        if k == kind and word in m.model_fields
    }
    if not takers:
        return None
    argument = next(iter(takers.values()))
    return Description(
        key=name,
        meaning=argument.description or f"argument of {kind}",
        type=_type(argument),
        default=", ".join(sorted({default_text(f).strip("`") for f in takers.values()})),
        allowed=tuple(_choices(argument)),
        used_by=f"trainer: {', '.join(takers)}",
        on_resume="may not change",
    )


def _parts(key: str) -> tuple[str, ...]:
    """Names of the arguments that the shipped parts take below an _args key."""
    match = re.fullmatch(r"algorithm\.(\w+)_args", key)
    return tuple(
        dict.fromkeys(
            n for (k, _), m in shipped().items() if match and k == match[1] for n in m.model_fields
        )
    )


def values(config: RunConfig, plan: Plan) -> list[tuple[str, str, str]]:
    """(key, value, where from) of every key: a line of the file, an override, "default", or what it
    was derived from.
    """
    derived = {d.key: d for d in plan.derived}
    reasons = {d.key: d.reason for d in reversed(plan.derived)}
    rows = []
    for loc, value in leaves(config.shown(), lists=False):
        key = dotted(loc)
        where = config.source.where(loc)
        if key in derived and (not where or value in (None, "auto", 0)):
            rows.append((key, str(derived.pop(key).value), f"derived: {reasons[key]}"))
        elif key in derived:
            rows.append((key, f"{value} → {derived[key].value}", f"{where}; {reasons[key]}"))
        else:
            rows.append((key, _text(value), where or "default"))
    return rows


def timeline(plan: Plan) -> str:
    """The first steps of the schedule in one line."""
    s = plan.schedule
    if s.style != "fixed":
        return _asynchronous(plan)
    parts = []
    last = -1
    for batch in range(2 * s.interval + s.offset + 1):
        need = s.required_step(batch)
        if need != last:
            parts.append(
                f"explore step {batch + 1} waits for the weights of step {need}"
                if need
                else "explore step 1 starts with the untrained weights"
            )
            last = need
    every = "every train step" if s.interval == 1 else f"every {s.interval} train steps"
    return f"sent after {every} ({plan.sync.sync_method}); {', '.join(parts[:2])}, and so on"


def _asynchronous(plan: Plan) -> str:
    s = plan.schedule
    steps = "every train step" if s.interval == 1 else f"every {s.interval} train steps"
    if s.style == "explorer_driven":
        batches = "explore step" if s.interval == 1 else f"{s.interval} explore steps"
        when = (
            f"when the explorer asks, after every {batches} from explore step "
            f"{s.offset + s.interval} on"
        )
    else:
        when = f"after {steps}"
    if s.quota is not None:
        unit = "tasks" if plan.trainer.batch_rows is None else "experiences"
        window = s.interval * s.step_units
        limit = (
            f"; a window takes {window} {unit}, and {s.quota} may have begun and not been "
            f"trained at its start"
        )
    else:
        limit = ""
    if s.max_staleness is not None:
        limit += f"; the explorer waits so that rows are at most {s.max_staleness} steps old"
    return f"sent {when} ({plan.sync.sync_method}){limit}" + (
        "" if plan.sync.partial_rollout else "; a sync waits for running tasks"
    )


def _text(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def type_text(field: FieldInfo) -> str:
    """The type of a key in words, with what is allowed."""
    if inner := list(models(field.annotation)):
        return {
            "": "a taskset, keys as in `tasksets[]`",
            "[]": "list of tasksets, keys as in `tasksets[]`",
            ".*": "a buffer, keys as in `experience_buffer`",
        }[inner[0][1]]
    if names := [n for n in literals(field.annotation) if n != ""]:
        many = "one or more of " if "tuple" in str(field.annotation) else ""
        return many + ", ".join(f"`{n}`" for n in names)
    text = str(field.annotation)
    many = "list of " if "tuple" in text else ""
    words = (
        ("dict", "mapping"),
        ("bool", "true, false"),
        ("float", "number"),
        ("int", "whole number"),
        ("str", "text"),
    )
    word = next((w for t, w in words if t in text), "text")
    signs = {Gt: ">", Ge: "≥", Lt: "<", Le: "≤"}
    bounds = [
        f"{signs[type(m)]} {getattr(m, type(m).__name__.lower()):g}"
        for f in declared(field)
        for m in f.metadata
        if type(m) in signs
    ]
    return f"{many}{word}{' ' + ', '.join(bounds) if bounds else ''}"


def default_text(field: FieldInfo) -> str:
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
