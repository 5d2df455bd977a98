"""`stages`: one file, several runs after one another, each beginning with the model that the one before exported.

Knows the names of sections, not what is in them.  Invariant: the tree of a stage is an ordinary configuration: the file's, in which the
stage's own sections stand instead of the common ones, as wholes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rft.config import aliases
from rft.config.schema.base import NAME
from rft.config.source import Loc, Source
from rft.errors import ConfigError, ConfigErrors

SECTIONS = ("mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")
"""What a stage may write; each replaces the whole section."""


@dataclass(frozen=True)
class Selected:
    """The tree of one stage."""

    values: dict[str, Any]
    origins: dict[Loc, str]
    sections: dict[str, str]  # section -> "stages[1].trainer"
    warnings: tuple[str, ...]


def names(values: dict[str, Any]) -> tuple[str, ...]:
    """The stages of a file, in order; none if it has none.  Raises ConfigErrors with everything that is wrong with the list."""
    given = values.get("stages")
    if given is None or given == []:
        return ()
    if not isinstance(given, list):
        raise ConfigError("must be a list of stages: [{stage_name: ..., trainer: {...}}, ...]", key="stages", given=given)
    errors: list[ConfigError] = []
    found: list[str] = []
    for i, stage in enumerate(given):
        key = f"stages[{i}]"
        if not isinstance(stage, dict):
            errors.append(ConfigError("must be a mapping with stage_name and sections", key=key, given=stage))
            continue
        name = stage.get("stage_name")
        if not isinstance(name, str) or not re.match(NAME, name) or len(name) > 120:
            message = "is required: " if name is None else f"given {name!r}: "
            errors.append(
                ConfigError(
                    f"{message}a name that begins with a letter or digit and holds no slash; the stage runs in <name>/<stage_name>",
                    key=f"{key}.stage_name",
                    given=name,
                )
            )
        elif name in found:
            errors.append(ConfigError(f"{name!r} is also the name of stages[{found.index(name)}]", key=f"{key}.stage_name"))
        found.append(str(name))
        errors += [_unknown(f"{key}.{k}", k) for k in stage if k not in ("stage_name", *SECTIONS)]
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
    return tuple(found)


def _unknown(key: str, name: str) -> ConfigError:
    near = difflib.get_close_matches(name, ("stage_name", *SECTIONS), n=1)
    if name == "model":
        return ConfigError("a stage's model is what the stage before it exported; write model once, at the top level", key=key)
    hint = f"  Did you mean {near[0]}?" if near else ""
    return ConfigError(f"a stage has stage_name and whole sections: {', '.join(SECTIONS)}.{hint}", key=key)


def select(values: dict[str, Any], origins: dict[Loc, str], name: str) -> Selected:
    """The tree of stage `name`; of a file without stages, with name "", the file's own.  Raises ConfigError."""
    known = names(values)
    common = {k: v for k, v in values.items() if k != "stages"}
    above = {at: o for at, o in origins.items() if at[:1] != ("stages",)}
    if not known and not name:
        return Selected(common, above, {}, ())
    if name not in known:
        says = f"no stage is called {name!r}" if name else "one run was asked for, and this is a program of several"
        raise ConfigError(f"{says}; the stages are: {', '.join(known) or 'none'}", key="stages", given=name)
    i = known.index(name)
    own = {k: v for k, v in values["stages"][i].items() if k != "stage_name"}
    idle = [".".join(map(str, at)) for at, o in above.items() if o.startswith("override") and at[0] in own]
    warnings = [f"stage {name} replaces {k.partition('.')[0]} as a whole; the override of {k} has no effect in it" for k in idle]
    tree = common | own
    above = {at: o for at, o in above.items() if at[0] not in own}
    for at, o in origins.items():
        if at[:2] == ("stages", i) and at[2:3] != ("stage_name",):
            above[at[2:]] = o
    warnings += aliases.expand(tree, above, lambda loc: loc[0] in own)
    trainer = tree.get("trainer")
    if isinstance(trainer, dict) and str(trainer.get("save_hf_checkpoint")).lower() == "never":
        tree = tree | {"trainer": trainer | {"save_hf_checkpoint": "last"}}
        above["trainer", "save_hf_checkpoint"] = "stages"
        warnings.append(
            f"stage {name}: trainer.save_hf_checkpoint is last instead of never, since stages hand on their last model"
        )
    return Selected(tree, above, {k: f"stages[{i}].{k}" for k in own}, tuple(warnings))


def rekey(errors: Iterable[ConfigError], source: Source) -> list[ConfigError]:
    """Errors of a stage under the keys that were written: trainer.total_steps as stages[1].trainer.total_steps."""

    def moved(e: ConfigError) -> ConfigError:
        section = re.split(r"[.\[]", e.key)[0]
        if section not in source.sections:
            return e
        return ConfigError(e.message, key=source.sections[section] + e.key.removeprefix(section), given=e.given)

    return [moved(e) for e in errors]
