"""A veRL launch script or YAML file → the program it starts and the arguments it passes.

Depends on no target key.  Invariant: no program of a script is started, and every word of the
launch's argument list is in exactly one of `arguments`, `options` and `notes` (or is "$@").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rft.config import yamlfile
from rft.config.schema.source import leaves
from rft.errors import ConfigError, ConfigErrors, raise_all
from rft.extras.migrate.convert import hydra, programs
from rft.extras.migrate.convert.programs import Program
from rft.extras.migrate.convert.reading import COMPLAINT, Launched, ScriptReader, shown
from rft.extras.migrate.convert.recording import (
    INSTEAD,
    RUN_S,
    SANDBOX_VARIABLES,
    Command,
    Inputs,
    Recorder,
    Recording,
    without_own,
)
from rft.secrets import is_secret_name

_YAML = {".yaml", ".yml", ".json"}
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)")
_RELATIVE = re.compile(r"(\$\{(?:oc\.select:)?\s*)(\.+)")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([A-Za-z_][\w.]*)\s*(?:,\s*([^${}]*))?\}")
_OTHERS = "of other tools: docs/howto/from-verl.md"
MAX_REFERENCES = 8


@dataclass(frozen=True)
class Argument:
    """One `key=value` of the argument list, e.g. `+data.seed=1` as key "data.seed", value 1, text
    "1", prefix "+".
    """

    key: str  # dotted veRL key, without + ++ ~
    value: Any  # None, bool, int, float, str, list or dict, read the way Hydra reads it
    text: str  # the value as written, after shell expansion
    line: int  # in the file, from 1
    prefix: str = ""  # "", "+", "++" or "~"
    variables: tuple[str, ...] = ()  # environment variables that stay in it as ${oc.env:NAME}
    unknown: str = ""  # why the script does not tell the value, which is then None
    machine: bool = False  # because only the machine or the caller can tell it


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
    # the words before the program: ("torchrun", "--nproc_per_node=8", "-m", …)
    launcher: tuple[str, ...] = ()


def read_launch(path: Path, inputs: Inputs | None = None) -> Launch:
    """The launch of a shell script, or of a veRL YAML file (by its ending).  Raises ConfigError(s)
    naming file and line.
    """
    text = _read(path)
    if path.suffix.lower() in _YAML:
        return _from_yaml(text, path)
    try:
        return _from_script(text, path, inputs or Inputs())
    except RecursionError:
        raise ConfigError(
            f"{path.name}: a value is nested too deeply to be read; write the launch with plain "
            f"values"
        ) from None


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > yamlfile.MAX_BYTES:
            raise ConfigError(
                f"{path} has {size:,} bytes; a launch script may have at most "
                f"{yamlfile.MAX_BYTES:,}"
            )
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(
            f"cannot read {path}: {e.strerror}; name a veRL launch script or YAML file"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError(
            f"{path.name}, line {line}: not UTF-8 text (byte {e.start}); is this a launch script?"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ConfigError(
            f"{path.name}, line {line}: holds a zero byte; this is a binary file, not a launch "
            f"script"
        )
    return text


def _variables(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_ENVIRONMENT.findall(text)))


# -- scripts


def _from_script(text: str, path: Path, inputs: Inputs) -> Launch:
    if sign := re.search("[\ue000-\ue002]", text):
        line = text.count("\n", 0, sign.start()) + 1
        raise ConfigError(
            f"{path.name}, line {line}: holds the character U+{ord(sign[0]):X}, which has no place "
            f"in a script"
        )
    text = text.replace("\r\n", "\n")
    pattern = "|".join([*programs.FILES, *(["python"] if inputs.other else [])])
    read = without_own(text)
    reader = ScriptReader(Recorder(read, path, pattern), read, inputs)
    reading = reader.read()
    if reading is None:
        raise _no_launch(text, path.name, reader.first)
    command = reading.launched.command
    entry = shown(reading.launched.match.entry)
    arguments = _Arguments(path.name, text, command.line)
    arguments.notes += ((at, _CUT_OFF) for at in reading.launched.cut_off)
    arguments.read(reading.words[reading.start :])
    first = f"{path.name}, line {command.line}: starts {entry}"
    if remark := programs.PROGRAMS.get(entry, ("", ""))[1]:
        first += f" ({remark})"
    elif entry.endswith(".py") or inputs.other:
        first += " (a file of its own may differ from veRL's; what it changes is not seen)"
    messages = [
        *_defaults(text),
        *arguments.notes,
        *_environment(reading.launched, text),
        *_other_commands(reader.first, command),
    ]
    notes = dict.fromkeys(messages)
    assert reading.launched.match.program is not None
    return Launch(
        program=reading.launched.match.program,
        arguments=tuple(arguments.arguments),
        passed_through=arguments.passed,
        notes=(
            first,
            *(f"line {line}: {note}" if line else note for line, note in sorted(notes)),
            *reading.notes,
        ),
        path=str(path),
        options=tuple(arguments.options),
        launcher=tuple(_launcher_word(*word) for word in reading.words[: reading.start] if word[0]),
    )


def launch_of(words: Sequence[str], other: Program | None = None) -> Launch:
    """The launch that is written out: python3 -m verl.trainer.main_ppo KEY=VALUE ..."""
    match = programs.find(words, other)
    if match is None or match.program is None:
        raise ConfigError(
            f"{words[0]} is no launch script, and {' '.join(words)[:80]!r} starts no veRL program; "
            f"programs: {programs.KNOWN}"
        )
    arguments = _Arguments("command line", " ".join(words), 1)
    arguments.read((word, "") for word in words[match.start :])
    notes = tuple(note for _, note in arguments.notes)
    options = tuple(arguments.options)
    launcher = tuple(words[: match.start])
    return Launch(
        match.program, tuple(arguments.arguments), False, notes, "command line", options, launcher
    )


def _launcher_word(word: str, unknown: str) -> str:
    option, equals, _ = word.rpartition("=")
    return f"{option}{equals}(not known)" if unknown else word


def _no_launch(text: str, name: str, recording: Recording) -> ConfigError:
    expected = (
        f"a launch is e.g. `python3 -m verl.trainer.main_ppo key=value …`; programs: "
        f"{programs.KNOWN}; {_OTHERS}"
    )
    matches = ((c, programs.find(c.words)) for c in recording.commands)
    if other := next(((c.line, m.entry) for c, m in matches if m is not None), None):
        advice = (
            "where it is veRL's trainer with code of yours, add --as main_ppo and carry that code "
            "over"
        )
        return ConfigError(
            f"{name}, line {other[0]}: {shown(other[1])} has no counterpart here; {advice}; "
            f"{expected}"
        )
    rows = text.splitlines()
    if not recording.ended:
        return ConfigError(
            f"{name}, line {len(rows)}: the script does not end within {RUN_S:g} s; {INSTEAD}"
        )
    if complaints := COMPLAINT.findall(recording.errors):
        line, message = complaints[-1]
        hint = (
            " (what Hydra shall read stands in single quotes or begins with \\$)"
            if "bad substitution" in message
            else ""
        )
        return ConfigError(
            f"{name}, line {line}: bash starts no launch and says: {shown(message)}{hint}; "
            f"{expected}"
        )
    for number, line in enumerate(rows, 1):
        if programs.mentions(line) and not line.lstrip().startswith("#"):
            return ConfigError(
                f"{name}, line {number}: a veRL program is named here but never started where the "
                f"script leads by itself; keep what sets "
                f"its arguments, leave out what ends the script or a branch before it; {expected}"
            )
    for number, line in enumerate(rows, 1):
        if re.search(r"\b(?:python|torchrun|ray\b)", line.split("#")[0]):
            return ConfigError(
                f"{name}, line {number}: {line.strip()[:60]!r} is no veRL launch, nor is anything "
                f"else here; {expected}"
            )
    return ConfigError(
        f"{name}, line {len(rows) or 1}: the script ends without starting a veRL program; "
        f"{expected}"
    )


Note = tuple[int, str]  # line, or 0, and text
_CUT_OFF = (
    "no backslash ends the line before; what follows is read as arguments of the launch anyway"
)


def _defaults(text: str) -> Iterator[Note]:
    """Defaults of variables that nothing else in the script sets."""
    for number, line in enumerate(text.splitlines(), 1):
        for name, default in re.findall(r"\$\{(\w+):?[-=]([^}]*)", line.split(" #")[0]):
            assignment = re.compile(rf"(?<![\w.])({name})\+?=(?![\"']?\$\{{{name}:?[-=])")
            if not assignment.search(text) and default.strip("\"'"):
                who = f"${name}" if name.isdigit() else name
                yield (
                    number,
                    f"{who} is not set by the script; its default "
                    f"{default.strip(chr(34) + chr(39))!r} is taken",
                )


def _environment(launched: Launched, text: str) -> Iterator[Note]:
    """What the script sets for the run: exported, and among the words of the launcher."""
    exported = {
        n: v for n, v in launched.command.environment.items() if n not in launched.inputs.variables
    }
    among = (
        w.partition("=")[::2]
        for w in launched.words[: launched.match.start]
        if re.match(r"[A-Za-z_]\w*=", w)
    )
    for name, value in {**exported, **dict(among)}.items():
        if not name.startswith("RFT_") and name not in SANDBOX_VARIABLES:
            hidden = "<hidden>" if is_secret_name(name) and value else shown(value)[:80]
            lines = [n for n, row in enumerate(text.splitlines(), 1) if f"{name}=" in row]
            yield (
                next(
                    (n for n in reversed(lines) if n <= launched.command.line),
                    launched.command.line,
                ),
                f"sets {name}={hidden} for the run; a configuration does not carry it",
            )


def _other_commands(recording: Recording, launch: Command) -> Iterator[Note]:
    """What the script starts beside the launch."""
    for command in recording.commands:
        match = programs.find(command.words)
        base = command.words[0].rsplit("/", 1)[-1]
        if command.words == launch.words and command.line == launch.line:
            continue
        if match is not None and match.program is not None:
            yield (
                command.line,
                f"a further launch, {shown(match.entry)}, is not read; convert it on its own",
            )
        elif match is not None:
            yield command.line, f"{shown(match.entry)} has no counterpart here and is not read"
        elif base == "source":
            yield (
                command.line,
                f"`source {shown(' '.join(command.words[1:2]))}` is not read; what it sets counts "
                f"as not set",
            )
        elif re.fullmatch(r"python[\d.]*", base) and len(command.words) > 1:
            rest = next((w for w in command.words[1:] if not w.startswith("-")), command.words[-1])
            yield command.line, f"`{base} … {shown(rest)[:60]}` is another program; it is not read"


class _Arguments:
    """Sorts the words of a launch, which stands in `text` at `line`, into arguments, options and
    notes.
    """

    def __init__(self, name: str, text: str, line: int) -> None:
        self.name = name
        self.rows = text.splitlines()
        self.line = line
        self.notes: list[Note] = []
        self.passed = False  # arguments of the script are handed on
        self.arguments: list[Argument] = []
        self.options: list[Argument] = []
        self.errors: list[ConfigError] = []

    def read(self, words: Iterable[tuple[str, str]]) -> None:
        """`words` with the reason where a value is not known."""
        waiting = iter(words)
        for word, unknown in waiting:
            if name := re.fullmatch(r"\$\{oc\.env:(\w+)\}", word):
                if name[1].startswith("ARG"):
                    self.passed = True
                else:
                    self.notes.append(
                        (self.line, f"${name[1]} is not set by the script and taken as empty")
                    )
            elif not word.strip(" \t\n\\"):
                continue
            elif word.startswith("-"):
                following = next(waiting, ("", ""))[0] if programs.HYDRA_OPTIONS.get(word) else ""
                self.option(word, following)
            else:
                self.argument(word, unknown)
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else ConfigErrors(self.errors)

    def fail(self, line: int, message: str) -> None:
        self.errors.append(ConfigError(f"{self.name}, line {line}: {message}"))

    def written(self, word: str) -> int:
        """The line where a word stands: of those that hold it, or its key, the first not before the
        launch, else the last before it.
        """
        prefix, key, _ = hydra.split(word) or ("", word, "")
        taken = {a.line for a in self.arguments if a.key == key}
        for part in (word, f"{prefix}{key}=", key):
            lines = [
                n
                for n, row in enumerate(self.rows, 1)
                if part in row and n not in taken and not row.lstrip().startswith("#")
            ]
            if lines:
                return next((n for n in lines if n >= self.line), lines[-1])
        return self.line

    def option(self, word: str, following: str) -> None:
        name, equals, value = word.partition("=")
        line = self.written(name)
        if name not in programs.HYDRA_OPTIONS:
            return self.fail(line, f"{word!r} is neither key=value nor one of Hydra's options")
        text = value if equals else following
        if programs.HYDRA_OPTIONS[name] and not text:
            return self.fail(line, f"{name} has no value")
        name = programs.LONG_FORM.get(name, name)
        self.options.append(Argument(name, text or True, text, line, variables=_variables(text)))
        note = (
            f"{name}{' ' + text if text else ''} is an option of Hydra; keys that only such a "
            f"file sets are not read"
        )
        self.notes.append((line, note))
        return None

    def argument(self, word: str, unknown: str) -> None:
        split_word = hydra.split(word)
        line = self.written(word)
        if split_word is None:
            return self.fail(
                line, f"{word[:120]!r} is no key=value, as in data.train_batch_size=1024"
            )
        prefix, key, text = split_word
        value = None
        reason = unknown
        if not unknown and text is not None:
            try:
                value = hydra.value(text)
            except ConfigError as e:
                reason = e.message
        if old := next((a for a in reversed(self.arguments) if a.key == key), None):
            self.notes.append(
                (old.line, f"{old.prefix}{key}={old.text} is replaced by {word} on line {line}")
            )
        names = _variables(text or "")
        for name in names:
            if re.fullmatch(r"ARG\d+", name):
                note = (
                    f"${name[3:]}, an argument of the script, becomes ${{oc.env:{name}}} in "
                    f"{key}; set {name} or write the value"
                )
                self.notes.append((line, note))
        if unknown:
            text = next(
                iter(
                    re.findall(
                        rf"{re.escape(key)}=((?:\$\([^)]*\)+|\"[^\"]*\"|\S)+)", self.rows[line - 1]
                    )
                ),
                text,
            )
        self.arguments.append(
            Argument(key, value, text or "", line, prefix, names, reason, machine=bool(unknown))
        )
        return None


# -- YAML


def _from_yaml(text: str, path: Path) -> Launch:
    values, lines = yamlfile.parse(text, path.name)
    if not isinstance(values, dict) or not values:
        raise ConfigError(
            f"{path.name}, line 1: no veRL configuration; the top level must be a mapping with "
            f"data, actor_rollout_ref, …"
        )
    notes = [f"{path.name}: read as veRL's resolved configuration"]
    if all(
        isinstance(v, dict) and "value" in v and v.keys() <= {"value", "desc"}
        for k, v in values.items()
        if k != "wandb_version"
    ):
        values = {k: v["value"] for k, v in values.items() if k not in ("wandb_version", "_wandb")}
        lines = {
            (loc[0], *loc[2:]): n for loc, n in lines.items() if len(loc) > 1 and loc[1] == "value"
        }
        notes.append("the form in which W&B keeps a configuration: {value: …} around each section")
    program = _yaml_program(values)
    if program is None:
        raise ConfigError(
            f"{path.name}, line 1: no veRL configuration: it has "
            f"{', '.join(map(str, list(values)[:6]))}; "
            f"one has data and actor_rollout_ref (RL), model.partial_pretrain (SFT) or "
            f"data.response_key (evaluation); {_OTHERS}"
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
    raise_all(
        [
            ConfigError(f"{path.name}, line {a.line}: {a.unknown}", key=a.key)
            for a in arguments
            if a.unknown
        ]
    )
    location = (
        replace(
            a, text="null" if a.value is None else str(a.value), variables=_variables(str(a.value))
        )
        for a in arguments
    )
    return Launch(program, tuple(location), False, tuple(notes), str(path))


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
    """References from the key's own group, ${.a}, or from those around it, ${..a}, as references
    from the top.
    """
    return (
        _RELATIVE.sub(lambda m: m[1] + "".join(f"{p}." for p in at[: -len(m[2])]), value)
        if isinstance(value, str)
        else value
    )


def opened(arguments: Sequence[Argument], defaults: Mapping[str, Any]) -> tuple[Argument, ...]:
    """Each ${a.b} replaced by what that key is: the argument, the group of arguments below it, else
    what `others` has.

    An argument that refers to nothing known, or to itself, gets the reason in `unknown`.
    ${oc.env:X} and other resolvers stay.
    """
    arguments = [replace(a, value=_absolute(a.value, a.key.split("."))) for a in arguments]
    values = {a.key: a.value for a in arguments}
    untold = {a.key: a.unknown for a in arguments if a.unknown}

    def look_up(key: str, otherwise: str | None, depth: int) -> Any:
        below = {k.removeprefix(f"{key}."): v for k, v in values.items() if k.startswith(f"{key}.")}
        if key not in values and not below and key not in defaults and otherwise is None:
            raise ConfigError(
                f"${{{key}}} refers to a key that the file does not have; write its value"
            )
        if key in untold:
            raise ConfigError(untold[key])
        value_below = value(values[key] if key in values else below or defaults.get(key), depth + 1)
        return (
            hydra.scalar(otherwise)
            if value_below is None and otherwise is not None
            else value_below
        )

    def value(written: Any, depth: int = 0) -> Any:
        if depth > MAX_REFERENCES:
            raise ConfigError(f"{written!r} refers to itself")
        if isinstance(written, list):
            return [value(v, depth) for v in written]
        if isinstance(written, dict):
            return {k: value(v, depth) for k, v in written.items()}
        if not isinstance(written, str) or "${" not in written:
            return written
        if reference := _REFERENCE.fullmatch(written.strip()):
            return look_up(reference[1], reference[2], depth)
        return _REFERENCE.sub(lambda m: str(look_up(m[1], m[2], depth)), written)

    def one(a: Argument) -> Argument:
        try:
            return replace(a, value=value(a.value))
        except ConfigError as e:
            return replace(a, value=None, unknown=e.message)

    return tuple(map(one, arguments))
