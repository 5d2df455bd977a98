"""What a script starts where only the script is known: the words of its launch, and which of them
depend on something else.

The script is run as it is, then again with one thing changed: a variable that it does not set, an
argument, what other programs print. A word that changes depends on that thing.  Invariant: such a
word holds the variable as ${oc.env:NAME}, or a reason why its value is not known; it is never the
value of one run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rft.extras.migrate.convert import programs
from rft.extras.migrate.convert.recording import (
    OWN,
    RANDOM,
    Command,
    Inputs,
    Recorder,
    Recording,
    marker,
)

PROBE = "7919"  # a number that no script has
MOST_TRIES = 80
# of bash, but for the line that it repeats
COMPLAINT = re.compile(r"^(?!\+).*?: line (\d+): (?!`)(.*)", re.MULTILINE)
_MARKER = re.compile(re.escape(marker("NAME")).replace("NAME", r"(\w+)"))
_MARKER_PIECE = re.compile("[\ue000-\ue002]")
_ARGUMENT_NAME = re.compile(r"ARG(\d+)")  # ARG1 is the script's first argument
_SETTING = re.compile(r"\+{0,2}[a-z_]+(\.\w+)+=")  # key=value, as only a launch has it
# of the text of a script
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[^]]*\])?(:?[-=+]\}?)?")
_ARITHMETIC = re.compile(r"\(\((.*?)\)\)", re.DOTALL)
_NAME = re.compile(r"(?<![\w$.])[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"(?<![\w.+])([A-Za-z_]\w*)\+?=")
_ASSIGNED_ITSELF = re.compile(r"""(?<![\w.])([A-Za-z_]\w*)=["']?\$\{?\1\b(?!:?[-=+])""")
_REQUIRED = re.compile(r"\$\{(\w+):?\?")  # ${NAME:?message}
_CONDITION = re.compile(r"^\s*(?:case|if|elif|while|until)\b|\[ ")
_ARGUMENT = re.compile(r"\$\{?([1-9@*#])")
_SHIFT = re.compile(r"\bshift\s+([1-9])")
_COMPARED = re.compile(
    r"""(?:==?|!=|-eq)\s+["']?([\w.-]+)|^\s*\(?["']?([\w.-]+)["']?(?:\|[\w.|-]+)?\)""", re.MULTILINE
)


@dataclass(frozen=True)
class Launched:
    """The first launch of a run."""

    inputs: Inputs
    match: programs.ProgramMatch
    command: Command
    # with those of commands after it that are arguments cut off by a stray blank
    words: tuple[str, ...]
    cut_off: tuple[int, ...]  # lines of such commands
    printing: tuple[str, ...]  # commands before it whose output the script may read
    failed: Mapping[str, str]  # variables that bash could not set, with its message

    def parts(self, names: Collection[str] = ()) -> list[str]:
        """Without words that are empty where these variables are."""
        return [w for w in self.words if _without(w, names)]

    def keys(self, names: Collection[str] = ()) -> list[str]:
        """What these words are about; before the program that is clear for options alone."""
        start = sum(bool(_without(w, names)) for w in self.words[: self.match.start])
        heads = [_without(w.partition("=")[0], names) for w in self.parts(names)]
        return [h if i >= start or h.startswith("-") else "" for i, h in enumerate(heads)]


@dataclass(frozen=True)
class ScriptReading:
    """`words` as people see them, with the reason where a value is not known; `start`: of the
    program's arguments among them.

    A word that is the value of a variable and nothing else is missing where that is not set.
    """

    launched: Launched
    words: tuple[tuple[str, str], ...]
    start: int
    notes: tuple[str, ...]


def shown(text: str) -> str:
    """With ${oc.env:NAME} for the value of a variable."""
    return _MARKER.sub(lambda m: f"${{oc.env:{m[1]}}}", text)


def with_values(inputs: Inputs, values: Mapping[str, str]) -> Inputs:
    """With these variables; ARG1 is the script's first argument."""
    variables = dict(inputs.variables)
    arguments = list(inputs.arguments)
    for name, value in values.items():
        if place := _ARGUMENT_NAME.fullmatch(name):
            arguments += [""] * (int(place[1]) - len(arguments))
            arguments[int(place[1]) - 1] = value
        else:
            variables[name] = value
    return replace(inputs, variables=variables, arguments=tuple(arguments))


class ScriptReader:
    """`first`: what was recorded where nothing is set."""

    def __init__(self, recorder: Recorder, text: str, inputs: Inputs) -> None:
        self._recorder = recorder
        self._text = text
        self._inputs = inputs
        self.first = recorder.run(inputs)

    def read(self) -> ScriptReading | None:
        """The first launch of the script, or None."""
        base = self._launched(self._inputs, self.first)
        assumption = ""
        while base is None and (names := self._required()):
            self._inputs = with_values(self._inputs, {n: marker(n) for n in names})
            self.first = self._recorder.run(self._inputs)
            base = self._launched(self._inputs, self.first)
        if base is None and self._may_start():
            for inputs, why in itertools.islice(self._assumptions(), MOST_TRIES):
                if (base := self.run(inputs)) is not None:
                    assumption = f"nothing is started where the script leads by itself; {why}"
                    break
        if base is None:
            return None
        reading = _Dependencies(self, base, self._unset(base)).reading()
        return replace(reading, notes=(*filter(None, [assumption]), *reading.notes))

    def run(self, inputs: Inputs) -> Launched | None:
        return self._launched(inputs, self._recorder.run(inputs))

    def _launched(self, inputs: Inputs, recording: Recording) -> Launched | None:
        rows = dict(enumerate(self._text.splitlines(), 1))
        complaints = [(int(line), message) for line, message in COMPLAINT.findall(recording.errors)]
        failed = {
            name: message
            for line, message in complaints
            for name in _ASSIGNED.findall(rows.get(line, ""))
        }
        for at, command in enumerate(recording.commands):
            match = programs.find(command.words, inputs.other)
            if match is not None and match.program is not None:
                more = list(
                    itertools.takewhile(
                        lambda c: _SETTING.match(c.words[0]), recording.commands[at + 1 :]
                    )
                )
                words = (*command.words, *(w for c in more for w in c.words))
                printing = dict.fromkeys(
                    f"`{shown(' '.join(c.words[:2]))}`"
                    for c in recording.commands[:at]
                    if c.captured
                )
                return Launched(
                    inputs,
                    match,
                    command,
                    words,
                    tuple(c.line for c in more),
                    tuple(printing),
                    failed,
                )
        return None

    def _required(self) -> list[str]:
        """Variables without which bash has ended the script."""
        required = _REQUIRED.findall(self._text)
        names = (n for n in re.findall(r"line \d+: (\w+): ", self.first.errors) if n in required)
        return [
            n
            for n in map(_argument_name, names)
            if n not in self._inputs.variables and marker(n) not in self._inputs.arguments
        ]

    def _may_start(self) -> bool:
        """Whether the script may start something with other inputs."""
        unreadable = re.search("syntax error|unexpected EOF", self.first.errors)
        return (
            self.first.ended
            and not unreadable
            and not any(programs.find(c.words, self._inputs.other) for c in self.first.commands)
        )

    def _assumptions(self) -> Iterator[tuple[Inputs, str]]:
        """What could lead to a launch."""
        used = [(m[1], m[2]) for m in _USED.finditer(self._text)]
        assigned = set(_ASSIGNED.findall(self._text))
        empty = list(
            dict.fromkeys(
                name for name, default in used if default in ("-}", ":-}") or name not in assigned
            )
        )
        if empty:
            yield (
                with_values(self._inputs, {n: marker(n) for n in empty}),
                f"what is not set ({', '.join(empty)}) is taken as set",
            )
        yield replace(self._inputs, ignore_exit=True), "`exit` is passed by"
        yield (
            replace(self._inputs, ignore_exit=True, other_files=True),
            "files that it asks for are taken to be there",
        )
        for count in range(1, self._most_arguments() + 1):
            arguments = {f"ARG{i}": marker(f"ARG{i}") for i in range(1, count + 1)}
            yield with_values(self._inputs, arguments), f"it is run with {count} arguments"
        literals = dict.fromkeys(["1", "0", *(a or b for a, b in _COMPARED.findall(self._text))])
        for name, value in itertools.product(
            dict.fromkeys(["ARG1", *(name for name, _ in used)]), literals
        ):
            yield (
                with_values(self._inputs, {name: value}),
                f"{_as_written(name)} is taken as {value}",
            )

    def _most_arguments(self) -> int:
        """How many arguments the script may look at, and one more; 0 where they are known."""
        places = [int(p) if p.isdigit() else 0 for p in _ARGUMENT.findall(self._text)]
        return (
            max(places) + sum(map(int, _SHIFT.findall(self._text))) + 1
            if places and not self._inputs.arguments
            else 0
        )

    def _unset(self, base: Launched) -> list[str]:
        """Variables that the script uses and does not set, and its arguments."""
        used = [m[1] for m in _USED.finditer(self._text) if m[2] is None]
        used += [n for body in _ARITHMETIC.findall(self._text) for n in _NAME.findall(body)]
        names = {*base.command.names, *base.inputs.variables} - set(
            _ASSIGNED_ITSELF.findall(self._text)
        )
        unset = [n for n in dict.fromkeys(used) if n not in names]
        return unset + [f"ARG{i}" for i in range(1, self._most_arguments() + 1)]

    @property
    def counts_arguments(self) -> bool:
        """Whether the script asks how many arguments it has."""
        return re.search(r"\$\{?#\}?(?![\w{])", self._text) is not None

    def in_conditions(self) -> set[str]:
        """Variables and arguments that stand in the line of a condition."""
        rows = (
            row
            for row in self._text.splitlines()
            if _CONDITION.search(row) and not row.lstrip().startswith("#")
        )
        return {
            _argument_name(n) for row in rows for n in re.findall(r"\$\{?([A-Za-z_]\w*|[1-9])", row)
        }


class _Dependencies:
    """The words of the launch `base`, compared with those of runs in which one thing is different."""

    def __init__(self, reader: ScriptReader, base: Launched, names: Sequence[str]) -> None:
        self._reader = reader
        self._base = base
        self._names = names
        self._texts = base.parts()
        self._unknown: dict[int, str] = {}
        self._notes: list[str] = []

    def reading(self) -> ScriptReading:
        names = list(self._names)
        joint = self._joint(self._names)
        if joint is None:
            names = []
            joint = self._base
            for name in self._names:
                more = self._joint([*names, name])
                if more is None:
                    self._take_apart(name)
                else:
                    names = [*names, name]
                    joint = more
        rows = zip(joint.parts(names), self._texts, self._base.parts(), strict=True)
        self._texts = [new if old == base_text else old for new, old, base_text in rows]
        self._compare_prints()
        handed_on = set(_MARKER.findall(" ".join(joint.words)))
        self._notes += (
            _as_if_unset(n) for n in names if n in self._reader.in_conditions() - handed_on
        )
        places = itertools.count()
        words = [
            self._word(next(places)) if _without(w, names) else (shown(w), "") for w in joint.words
        ]
        return ScriptReading(
            self._base, tuple(words), joint.match.start, tuple(dict.fromkeys(self._notes))
        )

    def _word(self, at: int) -> tuple[str, str]:
        text = self._texts[at]
        unknown = self._unknown.get(at, "")
        names = set(_MARKER.findall(text))
        if random := sorted(names & (RANDOM | OWN.keys())):
            name = OWN.get(random[0], f"${random[0]}")
            unknown = f"its value comes from {name}, which differs from run to run"
        elif failed := sorted(names & self._base.failed.keys()):
            unknown = (
                f"its value comes from ${failed[0]}, which bash cannot set: "
                f"{self._base.failed[failed[0]]}"
            )
        elif _MARKER_PIECE.search(_MARKER.sub("", text)):
            unknown = unknown or "its value is cut from one that the script does not tell"
        return shown(text), unknown

    def _with(self, values: Mapping[str, str]) -> Launched | None:
        """The launch with these values, if it has the same keys."""
        other = self._reader.run(with_values(self._base.inputs, values))
        return other if other is not None and other.keys(values) == self._base.keys() else None

    def _joint(self, names: Sequence[str]) -> Launched | None:
        """The launch with all of these set, if it is then what it is without them but for their
        values.
        """
        other = self._with({n: marker(n) for n in names}) if names else self._base
        return (
            other
            if other is not None
            and [_without(w, names) for w in other.parts(names)] == self._base.parts()
            else None
        )

    def _take_apart(self, name: str) -> None:
        """Of a variable that changes more than the words it is in: what is computed from it is not
        known; the rest is as without it.
        """
        runs = [self._with({name: value}) for value in (marker(name), "0", PROBE)]
        parts = self._base.parts()
        unexplained = True
        for at, text in enumerate(parts):
            marked, zero, probe = (
                run.parts([name])[at] if run is not None else None for run in runs
            )
            bare = _without(marked, [name]) if marked is not None else ""
            if marked is not None and marked != text == bare:
                self._texts[at] = marked
            elif _MARKER_PIECE.search(bare) and not _MARKER_PIECE.search(text):
                self._unknown[at] = (
                    f"its value is cut from {_as_written(name)}, which the script does not set"
                )
            elif zero == text and probe not in (text, None):
                self._unknown[at] = (
                    f"its value is computed from {_as_written(name)}, which the script does not set"
                )
            elif self._reader.counts_arguments and marked == zero == probe not in (text, None):
                self._unknown[at] = (
                    f"its value depends on whether {_as_written(name)} is given, which the script "
                    f"does not tell"
                )
            else:
                continue
            unexplained = False
        if unexplained:
            self._notes.append(_as_if_unset(name))

    def _compare_prints(self) -> None:
        """Of words that depend on what other programs print, the value is not known."""
        # three lines in one word
        inputs = replace(self._base.inputs, prints=f"{PROBE}\n\n", date=f"{PROBE}-date")
        other = self._reader.run(inputs)
        programs_read = ", ".join(self._base.printing[:3]) or "other programs"
        if other is None or other.keys() != self._base.keys():
            self._notes.append(
                f"what is started depends on what {programs_read} prints; it is taken as 1"
            )
            return
        for at, (text, changed) in enumerate(zip(self._base.parts(), other.parts(), strict=True)):
            if changed != text and changed.replace(f"{PROBE}-date", "date") == text:
                same = "a configuration is the same for each run; set `name` to tell runs apart"
                self._notes.append(f"`$(date …)` becomes the text 'date': {same}")
            elif changed != text:
                self._unknown[at] = (
                    f"its value comes from what {programs_read} prints: only running it tells"
                )


def _argument_name(name: str) -> str:
    return f"ARG{name}" if name.isdigit() else name


def _as_written(name: str) -> str:
    place = _ARGUMENT_NAME.fullmatch(name)
    return f"${place[1] if place else name}"


def _as_if_unset(name: str) -> str:
    return (
        f"{_as_written(name)} is not set by the script, and what depends on it is as it is "
        f"without it"
    )


def _without(text: str, names: Collection[str]) -> str:
    """The text with these variables empty."""
    return _MARKER.sub(lambda m: "" if m[1] in names else m[0], text)
