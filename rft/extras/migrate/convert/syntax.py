"""The pieces a shell script is made of, as `shell` reads them and `interpret` walks them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lit:
    """Plain text; quoted text is neither split nor a pattern."""

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Param:
    """`$name`, `${name[index]op arg}`; `op` is "" or as written (":-", "##", "//", ":" …),
    "length", "indirect" or "keys".
    """

    name: str
    line: int
    quoted: bool = False
    index: str | Word | None = None
    op: str = ""
    arg: Word | None = None
    # the replacement of ${x/pattern/replacement}, the length of ${x:offset:length}
    second: Word | None = None


@dataclass(frozen=True)
class Arith:
    """`$((…))`."""

    body: Word
    line: int
    quoted: bool = False


@dataclass(frozen=True)
class CommandSub:
    """`$(…)`, backticks and `<(…)`."""

    body: tuple[Command, ...]
    text: str
    line: int
    quoted: bool = False


Part = Lit | Param | Arith | CommandSub


@dataclass(frozen=True)
class Word:
    parts: tuple[Part, ...]
    line: int

    def literal(self) -> str | None:
        """The text, if no part of it depends on anything."""
        if all(isinstance(p, Lit) for p in self.parts):
            return "".join(p.text for p in self.parts if isinstance(p, Lit))
        return None


@dataclass(frozen=True)
class Assign:
    """`name[index]=value`; the entries of `A=(…)` are assignments without a name."""

    name: str
    value: Word | tuple[Assign, ...]
    line: int
    index: Word | None = None
    append: bool = False


@dataclass(frozen=True)
class Redirect:
    """`op` as written; `body` is the text of a here-document or here-string."""

    op: str
    body: Word | None = None


@dataclass(frozen=True)
class SimpleCommand:
    """`A=b cmd arg …`; an Assign among the words belongs to `export`, `local` and their kind.
    `((…))` is `let "…"`.
    """

    assigns: tuple[Assign, ...]
    words: tuple[Word | Assign, ...]
    # a here-document joins it when its text is read, after the line's end
    redirects: list[Redirect]
    line: int


@dataclass(frozen=True)
class TestCommand:
    """`[[ … ]]`: words and the operators between them as written."""

    items: tuple[Word | str, ...]
    line: int


@dataclass(frozen=True)
class GroupCommand:
    body: tuple[Command, ...]
    line: int
    subshell: bool = False


@dataclass(frozen=True)
class IfCommand:
    """`clauses`: (condition, commands); `otherwise` is empty without an `else`."""

    clauses: tuple[tuple[tuple[Command, ...], tuple[Command, ...]], ...]
    otherwise: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class CaseCommand:
    subject: Word
    clauses: tuple[tuple[tuple[Word, ...], tuple[Command, ...]], ...]
    line: int


@dataclass(frozen=True)
class ForCommand:
    name: str
    words: tuple[Word, ...] | None  # None: over "$@"
    body: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class WhileCommand:
    """`update` follows each turn, in `for ((start; condition; update))`."""

    condition: tuple[Command, ...]
    body: tuple[Command, ...]
    line: int
    until: bool = False
    update: tuple[Command, ...] = ()


@dataclass(frozen=True)
class FunctionCommand:
    name: str
    body: Command
    line: int


@dataclass(frozen=True)
class Pipeline:
    commands: tuple[Command, ...]
    line: int
    negated: bool = False


@dataclass(frozen=True)
class AndOr:
    """`first`, then each (op, command) with op "&&" or "||"."""

    first: Command
    rest: tuple[tuple[str, Command], ...]
    line: int


Command = (
    SimpleCommand
    | TestCommand
    | GroupCommand
    | IfCommand
    | CaseCommand
    | ForCommand
    | WhileCommand
    | FunctionCommand
    | Pipeline
    | AndOr
)
