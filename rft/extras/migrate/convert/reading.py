"""What a script starts where nothing but the script is known: the words of its launch, and which of
them depend on something else.

The script is run as it is, then again with one thing changed: a variable that it does not set, an
argument that it is not given, what a program prints.  A word that changes depends on that thing.
Invariant: such a word holds the variable as ${oc.env:NAME}, or a reason why its value is not known;
it is never the value of one run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from rft.extras.migrate.convert import programs
from rft.extras.migrate.convert.recording import Command, Inputs, Recorder, Recording, marker

PROBE = "7919"  # a number that no script has
RANDOM = frozenset("RANDOM SRANDOM SECONDS EPOCHSECONDS EPOCHREALTIME".split())
MOST_TRIES = 80
_MARKER = re.compile(re.escape(marker("NAME")).replace("NAME", r"(\w+)"))
_PIECE = re.compile("[\ue000-\ue002]")
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[^]]*\])?(:?[-=+]\}?)?")
_ARITHMETIC = re.compile(r"\(\((.*?)\)\)", re.DOTALL)
_NAME = re.compile(r"(?<![\w$.])[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"(?<![\w.+])([A-Za-z_]\w*)\+?=")
_ARGUMENT = re.compile(r"\$\{?([1-9@*#])")
_SHIFT = re.compile(r"\bshift\s+([1-9])")
_COMPARED = re.compile(
    r"""(?:==?|!=|-eq)\s+["']?([\w.-]+)|^\s*\(?["']?([\w.-]+)["']?(?:\|[\w.|-]+)?\)""", re.MULTILINE
)
_STOPPED = re.compile(r"line \d+: ([A-Za-z_]\w*|[1-9]): (?:unbound variable|parameter )")
_DOTTED = re.compile(r"\+{0,2}[a-z_]+(\.\w+)+=")  # key=value, as only a launch has it


@dataclass(frozen=True)
class Launched:
    """The first launch of a run.  `words`: its own, and those of commands after it that are
    arguments cut off by a stray blank.
    """

    inputs: Inputs
    match: programs.ProgramMatch
    command: Command
    words: tuple[str, ...]
    cut_off: tuple[int, ...]  # lines of such commands
    printing: tuple[str, ...]  # commands before it whose output the script may read

    def parts(self, names: Collection[str] = ()) -> list[str]:
        """Without words that are empty where these variables are."""
        return [w for w in self.words if _bare(w, names)]


@dataclass(frozen=True)
class Reading:
    """`words` as people see them, with the reason where a value is not known; `start`: of the
    program's arguments among them.
    """

    launched: Launched
    words: tuple[tuple[str, str], ...]
    start: int
    passed_through: bool  # arguments of the script are handed on
    empty: tuple[str, ...]  # variables that are not set, whose words are left out
    notes: tuple[str, ...]


def shown(text: str) -> str:
    """With ${oc.env:NAME} for the value of a variable."""
    return _MARKER.sub(lambda m: f"${{oc.env:{m[1]}}}", text)


def launched(inputs: Inputs, recording: Recording) -> Launched | None:
    for at, command in enumerate(recording.commands):
        match = programs.find(command.words)
        if match is not None and match.program is not None:
            more = list(
                itertools.takewhile(
                    lambda c: _DOTTED.match(c.words[0]), recording.commands[at + 1 :]
                )
            )
            words = (*command.words, *(w for c in more for w in c.words))
            printing = dict.fromkeys(
                f"`{shown(' '.join(c.words[:2]))}`" for c in recording.commands[:at] if c.captured
            )
            return Launched(
                inputs, match, command, words, tuple(c.line for c in more), tuple(printing)
            )
    return None


class ScriptReader:
    """`first`: what was recorded where nothing is set."""

    def __init__(self, recorder: Recorder, text: str, inputs: Inputs) -> None:
        self._recorder = recorder
        self._text = text
        self._inputs = inputs
        self.first = recorder.run(inputs)
        self.notes: list[str] = []

    def read(self) -> Reading | None:
        """The first launch of the script, or None."""
        base = launched(self._inputs, self.first)
        while base is None and (stopped := self._stopped()):  # set -u, ${NAME:?}
            self._inputs = with_values(self._inputs, {n: marker(n) for n in stopped})
            self.first = self._recorder.run(self._inputs)
            base = launched(self._inputs, self.first)
        if base is None and self.first.ended:
            tries = (
                self._try(inputs, why)
                for inputs, why in itertools.islice(self._assumptions(), MOST_TRIES)
            )
            base = next((found for found in tries if found is not None), None)
        return (
            _Dependencies(base, self._run, self._names(base), self.notes).reading()
            if base is not None
            else None
        )

    def _run(self, inputs: Inputs) -> Launched | None:
        return launched(inputs, self._recorder.run(inputs))

    def _try(self, inputs: Inputs, why: str) -> Launched | None:
        found = self._run(inputs)
        if found is not None:
            self.notes.append(f"nothing is started where the script leads by itself; {why}")
        return found

    def _stopped(self) -> list[str]:
        """Variables without which bash has ended the script."""
        names = (f"ARG{n}" if n.isdigit() else n for n in _STOPPED.findall(self.first.errors))
        return [
            n
            for n in names
            if n not in self._inputs.variables
            and not (n.startswith("ARG") and self._inputs.arguments)
        ]

    # -- what could lead to a launch

    def _assumptions(self) -> Iterator[tuple[Inputs, str]]:
        used = {m[1]: m[2] or "" for m in _USED.finditer(self._text)}
        required = [n for n in used if n not in _ASSIGNED.findall(self._text)] + [
            n for n, op in used.items() if op in ("-}", ":-}")
        ]
        if required:
            yield (
                with_values(self._inputs, {n: marker(n) for n in required}),
                f"{', '.join(required)} are taken as set",
            )
        yield replace(self._inputs, ignore_exit=True), "`exit` is passed by"
        for count in range(1, self._most_arguments() + 1):
            names = [f"ARG{i}" for i in range(1, count + 1)]
            yield (
                with_values(self._inputs, {n: marker(n) for n in names}),
                f"it is given {count} arguments",
            )
        literals = dict.fromkeys(["1", "0", *(a or b for a, b in _COMPARED.findall(self._text))])
        for name, value in itertools.product(["ARG1", *used], literals):
            yield (
                with_values(self._inputs, {name: value}),
                f"{name.replace('ARG', '$')} is taken as {value}",
            )

    def _most_arguments(self) -> int:
        """How many arguments the script may look at, and one more."""
        places = [int(p) if p.isdigit() else 0 for p in _ARGUMENT.findall(self._text)]
        return (
            max(places) + sum(map(int, _SHIFT.findall(self._text))) + 1
            if places and not self._inputs.arguments
            else 0
        )

    def _names(self, base: Launched) -> list[str]:
        """Variables that the script uses and does not set, and arguments."""
        used = [m[1] for m in _USED.finditer(self._text) if m[2] is None]
        used += [n for body in _ARITHMETIC.findall(self._text) for n in _NAME.findall(body)]
        unset = [
            n
            for n in dict.fromkeys(used)
            if n not in base.command.names and n not in base.inputs.variables
        ]
        return unset + [f"ARG{i}" for i in range(1, self._most_arguments() + 1)]


def with_values(inputs: Inputs, values: dict[str, str]) -> Inputs:
    """ARG1 is the script's first argument."""
    arguments = list(inputs.arguments)
    for name, value in values.items():
        if place := re.fullmatch(r"ARG(\d+)", name):
            arguments += [""] * (int(place[1]) - len(arguments))
            arguments[int(place[1]) - 1] = value
    variables = {n: v for n, v in values.items() if not re.fullmatch(r"ARG\d+", n)}
    return replace(inputs, variables={**inputs.variables, **variables}, arguments=tuple(arguments))


class _Dependencies:
    """The words of a launch, compared with those of runs in which one thing is different."""

    def __init__(
        self,
        base: Launched,
        run: Callable[[Inputs], Launched | None],
        names: Sequence[str],
        notes: list[str],
    ) -> None:
        self._base = base
        self._run = run
        self._names = names
        self._notes = notes
        self._texts = base.parts()
        self._unknown: dict[int, str] = {}

    def reading(self) -> Reading:
        names = list(self._names)
        joint = self._joint(self._names)
        if joint is None:
            names = []
            joint = self._base
            for name in self._names:
                more = self._joint([*names, name])
                if more is None:
                    self._apart(name)
                else:
                    names = [*names, name]
                    joint = more
        rows = zip(joint.parts(names), self._texts, self._base.parts(), strict=True)
        self._texts = [new if old == plain else old for new, old, plain in rows]
        self._printed()
        alone = [m[1] for w in joint.words if not _bare(w, names) for m in _MARKER.finditer(w)]
        return Reading(
            launched=self._base,
            words=tuple(self._word(i, text) for i, text in enumerate(self._texts)),
            start=sum(map(bool, self._base.words[: self._base.match.start])),
            passed_through=any(n.startswith("ARG") for n in alone),
            empty=tuple(n for n in dict.fromkeys(alone) if not n.startswith("ARG")),
            notes=tuple(self._notes),
        )

    def _word(self, at: int, text: str) -> tuple[str, str]:
        unknown = self._unknown.get(at, "")
        random = sorted(RANDOM & set(_MARKER.findall(text)))
        if random:
            unknown = f"its value comes from ${random[0]}: it differs from run to run"
        elif _PIECE.search(_MARKER.sub("", text)):
            unknown = (
                unknown
                or f"its value is cut from one that the script does not tell, {shown(text)[:80]!r}"
            )
        return shown(text), unknown

    def _with(self, names: Sequence[str], value: Callable[[str], str]) -> Launched | None:
        """The launch with these values, if it has the same keys."""
        found = self._run(with_values(self._base.inputs, {n: value(n) for n in names}))
        return found if found is not None and _keys(found, names) == _keys(self._base, ()) else None

    def _joint(self, names: Sequence[str]) -> Launched | None:
        """The launch with all of these set, if it is then what it is without them but for their
        values.
        """
        if not names:
            return self._base
        found = self._with(names, marker)
        return (
            found
            if found is not None
            and [_bare(w, names) for w in found.parts(names)] == self._base.parts()
            else None
        )

    def _apart(self, name: str) -> None:
        """Of a variable that changes more than the words it is in: what it is computed into is not
        known; the rest is as without it.
        """
        marked, zero, probe = (
            self._with([name], lambda _, v=v: v) for v in (marker(name), "0", PROBE)
        )  # type: ignore[misc]
        who = name.replace("ARG", "$") if name.startswith("ARG") else f"${name}"
        for at, text in enumerate(self._base.parts()):
            with_marker, with_zero, with_probe = (
                run.parts([name])[at] if run is not None else None for run in (marked, zero, probe)
            )
            bare = _bare(with_marker, [name]) if with_marker is not None else None
            if with_marker != text and bare == text:
                self._texts[at] = str(with_marker)
            elif bare is not None and _PIECE.search(bare) and not _PIECE.search(text):
                self._unknown[at] = f"its value is cut from {who}, which the script does not set"
            elif with_zero == text != with_probe and with_probe is not None:
                self._unknown[at] = (
                    f"its value is computed from {who}, which the script does not set"
                )
        self._notes.append(
            f"{who} is not set by the script; where it decides something, it counts as empty"
        )

    def _printed(self) -> None:
        """Words that depend on what other programs print."""
        inputs = replace(self._base.inputs, prints="\n".join([PROBE] * 3), date=f"{PROBE}-date")
        found = self._run(inputs)
        names = ", ".join(self._base.printing[:3]) or "other programs"
        if found is None or _keys(found, ()) != _keys(self._base, ()):
            self._notes.append(f"what is started depends on what {names} prints; it is taken as 1")
            return
        for at, (text, other) in enumerate(zip(self._base.parts(), found.parts(), strict=True)):
            if other != text and other.replace(f"{PROBE}-date", "date") == text:
                self._notes.append(
                    "`$(date …)` becomes the text 'date': a configuration is the same for each "
                    "run; set `name` to tell runs apart"
                )
            elif other != text:
                self._unknown[at] = (
                    f"its value comes from what {names} prints: only running it tells"
                )


def _bare(text: str, names: Collection[str]) -> str:
    """The text with these variables empty."""
    return _MARKER.sub(lambda m: "" if m[1] in names else m[0], text)


def _keys(found: Launched, names: Collection[str]) -> list[str]:
    return [_bare(w.partition("=")[0], names) for w in found.parts(names)]
