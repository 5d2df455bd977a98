"""A veRL launch script or YAML file → the program it starts and the arguments it passes.

Knows no target key.  Invariant: nothing is executed, and every word of the launch's argument list is in exactly one of
`arguments`, `options` and `notes` (or is "$@").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rft.config import yamlfile
from rft.config.schema.source import leaves
from rft.errors import ConfigError, ConfigErrors, raise_all
from rft.extras.migrate.convert import hydra, programs
from rft.extras.migrate.convert.interpret import Interpreter, StartedProgram
from rft.extras.migrate.convert.programs import Program
from rft.extras.migrate.convert.shell import parse
from rft.extras.migrate.convert.values import PASSED, Text, lone, names_in, shown

_YAML = {".yaml", ".yml", ".json"}
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)")
_RELATIVE = re.compile(r"(\$\{(?:oc\.select:)?\s*)(\.+)")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([A-Za-z_][\w.]*)\s*(?:,\s*([^${}]*))?\}")
_OTHERS = "of other tools: docs/migration.md"
MAX_REFERENCES = 8


@dataclass(frozen=True)
class Argument:
    """One `key=value` of the argument list, e.g. `+data.seed=1` as key "data.seed", value 1, text "1", prefix "+"."""

    key: str  # dotted veRL key, without + ++ ~
    value: Any  # None, bool, int, float, str, list or dict, read the way Hydra reads it
    text: str  # the value as written, after shell expansion
    line: int  # in the file, from 1
    prefix: str = ""  # "", "+", "++" or "~"
    variables: tuple[str, ...] = ()  # environment variables that stay in it as ${oc.env:NAME}
    unknown: str = ""  # why the script does not tell the value, which is then None


@dataclass(frozen=True)
class Launch:
    """What a script starts.  A key written twice is there twice; the last one counts.

    `options` are Hydra's own dash options, with the option as key: "--config-name".
    """

    program: Program
    arguments: tuple[Argument, ...]
    passed_through: bool  # "$@" is handed on
    notes: tuple[str, ...] = ()
    path: str = ""
    options: tuple[Argument, ...] = ()
    launcher: tuple[str, ...] = ()  # the words before the program: ("torchrun", "--nproc_per_node=8", "-m", …)


def read_launch(path: Path) -> Launch:
    """The launch of a shell script, or of a veRL YAML file (by its ending).  Raises ConfigError(s) naming file and line."""
    text = _read(path)
    if path.suffix.lower() in _YAML:
        return _from_yaml(text, path)
    try:
        return _from_script(text, path)
    except RecursionError:
        raise ConfigError(f"{path.name}: nested too deeply to be read; write the launch with plain values") from None


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > yamlfile.MAX_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes; a launch script may have at most {yamlfile.MAX_BYTES:,}")
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}; name a veRL launch script or YAML file") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError(f"{path.name}, line {line}: not UTF-8 text (byte {e.start}); is this a launch script?") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ConfigError(f"{path.name}, line {line}: holds a zero byte; this is a binary file, not a launch script")
    return text


def _variables(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_ENVIRONMENT.findall(text)))


# -- scripts


def _from_script(text: str, path: Path) -> Launch:
    try:
        commands = parse(text, path.name)
    except ConfigError as e:
        if programs.mentions(text):
            raise
        raise ConfigError(f"{e.message}; nor does it name a veRL program: is {path.name} a launch script?") from None
    interpreter = Interpreter(str(path), path.name)
    interpreter.script(commands)
    if not interpreter.started and programs.mentions(text):
        interpreter = Interpreter(str(path), path.name, prefer_launch=True)
        interpreter.script(commands)
    if not interpreter.started:
        raise _no_launch(text, path.name, interpreter)
    started, *later = interpreter.started
    for other in later:
        entry = other.found.entry
        interpreter.note(other.line, f"a further launch, {shown(entry, interpreter.marks)}, is not read; convert it on its own")
    for other in interpreter.others:
        interpreter.note(other.line, f"{shown(other.found.entry, interpreter.marks)} has no counterpart here and is not read")
    reader = _Arguments(started, interpreter)
    reader.read()
    entry = shown(started.found.entry, interpreter.marks)
    first = f"{path.name}, line {started.line}: starts {entry}"
    if said := programs.PROGRAMS.get(entry, ("", ""))[1]:
        first += f" ({said})"
    elif entry.endswith(".py"):
        first += " (a file of its own may differ from veRL's; what it changes is not seen)"
    notes = [f"line {line}: {note}" if line else note for line, note in sorted(interpreter.notes)]
    assert started.found.program is not None
    return Launch(
        program=started.found.program,
        arguments=tuple(reader.arguments),
        passed_through=reader.passed,
        notes=(first, *notes),
        path=str(path),
        options=tuple(reader.options),
        launcher=tuple(shown(w, interpreter.marks) for w in started.launcher),
    )


def _no_launch(text: str, name: str, interpreter: Interpreter) -> ConfigError:
    expected = f"a launch is e.g. `python3 -m verl.trainer.main_ppo key=value …`; programs: {programs.KNOWN}; {_OTHERS}"
    if interpreter.others:
        other = interpreter.others[0]
        entry = shown(other.found.entry, interpreter.marks)
        own = "where it is veRL's trainer with code of yours, write verl.trainer.main_ppo in its place and carry that code over"
        return ConfigError(f"{name}, line {other.line}: {entry} has no counterpart here; {own}; {expected}")
    for number, line in enumerate(text.splitlines(), 1):
        if programs.mentions(line) and not line.lstrip().startswith("#"):
            return ConfigError(
                f"{name}, line {number}: a veRL program is named here but never started on the way that was read; keep what sets its "
                f"arguments, leave out what ends the script or a branch before it; {expected}"
            )
    rows = text.splitlines()
    for number, row in enumerate(rows, 1):
        if re.search(r"\b(?:python|torchrun|ray\b)", row.split("#")[0]):
            return ConfigError(
                f"{name}, line {number}: {row.strip()[:60]!r} is no veRL launch, nor is anything else here; {expected}"
            )
    return ConfigError(f"{name}, line {len(rows) or 1}: the script ends without starting a veRL program; {expected}")


class _Arguments:
    """Sorts the words of a launch into arguments, options and notes."""

    def __init__(self, started: StartedProgram, interpreter: Interpreter) -> None:
        self.words, self.program = list(started.words), started.found.program
        self.note, self.marks, self.name = interpreter.note, interpreter.marks, interpreter.name
        self.arguments: list[Argument] = []
        self.options: list[Argument] = []
        self.passed = False
        self.errors: list[ConfigError] = []

    def read(self) -> None:
        waiting = iter(self.words)
        for word in waiting:
            if PASSED in word.text:
                self.passed = True
                if word.text == PASSED:
                    continue
                self.note(word.line, f'"$@" inside {shown(word.text, self.marks)!r} is taken as empty')
                word = Text(word.text.replace(PASSED, ""), word.line)
            if name := lone(word.text):
                self.note(word.line, f"${name} is not set by the script and taken as empty")
            elif not word.text.strip(" \t\n\\"):
                self.note(word.line, "an empty argument is left out")
            elif word.text.startswith("-"):
                following = next(waiting, None) if programs.HYDRA_OPTIONS.get(word.text) else None
                self.option(word, following)
            else:
                self.argument(word)
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else ConfigErrors(self.errors)

    def fail(self, line: int, message: str) -> None:
        self.errors.append(ConfigError(f"{self.name}, line {line}: {message}"))

    def option(self, word: Text, following: Text | None) -> None:
        name, equals, value = word.text.partition("=")
        if name not in programs.HYDRA_OPTIONS:
            return self.fail(word.line, f"{shown(word.text, self.marks)!r} is neither key=value nor one of Hydra's options")
        text = shown(value if equals else following.text if following else "", self.marks)
        if programs.HYDRA_OPTIONS[name] and not text:
            return self.fail(word.line, f"{name} has no value")
        name = programs.LONG_FORM.get(name, name)
        self.options.append(Argument(name, text or True, text, word.line, variables=_variables(text)))
        self.note(
            word.line, f"{name}{' ' + text if text else ''} is an option of Hydra; keys that only such a file sets are not read"
        )
        return None

    def argument(self, word: Text) -> None:
        found = hydra.split(word.text)
        given = shown(word.text, self.marks)
        if found is None:
            return self.fail(word.line, f"{given[:120]!r} is no key=value, as in data.train_batch_size=1024")
        prefix, key, text = found
        written, value = shown(text or "", self.marks), None
        why = self.untold(text or "")
        if not why and text is not None:
            try:
                value = hydra.value(written)
            except ConfigError as e:
                why = e.message
        if old := next((a for a in reversed(self.arguments) if a.key == key), None):
            self.note(old.line, f"{old.prefix}{key}={old.text} is replaced by {given} on line {word.line}")
        names = _variables(written)
        for name in names:
            if re.fullmatch(r"ARG\d+", name):
                self.note(
                    word.line,
                    f"${name[3:]}, an argument of the script, becomes ${{oc.env:{name}}} in {key}; set {name} or write the value",
                )
        self.arguments.append(Argument(key, value, written, word.line, prefix, names, why))
        return None

    def untold(self, text: str) -> str:
        """Why the script does not tell a value; "" if it does."""
        if unknown := self.marks.of(text):
            what = unknown[0]
            written = f"{what.what!r} on line {what.line}" if what.line else repr(what.what)
            return f"its value comes from {written}: {what.why}; write the value itself there"
        if "#" in names_in(text):
            return "its value comes from $#, the number of arguments, which only the caller of the script knows"
        return ""


# -- YAML


def _from_yaml(text: str, path: Path) -> Launch:
    values, lines = yamlfile.parse(text, path.name)
    if not isinstance(values, dict) or not values:
        raise ConfigError(
            f"{path.name}, line 1: no veRL configuration; the top level must be a mapping with data, actor_rollout_ref, …"
        )
    notes = [f"{path.name}: read as veRL's resolved configuration"]
    if all(
        isinstance(v, dict) and "value" in v and v.keys() <= {"value", "desc"} for k, v in values.items() if k != "wandb_version"
    ):
        values = {k: v["value"] for k, v in values.items() if k not in ("wandb_version", "_wandb")}
        lines = {(loc[0], *loc[2:]): n for loc, n in lines.items() if len(loc) > 1 and loc[1] == "value"}
        notes.append("the form in which W&B keeps a configuration: {value: …} around each section")
    program = _yaml_program(values)
    if program is None:
        raise ConfigError(
            f"{path.name}, line 1: no veRL configuration: it has {', '.join(map(str, list(values)[:6]))}; "
            f"one has data and actor_rollout_ref (RL), model.partial_pretrain (SFT) or data.response_key (evaluation); {_OTHERS}"
        )
    written: list[Argument] = []
    for loc, value in leaves(values, lists=False):
        line = lines.get(loc) or next((n for at, n in lines.items() if at[: len(loc)] == loc), 1)
        key = ".".join(map(str, loc))
        if loc[0] in ("hydra", "defaults") or loc[-1] == "_target_":
            notes.append(f"line {line}: {key} is Hydra's own and not read")
            continue
        written.append(Argument(key, value, "", line))
    arguments = opened(written, {})
    raise_all([ConfigError(f"{path.name}, line {a.line}: {a.unknown}", key=a.key) for a in arguments if a.unknown])
    told = (replace(a, text="null" if a.value is None else str(a.value), variables=_variables(str(a.value))) for a in arguments)
    return Launch(program, tuple(told), False, tuple(notes), str(path))


def _yaml_program(values: dict[str, Any]) -> Program | None:
    data = values["data"] if isinstance(values.get("data"), dict) else {}
    model = values["model"] if isinstance(values.get("model"), dict) else {}
    if "async_training" in values:
        return "fully_async"
    if "actor_rollout_ref" in values:
        return "yaml"
    if "partial_pretrain" in model or ("optim" in values and "model" in values):
        return "sft_trainer" if "engine" in values else "sft"
    return "main_eval" if "response_key" in data and "model" not in values else None


# -- references between arguments


def _absolute(value: Any, at: list[str]) -> Any:
    """References from the key's own group, ${.a}, or from those around it, ${..a}, as references from the top."""
    return _RELATIVE.sub(lambda m: m[1] + "".join(f"{p}." for p in at[: -len(m[2])]), value) if isinstance(value, str) else value


def opened(arguments: Sequence[Argument], others: Mapping[str, Any]) -> tuple[Argument, ...]:
    """Each ${a.b} replaced by what that key is: the argument, the group of arguments below it, else what `others` has.

    An argument that refers to nothing known, or to itself, gets the reason in `unknown`.  ${oc.env:X} and other resolvers stay.
    """
    arguments = [replace(a, value=_absolute(a.value, a.key.split("."))) for a in arguments]
    given = {a.key: a.value for a in arguments}
    untold = {a.key: a.unknown for a in arguments if a.unknown}

    def look_up(key: str, otherwise: str | None, depth: int) -> Any:
        below = {k.removeprefix(f"{key}."): v for k, v in given.items() if k.startswith(f"{key}.")}
        if key not in given and not below and key not in others and otherwise is None:
            raise ConfigError(f"${{{key}}} refers to a key that the file does not have; write its value")
        if key in untold:
            raise ConfigError(untold[key])
        found = value(given[key] if key in given else below or others.get(key), depth + 1)
        return hydra.scalar(otherwise) if found is None and otherwise is not None else found

    def value(written: Any, depth: int = 0) -> Any:
        if depth > MAX_REFERENCES:
            raise ConfigError(f"{written!r} refers to itself")
        if isinstance(written, list):
            return [value(v, depth) for v in written]
        if isinstance(written, dict):
            return {k: value(v, depth) for k, v in written.items()}
        if not isinstance(written, str) or "${" not in written:
            return written
        if whole := _REFERENCE.fullmatch(written.strip()):
            return look_up(whole[1], whole[2], depth)
        return _REFERENCE.sub(lambda m: str(look_up(m[1], m[2], depth)), written)

    def one(a: Argument) -> Argument:
        try:
            return replace(a, value=value(a.value))
        except ConfigError as e:
            return replace(a, value=None, unknown=e.message)

    return tuple(map(one, arguments))
