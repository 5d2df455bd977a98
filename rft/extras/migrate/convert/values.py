"""What a script's variables hold: texts in which unset environment variables and unknowable pieces
keep a mark.

Knows no grammar.  Invariant: marks are private-use characters that no script contains, so a mark is
never mistaken for text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rft.errors import ConfigError

PASSED = "\ue004"  # "$@" of the script itself
MAX_CHARACTERS = 20_000_000
MAX_VALUE = 300_000
# Set on every machine, so never taken as unset.
ALWAYS_SET = frozenset(
    {"HOME", "USER", "LOGNAME", "PWD", "PATH", "SHELL", "HOSTNAME", "UID", "OSTYPE", "LANG"}
)
_ENV = re.compile("\ue000([^\ue001]*)\ue001")
_UNKNOWN = re.compile("\ue002(\\d+)\ue003")
_MARK = re.compile("[\ue000\ue002\ue004]")


@dataclass(frozen=True)
class Text:
    """A text and the line on which it is written."""

    text: str
    line: int


@dataclass(frozen=True)
class Array:
    """What a variable holds: entries by key.  Keys of an indexed array are numbers as text; a
    single text is the entry "0".
    """

    entries: Mapping[str, Text] = field(default_factory=dict)
    named: bool = False

    @property
    def first(self) -> Text:
        """What the name alone means."""
        return self.entries.get("0", Text("", 0))

    def next_key(self) -> str:
        return str(max((int(k) for k in self.entries if k.isdecimal()), default=-1) + 1)

    def values(self) -> list[Text]:
        if self.named:
            return list(self.entries.values())
        return [self.entries[k] for k in sorted(self.entries, key=int)]


@dataclass(frozen=True)
class Unknown:
    """A piece of text that cannot be known without running the script."""

    what: str
    why: str
    line: int


class Marks:
    """The unknown pieces met so far, and how much text has been made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.unknown: list[Unknown] = []
        self.characters = 0

    def new(self, what: str, why: str, line: int) -> str:
        self.unknown.append(Unknown(" ".join(what[:400].split())[:80], why[:160], line))
        return f"\ue002{len(self.unknown) - 1}\ue003"

    def of(self, text: str) -> list[Unknown]:
        return [self.unknown[int(i)] for i in _UNKNOWN.findall(text)]

    def spend(self, text: str, line: int) -> str:
        """Refuses scripts whose values grow without end."""
        if len(text) > MAX_VALUE:
            raise ConfigError(
                f"{self.name}, line {line}: a value grows beyond any use, to {len(text):,} "
                f"characters"
            )
        self.work(len(text), line)
        return text

    def work(self, characters: int, line: int) -> None:
        """Counts what has been read and made; a script that would take long is refused."""
        self.characters += characters
        if self.characters > MAX_CHARACTERS:
            raise ConfigError(
                f"{self.name}, line {line}: the script does too much to read; write the launch "
                f"with plain values"
            )


def env(name: str) -> str:
    return f"\ue000{name}\ue001"


def marked(text: str) -> bool:
    return _MARK.search(text) is not None


def names_in(text: str) -> tuple[str, ...]:
    """The environment variables in a text, each once."""
    return tuple(dict.fromkeys(_ENV.findall(text)))


def lone(text: str) -> str:
    """The name, if the text is one environment variable and nothing else."""
    found = _ENV.fullmatch(text)
    return found[1] if found else ""


def shown(text: str, marks: Marks) -> str:
    """For people and for the configuration: ${oc.env:NAME} for a variable, the script's own text
    for what is unknown.
    """
    text = _ENV.sub(lambda m: f"${{oc.env:{m[1]}}}", text)
    return _UNKNOWN.sub(lambda m: marks.unknown[int(m[1])].what, text).replace(PASSED, "$@")


def assumed_empty(text: str) -> tuple[str, bool] | None:
    """The text with unset variables empty, and whether there were any; None if it cannot be told."""
    names = _ENV.findall(text)
    if ALWAYS_SET & set(names) or _UNKNOWN.search(text):
        return None
    plain = _ENV.sub(lambda m: "0" if m[1] == "#" else "", text).replace(PASSED, "")
    return plain, bool(names) or PASSED in text
