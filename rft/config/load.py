"""A YAML file and `key=value` overrides → `RunConfig`, or every error at once.

Knows the schema only as a type to validate against.  Relative paths are looked up from the current folder, then beside the file
(`resolve` does that).  Invariant: what comes out has passed the schema; nothing has been looked up, opened or started besides the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rft.config import aliases, extends, stages, yamlfile
from rft.config.messages import explain
from rft.config.schema.root import RunConfig
from rft.config.source import STEP, Loc, Source, dotted, is_secret, undotted
from rft.errors import ConfigError, ConfigErrors
from rft.logs import REDACTED, is_secret_name, learn_secrets, url_passwords

_ENV = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)")


def load(path: str | Path, overrides: Sequence[str] = (), *, stage: str = "") -> RunConfig:
    """The configuration written in `path`, with `overrides` such as "algorithm.optimizer.lr=1e-5" or "a.b[0].c=[1, 2]" on top.

    Values of overrides are YAML.  Of a file with stages, `stage` says which.  Raises ConfigError, or ConfigErrors with all that is
    wrong.
    """
    return validate(read(path, overrides, stage=stage))


def from_dict(values: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The same from values that are already there."""
    if "extends" in values:
        raise ConfigError("belongs into a file, whose folder it is relative to; merge the values yourself", key="extends")
    origins: dict[Loc, str] = {}
    warnings = aliases.expand(values, origins)
    return validate(_source(None, extends.Written(values, origins, "", [], warnings), overrides, ""))


def stage_names(path: str | Path, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """The stages that `path` describes, in order; none of an ordinary configuration."""
    written = extends.read(Path(path).expanduser(), lambda values: _interpolate(values)[0])
    _override(written, overrides)
    return stages.names(written.values)


def read(path: str | Path, overrides: Sequence[str] = (), *, stage: str = "") -> Source:
    """The written form, merged and interpolated, not yet checked against the schema."""
    path = Path(path).expanduser()
    return _source(path, extends.read(path, lambda values: _interpolate(values)[0]), overrides, stage)


def validate(source: Source) -> RunConfig:
    """Checks against the schema.  Numbers that came as text, from the environment or an override, are read as numbers here."""
    values = dict(source.values)
    try:
        config = _validate(values)
    except ValidationError as e:
        fixed = _retype(values, e, source)
        if fixed is None:
            raise ConfigErrors(stages.rekey(explain(e, source), source)) from None
        try:
            config = _validate(fixed)
        except ValidationError as again:
            raise ConfigErrors(stages.rekey(explain(again, source), source)) from None
    config._source = source
    return config


def _validate(values: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate_json(json.dumps(values), strict=True)


def _source(path: Path | None, written: extends.Written, overrides: Sequence[str], stage: str) -> Source:
    raw = _override(written, overrides)
    chosen = stages.select(written.values, written.origins, stage)
    values, origins = chosen.values, chosen.origins
    for loc, leaf in _leaves(values):
        if isinstance(leaf, str) and "${" in leaf:
            names = _ENV.findall(leaf)
            origins[loc] = f"{origins.get(loc, 'given')} ({', '.join('$' + n for n in names) or leaf})"
    values, replaced = _interpolate(values, origins)
    raw.update(replaced)
    learn_secrets(str(v) for loc, v in _leaves(values) if loc and is_secret(str(loc[-1]), v))
    learn_secrets(p for _, v in _leaves(values) if isinstance(v, str) for p in url_passwords(v))
    return Source(
        path=path,
        text=written.text,
        overrides=tuple(overrides),
        values=values,
        origins=origins,
        raw_texts=raw,
        files=tuple(written.files),
        warnings=(*written.warnings, *chosen.warnings),
        stage=stage,
        sections=chosen.sections,
    )


def _override(written: extends.Written, overrides: Sequence[str]) -> dict[Loc, str]:
    """Puts the overrides over what is written; the text of each."""
    raw: dict[Loc, str] = {}
    errors = []
    for override in overrides:
        try:
            loc, (text, value) = assign(written.values, override)
        except ConfigError as e:
            errors.append(e)
            continue
        if loc[0] == "extends":
            errors.append(ConfigError("cannot be an override; give the differing keys as key=value", key="extends", given=value))
        for at in [at for at in written.origins if at[: len(loc)] == loc]:
            del written.origins[at]
        written.origins.update(dict.fromkeys((leaf for leaf, _ in _leaves(value, loc)), "override"))
        raw[loc] = text
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
    origins = written.origins

    def given_here(loc: Loc) -> bool:
        return any(o.startswith("override") for at, o in origins.items() if at[: len(loc)] == loc)

    written.warnings += aliases.expand(written.values, origins, given_here)
    return raw


def _leaves(value: Any, loc: Loc = ()) -> list[tuple[Loc, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for k, v in value.items() for leaf in _leaves(v, (*loc, k))]
    if isinstance(value, list) and value:
        return [leaf for i, v in enumerate(value) for leaf in _leaves(v, (*loc, i))]
    return [(loc, value)]


def assign(values: dict[str, Any], override: str) -> tuple[Loc, tuple[str, Any]]:
    """Puts one override into `values`; the place it went to, its text and its value."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(f"override {override!r} is not of the form key.path=value, e.g. algorithm.optimizer.lr=1e-5")
    if path[0] in "+~":
        raise ConfigError(f"override {override!r}: leave out the {path[0]!r}; write key.path=value (null removes a value)")
    steps = list(undotted(path))
    if dotted(tuple(steps)) != path and STEP.sub("", path).strip("."):
        raise ConfigError(f"override {override!r}: cannot read the key {path!r}; write a.b.c, a.b.0.c or a.b[0].c")
    value = yamlfile.scalar(text, f"override {path}")
    place: Any = values
    for i, step in enumerate(steps):
        done, is_list = tuple(steps[:i]), isinstance(place, list)
        if is_list:
            steps[i] = _index(step, place, done, override)
        elif isinstance(step, int):
            raise ConfigError(f"override {override!r}: {dotted(done) or 'the top level'} is not a list", key=dotted(done))
        if i == len(steps) - 1:
            place[steps[i]] = value
            break
        inner = place[steps[i]] if is_list else place.get(step)
        if inner is None:
            inner = place[steps[i]] = {}
        if not isinstance(inner, dict | list):
            here = dotted(tuple(steps[: i + 1]))
            raise ConfigError(f"override {override!r}: {here} is {inner!r} and has no keys below it", key=here, given=inner)
        place = inner
    return tuple(steps), (text.strip(), value)


def _index(step: str | int, place: list[Any], done: Loc, override: str) -> int:
    number = step if isinstance(step, int) else int(step) if re.fullmatch(r"-?\d+", step) else None
    if number is None or not -len(place) <= number < len(place):
        allowed = f"0 to {len(place) - 1}" if place else "none, it is empty"
        raise ConfigError(
            f"override {override!r}: {dotted(done)} is a list of {len(place)}; indexes: {allowed}", key=dotted(done)
        )
    return number % len(place)


def _interpolate(values: dict[str, Any], origins: Mapping[Loc, str] | None = None) -> tuple[dict[str, Any], dict[Loc, str]]:
    """`${oc.env:X}`, `${oc.env:X,default}` and `${a.b}` replaced; and the text of each leaf that had one."""
    marked = [(loc, leaf) for loc, leaf in _leaves(values) if isinstance(leaf, str) and "${" in leaf]
    if not marked:
        return values, {}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    errors: list[ConfigError] = []
    texts: dict[Loc, str] = {}

    def wrong(loc: Loc, leaf: str, message: str) -> None:
        line = re.match(r"[^(]*", (origins or {}).get(loc, ""))
        where = f"  ({line[0].strip()})" if line and line[0].strip() else ""
        given = REDACTED if any(is_secret(str(part), leaf) for part in loc) else leaf
        errors.append(ConfigError(f"given {given!r}: {message}{where}", key=dotted(loc), given=given))

    for loc, leaf in marked:
        try:
            OmegaConf.create([leaf])
        except OmegaConfBaseException:
            wrong(loc, leaf, "cannot be read; write ${oc.env:NAME}, ${oc.env:NAME,DEFAULT} or ${another.key}, each brace closed")
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
    tree = OmegaConf.create(values)
    for loc, leaf in marked:
        try:
            node: Any = tree
            for step in loc:
                node = node[step]
            if isinstance(node, str):
                texts[loc] = node
        except OmegaConfBaseException as e:
            missing = _ENV.findall(leaf)
            hint = f"; set it, or write ${{oc.env:{missing[0]},DEFAULT}}" if missing and "not found" in str(e) else ""
            wrong(loc, leaf, f"{_first_line(e)}{hint}")
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
    learn_secrets(texts[loc] for loc, leaf in marked if loc in texts and any(is_secret_name(n) for n in _ENV.findall(leaf)))
    plain = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}, texts


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return re.sub(r"^.*?raised while resolving interpolation: ", "", text)


_TEXT_WANTED = {"string_type"}
_VALUE_WANTED = {"int_type", "int_parsing", "int_from_float", "float_type", "float_parsing", "bool_type", "bool_parsing"}


def _retype(values: dict[str, Any], error: ValidationError, source: Source) -> dict[str, Any] | None:
    """`values` with leaves that came as text read the way the schema wants them; None if there is nothing to do."""
    changed = False
    values = json.loads(json.dumps(values))
    for e in error.errors(include_url=False, include_input=False):
        text = next((t for loc, t in source.raw_texts.items() if e["loc"][: len(loc)] == loc), None)
        if text is None:
            continue
        loc = next(loc for loc in source.raw_texts if e["loc"][: len(loc)] == loc)
        place: Any = values
        for step in loc[:-1]:
            place = place[step]
        old = place[loc[-1]]
        if e["type"] in _TEXT_WANTED and not isinstance(old, str | dict | list | None.__class__):
            place[loc[-1]], changed = text, True
        elif e["type"] in _VALUE_WANTED and isinstance(old, str):
            new = yamlfile.scalar(old, dotted(loc))
            changed = changed or new != old
            place[loc[-1]] = new
    return values if changed else None
