"""Files that extend files: `extends: base.yaml`, or a list, merged into one tree with the file and line of each value.

Knows no schema.  Invariant: what a file writes wins over what it extends, and a later base over an earlier one; mappings merge, lists
and single values replace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.config import aliases, yamlfile
from rft.config.source import Loc
from rft.errors import ConfigError, ConfigErrors

MAX_DEPTH = 8
Interpolate = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Written:
    """A file with everything that it extends."""

    values: dict[str, Any]
    origins: dict[Loc, str]  # leaf -> "line 12", or "base.yaml line 12"
    text: str  # the file as written; of a file that extends others, the merged tree
    files: list[tuple[str, str]]  # (path, sha256), the file itself first
    warnings: list[str] = field(default_factory=list)


def read(path: Path, interpolate: Interpolate) -> Written:
    """The file at `path`.  Raises ConfigError(s) naming the file and the line; `interpolate` reads ${...} in names of bases."""
    found = _read(path, (), "", interpolate)
    if len(found.files) > 1:
        found.text = f"# {', '.join(p for p, _ in found.files)} as one\n{yamlfile.dump(found.values)}"
    return found


def _read(path: Path, above: tuple[Path, ...], label: str, interpolate: Interpolate) -> Written:
    chain = " → ".join(p.name for p in (*above, path))
    if path.resolve() in (p.resolve() for p in above):
        raise ConfigError(f"{chain}: a file cannot extend itself; remove one of them", key="extends", given=str(path))
    if len(above) > MAX_DEPTH:
        raise ConfigError(f"{chain}: more than {MAX_DEPTH} files deep; merge some of them", key="extends", given=str(path))
    text = _text(path, chain if above else "")
    values, lines = yamlfile.parse(text, path.name)
    if values is None:
        raise ConfigError(f"{path} is empty; it needs at least model.model_path and buffer.explorer_input")
    if not isinstance(values, dict):
        kind = "list" if isinstance(values, list) else "single value"
        raise ConfigError(f"{path} holds a {kind}; the top level must be a mapping such as `model:`")
    own = Written(
        values,
        {loc: f"{label} line {n}".strip() for loc, n in lines.items()},
        text,
        [(str(path), hashlib.sha256(text.encode()).hexdigest())],
    )
    bases = _bases(own, interpolate)
    own.warnings = _aliases(own, label)
    if not bases:
        return own
    merged = Written({}, {}, text, own.files)
    for name in bases:
        base = Path(name).expanduser()
        below = _read(path.parent / base, (*above, path), name, interpolate)
        _merge(merged.values, merged.origins, below.values, below.origins, ())
        merged.files += below.files
        merged.warnings += below.warnings
    _merge(merged.values, merged.origins, own.values, own.origins, ())
    merged.warnings += own.warnings
    return merged


def _text(path: Path, chain: str) -> str:
    """`chain`: the files that lead to it, of one that another file extends."""
    try:
        if path.stat().st_size > yamlfile.MAX_BYTES:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes; a configuration may have at most {yamlfile.MAX_BYTES:,}"
            )
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text (byte {e.start})") from None
    except OSError as e:
        if chain:
            hint = "the name is relative to the file it stands in"
            raise ConfigError(f"{chain}: cannot read {path}: {e.strerror}; {hint}", key="extends", given=str(path)) from None
        raise ConfigError(f"cannot read configuration {path}: {e.strerror}; --config names the YAML file") from None


def _bases(own: Written, interpolate: Interpolate) -> list[str]:
    """Names after `extends`, which is taken out."""
    where = next((o for at, o in own.origins.items() if at[:1] == ("extends",)), "")
    own.origins = {at: o for at, o in own.origins.items() if at[:1] != ("extends",)}
    given = own.values.pop("extends", None)
    if isinstance(given, list | str) and "${" in str(given):
        given = interpolate({"extends": given})["extends"]
    bases = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(bases, list) or not all(isinstance(b, str) and b for b in bases):
        raise ConfigError(f"must be a file name or a list of file names  ({where})", key="extends", given=given)
    return bases


def _aliases(own: Written, label: str) -> list[str]:
    """veRL's spellings become native keys file by file, so that a file's native key wins over its base's veRL spelling."""
    try:
        return aliases.expand(own.values, own.origins)
    except ConfigError as e:
        if not label:
            raise
        errors = e.errors if isinstance(e, ConfigErrors) else [e]
        raise ConfigErrors([ConfigError(f"{x.message}, in {label}", key=x.key, given=x.given) for x in errors]) from None


def _merge(into: dict[str, Any], origins: dict[Loc, str], values: dict[str, Any], new: dict[Loc, str], loc: Loc) -> None:
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
