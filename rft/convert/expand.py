"""Words of a script → the texts they become: variables, arrays, arithmetic, patterns, splitting.

Runs nothing; `capture` gives the text of `$(…)`.  Invariant: a variable that the script does not set stays a mark, or takes the default
that stands beside it; it never silently becomes empty.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from rft.convert.arithmetic import ArithmeticProblem, evaluate
from rft.convert.syntax import Arith, CommandSub, Lit, Param, Part, Word
from rft.convert.values import ALWAYS_SET, PASSED, Array, Marks, Text, env, lone, marked, names_in, shown
from rft.errors import ConfigError

MAX_FIELDS = 5_000
MAX_PATTERN_TEXT = 1_000
MAX_GLOBBED = 100  # replacing by a pattern takes time with the third power
_BRACE = re.compile(r"\{([^{}]*,[^{}]*|-?\d{1,6}\.\.-?\d{1,6})\}")
_UNKNOWABLE = {"RANDOM", "SECONDS", "LINENO", "EPOCHSECONDS", "$", "!", "?", "-", "_"}


@dataclass
class Scope:
    """Variables and positional arguments; `shifted` counts the script's own arguments that `shift` has dropped."""

    path: str
    variables: dict[str, Text | Array] = field(default_factory=dict)
    positional: list[Text] = field(default_factory=lambda: [Text(PASSED, 0)])
    shifted: int = 0


class Expander:
    def __init__(
        self, scope: Scope, marks: Marks, note: Callable[[int, str], None], capture: Callable[[CommandSub], str]
    ) -> None:
        self.scope, self.marks, self.note, self.capture = scope, marks, note, capture

    # -- words

    def fields(self, word: Word) -> list[Text]:
        """The arguments that a word becomes: none, one or several."""
        found: list[Text] = []
        for one in self.braces(word):
            found += _Fields(self, one).read()
        for piece in found:
            self.marks.spend(piece.text, word.line)
        if len(found) > MAX_FIELDS:
            raise ConfigError(f"{self.marks.name}, line {word.line}: one word becomes more than {MAX_FIELDS:,} arguments")
        return found

    def string(self, word: Word) -> str:
        """One text, as in an assignment: nothing is split."""
        return self.marks.spend("".join(self.text_of(p) for p in self.tilde(word).parts), word.line)

    def pattern(self, word: Word) -> str:
        """For fnmatch: what was quoted matches itself."""
        text = ""
        for part in word.parts:
            piece = self.text_of(part)
            text += glob.escape(piece) if part.quoted else re.sub(r"\[\^", "[!", piece)
        return text

    def text_of(self, part: Part) -> str:
        match part:
            case Lit():
                return part.text
            case Arith():
                return self.arithmetic(part.body, part.line)
            case CommandSub():
                return self.capture(part)
        found = self.parameter(part)
        if isinstance(found, Word):
            return self.string(found)
        if isinstance(found, str):
            return found
        star = part.name == "*" or part.index == "*"
        return (self.ifs()[:1] if star else " ").join(t.text for t in found)

    def ifs(self) -> str:
        value = self.scope.variables.get("IFS")
        return value.text if isinstance(value, Text) and not marked(value.text) else " \t\n"

    def tilde(self, word: Word) -> Word:
        first = word.parts[0] if word.parts else None
        if (
            isinstance(first, Lit)
            and not first.quoted
            and re.match(r"~(/|$)", first.text)
            and (len(word.parts) == 1 or first.text != "~")
        ):
            return Word((Lit(env("HOME") + first.text[1:], True), *word.parts[1:]), word.line)
        return word

    def braces(self, word: Word) -> list[Word]:
        """a{b,c} and {1..3}, where the braces stand in one unquoted piece."""
        done: list[Word] = []
        waiting = [word]
        while waiting:
            one = waiting.pop(0)
            for i, part in enumerate(one.parts):
                if isinstance(part, Lit) and not part.quoted and (found := _BRACE.search(part.text)):
                    before, after = part.text[: found.start()], part.text[found.end() :]
                    choices = [
                        Word((*one.parts[:i], Lit(before + c + after), *one.parts[i + 1 :]), one.line) for c in _choices(found[1])
                    ]
                    waiting = choices + waiting
                    break
            else:
                done.append(one)
            if len(done) + len(waiting) > MAX_FIELDS:
                raise ConfigError(f"{self.marks.name}, line {word.line}: braces make more than {MAX_FIELDS:,} words")
        return done

    # -- variables

    def get(self, name: str) -> Text | Array | None:
        return self.scope.variables.get(name)

    def set(self, name: str, text: str, line: int, key: str | None = None) -> None:
        self.marks.spend(text, line)
        if key is None:
            old = self.get(name)
            if isinstance(old, Array):
                old.entries["0"] = Text(text, line)
            else:
                self.scope.variables[name] = Text(text, line)
            return
        held = self.get(name)
        if not isinstance(held, Array):
            held = self.scope.variables[name] = Array({"0": held} if held else {})
        held.entries[key] = Text(text, line)

    def argument(self, number: int) -> Text | None:
        """$1 and on; None for an argument of the script itself, which only its caller knows."""
        if number == 0:
            return Text(self.scope.path, 1)
        known = [t for t in self.scope.positional if t.text != PASSED]
        if number <= len(known):
            return known[number - 1]
        return None if len(known) < len(self.scope.positional) else Text("", 0)

    def own_name(self, param: Param) -> str:
        """Under which environment variable an unset one can be given: itself, or ARG1 for $1."""
        if not param.name.isdigit():
            return param.name
        known = sum(t.text != PASSED for t in self.scope.positional)
        return f"ARG{int(param.name) - known + self.scope.shifted}"

    def key(self, array: Array | None, index: Word) -> str:
        text = self.string(index)
        if array is not None and array.named:
            return text
        number = self.compute(text, index.line)
        return number if marked(number) or not number.startswith("-") else self.from_end(array, int(number))

    @staticmethod
    def from_end(array: Array | None, number: int) -> str:
        count = int(array.next_key()) if array else 0
        return str(count + number)

    def held(self, param: Param) -> Text | list[Text] | None:
        """What a variable holds, a list for ${A[@]} and $@; None if the script does not set it."""
        name = param.name
        if name in ("@", "*"):
            return list(self.scope.positional)
        if name.isdigit():
            return self.argument(int(name)) if len(name) < 6 else Text("", 0)
        if name == "#":
            known = self.scope.positional
            return None if any(t.text == PASSED for t in known) else Text(str(len(known)), 0)
        if name == "BASH_SOURCE":
            return Text(self.scope.path, 1)
        value = self.get(name)
        if name in _UNKNOWABLE and value is None:
            return Text(self.marks.new(f"${name}", "it differs from run to run", param.line), param.line)
        if isinstance(param.index, str):
            return value.values() if isinstance(value, Array) else [value] if value else []
        if param.index is not None:
            key = self.key(value if isinstance(value, Array) else None, param.index)
            if marked(key):
                return Text(self.marks.new(f"${{{name}[…]}}", "its index is not known", param.line), param.line)
            entries = value.entries if isinstance(value, Array) else {"0": value} if value else {}
            return entries.get(key) or (None if value is None else Text("", param.line))
        if isinstance(value, Array):
            return value.entries.get("0", Text("", param.line))
        return value

    def parameter(self, param: Param) -> str | list[Text] | Word:
        """A text, the entries of a list, or the word that stands in for it (a default)."""
        op = param.op
        if op == "keys":
            value = self.get(param.name)
            keys = [] if value is None else list(value.entries) if isinstance(value, Array) else ["0"]
            return [Text(k, param.line) for k in keys]
        if op == "indirect":
            inner = self.held(replace(param, op=""))
            if isinstance(inner, Text) and re.fullmatch(r"[A-Za-z_]\w*", inner.text):
                return self.parameter(Param(inner.text, param.line, param.quoted))
            return self.marks.new(f"${{!{param.name}}}", "the variable that it names is not known", param.line)
        held = self.held(param)
        if op == "length":
            return self.length(param, held)
        if op in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return self.conditional(param, held)
        if held is None:
            held = Text(env(self.own_name(param)), param.line)
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
        return self.marks.new(f"${{#{param.name}}}", "the length of a value that the script does not set", param.line)

    def conditional(self, param: Param, held: Text | list[Text] | None) -> str | list[Text] | Word:
        assert param.arg is not None
        colon, kind = param.op[0] == ":", param.op[-1]
        text = held.text if isinstance(held, Text) else "".join(t.text for t in held or [])
        name = lone(text)
        unset = held is None or held == [] or (colon and name != "" and name not in ALWAYS_SET)
        if held is None and param.name in ALWAYS_SET:
            unset, text = False, env(param.name)
            held = Text(text, param.line)
        missing = unset or (colon and text in ("", PASSED))
        if kind == "+":
            return "" if missing else param.arg
        if not missing:
            assert held is not None
            return held if isinstance(held, list) else held.text
        if kind == "?":
            return env(self.own_name(param))
        if unset and not isinstance(held, list):
            who = f"${param.name}" if param.name.isdigit() else param.name
            default = shown(self.string(param.arg), self.marks)
            self.note(param.line, f"{who} is not set by the script; its default {default!r} is taken")
        if kind == "=" and not param.name.isdigit():
            self.set(param.name, self.string(param.arg), param.line)
        return param.arg

    def slice(self, param: Param, held: Text | list[Text]) -> str | list[Text]:
        assert param.arg is not None
        bounds = [self.compute(self.string(w), param.line) for w in (param.arg, param.second) if w is not None]
        if any(marked(b) for b in bounds):
            return self.marks.new(f"${{{param.name}:…}}", "the place to cut is not known", param.line)
        start, count = int(bounds[0]), int(bounds[1]) if len(bounds) > 1 else None
        if isinstance(held, list):
            if any(t.text == PASSED for t in held):
                return held
            begin = start - 1 if param.name in ("@", "*") and start > 0 else start
            return held[begin:][:count]
        if marked(held.text):
            return self.marks.new(f"${{{param.name}:…}}", f"{shown(held.text, self.marks)} is not known", param.line)
        cut = held.text[start:]
        return cut if count is None else cut[:count]

    # -- patterns

    def transform(self, param: Param, text: str) -> str:
        op, arg = param.op, param.arg
        assert arg is not None
        result: str | None = None
        if len(text) <= MAX_PATTERN_TEXT:
            self.marks.work(len(text) ** 2 // 5, param.line)
            if op in ("#", "##", "%", "%%"):
                result = _trim(text, self.pattern(arg), op)
            elif op[0] == "/" and not marked(text):
                self.marks.work(min(len(text), MAX_GLOBBED) ** 3 // 10, param.line)
                result = _substitute(text, self.pattern(arg), self.string(param.second) if param.second else "", op)
            elif op[0] in "^," and not marked(text) and not arg.parts:
                change = str.upper if op[0] == "^" else str.lower
                result = change(text) if len(op) == 2 else change(text[:1]) + text[1:]
            elif op == "@" and not marked(text):
                kind = self.string(arg)
                result = text.upper() if kind == "U" else text.lower() if kind == "L" else None
        if result is None:
            what = f"${{{param.name}{op}…}}"
            return self.marks.new(what, f"of {shown(text, self.marks)[:80]!r} it is not known", param.line)
        return result

    # -- arithmetic

    def arithmetic(self, body: Word, line: int) -> str:
        return self.compute(self.string(body), line)

    def compute(self, text: str, line: int) -> str:
        """The number as text, or a mark that says why there is none."""
        what = f"$(({shown(text, self.marks)}))"
        if unknown := self.marks.of(text):
            return self.marks.new(what, f"{unknown[0].what}: {unknown[0].why}", line)
        if names := names_in(text):
            return self.marks.new(what, f"{_said(names[0])} is not set by the script", line)
        try:
            return str(evaluate(text, lambda name: self.number(name, 0), lambda name, value: self.set(name, str(value), line)))
        except ArithmeticProblem as e:
            return self.marks.new(what, str(e), line)

    def number(self, name: str, depth: int) -> int:
        held = self.held(Param(name, 0))
        if held is None:
            raise ArithmeticProblem(f"{name} is not set by the script")
        text = held.text if isinstance(held, Text) else ""
        if marked(text):
            unknown, names = self.marks.of(text), names_in(text)
            reason = "it holds the script's arguments"
            if unknown:
                reason = f"{unknown[0].what}: {unknown[0].why}"
            elif names:
                reason = f"{_said(names[0])} is not set by the script"
            raise ArithmeticProblem(f"{name} is not known: {reason}")
        if depth > 8:
            raise ArithmeticProblem(f"{name} refers to itself")
        try:
            return evaluate(text, lambda n: self.number(n, depth + 1), lambda n, v: self.set(n, str(v), 0))
        except ArithmeticProblem as e:
            raise ArithmeticProblem(f"{name} is {text[:40]!r}: {e}") from None


def _said(name: str) -> str:
    return (
        "the number of arguments $#"
        if name == "#"
        else f"argument ${name[3:]} of the script"
        if re.fullmatch(r"ARG\d+", name)
        else name
    )


class _Fields:
    """Joins the pieces of one word and splits where nothing is quoted."""

    def __init__(self, expander: Expander, word: Word) -> None:
        self.expander, self.word = expander, expander.tilde(word)
        self.done: list[Text] = []
        self.text, self.line, self.open = "", word.line, False

    def read(self) -> list[Text]:
        for part in self.word.parts:
            self.add(part, False)
        self.close()
        return self.done

    def close(self) -> None:
        if self.open:
            self.done.append(Text(self.text, self.line))
        self.text, self.line, self.open = "", self.word.line, False

    def put(self, text: str, line: int | None = None) -> None:
        if not self.open and line:
            self.line = line
        self.text += text
        self.open = True

    def add(self, part: Part, quoted: bool) -> None:
        quoted = quoted or part.quoted
        if isinstance(part, Lit):
            if part.text or quoted:
                self.put(part.text)
            return
        if not isinstance(part, Param):
            text = self.expander.text_of(part)
            if quoted:
                self.put(text)
            else:
                self.split(text, self.word.line)
            return
        found = self.expander.parameter(part)
        if isinstance(found, Word):
            for inner in self.expander.tilde(found).parts:
                self.add_default(inner, quoted)
        elif isinstance(found, list):
            self.add_list(part, found, quoted)
        elif quoted:
            self.put(found, self.line_of(part))
        else:
            self.split(found, self.line_of(part) or self.word.line)

    def add_default(self, part: Part, quoted: bool) -> None:
        """A piece of ${x:-…}: plain text in it is split like a variable's value."""
        if isinstance(part, Lit) and not part.quoted and not quoted:
            self.split(part.text, self.word.line)
        else:
            self.add(part, quoted)

    def line_of(self, part: Param) -> int:
        """Where the value was written, if the word is this variable alone: several arguments in one variable keep their lines."""
        held = self.expander.get(part.name)
        return held.line if isinstance(held, Text) and len(self.word.parts) == 1 else 0

    def add_list(self, part: Param, found: list[Text], quoted: bool) -> None:
        star = part.name == "*" or part.index == "*"
        if quoted and star and not any(t.text == PASSED for t in found):
            self.put(self.expander.ifs()[:1].join(t.text for t in found))
            return
        for i, entry in enumerate(found):
            if i:
                self.close()
            if quoted or entry.text == PASSED:
                self.put(entry.text, entry.line)
            else:
                self.split(entry.text, entry.line)

    def split(self, text: str, line: int) -> None:
        signs = self.expander.ifs()
        if not signs:
            self.put(text)
            return
        pieces = re.split(f"([{re.escape(signs)}]+)", text)
        for i, piece in enumerate(pieces):
            if i % 2:
                self.close()
                line += piece.count("\n")
            elif piece:
                self.put(piece, line)


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
    return sum(text.count(s, 0, cut) for s in "\ue000\ue002") == sum(text.count(s, 0, cut) for s in "\ue001\ue003")


def _substitute(text: str, pattern: str, new: str, op: str) -> str | None:
    """${x/p/new} and its forms //, /#, /%; None where that would take long."""
    matches = re.compile(fnmatch.translate(pattern)).match
    out, pos = "", 0
    if not pattern:
        return text
    if op in ("/", "//") and not re.search(r"[*?\[]", pattern):
        return text.replace(pattern, new, -1 if op == "//" else 1)
    if len(text) > MAX_GLOBBED:
        return None
    while pos <= len(text):
        ends = (end for end in range(len(text), pos, -1) if (not op.endswith("%") or end == len(text)) and matches(text[pos:end]))
        end = next(ends, None)
        if end is not None:
            out, pos = out + new, end
            if not op.startswith("//"):
                break
        elif op.endswith("#") and pos == 0:
            break
        else:
            out, pos = out + text[pos : pos + 1], pos + 1
    return out + text[pos:]
