"""A YAML file and `key=value` overrides → `RunConfig`, or every error at once, in sentences.

Depends on the schema's classes, not on what they mean.  Invariants: what comes out has passed the
schema; nothing has been looked up, opened or started besides the file; a secret's value never
enters a message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rft.config import extends, yamlfile
from rft.config.hints import key_hint, refuse_other_tools, value_hint
from rft.config.schema.root import RunConfig
from rft.config.schema.source import Loc, Source, dotted, hidden, is_secret, leaves, plain, undotted
from rft.config.schema.walk import all_keys, extra, field_at, fields_at, owner
from rft.errors import ConfigError, ConfigErrors, most_similar, nearest, raise_all
from rft.schema.base import belongs
from rft.secrets import REDACTED, is_secret_name, learn_secrets, looks_random, url_passwords

_PATH = re.compile(r"""[^.\[\]"']+(\.?\[-?\d+\]|\.[^.\[\]"']+)*""")
_ENV = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)")
_KEY = re.compile(r"\$\{\s*(?:oc\.select\s*:\s*)?([\w.\[\]-]+)")
_UNREADABLE = (
    "cannot be read; write ${oc.env:NAME}, ${oc.env:NAME,DEFAULT} or ${another.key}; as a text "
    "\\${...}"
)
MAX_DEPTH = 64  # of references to keys that refer to others


def load(path: str | Path, overrides: Sequence[str] = (), *, stage: str = "") -> RunConfig:
    """The configuration written in `path`, with `overrides` such as "algorithm.optimizer.lr=1e-5"
    or "a.b[0].c=[1, 2]" on top.

    Values of overrides are YAML.  Of a file with stages, `stage` says which.  Raises ConfigError,
    or ConfigErrors with all that is wrong.
    """
    return validate(read(path, overrides, stage=stage))


def from_dict(values: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The same from values that are already there."""
    if "extends" in values:
        raise ConfigError(
            "belongs into a file, whose folder it is relative to; merge the values yourself",
            key="extends",
        )
    return validate(_source(None, extends.Written(values, {}, "", []), overrides, ""))


def stage_names(path: str | Path, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """The stages that `path` describes, in order; none of an ordinary configuration."""
    written = extends.read(Path(path).expanduser(), lambda values: _interpolate(values)[0])
    _override(written, overrides)
    return extends.names(written.values)


def read(path: str | Path, overrides: Sequence[str] = (), *, stage: str = "") -> Source:
    """The written form, merged and interpolated, not yet checked against the schema."""
    path = Path(path).expanduser()
    return _source(
        path, extends.read(path, lambda values: _interpolate(values)[0]), overrides, stage
    )


def validate(source: Source, retyped: dict[str, Any] | None = None) -> RunConfig:
    """Checks against the schema.  Numbers that came as text, from the environment or an override,
    are read as numbers here.
    """
    values = dict(source.values) if retyped is None else retyped
    refuse_other_tools(values, lambda key: source.where((key,)))
    try:
        config = RunConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as e:
        if retyped is None and (fixed := _retype(values, e, source)) is not None:
            return validate(source, fixed)
        raise ConfigErrors(extends.rekey(explain(e, source), source)) from None
    config._source = source
    return config


def _source(
    path: Path | None, written: extends.Written, overrides: Sequence[str], stage: str
) -> Source:
    raw = _override(written, overrides)
    chosen = extends.select(written.values, written.origins, stage)
    values = chosen.values
    origins = chosen.origins
    for loc, leaf in leaves(values):
        if isinstance(leaf, str) and "${" in leaf:
            names = ", ".join(f"${name}" for name in _variables(leaf)) or leaf
            origins[loc] = f"{origins.get(loc, 'given')}, {names}"
    values, replaced = _interpolate(values, origins)
    raw.update(replaced)
    learn_secrets(
        str(v)
        for loc, v in leaves(values)
        if hidden(loc, v) and (is_secret(str(loc[-1]), v) or looks_random(str(v)))
    )
    learn_secrets(p for _, v in leaves(values) if isinstance(v, str) for p in url_passwords(v))
    return Source(
        path=path,
        text=written.text,
        overrides=tuple(overrides),
        values=values,
        origins=origins,
        raw_texts=raw,
        files=tuple(written.files),
        warnings=chosen.warnings,
        stage=stage,
        sections=chosen.sections,
    )


def _variables(leaf: str) -> list[str]:
    """Return the variables that `leaf` depends on: not those in the default of one that is set."""
    names = _ENV.findall(leaf)
    is_one = re.fullmatch(r"\$\{[^{}]*(\$\{[^{}]*\}[^{}]*)*\}", leaf)
    return names[:1] if is_one and names and names[0] in os.environ else names


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
            errors.append(
                ConfigError(
                    "cannot be an override; give the differing keys as key=value",
                    key="extends",
                    given=value,
                )
            )
        for at in [at for at in written.origins if at[: len(loc)] == loc]:
            del written.origins[at]
        written.origins.update((leaf, "override") for leaf, _ in leaves(value, loc))
        raw[loc] = text
    raise_all(errors)
    return raw


def assign(values: dict[str, Any], override: str) -> tuple[Loc, tuple[str, Any]]:
    """Puts one override into `values`; the place it went to, its text and its value."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(
            f"override {override!r} is not of the form key.path=value, e.g. "
            f"algorithm.optimizer.lr=1e-5"
        )
    if path[0] in "+~-":
        raise ConfigError(
            f"override {override!r}: leave out the {path[0]!r}; write key.path=value (null removes "
            f"a value)"
        )
    steps = list(undotted(path))
    if not _PATH.fullmatch(path):
        raise ConfigError(
            f"override {override!r}: cannot read the key {path!r}; write a.b.c, a.b.0.c or a.b[0].c"
        )
    value = yamlfile.scalar(text, f"override {path}")
    place: Any = values
    for i, step in enumerate(steps):
        done = tuple(steps[:i])
        is_list = isinstance(place, list)
        if is_list:
            steps[i] = _index(step, place, done, override)
        elif isinstance(step, int):
            here = dotted(done) or "the top level"
            problem = (
                "is not a list"
                if place
                else f"is not written, so it has no entries; write {here}=[...]"
            )
            raise ConfigError(f"override {override!r}: {here} {problem}", key=dotted(done))
        if i == len(steps) - 1:
            place[steps[i]] = value
            break
        inner = place[steps[i]] if is_list else place.get(step)
        if inner is None:
            inner = place[steps[i]] = {}
        if not isinstance(inner, dict | list):
            here = dotted(tuple(steps[: i + 1]))
            raise ConfigError(
                f"override {override!r}: {here} is {inner!r} and has no keys below it",
                key=here,
                given=inner,
            )
        place = inner
    return tuple(steps), (text.strip(), value)


def _index(step: str | int, place: list[Any], done: Loc, override: str) -> int:
    number = step if isinstance(step, int) else int(step) if re.fullmatch(r"-?\d+", step) else None
    if number is None or not -len(place) <= number < len(place):
        allowed = f"0 to {len(place) - 1}" if place else "none, it is empty"
        raise ConfigError(
            f"override {override!r}: {dotted(done)} is a list of {len(place)}; indexes: {allowed}",
            key=dotted(done),
        )
    return number % len(place)


def _interpolate(
    values: dict[str, Any], origins: Mapping[Loc, str] | None = None
) -> tuple[dict[str, Any], dict[Loc, str]]:
    """Replace `${oc.env:X}`, `${oc.env:X,default}` and `${a.b}`; also return the text of each leaf
    that had one.
    """
    marked = {loc: leaf for loc, leaf in leaves(values) if isinstance(leaf, str) and "${" in leaf}
    if not marked:
        return values, {}
    return _References(values, marked, origins or {}).resolve()


class _References:
    """The leaves with references, each resolved once, after the leaves that it refers to."""

    def __init__(
        self, values: dict[str, Any], marked: dict[Loc, str], origins: Mapping[Loc, str]
    ) -> None:
        self._values = values
        self._marked = marked
        self._origins = origins
        self._resolved: dict[Loc, Any] = {}
        self._open: list[Loc] = []
        self._size = 0  # characters of all resolved leaves
        self._errors: list[ConfigError] = []

    def resolve(self) -> tuple[dict[str, Any], dict[Loc, str]]:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        for loc, leaf in self._marked.items():
            try:
                OmegaConf.create([leaf])
            except OmegaConfBaseException:
                self._refuse(loc, _UNREADABLE)
        raise_all(self._errors)
        self._tree = OmegaConf.create(self._values)
        for loc in self._marked:
            self._resolve_leaf(loc)
        raise_all(self._errors)
        learn_secrets(
            self._resolved[loc]
            for loc, leaf in self._marked.items()
            if isinstance(self._resolved[loc], str)
            and any(is_secret_name(n) for n in _ENV.findall(leaf))
        )
        values = OmegaConf.to_container(self._tree, resolve=True)
        assert isinstance(values, dict)
        texts = {loc: text for loc, text in self._resolved.items() if isinstance(text, str)}
        return {str(k): v for k, v in values.items()}, texts

    def _resolve_leaf(self, loc: Loc) -> None:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if loc in self._resolved or loc in self._open:  # a circle is OmegaConf's to name
            return
        if len(self._open) == MAX_DEPTH:
            self._refuse(loc, f"is reached through more than {MAX_DEPTH} references in a row")
            raise_all(self._errors)
        self._open.append(loc)
        for key in _KEY.findall(self._marked[loc]):
            target = undotted(key)
            for at in self._marked:
                if at[: len(target)] == target:
                    self._resolve_leaf(at)
        self._open.pop()
        try:
            node: Any = self._tree
            for step in loc[:-1]:
                node = node[step]
            value = node[loc[-1]]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as e:
            reason = str(e).strip().partition("\n")[0]
            reason = re.sub(r"^.*?raised while resolving interpolation: ", "", reason)
            self._refuse(loc, f"{reason}{_remedy(self._marked[loc], e)}")
            self._resolved[loc] = None
            return
        self._size = self._size + sum(len(str(leaf)) + 50 for _, leaf in leaves(value))
        if self._size > yamlfile.MAX_BYTES:
            self._refuse(
                loc, f"its references unfold to more than {yamlfile.MAX_BYTES:,} characters"
            )
            raise_all(self._errors)
        self._resolved[loc] = value
        node[loc[-1]] = value.replace("${", "\\${") if isinstance(value, str) else value

    def _refuse(self, loc: Loc, message: str) -> None:
        line = self._origins.get(loc, "").partition("(")[0].strip()
        leaf = self._marked[loc]
        shown = REDACTED if any(is_secret(str(part), leaf) for part in loc) else leaf
        text = f"given {shown!r}: {message}{f'  ({line})' if line else ''}"
        self._errors.append(ConfigError(text, key=dotted(loc), given=shown))


def _remedy(leaf: str, error: Exception) -> str:
    """Say what to do about a reference that leads nowhere."""
    if "not found" not in str(error):
        return ""
    if missing := _ENV.findall(leaf):
        return f"; set it, or write ${{oc.env:{missing[0]},DEFAULT}}"
    key = re.search(r"key '([^']+)' not found", str(error))
    if key and field_at(undotted(key[1])) is not None:
        return "; references see what is written, no defaults: write that key, too"
    return "; a text that is no reference is written \\${...}"


def _retype(
    values: dict[str, Any], error: ValidationError, source: Source
) -> dict[str, Any] | None:
    """Return `values` with leaves that came as text read the way the schema wants them; None if
    nothing changes.
    """
    changed = False
    values = json.loads(json.dumps(values))
    for e in error.errors(include_url=False, include_input=False):
        loc = next((loc for loc in source.raw_texts if e["loc"][: len(loc)] == loc), None)
        if loc is None:
            continue
        place: Any = values
        for step in loc[:-1]:
            place = place[step]
        old = place[loc[-1]]
        new = old
        if e["type"] == "string_type" and isinstance(old, bool | int | float):
            new = source.raw_texts[loc]
        elif e["type"].startswith(("int_", "float_", "bool_")) and isinstance(old, str):
            new = yamlfile.scalar(old, dotted(loc))
        changed = changed or new != old
        place[loc[-1]] = new
    return values if changed else None


# ---------------------------------------------------------------- pydantic's errors in sentences


def explain(error: ValidationError, source: Source) -> list[ConfigError]:
    """One ConfigError for each key that is wrong, in the order of the schema."""
    errors: dict[str, ConfigError] = {}
    for e in error.errors(include_url=False):
        loc = _real(tuple(e["loc"]), source.values)
        key = dotted(loc)
        if key not in errors:
            errors[key] = ConfigError(
                _sentence(e, loc, source), key=key, given=_shown(loc, e.get("input"))
            )
    return list(errors.values())


def _sentence(e: Any, loc: Loc, source: Source) -> str:
    key = dotted(loc)
    kind = e["type"]
    value = e.get("input")
    where = f"  ({source.where(loc)})" if source.where(loc) else ""
    if kind == "extra_forbidden":
        return f"{_unknown(loc, value, source)}{where}"
    if kind == "missing":
        field = field_at(loc)
        return f"is required: {field.description if field and field.description else 'write it'}"
    got = f"given {_show(_shown(loc, _written(source, loc, value)))}"
    if hint := value_hint(key, value):
        return f"{got}: {hint}{where}"
    return f"{got}; {_allowed(e, loc)}{', or left out' if value is None else ''}{where}"


def _written(source: Source, loc: Loc, default: Any) -> Any:
    """The value before validators changed its case."""
    value: Any = source.values
    for part in loc:
        if isinstance(value, str):
            return value  # one name where a list may stand
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return default
    return value


def _unknown(loc: Loc, value: Any, source: Source) -> str:
    key = dotted(loc)
    if text := key_hint(key):
        return text
    if choice := owner(loc):
        chooser = choice.partition(" ")[0]
        field = field_at((*loc[:-1], chooser))
        default = field.default if field else None
        return belongs(choice, chooser, _written(source, (*loc[:-1], chooser), default))
    fields = fields_at(loc[:-1])
    near = [n for n in fields if not isinstance(value, dict) or fields_at((*loc[:-1], n))]
    listed = f"  Known here: {', '.join(fields) or 'nothing, it is a value'}"
    return f"unknown key.{did_you_mean(loc, near) or listed}"


def did_you_mean(loc: Loc, near: list[str]) -> str:
    """Return a question with the key of the same name elsewhere, the nearest of the names `near` at
    the same place, or the nearest of all.
    """
    last = str(loc[-1])
    by_name = {k.rpartition(".")[2]: k for k in reversed(all_keys())}
    here = most_similar(last, near, 0.65) or [n for n in near if len(last) > 2 and last in n]
    close = (
        [k for k in all_keys() if k.rpartition(".")[2] == last]
        or [dotted((*loc[:-1], n)) for n in here]
        or [by_name[n] for n in most_similar(last, by_name, 0.9)]
    )
    return f"  Did you mean {' or '.join(close[:2])}?" if close else ""


_ALLOWED = {  # kind of pydantic's error -> what is allowed
    "greater_than": "must be greater than {gt}{unit}",
    "greater_than_equal": "must be at least {ge}{unit}",
    "less_than": "must be less than {lt}{unit}",
    "less_than_equal": "must be at most {le}{unit}",
    "finite_number": "must be a finite number{unit}",
    "int": "must be a whole number{unit}{quotes}",
    "float": "must be a number{unit}{quotes}",
    "bool": "must be true or false{quotes}",
    "string_type": "must be a text",
    "string_pattern_mismatch": "must begin with a letter or digit and hold no slash and no "
    "invisible character, since it becomes part of a path",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} of them",
    "too_short": "must have at least {min_length} of them",
}
_WORDS = ("true", "false", "yes", "no", "on", "off")


def _allowed(e: Any, loc: Loc) -> str:
    kind = e["type"]
    given = e.get("input")
    names = list(fields_at(loc))
    ctx = {k: _number(v) for k, v in e.get("ctx", {}).items()}
    if kind == "literal_error":
        hint = nearest(str(given).lower(), re.findall(r"'([^']*)'", ctx["expected"]))
        return f"must be one of {ctx['expected']}{'.' if hint else ''}{hint}"
    if kind in ("tuple_type", "list_type"):
        entry = f"{{{names[0]}: ..., {names[1]}: ...}}" if len(names) > 1 else ""
        return f"must be a list of mappings: [{entry}]" if entry else "must be a list: [a, b]"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be a mapping{' with keys such as ' + ', '.join(names[:5]) if names else ''}"
    sentence = _ALLOWED.get(kind) or _ALLOWED.get(kind.partition("_")[0])
    if sentence is None:
        text = str(e["msg"]).removeprefix("Value error, ")
        return text[0].lower() + text[1:]
    is_quoted = isinstance(given, str) and (
        given.strip().lower() in _WORDS if kind.startswith("bool") else yamlfile.is_number(given)
    )
    quotes = "; remove the quotes" if is_quoted else ""
    if kind == "string_type" and isinstance(given, bool | int | float):
        sentence += "; put it in quotes"
    return sentence.format(unit=_unit(loc), quotes=quotes, **ctx)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unit(loc: Loc) -> str:
    unit = extra(field_at(loc), "unit")
    return f" ({unit})" if unit else ""


def _shown(loc: Loc, value: Any) -> Any:
    """`value` without secrets."""
    return REDACTED if any(is_secret(str(part), value) for part in loc) else plain(value, loc)


def _show(value: Any) -> str:
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _real(loc: tuple[Any, ...], values: Any) -> Loc:
    """pydantic puts names of union members and validators into the path; what stands in `values`,
    keys and indexes stay.
    """
    keys: list[str | int] = []
    for part in loc:
        exists = part in (
            values
            if isinstance(values, dict)
            else range(len(values))
            if isinstance(values, list)
            else ()
        )
        if exists or not (
            any(c in str(part) for c in "[(- ")
            or (keys and part in ("str", "int", "float", "bool"))
        ):
            keys.append(part)
            values = values[part] if exists else None
    return tuple(keys)
