"""Shell text → commands.  Reads bash's grammar as launch scripts use it; runs nothing and knows no variable's value.

Invariant: reading takes time in proportion to the text (no backtracking over more than a few characters), and whatever cannot be read
raises ConfigError with the line, and for quotes the column.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from rft.convert.syntax import (
    AndOr,
    ArithCommand,
    Assign,
    Case,
    Command,
    CountingFor,
    Element,
    For,
    Function,
    Group,
    If,
    Lit,
    Pipeline,
    Redirect,
    Simple,
    Test,
    While,
    Word,
)
from rft.convert.words import WordReader

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[|\+?=)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(<<-|<<<|<<|<>|<&|>&|>>|>\||<|>)|&>>|&>")
_RESERVED = re.compile(r"(?:if|then|elif|else|fi|case|esac|for|while|until|do|done|function|select|[{}!]|\[\[)(?=[\s;&|<>()]|$)")
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)")
_KEYED = re.compile(r"\[[^\]\s]*\]=")
_DECLARE = frozenset({"export", "local", "declare", "typeset", "readonly"})
_PRIVATE = re.compile("[\0\ue000-\ue00f]")


def parse(text: str, name: str, *, line: int = 1, depth: int = 0, marked: bool = False) -> tuple[Command, ...]:
    """The commands of a script.  `line` is the number of its first line, `depth` how deep it stands in other scripts, `marked` says
    that it is made of variables' values and may hold their marks."""
    parser = Parser(text, name, line, depth)
    if not marked and (bad := _PRIVATE.search(text)):
        raise parser.error(f"holds the character U+{ord(bad[0]):04X}, which no script needs; remove it", bad.start())
    return parser.script()


class Parser(WordReader):
    """Commands, lists of them, and what encloses them."""

    def newline(self) -> None:
        """Past a line end and the here-documents that begin there."""
        self.pos += 1
        pending, self.documents = self.documents, []
        for mark, strip, quoted, place, start in pending:
            place.append(self.document(mark, strip, quoted, start))

    def document(self, mark: str, strip: bool, quoted: bool, start: int) -> Redirect:
        line, lines = self.line(), list[str]()
        while self.pos < len(self.text):
            newline = self.text.find("\n", self.pos)
            end = len(self.text) if newline < 0 else newline
            row = self.text[self.pos : end]
            self.pos = min(end + 1, len(self.text))
            row = row.lstrip("\t") if strip else row
            if row == mark:
                return Redirect("<<", None, self.document_word("\n".join([*lines, ""]) if lines else "", quoted, line))
            lines.append(row)
        raise self.error(f"the here-document <<{mark} has no closing line {mark!r}", start)

    def document_word(self, text: str, quoted: bool, line: int) -> Word:
        if quoted:
            return Word((Lit(text, True),), line)
        inner = self.nested(text, line)
        return Word(inner.quoted_parts(""), line)

    def gap(self) -> None:
        """Blanks and line ends."""
        self.blanks()
        while self.peek() == "\n":
            self.newline()
            self.blanks()

    # -- lists of commands

    def script(self) -> tuple[Command, ...]:
        body = self.commands(())
        if self.pos < len(self.text):
            raise self.error(f"unexpected {self.text[self.pos : self.pos + 10].split()[0]!r}")
        return body

    def reserved(self) -> str:
        found = _RESERVED.match(self.text, self.pos)
        return found[0] if found else ""

    def commands(self, ends: Collection[str]) -> tuple[Command, ...]:
        """Up to a closing word or sign, which is not consumed."""
        self.deeper()
        found: list[Command] = []
        while True:
            self.gap()
            sign = self.peek()
            if not sign or sign == ")" or self.at(";;") or self.at(";&"):
                break
            word = self.reserved()
            if word in ends:
                break
            if word in ("then", "elif", "else", "fi", "do", "done", "esac", "}"):
                raise self.error(f"{word!r} without its beginning")
            if sign in ";&":
                raise self.error(f"unexpected {sign!r}")
            found.append(self.and_or())
            self.blanks()
            if self.peek() in (";", "&") and not self.at(";;") and not self.at(";&"):
                self.pos += 1
        if self.documents and self.pos >= len(self.text):
            raise self.error(f"the here-document <<{self.documents[0][0]} has no closing line", self.documents[0][4])
        self.depth -= 1
        return tuple(found)

    def and_or(self) -> Command:
        line, first = self.line(), self.pipeline()
        rest: list[tuple[str, Command]] = []
        while True:
            self.blanks()
            if not (self.at("&&") or self.at("||")):
                return AndOr(first, tuple(rest), line) if rest else first
            op = self.text[self.pos : self.pos + 2]
            self.pos += 2
            self.gap()
            rest.append((op, self.pipeline()))

    def pipeline(self) -> Command:
        line, negated = self.line(), False
        while self.reserved() == "!":
            negated = not negated
            self.pos += 1
            self.blanks()
        commands = [self.command()]
        while True:
            self.blanks()
            if self.peek() != "|" or self.at("||"):
                break
            self.pos += 2 if self.at("|&") else 1
            self.gap()
            commands.append(self.command())
        return Pipeline(tuple(commands), line, negated) if negated or len(commands) > 1 else commands[0]

    def command(self) -> Command:
        self.deeper()
        word, line, begin = self.reserved(), self.line(), self.pos
        command: Command
        if self.at("((") and (end := self.arithmetic_end(self.pos + 2)) is not None:
            command = ArithCommand(self.inner(self.text[self.pos + 2 : end], line), line)
            self.pos = end + 2
        elif self.peek() == "(":
            self.pos += 1
            command = Group(self.until_paren(begin), line, subshell=True)
        elif word == "[[":
            command = self.test()
        elif word and word != "!":
            command = self.compound(word, begin, line)
        else:
            command = self.function_or_simple()
        if not isinstance(command, Simple):
            self.redirects()  # where the output of a loop or group goes changes no argument
        self.depth -= 1
        return command

    def compound(self, word: str, begin: int, line: int) -> Command:
        self.pos += len(word)
        match word:
            case "{":
                body = self.commands(("}",))
                self.expect("}", "{", begin)
                return Group(body, line)
            case "if":
                return self.if_(begin, line)
            case "while" | "until":
                condition = self.commands(("do",))
                return While(condition, self.do(word, begin), line, word == "until")
            case "for" | "select":
                return self.for_(begin, line)
            case "case":
                return self.case(begin, line)
            case "function":
                self.blanks()
                found = re.compile(r"[^\s(){}]+").match(self.text, self.pos)
                if not found:
                    raise self.error("`function` without a name")
                self.pos = found.end()
                self.blanks()
                if bracket := re.compile(r"\([ \t]*\)").match(self.text, self.pos):
                    self.pos = bracket.end()
                self.gap()
                return Function(found[0], self.command(), line)
        raise self.error(f"unexpected {word!r}", begin)

    def expect(self, word: str, opened: str, begin: int) -> None:
        self.gap()
        if self.reserved() != word:
            raise self.error(f"`{opened}` on this line has no `{word}`", begin)
        self.pos += len(word)

    def until_paren(self, begin: int) -> tuple[Command, ...]:
        body = self.commands(())
        if self.peek() != ")":
            raise self.error("unbalanced '('", begin, column=True)
        self.pos += 1
        return body

    def if_(self, begin: int, line: int) -> If:
        clauses = []
        while True:
            condition = self.commands(("then",))
            self.expect("then", "if", begin)
            clauses.append((condition, self.commands(("elif", "else", "fi"))))
            word = self.reserved()
            if word != "elif":
                break
            self.pos += 4
        otherwise = None
        if word == "else":
            self.pos += 4
            otherwise = self.commands(("fi",))
        self.expect("fi", "if", begin)
        return If(tuple(clauses), otherwise, line)

    def do(self, opened: str, begin: int) -> tuple[Command, ...]:
        self.expect("do", opened, begin)
        body = self.commands(("done",))
        self.expect("done", opened, begin)
        return body

    def for_(self, begin: int, line: int) -> Command:
        self.blanks()
        if self.at("(("):
            end = self.arithmetic_end(self.pos + 2)
            pieces = self.text[self.pos + 2 : end].split(";") if end is not None else []
            if end is None or len(pieces) != 3:
                raise self.error("cannot read this `for ((start; condition; update))`", begin)
            self.pos = end + 2
            self.separator()
            start, condition, update = (self.inner(p, line) for p in pieces)
            return CountingFor(start, condition, update, self.do("for", begin), line)
        name = _NAME.match(self.text, self.pos)
        if not name:
            raise self.error("`for` without a variable's name", begin)
        self.pos = name.end()
        self.gap()
        words: list[Word] | None = None
        if re.compile(r"in(?=[\s;]|$)").match(self.text, self.pos):
            self.pos += 2
            words = []
            self.blanks()
            while self.peek() not in ("", "\n", ";", "&", "|", ")"):
                words.append(self.word())
                self.blanks()
        self.separator()
        return For(name[0], None if words is None else tuple(words), self.do("for", begin), line)

    def separator(self) -> None:
        self.blanks()
        if self.peek() == ";":
            self.pos += 1
        self.gap()

    def case(self, begin: int, line: int) -> Case:
        self.blanks()
        subject = self.word()
        self.gap()
        if not re.compile(r"in(?=\s|$)").match(self.text, self.pos):
            raise self.error("`case` without `in`", begin)
        self.pos += 2
        clauses = []
        while True:
            self.gap()
            if self.reserved() == "esac" or not self.peek():
                break
            if self.peek() == "(":
                self.pos += 1
                self.blanks()
            patterns = [self.word()]
            self.blanks()
            while self.peek() == "|":
                self.pos += 1
                self.blanks()
                patterns.append(self.word())
                self.blanks()
            if self.peek() != ")":
                raise self.error("a pattern of this `case` has no ')'", begin)
            self.pos += 1
            clauses.append((tuple(patterns), self.commands(("esac",))))
            if sign := re.compile(r";;&|;;|;&").match(self.text, self.pos):
                self.pos = sign.end()
        self.expect("esac", "case", begin)
        return Case(subject, tuple(clauses), line)

    def test(self) -> Test:
        begin, line = self.pos, self.line()
        self.pos += 2
        items: list[Word | str] = []
        while True:
            self.gap()
            if self.at("]]"):
                self.pos += 2
                return Test(tuple(items), line)
            if self.at("&&") or self.at("||"):
                items.append(self.text[self.pos : self.pos + 2])
                self.pos += 2
            elif self.peek() in ("(", ")", "<", ">"):
                items.append(self.peek())
                self.pos += 1
            elif self.peek() in ("", ";", "&", "|"):
                raise self.error("`[[` on this line has no `]]`", begin)
            else:
                items.append(self.word(test=True))
                if items[-1].literal() == "=~":  # type: ignore[union-attr]
                    self.blanks()
                    regex = re.compile(r"(?:\\.|\"[^\"]*\"|'[^']*'|[^\s\"'\\])+").match(self.text, self.pos)
                    items.append(Word((Lit(regex[0] if regex else "", True),), self.line()))
                    self.pos = regex.end() if regex else self.pos

    # -- simple commands

    def function_or_simple(self) -> Command:
        if (found := _FUNCTION.match(self.text, self.pos)) and not self.at("(("):
            line = self.line()
            self.pos = found.end()
            self.gap()
            return Function(found[1], self.command(), line)
        return self.simple()

    def simple(self) -> Simple:
        line, begin = self.line(), self.pos
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        redirects: list[Redirect] = []
        declares = False
        while True:
            self.blanks()
            if self.redirect(redirects):
                continue
            sign = self.peek()
            if sign in ("", "\n", ";", "&", "|", ")"):
                break
            if sign == "(":
                raise self.error("unexpected '('", column=True)
            assign = self.assignment() if not words or declares else None
            if assign is None:
                words.append(self.word())
                declares = _declares(words[0])
            elif words:
                words.append(assign)
            else:
                assigns.append(assign)
        if self.pos == begin:
            raise self.error(f"unexpected {self.peek()!r}" if self.peek() else "the script ends in the middle of a command")
        return Simple(tuple(assigns), tuple(words), redirects, line)

    def redirects(self) -> list[Redirect]:
        found: list[Redirect] = []
        self.blanks()
        while self.redirect(found):
            self.blanks()
        return found

    def redirect(self, found: list[Redirect]) -> bool:
        match = _REDIRECT.match(self.text, self.pos)
        if not match or (match[0] in "<>" and self.text[match.end() : match.end() + 1] == "("):
            return False
        start, self.pos = self.pos, match.end()
        op = match[1] or match[0]
        self.blanks()
        if self.peek() in ("", "\n", ";", "|", ")"):
            raise self.error(f"{op!r} without a target", start)
        if op in ("<<", "<<-"):
            word = self.word()
            mark = "".join(p.text for p in word.parts if isinstance(p, Lit))
            quoted = any(p.quoted for p in word.parts)
            self.documents.append((mark, op == "<<-", quoted, found, start))
        elif op == "<<<":
            found.append(Redirect(op, None, self.word()))
        else:
            found.append(Redirect(op, self.word()))
        return True

    def assignment(self) -> Assign | None:
        match = _ASSIGN.match(self.text, self.pos)
        if not match:
            return None
        line, index, op, after = self.line(), None, match[2], match.end()
        if op == "[":
            close = re.compile(r"([^\]\n]*)\](\+?=)").match(self.text, after)
            if not close:
                return None
            index, op, after = self.inner(close[1], line), close[2], close.end()
        self.pos = after
        value: Word | tuple[Element, ...]
        value = self.elements() if self.peek() == "(" else self.word(empty=True)
        return Assign(match[1], value, line, index, op == "+=")

    def elements(self) -> tuple[Element, ...]:
        opened, self.pos = self.pos, self.pos + 1
        found: list[Element] = []
        while True:
            self.gap()
            sign = self.peek()
            if sign == ")":
                self.pos += 1
                return tuple(found)
            if sign in ("", ";", "&", "|", "(") or (sign in "<>" and self.text[self.pos + 1 : self.pos + 2] != "("):
                raise self.error("unbalanced '(' of an array", opened, column=True)
            key = None
            if keyed := _KEYED.match(self.text, self.pos):
                key, self.pos = self.inner(keyed[0][1:-2], self.line()), keyed.end()
            found.append(Element(key, self.word(empty=key is not None)))


def _declares(word: Word | Assign) -> bool:
    return isinstance(word, Word) and word.literal() in _DECLARE
