"""`[ … ]` and `[[ … ]]` decided from what the script itself says.

Rule: a test of known values is decided; a variable that the script does not set counts as empty,
which makes the answer *assumed*; files, folders, unknowable values and all but simple regular
expressions leave it open (None).  Runs nothing and looks at no file.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rft.extras.migrate.convert.values import assumed_empty

MAX_TEXT = 200
# at most one repetition, at its end
_REGEX = re.compile(r"\^?(?:[\w/ .:-]|\[[\w-]+\])*(?:(?:[\w/ .:-]|\[[\w-]+\])[+*]?)?\$?")


@dataclass(frozen=True)
class Decision:
    """`value` None: open.  `assumed`: it holds only if the variables that the script does not set
    are empty.
    """

    value: bool | None
    assumed: bool = False

    @property
    def unsure(self) -> bool:
        return self.assumed or self.value is None

    @property
    def why(self) -> str:
        """Why it is unsure."""
        if self.value is None:
            return "the condition cannot be told without running the script"
        return (
            "the variable that the condition asks for is not set by the script and counts as empty"
        )

    def negated(self) -> Decision:
        return Decision(None if self.value is None else not self.value, self.assumed)


YES = Decision(True)
NO = Decision(False)
OPEN = Decision(None)


@dataclass(frozen=True)
class Operand:
    """One word of a test; `pattern` is it as a pattern."""

    text: str
    pattern: str = ""


Item = Operand | str  # an operator of [[ … ]]: && || ( ) < >


def both(a: Decision, b: Decision) -> Decision:
    if False in (a.value, b.value):
        return a if a.value is False else b
    return Decision(None if None in (a.value, b.value) else True, a.assumed or b.assumed)


def either(a: Decision, b: Decision) -> Decision:
    return both(a.negated(), b.negated()).negated()


def bracket(words: Sequence[str]) -> Decision:
    """`[ … ]` and `test`: the operators are words."""
    items: list[Item] = [
        w if w in ("(", ")") else {"-a": "&&", "-o": "||"}.get(w, Operand(w)) for w in words
    ]
    if len(words) <= 3 and (len(words) < 3 or words[1] not in ("-a", "-o")):
        items = [Operand(w) for w in words]  # [ -a ] and [ "(" ] ask about texts
    return decide(items, patterns=False)


def decide(items: Sequence[Item], *, patterns: bool = True) -> Decision:
    """`patterns`: == compares with a pattern, as in [[ … ]]."""
    if not items:
        return NO
    reader = _TestReader(items, patterns)
    answer = reader.disjunction()
    return answer if reader.pos == len(items) else OPEN


class _TestReader:
    def __init__(self, items: Sequence[Item], patterns: bool) -> None:
        self.items = items
        self.patterns = patterns
        self.pos = 0

    def peek(self, ahead: int = 0) -> Item:
        at = self.pos + ahead
        return self.items[at] if at < len(self.items) else ""

    def disjunction(self) -> Decision:
        answer = self.conjunction()
        while self.peek() == "||":
            self.pos += 1
            answer = either(answer, self.conjunction())
        return answer

    def conjunction(self) -> Decision:
        answer = self.primary()
        while self.peek() == "&&":
            self.pos += 1
            answer = both(answer, self.primary())
        return answer

    def primary(self) -> Decision:
        item = self.peek()
        if isinstance(item, Operand):
            return self.operand(item)
        self.pos += 1
        if item != "(":
            return OPEN
        answer = self.disjunction()
        self.pos += 1
        return answer

    def operand(self, item: Operand) -> Decision:
        following = self.peek(1)
        op = (
            following
            if following in ("<", ">")
            else following.text
            if isinstance(following, Operand)
            else ""
        )
        assert isinstance(op, str)
        right = self.peek(2)
        if op in _BINARY and isinstance(right, Operand):
            self.pos += 3
            return self.compare(item, op, right)
        if item.text == "!":
            self.pos += 1
            return self.primary().negated()
        if re.fullmatch(r"-[a-zA-Z]", item.text) and isinstance(following, Operand):
            self.pos += 2
            return _unary(item.text, following.text)
        self.pos += 1
        return _unary("-n", item.text)

    def compare(self, left: Operand, op: str, right: Operand) -> Decision:
        a = assumed_empty(left.text)
        b = assumed_empty(right.text)
        if left.text == right.text and op in ("=", "=="):
            return YES
        if a is None or b is None or op in ("-nt", "-ot", "-ef"):
            return OPEN
        if op == "=~":
            if not _REGEX.fullmatch(b[0]) or len(a[0]) > MAX_TEXT:
                return OPEN
            try:
                return Decision(re.search(b[0], a[0]) is not None, a[1] or b[1])
            except re.error:  # a range such as [z-a]
                return OPEN
        assumed = a[1] or b[1]
        if op in ("=", "==", "!="):
            pattern = assumed_empty(right.pattern) if self.patterns else None
            same = fnmatch.fnmatchcase(a[0], pattern[0]) if pattern else a[0] == b[0]
            return Decision(same == (op != "!="), assumed)
        if op in ("<", ">"):
            return Decision(a[0] < b[0] if op == "<" else a[0] > b[0], assumed)
        numbers = [_NUMBER.fullmatch(t) for t in (a[0], b[0])]
        x, y = (int(n[1]) if n else None for n in numbers)
        return OPEN if x is None or y is None else Decision(_NUMBERS[op](x, y), assumed)


_NUMBER = re.compile(r"\s*([+-]?\d{1,20})\s*")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_BINARY = {"=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef", *_NUMBERS}


def _unary(op: str, text: str) -> Decision:
    if op not in ("-z", "-n"):
        return OPEN
    plain = assumed_empty(text)
    if plain is None:
        # a home folder's name is not empty, an unknown piece may be
        full = bool(re.sub("\ue002\\d+\ue003", "", text))
        return Decision(op == "-n") if full else OPEN
    return Decision((plain[0] == "") == (op == "-z"), plain[1] and plain[0] == "")
