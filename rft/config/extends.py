"""Files that extend files, merged into one tree with the file and line of each value; and the trees
of a file's `stages`.

Depends on names of sections, not on what is in them.  Invariants: what a file writes wins over what
it extends, and a later base over an earlier one; mappings merge, lists and single values replace.
The tree of a stage is an ordinary configuration: the file's, in which the stage's own sections
stand instead of the common ones, as wholes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.config import yamlfile
from rft.config.schema.source import Loc, Source
from rft.errors import ConfigError, nearest, raise_all
from rft.files.disk import read_regular
from rft.schema.base import NAME

MAX_DEPTH = 8
MAX_FILES = 64  # a file that two others extend counts twice
Interpolate = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Written:
    """A file with everything that it extends."""

    values: dict[str, Any]
    origins: dict[Loc, str]  # leaf -> "line 12", or "base.yaml line 12"
    text: str  # the file as written; of a file that extends others, the merged tree
    files: list[tuple[str, str]]  # (path, sha256), the file itself first


def read(path: Path, interpolate: Interpolate) -> Written:
    """The file at `path`.  Raises ConfigError(s) naming the file and the line; `interpolate` reads
    ${...} in names of bases.
    """
    merged = _read(path, (), "", interpolate, [])
    if len(merged.files) > 1:
        merged.text = (
            f"# {', '.join(p for p, _ in merged.files)} as one\n{yamlfile.dump(merged.values)}"
        )
    return merged


def _read(
    path: Path, above: tuple[Path, ...], label: str, interpolate: Interpolate, opened: list[Path]
) -> Written:
    chain = " → ".join(p.name for p in (*above, path))
    if os.path.realpath(path) in map(os.path.realpath, above):
        raise ConfigError(
            f"{chain}: a file cannot extend itself; remove one of them",
            key="extends",
            given=str(path),
        )
    if len(above) > MAX_DEPTH:
        raise ConfigError(
            f"{chain}: more than {MAX_DEPTH} files deep; merge some of them",
            key="extends",
            given=str(path),
        )
    opened.append(path)
    if len(opened) > MAX_FILES:
        raise ConfigError(
            f"{opened[0].name}: more than {MAX_FILES} files are read; merge some of them",
            key="extends",
            given=str(path),
        )
    text = read_config_text(path, chain if above else "")
    values, lines = yamlfile.parse(text, path.name)
    if values is None:
        raise ConfigError(
            f"{path} is empty; it needs at least model.model_path and buffer.explorer_input"
        )
    if not isinstance(values, dict):
        kind = "list" if isinstance(values, list) else "single value"
        raise ConfigError(
            f"{path} holds a {kind}; the top level must be a mapping such as `model:`; of other "
            f"tools: docs/howto/from-verl.md"
        )
    file = Written(
        values,
        {loc: f"{label} line {n}".strip() for loc, n in lines.items()},
        text,
        [(str(path), hashlib.sha256(text.encode()).hexdigest())],
    )
    bases = _bases(file, interpolate)
    if not bases:
        return file
    merged = Written({}, {}, text, file.files)
    for name in bases:
        base = Path(name).expanduser()
        below = _read(path.parent / base, (*above, path), name, interpolate, opened)
        _merge(merged.values, merged.origins, below.values, below.origins, ())
        merged.files += below.files
    _merge(merged.values, merged.origins, file.values, file.origins, ())
    return merged


def read_config_text(path: Path, chain: str = "") -> str:
    """The text of a YAML file; `chain` names the files that extend it, for messages."""
    try:
        return read_regular(path, yamlfile.MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text (byte {e.start})") from None
    except OSError as e:
        if chain:
            hint = "the name is relative to the file it stands in"
            raise ConfigError(
                f"{chain}: cannot read {path}: {e.strerror}; {hint}", key="extends", given=str(path)
            ) from None
        raise ConfigError(
            f"cannot read configuration {path}: {e.strerror}; --config names the YAML file"
        ) from None


def _bases(file: Written, interpolate: Interpolate) -> list[str]:
    """Names after `extends`, which is taken out."""
    where = next((o for at, o in file.origins.items() if at[:1] == ("extends",)), "")
    file.origins = {at: o for at, o in file.origins.items() if at[:1] != ("extends",)}
    given = file.values.pop("extends", None)
    if isinstance(given, list | str) and "${" in str(given):
        given = interpolate({"extends": given})["extends"]
    bases = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(bases, list) or not all(isinstance(b, str) and b for b in bases):
        raise ConfigError(
            f"must be a file name or a list of file names  ({where})", key="extends", given=given
        )
    return bases


def _merge(
    into: dict[str, Any],
    origins: dict[Loc, str],
    values: dict[str, Any],
    new: dict[Loc, str],
    loc: Loc,
) -> None:
    """Puts `values` over `into`, and their origins over its."""
    for k, v in values.items():
        here = (*loc, k)
        if isinstance(v, dict) and v and isinstance(into.get(k), dict):
            for at in [at for at in origins if at == here]:
                del origins[at]  # it was {}
            _merge(into[k], origins, v, new, here)
            continue
        if v == {} and isinstance(into.get(k), dict):
            continue  # a section of which nothing is written changes nothing
        into[k] = v
        for at in [at for at in origins if at[: len(here)] == here]:
            del origins[at]
        origins |= {at: o for at, o in new.items() if at[: len(here)] == here}


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
    """The stages of a file, in order; none if it has none.  Raises ConfigErrors with everything
    that is wrong with the list.
    """
    stages = values.get("stages")
    if stages is None or stages == []:
        return ()
    if not isinstance(stages, list):
        raise ConfigError(
            "must be a list of stages: [{stage_name: ..., trainer: {...}}, ...]",
            key="stages",
            given=stages,
        )
    errors: list[ConfigError] = []
    stage_names: list[str] = []
    for i, stage in enumerate(stages):
        key = f"stages[{i}]"
        if not isinstance(stage, dict):
            errors.append(
                ConfigError("must be a mapping with stage_name and sections", key=key, given=stage)
            )
            continue
        name = stage.get("stage_name")
        if not isinstance(name, str) or not re.match(NAME, name) or len(name) > 120:
            message = "is required: " if name is None else f"given {name!r}: "
            message += (
                "a name that begins with a letter or digit and holds no slash; the stage "
                "runs in <name>/<stage_name>"
            )
            errors.append(ConfigError(message, key=f"{key}.stage_name", given=name))
        elif name in stage_names:
            errors.append(
                ConfigError(
                    f"{name!r} is also the name of stages[{stage_names.index(name)}]",
                    key=f"{key}.stage_name",
                )
            )
        stage_names.append(str(name))
        errors += [_unknown(f"{key}.{k}", k) for k in stage if k not in ("stage_name", *SECTIONS)]
    raise_all(errors)
    return tuple(stage_names)


def _unknown(key: str, name: str) -> ConfigError:
    if name == "model":
        return ConfigError(
            "a stage's model is what the stage before it exported; write model once, at the top "
            "level",
            key=key,
        )
    hint = nearest(name, ("stage_name", *SECTIONS))
    return ConfigError(
        f"a stage has stage_name and whole sections: {', '.join(SECTIONS)}.{hint}", key=key
    )


def select(values: dict[str, Any], origins: dict[Loc, str], name: str) -> Selected:
    """The tree of stage `name`; of a file without stages, with name "", the file's own.  Raises
    ConfigError.
    """
    stage_names = names(values)
    common = {k: v for k, v in values.items() if k != "stages"}
    above = {at: o for at, o in origins.items() if at[:1] != ("stages",)}
    if not stage_names and not name:
        return Selected(common, above, {}, ())
    if name not in stage_names:
        problem = (
            f"no stage is called {name!r}"
            if name
            else "one run was asked for, and this is a program of several"
        )
        raise ConfigError(
            f"{problem}; the stages are: {', '.join(stage_names) or 'none'}",
            key="stages",
            given=name,
        )
    i = stage_names.index(name)
    stage = {k: v for k, v in values["stages"][i].items() if k != "stage_name"}
    idle = [
        ".".join(map(str, at))
        for at, o in above.items()
        if o.startswith("override") and at[0] in stage
    ]
    warnings = [
        f"stage {name} replaces {k.partition('.')[0]} as a whole; the override of {k} has no "
        f"effect in it"
        for k in idle
    ]
    tree = common | stage
    above = {at: o for at, o in above.items() if at[0] not in stage}
    for at, o in origins.items():
        if at[:2] == ("stages", i) and at[2:3] != ("stage_name",):
            above[at[2:]] = o
    trainer = tree.get("trainer")
    if isinstance(trainer, dict) and str(trainer.get("save_hf_checkpoint")).lower() == "never":
        tree = tree | {"trainer": trainer | {"save_hf_checkpoint": "last"}}
        above["trainer", "save_hf_checkpoint"] = "stages"
        warnings.append(
            f"stage {name}: trainer.save_hf_checkpoint is last instead of never, since stages hand "
            f"on their last model"
        )
    return Selected(tree, above, {k: f"stages[{i}].{k}" for k in stage}, tuple(warnings))


def rekey(errors: Iterable[ConfigError], source: Source) -> list[ConfigError]:
    """Errors of a stage under the keys that were written: trainer.total_steps as
    stages[1].trainer.total_steps.
    """

    def moved(e: ConfigError) -> ConfigError:
        section = re.split(r"[.\[]", e.key)[0]
        if section not in source.sections:
            return e
        return ConfigError(
            e.message, key=source.sections[section] + e.key.removeprefix(section), given=e.given
        )

    return [moved(e) for e in errors]
