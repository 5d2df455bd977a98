"""A YAML file and `key=value` overrides → `RunConfig`, or every error at once, in sentences.

Knows the schema's classes, not what they mean.  Invariants: what comes out has passed the schema;
nothing has been looked up, opened or started besides the file; a secret's value never enters a
message.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rft.config import expansions, extends, foreign, yamlfile
from rft.config.foreign import advice, value_advice
from rft.config.schema.root import RunConfig
from rft.config.schema.source import Loc, Source, dotted, hidden, is_secret, leaves, plain, undotted
from rft.config.schema.walk import aliases, all_keys, extra, field_at, fields_at
from rft.errors import ConfigError, ConfigErrors, nearest, raise_all
from rft.secrets import REDACTED, is_secret_name, learn_secrets, looks_random, url_passwords

_PATH = re.compile(r"""[^.\[\]"']+(\.?\[-?\d+\]|\.[^.\[\]"']+)*""")
_ENV = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)")


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
    origins: dict[Loc, str] = {}
    warnings = foreign.expand(values, origins)
    return validate(
        _source(None, extends.Written(values, origins, "", [], warnings), overrides, "")
    )


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
            names = _ENV.findall(leaf)
            origins[loc] = (
                f"{origins.get(loc, 'given')} ({', '.join('$' + n for n in names) or leaf})"
            )
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

    def given_here(loc: Loc) -> bool:
        return any(
            o.startswith("override") for at, o in written.origins.items() if at[: len(loc)] == loc
        )

    written.warnings += foreign.expand(written.values, written.origins, given_here)
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
            why = (
                "is not a list"
                if place
                else f"is not written, so it has no entries; write {here}=[...]"
            )
            raise ConfigError(f"override {override!r}: {here} {why}", key=dotted(done))
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
    """`${oc.env:X}`, `${oc.env:X,default}` and `${a.b}` replaced; and the text of each leaf that
    had one.
    """
    written = list(leaves(values))
    marked = [(loc, leaf) for loc, leaf in written if isinstance(leaf, str) and "${" in leaf]
    if not marked:
        return values, {}
    expansions.refuse_bombs(written, origins or {})
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    errors: list[ConfigError] = []
    texts: dict[Loc, str] = {}

    def wrong(loc: Loc, leaf: str, message: str) -> None:
        line = re.match(r"[^(]*", (origins or {}).get(loc, ""))
        where = f"  ({line[0].strip()})" if line and line[0].strip() else ""
        given = REDACTED if any(is_secret(str(part), leaf) for part in loc) else leaf
        errors.append(
            ConfigError(f"given {given!r}: {message}{where}", key=dotted(loc), given=given)
        )

    for loc, leaf in marked:
        try:
            OmegaConf.create([leaf])
        except OmegaConfBaseException:
            wrong(
                loc,
                leaf,
                "cannot be read; write ${oc.env:NAME}, ${oc.env:NAME,DEFAULT} or ${another.key}; "
                "as a text \\${...}",
            )
    raise_all(errors)
    tree = OmegaConf.create(values)
    for loc, leaf in marked:
        try:
            node: Any = tree
            for step in loc:
                node = node[step]
            if isinstance(node, str):
                texts[loc] = node
        except OmegaConfBaseException as e:
            said = re.sub(
                r"^.*?raised while resolving interpolation: ", "", str(e).strip().partition("\n")[0]
            )
            wrong(loc, leaf, f"{said}{_remedy(leaf, e)}")
    raise_all(errors)
    learn_secrets(
        texts[loc]
        for loc, leaf in marked
        if loc in texts and any(is_secret_name(n) for n in _ENV.findall(leaf))
    )
    replaced = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(replaced, dict)
    return {str(k): v for k, v in replaced.items()}, texts


def _remedy(leaf: str, error: Exception) -> str:
    """What to do about a reference that leads nowhere."""
    if "not found" not in str(error):
        return ""
    if missing := _ENV.findall(leaf):
        return f"; set it, or write ${{oc.env:{missing[0]},DEFAULT}}"
    if (key := re.search(r"key '([^']+)' not found", str(error))) and field_at(
        undotted(key[1])
    ) is not None:
        return "; references see what is written, no defaults: write that key, too"
    return "; a text that is no reference is written \\${...}"


_VALUE_WANTED = {
    "int_type",
    "int_parsing",
    "int_from_float",
    "float_type",
    "float_parsing",
    "bool_type",
    "bool_parsing",
}


def _retype(
    values: dict[str, Any], error: ValidationError, source: Source
) -> dict[str, Any] | None:
    """`values` with leaves that came as text read the way the schema wants them; None if there is
    nothing to do.
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
        if e["type"] == "string_type" and not isinstance(old, str | dict | list | None.__class__):
            place[loc[-1]], changed = source.raw_texts[loc], True
        elif e["type"] in _VALUE_WANTED and isinstance(old, str):
            new = yamlfile.scalar(old, dotted(loc))
            changed = changed or new != old
            place[loc[-1]] = new
    return values if changed else None


# ---------------------------------------------------------------- pydantic's errors in sentences


def explain(error: ValidationError, source: Source) -> list[ConfigError]:
    """One ConfigError for each key that is wrong, in the order of the schema."""
    found: dict[str, ConfigError] = {}
    for e in error.errors(include_url=False):
        loc = _real(tuple(e["loc"]), source.values)
        key = dotted(loc)
        if key not in found:
            found[key] = ConfigError(
                _sentence(e, loc, source), key=key, given=_shown(loc, e.get("input"))
            )
    return list(found.values())


def _sentence(e: Any, loc: Loc, source: Source) -> str:
    key = dotted(loc)
    kind = e["type"]
    given = e.get("input")
    where = f"  ({source.where(loc)})" if source.where(loc) else ""
    if kind == "extra_forbidden":
        return f"{_unknown(loc, given)}{where}"
    if kind == "missing":
        field = field_at(loc)
        return f"is required: {field.description if field and field.description else 'write it'}"
    got = f"given {_show(_shown(loc, _written(source, loc, given)))}"
    if hint := value_advice(key, given):
        return f"{got}: {hint}{where}"
    return f"{got}; {_allowed(e, loc)}{', or left out' if given is None else ''}{where}"


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
    fields = fields_at(loc[:-1])
    if same := next((n for n, f in fields.items() if loc[-1] in aliases(f)), ""):
        return f"is another name of {same}, which is written too; write one of them"
    near = [n for n in fields if not isinstance(given, dict) or fields_at((*loc[:-1], n))]
    return (
        f"unknown key.{did_you_mean(loc, near)}  Known here: "
        f"{', '.join(fields) or 'nothing, it is a value'}"
    )


def did_you_mean(loc: Loc, near: list[str]) -> str:
    """A question with the key of the same name elsewhere, the nearest of the names `near` at the
    same place, or the nearest of all.
    """
    key = dotted(loc)
    last = str(loc[-1])
    close = [k for k in all_keys() if k.rsplit(".", 1)[-1] == last]
    here = difflib.get_close_matches(last, near, n=1, cutoff=0.65) or [
        n for n in near if len(last) > 2 and last in n
    ]
    close = close or _below(loc, last) or [dotted((*loc[:-1], n)) for n in here]
    close = close or [
        k
        for k in difflib.get_close_matches(key, all_keys(), n=1, cutoff=0.9)
        if not key.startswith(f"{k}.")
    ]
    return f"  Did you mean {' or '.join(close[:2])}?" if close else ""


def _below(loc: Loc, last: str) -> list[str]:
    """A key deeper in the same section whose name is all but `last`: engine_nums →
    rollout_model.engine_num.
    """
    section = f"{dotted(loc[:-1])}." if len(loc) > 1 else ""
    inside = {
        k.rsplit(".", 1)[-1]: k for k in reversed(all_keys()) if section and k.startswith(section)
    }
    return [inside[n] for n in difflib.get_close_matches(last, inside, n=1, cutoff=0.9)]


def _allowed(e: Any, loc: Loc) -> str:
    kind = e["type"]
    ctx = e.get("ctx", {})
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
        hint = nearest(
            str(e.get("input")).lower(),
            [n.strip(" '") for n in ctx["expected"].replace(" or ", ", ").split(",")],
        )
        return f"must be one of {ctx['expected']}{'.' if hint else ''}{hint}"
    quoted = isinstance(e.get("input"), str) and kind not in ("string_type",)
    tail = "; remove the quotes" if quoted and yamlfile.is_number(e["input"]) else ""
    if kind.startswith("int"):
        return f"must be a whole number{_unit(loc)}{tail}"
    if kind == "finite_number":
        return f"must be a finite number{_unit(loc)}"
    if kind.startswith("float"):
        return f"must be a number{_unit(loc)}{tail}"
    if kind.startswith("bool"):
        named = quoted and e["input"].strip().lower() in ("true", "false", "yes", "no", "on", "off")
        return f"must be true or false{'; remove the quotes' if named else ''}"
    if kind == "string_type":
        return (
            "must be a text"
            if isinstance(e.get("input"), dict | list | None)
            else "must be a text; put it in quotes"
        )
    if kind in ("tuple_type", "list_type"):
        names = list(fields_at(loc))
        return (
            f"must be a list of mappings: [{{{names[0]}: ..., {names[1]}: ...}}]"
            if len(names) > 1
            else "must be a list: [a, b]"
        )
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        names = list(fields_at(loc))
        return f"must be a mapping{' with keys such as ' + ', '.join(names[:5]) if names else ''}"
    if kind == "string_pattern_mismatch":
        return (
            "must begin with a letter or digit and hold no slash and no invisible character, "
            "since it becomes part of a path"
        )
    if kind in ("too_long", "too_short"):
        most = ctx.get("max_length")
        least = ctx.get("min_length")
        return f"must have at {f'most {most}' if least is None else f'least {least}'} of them"
    if kind == "string_too_long":
        return f"must have at most {ctx['max_length']} characters"
    text = str(e["msg"]).removeprefix("Value error, ")
    return text[0].lower() + text[1:]


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
    kept: list[str | int] = []
    for part in loc:
        there = part in (
            values
            if isinstance(values, dict)
            else range(len(values))
            if isinstance(values, list)
            else ()
        )
        if there or not (
            any(c in str(part) for c in "[(- ")
            or (kept and part in ("str", "int", "float", "bool"))
        ):
            kept.append(part)
            values = values[part] if there else None
    return tuple(kept)
