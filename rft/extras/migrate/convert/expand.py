"""Words of a script → the texts they become: variables, arrays, arithmetic, patterns, splitting.

Runs nothing; `capture` gives the text of `$(…)`.  Invariant: a variable that the script does not
set stays a mark, or takes the default that stands beside it; it never silently becomes empty.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from rft.errors import ConfigError
from rft.extras.migrate.convert.shell_arithmetic import ArithmeticProblem, evaluate
from rft.extras.migrate.convert.syntax import Arith, CommandSub, Lit, Param, Part, Word
from rft.extras.migrate.convert.values import (
    ALWAYS_SET,
    PASSED,
    Array,
    Marks,
    Text,
    env,
    lone,
    marked,
    names_in,
    shown,
)

MAX_FIELDS = 5_000
MAX_PATTERN_TEXT = 1_000
_BRACE = re.compile(r"\{([^{}]*,[^{}]*|-?\d{1,6}\.\.-?\d{1,6})\}")
_UNKNOWABLE = {"RANDOM", "SECONDS", "LINENO", "EPOCHSECONDS", "$", "!", "?", "-", "_"}


@dataclass(frozen=True)
class WordPiece:
    """What one part of a word becomes."""

    text: str
    quoted: bool
    line: int = 0  # on which it was written; 0: that of the word
    split: bool = False  # blanks in it part arguments
    # an entry of a list begins an argument; in one text, this stands before it
    before: str | None = None


@dataclass
class Scope:
    """Variables and positional arguments; `shifted` counts the script's own arguments that `shift`
    has dropped.
    """

    path: str
    variables: dict[str, Array] = field(default_factory=dict)
    positional: list[Text] = field(default_factory=lambda: [Text(PASSED, 0)])
    shifted: int = 0

    def argument(self, number: int) -> Text | None:
        """$1 and on; None for an argument of the script itself, which only its caller knows."""
        if number == 0:
            return Text(self.path, 1)
        known = [t for t in self.positional if t.text != PASSED]
        if number <= len(known):
            return known[number - 1]
        return None if len(known) < len(self.positional) else Text("", 0)

    def own_name(self, param: Param) -> str:
        """Under which environment variable an unset one can be given: itself, or ARG1 for $1."""
        if not param.name.isdigit():
            return param.name
        known = sum(t.text != PASSED for t in self.positional)
        return f"ARG{int(param.name) - known + self.shifted}"


class Expander:
    def __init__(
        self,
        scope: Scope,
        marks: Marks,
        note: Callable[[int, str], None],
        capture: Callable[[CommandSub], str],
    ) -> None:
        self.scope = scope
        self.marks = marks
        self.note = note
        self.capture = capture

    # -- words

    def fields(self, word: Word) -> list[Text]:
        """The arguments that a word becomes: none, one or several."""
        found = [text for one in self.braces(word) for text in self.split(one)]
        for text in found:
            self.marks.spend(text.text, word.line)
        if len(found) > MAX_FIELDS:
            raise ConfigError(
                f"{self.marks.name}, line {word.line}: one word becomes more than {MAX_FIELDS:,} "
                f"arguments"
            )
        return found

    def split(self, word: Word) -> Iterator[Text]:
        signs = re.escape(self.ifs())
        current: Text | None = None
        for piece in self.pieces(word):
            line = piece.line or word.line
            chunks = (
                re.split(f"([{signs}]+)", piece.text) if signs and piece.split else [piece.text]
            )
            for i, chunk in enumerate(chunks):
                if (i % 2 or (not i and piece.before is not None)) and current is not None:
                    yield current
                    current = None
                if i % 2:
                    line += chunk.count("\n")
                elif chunk or piece.quoted:
                    current = (
                        Text(current.text + chunk, current.line)
                        if current is not None
                        else Text(chunk, line)
                    )
        if current is not None:
            yield current

    def string(self, word: Word) -> str:
        """One text, as in an assignment: nothing is split."""
        return self.marks.spend(
            "".join((p.before or "") + p.text for p in self.pieces(word)), word.line
        )

    def pattern(self, word: Word) -> str:
        """For fnmatch: what was quoted matches itself."""
        return "".join(
            (p.before or "") + (glob.escape(p.text) if p.quoted else re.sub(r"\[\^", "[!", p.text))
            for p in self.pieces(word)
        )

    def pieces(self, word: Word) -> Iterator[WordPiece]:
        word = self.tilde(word)
        for part in word.parts:
            yield from self.pieces_of(part, part.quoted, len(word.parts) == 1)

    def pieces_of(
        self, part: Part, quoted: bool, alone: bool, default: bool = False
    ) -> Iterator[WordPiece]:
        """`alone`: nothing else is in the word; `default`: plain text is split too, as in ${x:-a
        b}.
        """
        match part:
            case Lit():
                yield WordPiece(part.text, quoted, split=default and not quoted)
                return
            case Arith():
                yield WordPiece(self.arithmetic(part.body, part.line), quoted, split=not quoted)
                return
            case CommandSub():
                yield WordPiece(self.capture(part), quoted, split=not quoted)
                return
        found = self.parameter(part)
        if isinstance(found, str):
            held = self.get(part.name)
            line = (
                held.first.line if held and alone and part.index is None else 0
            )  # several arguments in one variable keep their lines
            yield WordPiece(found, quoted, line, split=not quoted)
        elif isinstance(found, Word):
            for inner in self.tilde(found).parts:
                yield from self.pieces_of(inner, quoted or inner.quoted, alone, default=True)
        else:
            star = part.name == "*" or part.index == "*"
            between = self.ifs()[:1] if star else " "
            if quoted and star and not any(t.text == PASSED for t in found):
                found = [Text(between.join(t.text for t in found), 0)]
            for i, entry in enumerate(found):
                yield WordPiece(
                    entry.text,
                    quoted,
                    entry.line,
                    not quoted and entry.text != PASSED,
                    between if i else None,
                )

    def ifs(self) -> str:
        value = self.get("IFS")
        return value.first.text if value and not marked(value.first.text) else " \t\n"

    def tilde(self, word: Word) -> Word:
        first = word.parts[:1]
        rest = word.parts[1:]
        text = first[0].text if first and isinstance(first[0], Lit) and not first[0].quoted else ""
        if text.startswith("~/") or (text == "~" and not rest):
            return Word((Lit(env("HOME") + text[1:], True), *rest), word.line)
        return word

    def braces(self, word: Word) -> list[Word]:
        """a{b,c} and {1..3}, where the braces stand in one unquoted piece."""
        done: list[Word] = []
        waiting = [word]
        while waiting:
            one = waiting.pop(0)
            for i, part in enumerate(one.parts):
                if (
                    isinstance(part, Lit)
                    and not part.quoted
                    and (found := _BRACE.search(part.text))
                ):
                    before = part.text[: found.start()]
                    after = part.text[found.end() :]
                    pieces = (Lit(before + choice + after) for choice in _choices(found[1]))
                    waiting = [
                        Word((*one.parts[:i], piece, *one.parts[i + 1 :]), one.line)
                        for piece in pieces
                    ] + waiting
                    break
            else:
                done.append(one)
            if len(done) + len(waiting) > MAX_FIELDS:
                raise ConfigError(
                    f"{self.marks.name}, line {word.line}: braces make more than {MAX_FIELDS:,} "
                    f"words"
                )
        return done

    # -- variables

    def get(self, name: str) -> Array | None:
        return self.scope.variables.get(name)

    def set(self, name: str, text: str, line: int, key: str = "0") -> None:
        self.marks.spend(text, line)
        held = self.get(name) or Array()
        self.scope.variables[name] = Array({**held.entries, key: Text(text, line)}, held.named)

    def key(self, array: Array | None, index: Word) -> str:
        text = self.string(index)
        if array is not None and array.named:
            return text
        number = self.compute(text, index.line)
        if marked(number) or not number.startswith("-"):
            return number
        return str((int(array.next_key()) if array else 0) + int(number))  # counted from the end

    def held(self, param: Param) -> Text | list[Text] | None:
        """What a variable holds, a list for ${A[@]} and $@; None if the script does not set it."""
        name = param.name
        if name in ("@", "*"):
            return list(self.scope.positional)
        if name.isdigit():
            return self.scope.argument(int(name)) if len(name) < 6 else Text("", 0)
        if name == "#":
            known = self.scope.positional
            return None if any(t.text == PASSED for t in known) else Text(str(len(known)), 0)
        if name == "BASH_SOURCE":
            return Text(self.scope.path, 1)
        value = self.get(name)
        if name in _UNKNOWABLE and value is None:
            return Text(
                self.marks.new(f"${name}", "it differs from run to run", param.line), param.line
            )
        if isinstance(param.index, str):
            return value.values() if value else []
        key = "0" if param.index is None else self.key(value, param.index)
        if marked(key):
            return Text(
                self.marks.new(f"${{{name}[…]}}", "its index is not known", param.line), param.line
            )
        return value.entries.get(key, Text("", param.line)) if value else None

    def parameter(self, param: Param) -> str | list[Text] | Word:
        """A text, the entries of a list, or the word that stands in for it (a default)."""
        op = param.op
        if op == "keys":
            value = self.get(param.name)
            return [Text(k, param.line) for k in value.entries] if value else []
        if op == "indirect":
            inner = self.held(replace(param, op=""))
            if isinstance(inner, Text) and re.fullmatch(r"[A-Za-z_]\w*", inner.text):
                return self.parameter(Param(inner.text, param.line, param.quoted))
            return self.marks.new(
                f"${{!{param.name}}}", "the variable that it names is not known", param.line
            )
        held = self.held(param)
        if op == "length":
            return self.length(param, held)
        if op in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return self.conditional(param, held)
        if held is None:
            held = Text(env(self.scope.own_name(param)), param.line)
        if op == "":
            return held if isinstance(held, list) else held.text
        if op == ":":
            return self.slice(param, held)
        if isinstance(held, list):
            return [Text(self.transform(param, t.text), t.line) for t in held]
        return self.transform(param, held.text)

    def length(self, param: Param, held: Text | list[Text] | None) -> str:
        if isinstance(held, list) and not any(t.text == PASSED for t in held):
            return str(len(held))
        if isinstance(held, Text) and not marked(held.text):
            return str(len(held.text))
        return self.marks.new(
            f"${{#{param.name}}}", "the length of a value that the script does not set", param.line
        )

    def conditional(self, param: Param, held: Text | list[Text] | None) -> str | list[Text] | Word:
        assert param.arg is not None
        colon = param.op[0] == ":"
        kind = param.op[-1]
        text = held.text if isinstance(held, Text) else "".join(t.text for t in held or [])
        name = lone(text)
        unset = held is None or held == [] or (colon and name != "" and name not in ALWAYS_SET)
        if held is None and param.name in ALWAYS_SET:
            unset = False
            text = env(param.name)
            held = Text(text, param.line)
        missing = unset or (colon and text in ("", PASSED))
        if kind == "+":
            return "" if missing else param.arg
        if not missing:
            assert held is not None
            return held if isinstance(held, list) else held.text
        if kind == "?":
            return env(self.scope.own_name(param))
        if unset and not isinstance(held, list):
            who = f"${param.name}" if param.name.isdigit() else param.name
            default = shown(self.string(param.arg), self.marks)
            self.note(
                param.line, f"{who} is not set by the script; its default {default!r} is taken"
            )
        if kind == "=" and not param.name.isdigit():
            self.set(param.name, self.string(param.arg), param.line)
        return param.arg

    def slice(self, param: Param, held: Text | list[Text]) -> str | list[Text]:
        assert param.arg is not None
        bounds = [
            self.compute(self.string(w), param.line)
            for w in (param.arg, param.second)
            if w is not None
        ]
        if any(marked(b) for b in bounds):
            return self.marks.new(
                f"${{{param.name}:…}}", "the place to cut is not known", param.line
            )
        start = int(bounds[0])
        count = int(bounds[1]) if len(bounds) > 1 else None
        if isinstance(held, list):
            if any(t.text == PASSED for t in held):
                return held
            begin = start - 1 if param.name in ("@", "*") and start > 0 else start
            return held[begin:][:count]
        if marked(held.text):
            return self.marks.new(
                f"${{{param.name}:…}}", f"{shown(held.text, self.marks)} is not known", param.line
            )
        cut = held.text[start:]
        return cut if count is None else cut[:count]

    # -- patterns

    def transform(self, param: Param, text: str) -> str:
        op = param.op
        arg = param.arg
        assert arg is not None
        result: str | None = None
        if len(text) <= MAX_PATTERN_TEXT:
            self.marks.work(len(text) ** 2 // 5, param.line)
            if op in ("#", "##", "%", "%%"):
                result = _trim(text, self.pattern(arg), op)
            elif op[0] == "/" and not marked(text):
                result = _substitute(
                    text, self.pattern(arg), self.string(param.second) if param.second else "", op
                )
            elif op[0] in "^," and not marked(text) and not arg.parts:
                change = str.upper if op[0] == "^" else str.lower
                result = change(text) if len(op) == 2 else change(text[:1]) + text[1:]
            elif op == "@" and not marked(text):
                kind = self.string(arg)
                result = text.upper() if kind == "U" else text.lower() if kind == "L" else None
        if result is None:
            what = f"${{{param.name}{op}…}}"
            return self.marks.new(
                what, f"of {shown(text, self.marks)[:80]!r} it is not known", param.line
            )
        return result

    # -- arithmetic

    def arithmetic(self, body: Word, line: int) -> str:
        return self.compute(self.string(body), line)

    def compute(self, text: str, line: int) -> str:
        """The number as text, or a mark that says why there is none."""
        what = f"$(({shown(text, self.marks)}))"
        if why := self.unknown(text):
            return self.marks.new(what, why, line)
        try:
            return str(
                evaluate(text, self.number, lambda name, value: self.set(name, str(value), line))
            )
        except ArithmeticProblem as e:
            return self.marks.new(what, str(e), line)

    def unknown(self, text: str) -> str:
        """Why a text has no value that can be computed with; "" if it has one."""
        if found := self.marks.of(text):
            return f"{found[0].what}: {found[0].why}"
        if names := names_in(text):
            return f"{_said(names[0])} is not set by the script"
        return ""

    def number(self, name: str, depth: int = 0) -> int:
        held = self.held(Param(name, 0))
        if held is None:
            raise ArithmeticProblem(f"{name} is not set by the script")
        text = held.text if isinstance(held, Text) else ""
        if marked(text):
            why = self.unknown(text) or "it holds the script's arguments"
            raise ArithmeticProblem(f"{name} is not known: {why}")
        if depth > 8:
            raise ArithmeticProblem(f"{name} refers to itself")
        try:
            return evaluate(
                text, lambda n: self.number(n, depth + 1), lambda n, v: self.set(n, str(v), 0)
            )
        except ArithmeticProblem as e:
            raise ArithmeticProblem(f"{name} is {text[:40]!r}: {e}") from None


def _said(name: str) -> str:
    if name == "#":
        return "the number of arguments $#"
    return f"argument ${name[3:]} of the script" if re.fullmatch(r"ARG\d+", name) else name


def _choices(inside: str) -> Iterator[str]:
    if "," in inside:
        yield from inside.split(",")
        return
    low, high = (int(n) for n in inside.split(".."))
    step = 1 if low <= high else -1
    for count, number in enumerate(range(low, high + step, step)):
        if count > MAX_FIELDS:
            return
        yield str(number)


def _trim(text: str, pattern: str, op: str) -> str | None:
    """${x#p}, ${x##p}, ${x%p}, ${x%%p}; None where an unset variable in the text decides."""
    matches = re.compile(fnmatch.translate(pattern)).match
    size = len(text)
    if op[0] == "#":
        cuts = range(size + 1) if op == "#" else range(size, -1, -1)
        cut = next((c for c in cuts if _whole(text, c) and matches(text[:c])), None)
        return text[cut:] if cut is not None else None if marked(text[:1]) else text
    cuts = range(size, -1, -1) if op == "%" else range(size + 1)
    cut = next((c for c in cuts if _whole(text, c) and matches(text[c:])), None)
    return text[:cut] if cut is not None else None if text[-1:] in ("\ue001", "\ue003") else text


def _whole(text: str, cut: int) -> bool:
    """Whether no mark is cut in two."""
    return sum(text.count(s, 0, cut) for s in "\ue000\ue002") == sum(
        text.count(s, 0, cut) for s in "\ue001\ue003"
    )


def _substitute(text: str, pattern: str, new: str, op: str) -> str:
    """${x/p/new} and its forms //, /#, /%: the longest match from each place; what is empty is not
    replaced.
    """
    regex = fnmatch.translate(pattern)[:-2] if pattern else "(?!)"
    regex = rf"\A{regex}" if op.endswith("#") else rf"{regex}\Z" if op.endswith("%") else regex
    return re.sub(regex, lambda m: new if m[0] else "", text, count=0 if op.startswith("//") else 1)
