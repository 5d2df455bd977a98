"""Shell text → commands.  Reads bash's grammar as launch scripts use it; runs nothing and knows no
variable's value.

Invariant: reading takes time in proportion to the text (no backtracking over more than a few
characters), and whatever cannot be read raises ConfigError with the line, and for quotes the
column.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from rft.extras.migrate.convert import syntax
from rft.extras.migrate.convert.syntax import Assign, Command, Lit, Redirect, SimpleCommand, Word
from rft.extras.migrate.convert.words import Document, WordReader

DECLARING = frozenset({"export", "local", "declare", "typeset", "readonly"})
_NAME = re.compile(r"[A-Za-z_]\w*")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|case|esac|for|while|until|do|done|function|select|[{}!]|\[\[)(?=[\s;&|<>()]|$)"
)
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)")
_NAMED_FUNCTION = re.compile(r"[ \t]*([^\s(){}]+)(?:[ \t]*\([ \t]*\))?")
_REGEX = re.compile(r"(?:\\.|\"[^\"]*\"|'[^']*'|[^\s\"'\\])+")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(?:(\+?)=|\[([^\]\n]*)\](\+?)=)")
_KEYED = re.compile(r"\[([^\]\s]*)\]=")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(<<-|<<<|<<|<>|<&|>&|>>|>\||<|>)|&>>|&>")
_PRIVATE = re.compile("[\0\ue000-\ue00f]")


def parse(text: str, name: str, *, line: int = 1, marked: bool = False) -> tuple[Command, ...]:
    """The commands of a script.  `line` is the number of its first line, `marked` says that it is
    made of variables' values and may hold their marks.
    """
    parser = Parser(text, name, line)
    if not marked and (bad := _PRIVATE.search(text)):
        raise parser.error(
            f"holds the character U+{ord(bad[0]):04X}, which no script needs; remove it",
            bad.start(),
        )
    return parser.script()


class SimpleCommandReader(WordReader):
    """One command and what is redirected to and from it, and what stands between commands."""

    def blanks(self) -> None:
        """Past spaces, continuation lines and a comment."""
        text = self.text
        end = len(self.text)
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

    def gap(self) -> None:
        """Past blanks, line ends and the here-documents that begin there."""
        self.blanks()
        while self.peek() == "\n":
            self.pos += 1
            pending = self.documents
            self.documents = []
            for document in pending:
                self.read_document(document)
            self.blanks()

    def read_document(self, document: Document) -> None:
        line = self.line()
        lines = list[str]()
        while self.pos < len(self.text):
            newline = self.text.find("\n", self.pos)
            end = len(self.text) if newline < 0 else newline
            row = self.text[self.pos : end]
            self.pos = min(end + 1, len(self.text))
            row = row.lstrip("\t") if document.strip else row
            if row == document.mark:
                text = "".join(f"{one}\n" for one in lines)
                parts = (
                    (Lit(text, True),)
                    if document.quoted
                    else self.nested(text, line).quoted_parts("")
                )
                document.redirects.append(Redirect("<<", Word(parts, line)))
                return
            lines.append(row)
        raise self.error(
            f"the here-document <<{document.mark} has no closing line {document.mark!r}",
            document.start,
        )

    def simple(self) -> SimpleCommand:
        line = self.line()
        begin = self.pos
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        redirects: list[Redirect] = []
        while True:
            self.redirected(redirects)
            sign = self.peek()
            if sign in ("", "\n", ";", "&", "|", ")"):
                break
            if sign == "(":
                raise self.error("unexpected '('", column=True)
            declares = (
                bool(words) and isinstance(words[0], Word) and words[0].literal() in DECLARING
            )
            assign = self.assignment() if not words or declares else None
            if assign is None:
                words.append(self.word())
            elif words:
                words.append(assign)
            else:
                assigns.append(assign)
        if self.pos == begin:
            raise self.unexpected()
        return SimpleCommand(tuple(assigns), tuple(words), redirects, line)

    def redirected(self, found: list[Redirect]) -> None:
        """Past blanks and redirections, which join `found`."""
        while True:
            self.blanks()
            start = self.pos
            sign = self.take(_REDIRECT)
            if not sign or (sign[0] in "<>" and self.peek() == "("):
                self.pos = start
                return
            op = sign[1] or sign[0]
            self.blanks()
            if self.peek() in ("", "\n", ";", "|", ")"):
                raise self.error(f"{op!r} without a target", start)
            word = self.word()
            if op in ("<<", "<<-"):
                mark = "".join(p.text for p in word.parts if isinstance(p, Lit))
                self.documents.append(
                    Document(mark, op == "<<-", any(p.quoted for p in word.parts), found, start)
                )
            else:
                found.append(Redirect(op, word if op == "<<<" else None))

    def assignment(self) -> Assign | None:
        line = self.line()
        found = self.take(_ASSIGN)
        if not found:
            return None
        index = None if found[3] is None else self.inner(found[3], line)
        value = self.elements(line) if self.peek() == "(" else self.word(empty=True)
        return Assign(found[1], value, line, index, "+" in (found[2], found[4]))

    def elements(self, line: int) -> tuple[Assign, ...]:
        opened = self.pos
        self.pos = self.pos + 1
        found: list[Assign] = []
        while True:
            self.gap()
            sign = self.peek()
            if sign == ")":
                self.pos += 1
                return tuple(found)
            if sign in ("", ";", "&", "|", "(") or (
                sign in "<>" and self.text[self.pos + 1 : self.pos + 2] != "("
            ):
                raise self.error("unbalanced '(' of an array", opened, column=True)
            at = self.line()
            keyed = self.take(_KEYED)
            key = self.inner(keyed[1], at) if keyed else None
            found.append(Assign("", self.word(empty=key is not None), line, key))


class Parser(SimpleCommandReader):
    """Commands, lists of them, and what encloses them."""

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
        found: list[Command] = []
        while True:
            self.gap()
            sign = self.peek()
            if not sign or sign == ")" or self.at(";;", ";&"):
                break
            word = self.reserved()
            if word in ends:
                break
            if word in ("then", "elif", "else", "fi", "do", "done", "esac", "}"):
                raise self.error(f"{word!r} without its beginning")
            if sign in ";&":
                raise self.unexpected()
            found.append(self.and_or())
            self.blanks()
            if self.at(";", "&") and not self.at(";;", ";&"):
                self.pos += 1
        if self.documents and self.pos >= len(self.text):
            self.read_document(self.documents[0])  # says that it has no end
        return tuple(found)

    def and_or(self) -> Command:
        line = self.line()
        first = self.pipeline()
        rest: list[tuple[str, Command]] = []
        while True:
            self.blanks()
            if not self.at("&&", "||"):
                return syntax.AndOr(first, tuple(rest), line) if rest else first
            op = self.text[self.pos : self.pos + 2]
            self.pos += 2
            self.gap()
            rest.append((op, self.pipeline()))

    def pipeline(self) -> Command:
        line = self.line()
        negated = False
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
        return (
            syntax.Pipeline(tuple(commands), line, negated)
            if negated or len(commands) > 1
            else commands[0]
        )

    def command(self) -> Command:
        word = self.reserved()
        line = self.line()
        begin = self.pos
        command: Command
        if self.at("((") and (text := self.arithmetic(2)) is not None:
            command = self.let(text, line)
        elif self.peek() == "(":
            self.pos += 1
            command = syntax.GroupCommand(self.until_paren(begin), line, subshell=True)
        elif word and word != "!":
            self.pos += len(word)
            command = self.compound(word, begin, line)
        elif found := self.take(_FUNCTION):
            self.gap()
            command = syntax.FunctionCommand(found[1], self.command(), line)
        else:
            command = self.simple()
        if not isinstance(command, SimpleCommand):
            self.redirected([])  # where the output of a loop or group goes changes no argument
        return command

    def let(self, text: str, line: int) -> SimpleCommand:
        return SimpleCommand((), (Word((Lit("let"),), line), self.inner(text, line)), [], line)

    def compound(self, word: str, begin: int, line: int) -> Command:
        match word:
            case "{":
                body = self.commands(("}",))
                self.expect("}", "{", begin)
                return syntax.GroupCommand(body, line)
            case "[[":
                return self.test(begin, line)
            case "if":
                return self.if_(begin, line)
            case "while" | "until":
                condition = self.commands(("do",))
                return syntax.WhileCommand(condition, self.do(word, begin), line, word == "until")
            case "for" | "select":
                return self.for_(begin, line)
            case "case":
                return self.case(begin, line)
            case "function":
                if not (found := self.take(_NAMED_FUNCTION)):
                    raise self.error("`function` without a name")
                self.gap()
                return syntax.FunctionCommand(found[1], self.command(), line)
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

    def if_(self, begin: int, line: int) -> syntax.IfCommand:
        clauses = []
        word = "if"
        while word in ("if", "elif"):
            condition = self.commands(("then",))
            self.expect("then", "if", begin)
            clauses.append((condition, self.commands(("elif", "else", "fi"))))
            word = self.reserved()
            self.pos += len(word) if word != "fi" else 0
        otherwise = self.commands(("fi",)) if word == "else" else ()
        self.expect("fi", "if", begin)
        return syntax.IfCommand(tuple(clauses), otherwise, line)

    def do(self, opened: str, begin: int) -> tuple[Command, ...]:
        self.expect("do", opened, begin)
        body = self.commands(("done",))
        self.expect("done", opened, begin)
        return body

    def for_(self, begin: int, line: int) -> Command:
        self.blanks()
        if self.at("(("):
            pieces = (self.arithmetic(2) or "").split(";")
            if len(pieces) != 3:
                raise self.error("cannot read this `for ((start; condition; update))`", begin)
            self.separator()
            start, condition, update = (self.let(p, line) for p in pieces)
            return syntax.GroupCommand(
                (
                    start,
                    syntax.WhileCommand(
                        (condition,), self.do("for", begin), line, update=(update,)
                    ),
                ),
                line,
            )
        name = self.take(_NAME)
        if not name:
            raise self.error("`for` without a variable's name", begin)
        self.gap()
        words: list[Word] | None = None
        if self.take(re.compile(r"in(?=[\s;]|$)")):
            words = []
            self.blanks()
            while self.peek() not in ("", "\n", ";", "&", "|", ")"):
                words.append(self.word())
                self.blanks()
        self.separator()
        return syntax.ForCommand(
            name[0], None if words is None else tuple(words), self.do("for", begin), line
        )

    def separator(self) -> None:
        self.blanks()
        if self.peek() == ";":
            self.pos += 1
        self.gap()

    def case(self, begin: int, line: int) -> syntax.CaseCommand:
        self.blanks()
        subject = self.word()
        self.gap()
        if not self.take(re.compile(r"in(?=\s|$)")):
            raise self.error("`case` without `in`", begin)
        clauses = []
        while True:
            self.gap()
            if self.reserved() == "esac" or not self.peek():
                break
            self.take(re.compile(r"\("))
            patterns = list[Word]()
            while not patterns or self.take(re.compile(r"\|")):
                self.blanks()
                patterns.append(self.word())
                self.blanks()
            if self.peek() != ")":
                raise self.error("a pattern of this `case` has no ')'", begin)
            self.pos += 1
            clauses.append((tuple(patterns), self.commands(("esac",))))
            self.take(re.compile(r";;&|;;|;&"))
        self.expect("esac", "case", begin)
        return syntax.CaseCommand(subject, tuple(clauses), line)

    def test(self, begin: int, line: int) -> syntax.TestCommand:
        items: list[Word | str] = []
        while True:
            self.gap()
            if self.at("]]"):
                self.pos += 2
                return syntax.TestCommand(tuple(items), line)
            if operator := self.take(re.compile(r"&&|\|\||[()<>]")):
                items.append(operator[0])
            elif self.peek() in ("", ";", "&", "|"):
                raise self.error("`[[` on this line has no `]]`", begin)
            else:
                items.append(word := self.word(test=True))
                if word.literal() == "=~":
                    self.blanks()
                    line_of = self.line()
                    regex = self.take(_REGEX)
                    items.append(Word((Lit(regex[0] if regex else "", True),), line_of))
