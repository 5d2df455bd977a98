"""The configuration a run keeps in its folder, and what may change when the run is resumed.

`config.yaml` is what was written, `config.resolved.yaml` the whole tree with overrides, and
`config.json` the hashes, the versions of libraries and the tree for comparing.  Invariant: no
secret is written; the hash is of the original.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from rft.config import yamlfile
from rft.config.schema.root import RunConfig
from rft.config.schema.source import Loc, dotted, hidden, is_secret, plain, undotted
from rft.config.schema.walk import extra, field_at, fields_at
from rft.errors import ConfigError, ConfigErrors
from rft.files.disk import read_regular, write_whole
from rft.reward.judge_args import ModelLimits
from rft.secrets import REDACTED, redact

RESOLVED = "config.resolved.yaml"
_MOST_BYTES = 16 << 20  # of a config.json
LIBRARIES = (
    "rft-platform",
    "torch",
    "transformers",
    "vllm",
    "ray",
    "peft",
    "datasets",
    "numpy",
    "sqlalchemy",
)


def versions() -> dict[str, str]:
    """Of Python and of the libraries that decide what a run computes, as far as they are installed;
    nothing is imported.
    """
    installed = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return {**installed, "platform": platform.platform()}


@dataclass(frozen=True)
class Change:
    """One key that differs between the saved configuration and the one at hand."""

    key: str
    old: Any
    new: Any
    kind: Literal["safe", "refuse", "unknown"]  # unknown: no key of this version


def save(config: RunConfig, run_dir: Path, began_with: str = "") -> None:
    """Writes the three files, each aside and renamed.  `began_with`: a stage's model, where that is
    not the one that is written.
    """
    source = config.source
    tree = config.shown()
    head = (f"# {source.path}\n" if source.path else "") + (
        f"# stage: {source.stage}\n" if source.stage else ""
    )
    overrides = [_override(o) for o in source.overrides]
    comments = "".join(f"# override: {o}\n" for o in overrides)
    written = redact(_without_secrets(source.text)) if source.text else yamlfile.dump(tree)
    record = {
        "sha256": source.files[0][1] if source.files else None,
        "files": dict(source.files),
        "stage": source.stage,
        "path": str(source.path.absolute()) if source.path else None,
        "overrides": overrides,
        "versions": versions(),
        "tree": tree,
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / "config.yaml", redact(head + comments) + written)
    again = config.shown(again=True)
    again["model"]["model_path"] = began_with or again["model"]["model_path"]
    write_whole(run_dir / RESOLVED, yamlfile.dump(again))
    write_whole(run_dir / "config.json", json.dumps(record, indent=1))


def start_command(
    mode: str,
    path: Path | str,
    overrides: Sequence[str],
    plugin_dirs: Sequence[str] = (),
    *,
    in_process: bool = False,
) -> str:
    """The command that starts or resumes a run of a configuration file, without secrets."""
    verb = "serve" if mode == "serve" else "run"
    shown = [_override(o) for o in overrides if (verb, o) != ("serve", "mode=serve")]
    folders = [x for folder in plugin_dirs for x in ("--plugin-dir", folder)]
    return shlex.join(
        [
            "rft",
            verb,
            "--config",
            str(path),
            *(["--in-process"] if in_process else []),
            *folders,
            *shown,
        ]
    )


def saved(run_dir: Path) -> dict[str, Any]:
    """All of a run's config.json; the configuration is its "tree".  Raises ConfigError where there
    is none that can be read.
    """
    file = run_dir / "config.json"
    try:
        record = json.loads(read_regular(file, _MOST_BYTES))
        if isinstance(record["tree"], dict):
            return dict(record)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ConfigError(f"{file} cannot be read: {e}", key="RUN", given=str(run_dir)) from None
    raise ConfigError(f"{file} holds no configuration", key="RUN", given=str(run_dir))


def home(path: Path) -> Path:
    """The folder beside which a configuration's relative paths are looked for: of a run's own one
    that of the file it was made from.
    """
    with suppress(ConfigError):
        if path.name == RESOLVED and (made_from := saved(path.parent).get("path")):
            return Path(made_from).parent
    return path.absolute().parent


def changes(config: RunConfig, run_dir: Path) -> list[Change]:
    """What differs from the configuration saved in `run_dir`; nothing if none is saved there.
    Raises ConfigError if it is damaged.
    """
    if not (run_dir / "config.json").exists():
        return []
    try:
        old = saved(run_dir)["tree"]
    except ConfigError as e:
        text = (
            f"{run_dir / 'config.json'} is damaged ({e.message}); restore it, or choose another "
            f"`name` for this run"
        )
        raise ConfigError(text) from None
    differences = compare(
        plain(old), config.shown(), ()
    )  # an earlier version may have kept secrets
    return [Change(dotted(at), before, now, _kind(at)) for at, before, now in differences]


def refuse_changes(config: RunConfig, run_dir: Path) -> list[Change]:
    """The changes that are safe; raises ConfigErrors for those that would make it another run."""
    all_changes = changes(config, run_dir)
    if unknown := [c.key for c in all_changes if c.kind == "unknown"]:
        raise ConfigError(
            f"the run in {run_dir} began with another version of rft, which had "
            f"{', '.join(unknown)}; choose another `name`",
            key="name",
            given=config.name,
        )
    if refused := [c for c in all_changes if c.kind == "refuse"]:
        raise ConfigErrors(
            [
                ConfigError(
                    f"was {c.old!r} when the run in {run_dir} began and is {c.new!r} now; write "
                    f"the old value, or choose another `name`",
                    key=c.key,
                    given=c.new,
                )
                for c in refused
            ]
        )
    return all_changes


def compare(old: Any, new: Any, loc: Loc) -> Iterator[tuple[Loc, Any, Any]]:
    """(key, old value, new value) of each key at or below `loc` that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            # a key that came after the run began
            before = old[name] if name in old else _default((*loc, name))
            yield from compare(before, new.get(name), (*loc, name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from compare(a, b, (*loc, i))
    elif old != new:
        yield loc, old, new


def beyond_defaults(tree: dict[str, Any], loc: Loc = ()) -> Iterator[tuple[str, Any]]:
    """(key, value) of each key of a saved tree that is not its default; lists are whole but for
    those of sections.
    """
    for name, value in tree.items():
        at = (*loc, name)
        if value == _default(at) or _unknown(at):
            continue
        sections = (
            [(at, value)]
            if isinstance(value, dict)
            else [((*at, i), v) for i, v in enumerate(value or ())]
            if isinstance(value, list)
            else []
        )
        if sections and all(isinstance(v, dict) and v for _, v in sections):
            for where, inner in sections:
                yield from beyond_defaults(inner, where)
        else:
            yield dotted(at), value


def changed(tree: dict[str, Any]) -> dict[str, str]:
    """`beyond_defaults` as people read it."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in beyond_defaults(tree)
    }


def differing(runs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Of what each run has, keys whose value is not the same in all; "default" where a run does not
    name the key.
    """
    rows = {
        key: [run.get(key, "default") for run in runs]
        for key in dict.fromkeys(k for run in runs for k in run)
    }
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _default(loc: Loc) -> Any:
    field = field_at(loc)
    if field is None or field.is_required():
        return None
    return to_jsonable_python(field.get_default(call_default_factory=True))


def _unknown(loc: Loc) -> bool:
    return bool(fields_at(loc[:-1])) and field_at(loc) is None


def _kind(loc: Loc) -> Literal["safe", "refuse", "unknown"]:
    if _unknown(loc):
        return "unknown"
    return "safe" if _safe(loc) else "refuse"


def _safe(loc: Loc) -> bool:
    """A key may change if it, or a section around it, says so, and the limits of what a judge asks."""
    if "reward_fn_args" in loc and loc[-1] in ModelLimits.model_fields:
        return True
    return any(extra(field_at(loc[:end]), "on_resume") == "safe" for end in range(1, len(loc) + 1))


_REMARK = re.compile(r"(#.*?\b)([\w-]+)(\s*[:=]\s*)(\S+)")


def _override(text: str) -> str:
    key, equals, value = text.partition("=")
    secret = hidden(undotted(key.strip().lstrip("+~")), value)
    return f"{key}{equals}{REDACTED}" if secret and "${" not in value else redact(text)


def _without_secrets(text: str) -> str:
    """The YAML text with values under secret names replaced, line by line (block scalars and flow
    maps included).
    """
    for start, end in sorted(yamlfile.secret_spans(text), reverse=True):
        end_of_block = "\n" if text[start:end].endswith("\n") else ""
        text = text[:start] + f"'{REDACTED}'" + end_of_block + text[end:]
    return _REMARK.sub(
        lambda m: f"{m[1]}{m[2]}{m[3]}{REDACTED}" if is_secret(m[2], m[4]) else m[0], text
    )
