"""One key explained: meaning, type, default, who reads it, and what veRL and Trinity-RFT call it.

Knows the schema and the two tables of foreign names.  Invariant: everything said is read from them; nothing is described twice.
"""

from __future__ import annotations

import importlib.resources
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from rft.algorithm.args import ARGS
from rft.config import aliases, reference
from rft.config.active import marked
from rft.config.known import advice
from rft.config.messages import aliases as other_names
from rft.config.messages import did_you_mean, field_at, fields_at, literals, models
from rft.config.outside import LATER_OUTSIDE
from rft.config.source import dotted
from rft.config.stages import SECTIONS
from rft.config.verlkeys import Row, by_path, by_target
from rft.errors import ConfigError

READ_BY = (  # longest beginning first: who does what with a key
    ("algorithm.repeat_times", "explorer: size of a group"),
    ("algorithm.optimizer", "trainer: optimizer and learning rate"),
    ("algorithm.sample_strategy", "trainer: which experiences a step reads"),
    ("algorithm", "trainer: advantages and loss"),
    ("model.critic_model_path", "trainer: critic"),
    ("model.temperature", "explorer: sampling of every taskset; trainer: log-probs at the same temperature"),
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
    ("seed", "explorer, engines and trainer: everything that draws"),
    ("deterministic", "explorer, engines and trainer"),
    ("", "launcher: the run and its folder"),
)


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
    active: str = "yes"  # or what happens today
    on_resume: str = ""
    verl: tuple[str, ...] = ()
    trinity: str = "none"
    note: str = ""  # about the other name
    also: tuple[str, ...] = ()  # other spellings that are accepted
    below: tuple[str, ...] = ()  # keys of a section, arguments of a part
    more: dict[str, str] = field(default_factory=dict)


def describe(name: str) -> list[Description]:
    """The key called `name`: ours, with or without list indexes, veRL's, or Trinity-RFT's.  veRL's may have become several.

    Raises ConfigError naming the nearest key, or what to do about a key that is not offered.
    """
    asked = name.strip().removeprefix("--")
    if before := _before_the_schema(asked):
        return [before]
    inner = re.sub(r"^stages(\[\w*\]|\.\d+)\.", "", asked)  # a stage's sections have the keys of the common ones
    key = _own(inner)
    if key is not None and (inner == asked or key.split(".")[0] in SECTIONS):
        return [_described(key, "" if key == _listed(asked) else asked)]
    if below := _argument(asked):
        return [below]
    row = aliases.native(asked)
    if row is not None:
        return _of_verl(row, asked)
    if (theirs := trinity().get(_listed(asked))) and (key := _own(theirs)) is not None:
        return [_described(key, asked)]
    said = advice(re.sub(r"\[\]", "[0]", _listed(asked)))
    loc = tuple(re.sub(r"\[\]", "", _listed(asked)).split("."))
    raise ConfigError(said or f"unknown key.{_nearest(loc)}", key=asked if len(asked) <= 120 else f"{asked[:117]}...")


def _nearest(loc: tuple[str, ...]) -> str:
    """What to say of a name that nobody knows: the nearest keys, else veRL's names that end like it, else what there is."""
    if len(loc[-1]) <= 120 and (near := did_you_mean(loc, list(fields_at(loc[:-1])))):
        return near
    theirs = [path for path in by_path() if path.rpartition(".")[2] == loc[-1]]
    if theirs:
        return f"  veRL's keys of that name: {', '.join(theirs[:4])}"
    if _own(".".join(loc[:-1])) and not fields_at(loc[:-1]):
        return f"  {dotted(loc[:-1])} is a value; no keys stand below it"
    parent = loc[:-1] if fields_at(loc[:-1]) else ()
    return f"  Known {f'below {dotted(parent)}' if parent else 'at the top'}: {', '.join(fields_at(parent))}"


def _before_the_schema(asked: str) -> Description | None:
    """extends, stages and trainer_config, which are gone before the schema sees the values."""
    key = _listed(asked).removesuffix("[]")
    if key not in reference.READ_BEFORE:
        return None
    kind, meaning = reference.READ_BEFORE[key]
    return Description(
        key=key,
        meaning=meaning,
        type=kind,
        default="none",
        used_by="the loader, before keys are checked; its rules: docs/reference/configuration.md",
        trinity="the same" if key in trinity() else "none",
        below=("stage_name", *SECTIONS) if key == "stages" else (),
    )


def _of_verl(row: Row, asked: str) -> list[Description]:
    found = []
    for target in row.targets:
        key = _own(target)
        said = _described(key, asked) if key is not None else _argument(target)
        if said is None:
            kind = "metric" if row.section == 21 else "command-line option"
            waits = LATER_OUTSIDE.get(target)
            said = Description(
                key=target,
                meaning=f"a {kind}",
                type=kind,
                default="",
                active=f"not yet: {waits}" if waits else "yes",
                verl=(row.name,),
            )
        found.append(_noted(said, asked, row))
    if not found:
        words = {"derived": "follows from other keys", "n/a": "is not taken over", "native": "has no key"}
        found = [
            Description(key="none", asked=asked, meaning=f"{words[row.kind]}: {row.note}", type="", default="", verl=(row.name,))
        ]
    return found


def _noted(said: Description, asked: str, row: Row) -> Description:
    return Description(**{**vars(said), "asked": asked, "note": row.note})


def _listed(name: str) -> str:
    """a.0.b, a[3].b and a[i].b as a[].b."""
    return re.sub(r"\[\w*\]|\.\d+(?=\.|$)", "[]", name)


def _own(name: str) -> str | None:
    """The schema's spelling of a key, or None."""
    parts, found = re.sub(r"\[\]", "", _listed(name)).split("."), ""
    fields: dict[str, FieldInfo] = fields_at(())
    mark = ""
    while parts:
        if mark == ".*":
            parts.pop(0)  # a name of the user's own
            if not parts:
                return None
        part = parts.pop(0)
        real = next((n for n, f in fields.items() if n == part or part in other_names(f)), None)
        if real is None:
            return None
        found = f"{found}{mark}.{real}" if found else real
        inner, mark = next(models(fields[real].annotation), (None, ""))
        fields = dict(inner.model_fields) if inner else {}
    return found


def _described(key: str, asked: str) -> Description:
    found = _field(key)
    extra = found.json_schema_extra if isinstance(found.json_schema_extra, dict) else {}
    later = _later(key)
    inner = next((m for m, _ in models(found.annotation)), None)
    return Description(
        key=key,
        asked=asked,
        meaning=found.description or "",
        type=_type(found),
        default="" if inner else reference.default_text(found).strip("`*"),
        unit=str(extra.get("unit", "")),
        allowed=tuple(_choices(found)),
        used_by=next(text for beginning, text in READ_BY if key.startswith(beginning)),
        active=later or "yes",
        on_resume={"safe": "may change", "refuse": "may not change"}.get(str(extra.get("on_resume", "")), ""),
        verl=tuple(r.name for r in _verl(key)),
        trinity=_trinity_of(key),
        also=tuple(n for n in other_names(found) if n != key.rpartition(".")[2]),
        below=tuple(inner.model_fields) if inner else _parts(key),
    )


def _field(key: str) -> FieldInfo:
    found = field_at(tuple(re.sub(r"\[\]|\.\*", "", key).split(".")))
    assert found is not None, key
    return found


def _type(found: FieldInfo) -> str:
    marks = [m for _, m in models(found.annotation)]
    if marks:
        return {"": "section", "[]": "list of sections"}.get(marks[0], "section for each name")
    return "choice" if _choices(found) else reference.type_text(found).replace("`", "")


def _choices(found: FieldInfo) -> list[str]:
    return [str(n) for n in literals(found.annotation) if n != ""]


def _later(key: str) -> str:
    """What happens today where the key, or a section around it, is not active yet."""
    parts = re.sub(r"\[\]|\.\*", "", key).split(".")
    for end in range(len(parts), 0, -1):
        found = field_at(tuple(parts[:end]))
        if found is not None and (mark := marked(found)):
            which = ", ".join(map(str, mark.get("values", ())))
            if which and end < len(parts):
                continue
            word = _word(mark)
            return f"{f'{word} for {which}' if which else word}: {mark['instead']}"
    return ""


def _word(mark: dict[str, Any]) -> str:
    return "no meaning here" if mark.get("moot") else "not yet"


def _verl(key: str) -> tuple[Row, ...]:
    """The rows that became `key`; an evaluation taskset shares the training taskset's."""
    return by_target().get(key) or by_target().get(_as_training(key), ())


def _as_training(key: str) -> str:
    """taskset and eval_tasksets[] have the keys of tasksets[]."""
    return re.sub(r"^(buffer\.explorer_input\.)(taskset|eval_tasksets\[\])(?=\.)", r"\1tasksets[]", key)


def _argument(name: str) -> Description | None:
    """algorithm.policy_loss_fn_args.clip_range: an argument of one or more parts."""
    match = re.fullmatch(r"algorithm\.(\w+)_args\.(\w+)", name)
    if match is None:
        found = re.fullmatch(r"(.+_args)\.\w+", _listed(name))  # of a workflow or a reward: the plugin's own
        if found is None or (key := _own(found[1])) is None or next(models(_field(key).annotation), None):
            return None  # a section such as rollout_args has keys of its own, and no others
        return Description(
            key=_listed(name),
            meaning="argument of the workflow or reward that is named beside it",
            type="argument",
            default="of the plugin",
            used_by=_described(key, "").used_by,
            active=next((f"not yet: {t}" for k, t in LATER_OUTSIDE.items() if _listed(k) == _as_training(_listed(name))), "yes"),
            on_resume="may not change",
            verl=tuple(r.name for r in _verl(_listed(name))),
            trinity=key,
        )
    kind, argument = match.groups()
    takers = {part: m.model_fields[argument] for (k, part), m in ARGS.items() if k == kind and argument in m.model_fields}
    if not takers:
        return None
    one = next(iter(takers.values()))
    later = marked(one)
    active = f"{_word(later)}: {later['instead']}" if later else "yes"
    return Description(
        key=name,
        meaning=one.description or f"argument of {kind}",
        type=_type(one),
        default=", ".join(sorted({reference.default_text(f).strip("`") for f in takers.values()})),
        allowed=tuple(_choices(one)),
        used_by=f"trainer: {', '.join(takers)}",
        active=active,
        on_resume="may not change",
        verl=tuple(r.name for r in _verl(name)),
        trinity=f"algorithm.{kind}_args",
    )


def _parts(key: str) -> tuple[str, ...]:
    """Names of the arguments that the shipped parts take below an _args key."""
    match = re.fullmatch(r"algorithm\.(\w+)_args", key)
    return tuple(dict.fromkeys(n for (k, _), m in ARGS.items() if match and k == match[1] for n in m.model_fields))


@cache
def trinity() -> dict[str, str]:
    """Trinity-RFT's key → ours, for all keys of its schema; a key that is not offered stands for itself."""
    text = importlib.resources.files("rft.config").joinpath("data/trinity_keys.txt").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        section, _, names = line.partition(":")
        for name in names.split():
            theirs, _, ours = name.partition("=")
            path = f"{section}.{theirs}" if section else theirs
            found[path] = ours or path
            parents = path.split(".")
            for end in range(1, len(parents)):
                above = ".".join(parents[:end]).removesuffix("[]")
                found.setdefault(above, above)
    return found


def _trinity_of(key: str) -> str:
    plain = _as_training(key)
    names = [theirs for theirs, ours in trinity().items() if ours == plain]
    same = [n for n in names if n == plain]
    if same:
        return "the same"
    return ", ".join(names) or "none"


def values(said: Description) -> dict[str, Any]:
    """For --json; what does not apply is left out."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(said).items() if v not in ("", (), {}) or k == "default"}
