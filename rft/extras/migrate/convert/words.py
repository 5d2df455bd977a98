"""Words of shell text: quotes, escapes, $ and its forms.  `shell` reads commands with it.

Knows no command.  Invariant: reading goes forward only; an unbalanced quote raises ConfigError with
the line and column of its beginning.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Self

from rft.errors import ConfigError
from rft.extras.migrate.convert.syntax import (
    Arith,
    Command,
    CommandSub,
    Lit,
    Param,
    Part,
    Redirect,
    Word,
)

_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!_-]")
_SHORT = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PLAIN = re.compile(r"[^ \t\n\\'\"$`;&|<>()]+")
_BACKTICKS = re.compile(r"`((?:\\.|[^`\\])*+)`", re.DOTALL)
_ANSI = re.compile(r"\$'((?:\\.|[^'\\])*+)'", re.DOTALL)
_ANSI_CODE = re.compile(
    r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})|(.))", re.DOTALL
)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "v": "\v",
}
_ESCAPES |= {sign: sign for sign in "\\'\"?"}
_OPS = (
    ":-",
    ":=",
    ":+",
    ":?",
    "-",
    "=",
    "+",
    "?",
    "%%",
    "%",
    "##",
    "#",
    "//",
    "/",
    "^^",
    "^",
    ",,",
    ",",
    "@",
    ":",
)


@dataclass(frozen=True)
class Document:
    """A here-document whose operator stands at `start`; it becomes one of `redirects` when its text
    is read.
    """

    mark: str
    strip: bool
    quoted: bool
    redirects: list[Redirect]
    start: int


class WordReader(ABC):
    """One pass over one text.  `pos` is the next character to read."""

    def __init__(self, text: str, name: str, line: int) -> None:
        self.text = text.replace("\r\n", "\n")
        self.name = name
        self.first = line
        self.pos = 0
        self.documents: list[Document] = []  # their texts begin after the next line end
        self.starts = [0, *(m.end() for m in re.finditer("\n", self.text))]

    @abstractmethod
    def script(self) -> tuple[Command, ...]:
        """All commands of the text."""

    @abstractmethod
    def until_paren(self, begin: int) -> tuple[Command, ...]:
        """The commands up to the bracket that closes the one at `begin`, and past it."""

    # -- the place in the text

    def line(self, pos: int | None = None) -> int:
        return self.first + bisect_right(self.starts, self.pos if pos is None else pos) - 1

    def error(self, message: str, pos: int | None = None, *, column: bool = False) -> ConfigError:
        pos = self.pos if pos is None else pos
        line = self.line(pos)
        where = f", column {pos - self.starts[line - self.first] + 1}" if column else ""
        return ConfigError(f"{self.name}, line {line}{where}: {message}")

    def unexpected(self) -> ConfigError:
        sign = self.peek()
        return self.error(
            f"unexpected {sign!r}" if sign else "the script ends in the middle of a command"
        )

    def unclosed(self, sign: str, begin: int) -> ConfigError:
        what = "backtick" if sign == "`" else "quote"
        return self.error(
            f"unbalanced {sign!r}: the {what} that opens here is never closed", begin, column=True
        )

    def at(self, *texts: str) -> bool:
        return self.text.startswith(texts, self.pos)

    def peek(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What matches here, and past it."""
        if found := pattern.match(self.text, self.pos):
            self.pos = found.end()
        return found

    def closing(self, pos: int) -> int:
        """Where the bracket that closes the one before `pos` stands; -1 if there is none."""
        level = 0
        for found in re.compile(r"[()]").finditer(self.text, pos):
            level += 1 if found[0] == "(" else -1
            if level < 0:
                return found.start()
        return -1

    def arithmetic(self, skip: int) -> str | None:
        """The text of the arithmetic expression that begins `skip` characters on, and past its
        `))`; None if it is two brackets.
        """
        start = self.pos + skip
        end = self.closing(start)
        if end < 0 or not self.text.startswith("))", end):
            return None
        self.pos = end + 2
        return self.text[start:end]

    # -- words

    def nested(self, text: str, line: int) -> Self:
        return type(self)(text, self.name, line)

    def inner(self, text: str, line: int) -> Word:
        """A text inside brackets, in which quotes only group."""
        return Word(self.nested(text, line).quoted_parts("", skip="'\""), line)

    def word(self, *, empty: bool = False, test: bool = False) -> Word:
        line = self.line()
        begin = self.pos
        parts: list[Part] = []
        while (sign := self.peek()) and sign not in " \t\n;&|)" and not (test and sign == "("):
            if sign in "<>":
                if not self.at(sign + "(") or parts:
                    break
                self.pos += 1
                parts.append(self.command_sub(self.pos + 1, begin, False))
            elif sign == "(":
                if not (parts and self.text[self.pos - 1] in "@!?*+"):
                    break
                end = self.closing(self.pos + 1)
                if end < 0:
                    raise self.error("unbalanced '('", column=True)
                parts.append(Lit(self.text[self.pos : end + 1]))
                self.pos = end + 1
            else:
                parts.extend(self.piece(sign))
        if self.pos == begin and not empty:
            raise self.unexpected()
        return Word(tuple(parts), line)

    def piece(self, sign: str) -> list[Part]:
        """One part of an unquoted word."""
        begin = self.pos
        if sign == "\\":
            self.pos += 2
            taken = self.text[begin + 1 : begin + 2]
            return [] if taken == "\n" else [Lit(taken or "\\", True)]
        if sign == "'":
            end = self.text.find("'", begin + 1)
            if end < 0:
                raise self.unclosed("'", begin)
            self.pos = end + 1
            return [Lit(self.text[begin + 1 : end], True)]
        if sign == '"':
            return self.double_quoted()
        if sign in "$`":
            return [self.dollar(False)]
        plain = self.take(_PLAIN)
        assert plain is not None
        return [Lit(plain[0])]

    def double_quoted(self) -> list[Part]:
        begin = self.pos
        self.pos = self.pos + 1
        parts = self.quoted_parts('"')
        if self.peek() != '"':
            raise self.unclosed('"', begin)
        self.pos += 1
        return [*parts] or [Lit("", True)]

    def quoted_parts(self, stops: str, skip: str = "") -> tuple[Part, ...]:
        """Text in which only $, backticks and backslashes mean something, up to one of `stops` or
        the end.
        """
        plain = re.compile(rf"[^\\$`{stops}{skip}]+")
        parts: list[Part] = []
        while (sign := self.peek()) and sign not in stops:
            if sign in skip:
                self.pos += 1
            elif sign == "\\":
                after = self.text[self.pos + 1 : self.pos + 2]
                self.pos += 2
                if after != "\n":
                    parts.append(Lit(after if after and after in '$`"\\' else "\\" + after, True))
            elif sign in "$`":
                parts.append(self.dollar(True))
            elif run := self.take(plain):
                parts.append(Lit(run[0], True))
        return tuple(parts)

    # -- $ and its forms

    def dollar(self, quoted: bool) -> Part:
        begin = self.pos
        line = self.line()
        if self.peek() == "`":
            return self.backticks(quoted)
        if self.at("$((") and (text := self.arithmetic(3)) is not None:
            return Arith(self.inner(text, line), line, quoted)
        if self.at("$("):
            return self.command_sub(self.pos + 2, begin, quoted)
        if self.at("${"):
            self.pos += 2
            return self.parameter(begin, line, quoted)
        if self.at("$'") and not quoted:
            return self.ansi_quoted()
        if self.at('$"') and not quoted:
            self.pos += 1
            parts = self.double_quoted()
            if len(parts) == 1:
                return parts[0]
            raise self.error('translated text $"…" with variables is not read; write "…"', begin)
        self.pos += 1
        name = self.take(_SHORT)
        return Param(name[0], line, quoted) if name else Lit("$", quoted)

    def command_sub(self, start: int, begin: int, quoted: bool) -> CommandSub:
        line, self.pos = self.line(begin), start
        documents = self.documents
        self.documents = []
        body = self.until_paren(begin)
        self.documents = documents
        return CommandSub(body, self.text[begin : self.pos], line, quoted)

    def backticks(self, quoted: bool) -> CommandSub:
        begin = self.pos
        line = self.line()
        found = self.take(_BACKTICKS)
        if not found:
            raise self.unclosed("`", begin)
        body = self.nested(re.sub(r"\\([`$\\])", r"\1", found[1]), line).script()
        return CommandSub(body, found[0], line, quoted)

    def ansi_quoted(self) -> Lit:
        def sign(code: re.Match[str]) -> str:
            if code[4]:
                return _ESCAPES.get(code[4], code[0])
            number = code[1] or code[2]
            return chr(int(number, 16) if number else int(code[3], 8) & 255)

        begin = self.pos
        found = self.take(_ANSI)
        if not found:
            raise self.unclosed("$'", begin)
        return Lit(_ANSI_CODE.sub(sign, found[1]), True)

    def parameter(self, begin: int, line: int, quoted: bool) -> Param:
        op = ""
        if self.peek() == "#" and not re.compile(r"#[}:%#/+?=-]").match(self.text, self.pos):
            self.pos = self.pos + 1
            op = "length"
        elif self.peek() == "!" and not self.at("!}"):
            self.pos = self.pos + 1
            op = "indirect"
        name = self.take(_PARAMETER)
        if not name:
            raise self.bad_substitution(begin)
        index: str | Word | None = None
        if self.peek() == "[":
            close = self.text.find("]", self.pos)
            if close < 0:
                raise self.bad_substitution(begin)
            inside = self.text[self.pos + 1 : close]
            index = inside if inside in ("@", "*") else self.inner(inside, line)
            self.pos = close + 1
        param = Param(name[0], line, quoted, index, op)
        if self.peek() != "}":
            param = self.operator(param, begin)
        elif op == "indirect" and isinstance(index, str):
            param = replace(param, op="keys")
        self.pos += 1
        return param

    def operator(self, param: Param, begin: int) -> Param:
        op = next((o for o in _OPS if self.at(o)), None)
        if not self.peek():
            raise self.error("unbalanced '${': no '}' closes it", begin, column=True)
        if op is None or param.op:
            raise self.bad_substitution(begin)
        self.pos += len(op)
        if op in ("/", "//") and self.at("#", "%"):
            op += self.peek()
            self.pos += 1
        # what parts the two words after the operator
        between = op[0] if op[0] == "/" or op == ":" else ""
        quoted = op == ":" or (param.quoted and op[0] not in "%#")
        arg = self.argument(between + "}", quoted, begin)
        second = None
        if between and self.peek() == between:
            self.pos += 1
            second = self.argument("}", quoted, begin)
        return replace(param, op=op, arg=arg, second=second)

    def argument(self, stops: str, quoted: bool, begin: int) -> Word:
        """The word after an operator of ${…}, up to one of `stops`."""
        line = self.line()
        parts: list[Part] = []
        plain = re.compile(rf"[^\\'\"$`{stops}]+")
        while (sign := self.peek()) not in stops:
            if sign == "'" and quoted:
                self.pos += 1
                parts.append(Lit("'", True))
            elif sign in "$`":
                parts.append(self.dollar(quoted))
            elif sign in "\\'\"":
                parts.extend(self.piece(sign))
            elif run := self.take(plain):
                parts.append(Lit(run[0], quoted))
        if not self.peek():
            raise self.error("unbalanced '${': no '}' closes it", begin, column=True)
        return Word(tuple(parts), line)

    def bad_substitution(self, begin: int) -> ConfigError:
        close = self.text.find("}", begin)
        given = self.text[begin : close + 1 if 0 <= close < begin + 60 else begin + 30].split("\n")[
            0
        ]
        return self.error(
            f'{given!r} is no shell variable (bash stops with "bad substitution"); '
            "an interpolation meant for Hydra stands in single quotes or begins with \\$",
            begin,
            column=True,
        )
