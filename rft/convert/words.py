"""Words of shell text: quotes, escapes, $ and its forms.  `shell` reads commands with it.

Knows no command.  Invariant: reading goes forward only; an unbalanced quote raises ConfigError with the line and column of its beginning.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import replace
from typing import Self

from rft.convert.syntax import Arith, Command, CommandSub, Lit, Param, Part, Redirect, Word
from rft.errors import ConfigError

MAX_DEPTH = 60
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!_-]")
_SHORT = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PLAIN = re.compile(r"[^ \t\n\\'\"$`;&|<>()]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_OPS = (":-", ":=", ":+", ":?", "-", "=", "+", "?", "%%", "%", "##", "#", "//", "/", "^^", "^", ",,", ",", "@", ":")


class WordReader(ABC):
    """One pass over one text; `pos` is the next character to read."""

    def __init__(self, text: str, name: str, line: int, depth: int) -> None:
        self.text = text.replace("\r\n", "\n")
        self.name = name
        self.depth = depth
        self.pos = 0
        self.first = line
        self.starts = [0, *(m.end() for m in re.finditer("\n", self.text))]
        self.documents: list[tuple[str, bool, bool, list[Redirect], int]] = []

    # -- places and errors

    def line(self, pos: int | None = None) -> int:
        return self.first + bisect_right(self.starts, self.pos if pos is None else pos) - 1

    def error(self, message: str, pos: int | None = None, *, column: bool = False) -> ConfigError:
        pos = self.pos if pos is None else pos
        line = self.line(pos)
        where = f", column {pos - self.starts[line - self.first] + 1}" if column else ""
        return ConfigError(f"{self.name}, line {line}{where}: {message}")

    def at(self, text: str) -> bool:
        return self.text.startswith(text, self.pos)

    def peek(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"nested too deeply; at most {MAX_DEPTH} levels are read")

    def blanks(self) -> None:
        """Spaces, continuation lines and a comment."""
        text, end = self.text, len(self.text)
        while self.pos < end:
            if text[self.pos] in " \t":
                self.pos += 1
            elif self.at("\\\n"):
                self.pos += 2
            elif text[self.pos] == "#":
                newline = text.find("\n", self.pos)
                self.pos = end if newline < 0 else newline
            else:
                return

    @abstractmethod
    def script(self) -> tuple[Command, ...]:
        """All commands of the text."""

    @abstractmethod
    def until_paren(self, begin: int) -> tuple[Command, ...]:
        """The commands up to the bracket that closes the one at `begin`, and past it."""

    def nested(self, text: str, line: int) -> Self:
        return type(self)(text, self.name, line, self.depth)

    def inner(self, text: str, line: int) -> Word:
        """A text inside brackets, in which quotes only group."""
        return self.nested(text, line).bracketed()

    def bracketed(self) -> Word:
        parts: list[Part] = []
        while self.pos < len(self.text):
            if self.peek() in "'\"":
                self.pos += 1
            else:
                parts.extend(self.quoted_parts("'\""))
        return Word(tuple(parts), self.first)

    def word(self, *, empty: bool = False, test: bool = False) -> Word:
        line, begin = self.line(), self.pos
        parts: list[Part] = []
        while self.pos < len(self.text):
            sign = self.peek()
            if sign in " \t\n;&|)" or (test and sign == "("):
                break
            if sign in "<>":
                if not self.at(sign + "(") or parts:
                    break
                self.pos += 1
                parts.append(self.command_sub(self.pos + 1, begin, False))
            elif sign == "(":
                if not (parts and self.text[self.pos - 1] in "@!?*+"):
                    break
                parts.append(Lit(self.extended_pattern()))
            else:
                parts.extend(self.piece(sign))
        if not parts and not empty and self.pos == begin:
            raise self.error(f"unexpected {self.peek()!r}" if self.peek() else "the script ends in the middle of a command")
        return Word(tuple(parts), line)

    def extended_pattern(self) -> str:
        begin, level = self.pos, 0
        for at in range(self.pos, len(self.text)):
            level += {"(": 1, ")": -1}.get(self.text[at], 0)
            if level == 0:
                self.pos = at + 1
                return self.text[begin : self.pos]
        raise self.error("unbalanced '('", begin, column=True)

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
                raise self.error('unbalanced "\'": the quote that opens here is never closed', begin, column=True)
            self.pos = end + 1
            return [Lit(self.text[begin + 1 : end], True)]
        if sign == '"':
            return self.double_quoted()
        if sign in "$`":
            return [self.dollar(False)]
        plain = _PLAIN.match(self.text, begin)
        assert plain is not None
        self.pos = plain.end()
        return [Lit(plain[0])]

    def double_quoted(self) -> list[Part]:
        begin, self.pos = self.pos, self.pos + 1
        parts = self.quoted_parts('"')
        if self.peek() != '"':
            raise self.error("unbalanced '\"': the quote that opens here is never closed", begin, column=True)
        self.pos += 1
        return [*parts] or [Lit("", True)]

    def quoted_parts(self, stops: str) -> tuple[Part, ...]:
        """Text in which only $, backticks and backslashes mean something, up to one of `stops` or the end."""
        plain = re.compile(rf"[^\\$`{re.escape(stops)}]+")
        parts: list[Part] = []
        while (sign := self.peek()) and sign not in stops:
            if sign == "\\":
                after = self.text[self.pos + 1 : self.pos + 2]
                self.pos += 2
                if after != "\n":
                    parts.append(Lit(after if after and after in '$`"\\' else "\\" + after, True))
            elif sign in "$`":
                parts.append(self.dollar(True))
            else:
                run = plain.match(self.text, self.pos)
                assert run is not None
                self.pos = run.end()
                parts.append(Lit(run[0], True))
        return tuple(parts)

    def dollar(self, quoted: bool) -> Part:
        begin, line = self.pos, self.line()
        if self.peek() == "`":
            return self.backticks(quoted)
        if self.at("$((") and (end := self.arithmetic_end(self.pos + 3)) is not None:
            self.pos = end + 2
            return Arith(self.inner(self.text[begin + 3 : end], line), line, quoted)
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
        if name := _SHORT.match(self.text, self.pos):
            self.pos = name.end()
            return Param(name[0], line, quoted)
        return Lit("$", quoted)

    def arithmetic_end(self, pos: int) -> int | None:
        """Where the `))` of an arithmetic expression that begins at `pos` stands; None if it is two brackets."""
        level = 0
        for found in re.compile(r"[()]").finditer(self.text, pos):
            level += 1 if found[0] == "(" else -1
            if level < 0:
                return found.start() if self.text.startswith("))", found.start()) else None
        return None

    def command_sub(self, start: int, begin: int, quoted: bool) -> CommandSub:
        line, self.pos = self.line(begin), start
        documents, self.documents = self.documents, []
        body = self.until_paren(begin)
        self.documents = documents
        return CommandSub(body, self.text[begin : self.pos], line, quoted)

    def backticks(self, quoted: bool) -> CommandSub:
        begin, line = self.pos, self.line()
        end = begin + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self.error("unbalanced '`': the backtick that opens here is never closed", begin, column=True)
        self.pos = end + 1
        inner = re.sub(r"\\([`$\\])", r"\1", self.text[begin + 1 : end])
        self.deeper()
        body = self.nested(inner, line).script()
        self.depth -= 1
        return CommandSub(body, self.text[begin : end + 1], line, quoted)

    def ansi_quoted(self) -> Lit:
        begin, self.pos = self.pos, self.pos + 2
        text = ""
        code = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})|(.))", re.DOTALL)
        while True:
            sign = self.peek()
            if not sign:
                raise self.error('unbalanced "$\'": the quote that opens here is never closed', begin, column=True)
            if sign == "'":
                self.pos += 1
                return Lit(text, True)
            if sign == "\\" and (found := code.match(self.text, self.pos)):
                number = found[1] or found[2]
                if found[4]:
                    text += _ESCAPES.get(found[4], found[4] if found[4] in "\\'\"?" else found[0])
                else:
                    text += chr(int(number, 16) if number else int(found[3], 8) & 255)
                self.pos = found.end()
            else:
                text += sign
                self.pos += 1

    # -- ${…}

    def parameter(self, begin: int, line: int, quoted: bool) -> Param:
        self.deeper()
        op = ""
        if self.peek() == "#" and not re.compile(r"#[}:%#/+?=-]").match(self.text, self.pos):
            self.pos, op = self.pos + 1, "length"
        elif self.peek() == "!" and not self.at("!}"):
            self.pos, op = self.pos + 1, "indirect"
        name = _PARAMETER.match(self.text, self.pos)
        if not name:
            raise self.bad_substitution(begin)
        self.pos = name.end()
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
        self.depth -= 1
        return param

    def operator(self, param: Param, begin: int) -> Param:
        if not self.peek():
            raise self.error("unbalanced '${': no '}' closes it", begin, column=True)
        op = next((o for o in _OPS if self.at(o)), None)
        if op is None or param.op:
            raise self.bad_substitution(begin)
        self.pos += len(op)
        second = None
        if op in ("/", "//"):
            if self.peek() in ("#", "%"):
                op += self.peek()
                self.pos += 1
            arg = self.argument("/}", param.quoted, begin)
            if self.peek() == "/":
                self.pos += 1
                second = self.argument("}", param.quoted, begin)
        elif op == ":":
            arg = self.argument(":}", True, begin)
            if self.peek() == ":":
                self.pos += 1
                second = self.argument("}", True, begin)
        else:
            arg = self.argument("}", param.quoted and op not in ("%", "%%", "#", "##"), begin)
        return replace(param, op=op, arg=arg, second=second)

    def argument(self, stops: str, quoted: bool, begin: int) -> Word:
        """The word after an operator of ${…}, up to one of `stops`."""
        line = self.line()
        parts: list[Part] = []
        plain = re.compile(rf"[^\\'\"$`{re.escape(stops)}]+")
        while (sign := self.peek()) not in stops:
            if sign == "'" and quoted:
                self.pos += 1
                parts.append(Lit("'", True))
            elif sign in "\\'\"$`":
                found = self.piece(sign) if sign != "$" else [self.dollar(quoted)]
                parts.extend(found)
            else:
                run = plain.match(self.text, self.pos)
                assert run is not None
                self.pos = run.end()
                parts.append(Lit(run[0], quoted))
        if not self.peek():
            raise self.error("unbalanced '${': no '}' closes it", begin, column=True)
        return Word(tuple(parts), line)

    def bad_substitution(self, begin: int) -> ConfigError:
        close = self.text.find("}", begin)
        given = self.text[begin : close + 1 if 0 <= close < begin + 60 else begin + 30].split("\n")[0]
        return self.error(
            f"{given!r} is no shell variable (bash stops with \"bad substitution\"); "
            "an interpolation meant for Hydra stands in single quotes or begins with \\$",
            begin, column=True,
        )  # fmt: skip
