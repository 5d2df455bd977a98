"""Shell arithmetic, `$((…))`: whole numbers, variables, + - * / % **, comparisons, && || !, bits,
?:, assignments.

Runs nothing.  Invariant: the result is what bash computes (64 bits are not imitated; larger numbers
are refused), division cuts towards zero.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial

LIMIT = 1 << 63
_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+(?:#[0-9a-zA-Z]+)?|[A-Za-z_]\w*"
    r"|\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>!~&|^?:=(),])"
)
_BINARY: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)
_LEVELS = {op: level for level, ops in enumerate(_BINARY) for op in ops}
_ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_UNARY: dict[str, Callable[[int], int]] = {
    "+": lambda v: v,
    "-": lambda v: -v,
    "!": lambda v: int(not v),
    "~": lambda v: ~v,
}


class ArithmeticProblem(Exception):
    """What cannot be computed, as a sentence."""


def evaluate(text: str, read: Callable[[str], int], write: Callable[[str, int], None]) -> int:
    """The value of an expression.  `read` gives a variable's value and `write` sets it; raises
    ArithmeticProblem.
    """
    return _Evaluator(text, read, write).whole()


class _Evaluator:
    def __init__(
        self, text: str, read: Callable[[str], int], write: Callable[[str, int], None]
    ) -> None:
        self.read = read
        self.write = write
        self.tokens = _tokens(text)
        self.pos = 0
        self.skipping = 0  # inside a branch that && || ?: do not take: nothing is read or written

    def whole(self) -> int:
        result = self.comma() if self.tokens else 0
        if self.pos < len(self.tokens):
            raise ArithmeticProblem(f"unexpected {self.peek()!r}")
        return result

    def peek(self) -> str:
        return self.tokens[self.pos] if self.pos < len(self.tokens) else ""

    def accept(self, *tokens: str) -> str:
        found = self.peek()
        if not found or found not in tokens:
            return ""
        self.pos += 1
        return found

    def part(self, read: Callable[[], int], skip: bool) -> int:
        """One operand; `skip`: nothing in it is read or written."""
        self.skipping += skip
        result = read()
        self.skipping -= skip
        return result

    def comma(self) -> int:
        result = self.assignment()
        while self.accept(","):
            result = self.assignment()
        return result

    def assignment(self) -> int:
        name = self.peek()
        op = self.tokens[self.pos + 1] if self.pos + 1 < len(self.tokens) else ""
        if not re.match(r"[A-Za-z_]", name) or op not in _ASSIGNING:
            return self.conditional()
        self.pos += 2
        right = self.assignment()
        return self.assign(
            name, right if op == "=" else self.apply(op[:-1], self.variable(name), right)
        )

    def assign(self, name: str, value: int) -> int:
        if not self.skipping:
            self.write(name, value)
        return value

    def variable(self, name: str) -> int:
        return 1 if self.skipping else self.read(name)

    def conditional(self) -> int:
        test = self.binary(0)
        if not self.accept("?"):
            return test
        yes = self.part(self.assignment, skip=not test)
        if not self.accept(":"):
            raise ArithmeticProblem("'?' without ':'")
        no = self.part(self.assignment, skip=bool(test))
        return yes if test else no

    def binary(self, lowest: int) -> int:
        """Operators from level `lowest` on; all but ** group from the left."""
        left = self.unary()
        while (level := _LEVELS.get(op := self.peek(), -1)) >= lowest:
            self.pos += 1
            skip = (op == "&&" and not left) or (op == "||" and bool(left))
            right = self.part(partial(self.binary, level + (op != "**")), skip=skip)
            left = self.apply(op, left, right)
        return left

    def unary(self) -> int:
        signs: list[str] = []
        while sign := self.accept(*_UNARY):
            signs.append(sign)
        if op := self.accept("++", "--"):
            name = self.peek()
            if not re.match(r"[A-Za-z_]", name):
                raise ArithmeticProblem(f"a variable is missing before {name!r}")
            self.pos += 1
            value = self.assign(name, self.variable(name) + (1 if op == "++" else -1))
        else:
            value = self.atom()
        for sign in reversed(signs):
            value = _UNARY[sign](value)
        return value

    def atom(self) -> int:
        token = self.peek()
        if not token:
            raise ArithmeticProblem("a number is missing at the end")
        if self.accept("("):
            result = self.comma()
            if not self.accept(")"):
                raise ArithmeticProblem("unbalanced '('")
            return result
        if not re.match(r"\w", token):
            raise ArithmeticProblem(f"unexpected {token!r}")
        self.pos += 1
        if token[0].isdigit():
            return number(token)
        result = self.variable(token)
        if op := self.accept("++", "--"):
            self.assign(token, result + (1 if op == "++" else -1))
        return result

    def apply(self, op: str, a: int, b: int) -> int:
        if self.skipping:
            return 1
        if op in ("/", "%") and b == 0:
            raise ArithmeticProblem("division by zero")
        if op in ("<<", ">>") and not 0 <= b < 64:
            raise ArithmeticProblem(f"a shift by {b}")
        if op == "**" and (b < 0 or (abs(a) > 1 and b > 63)):
            raise ArithmeticProblem(f"{a}**{b} is out of range")
        return _small(int(_OPERATIONS[op](a, b)))


def _divide(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) else -(-a // b)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda a, b: bool(a) and bool(b),
    "||": lambda a, b: bool(a) or bool(b),
}


def _tokens(text: str) -> list[str]:
    found = []
    pos = 0
    text = text.strip()
    while pos < len(text):
        token = _TOKEN.match(text, pos)
        if not token:
            bad = text[pos:].strip()[:1]
            what = (
                "shell arithmetic knows whole numbers only" if bad == "." else f"unexpected {bad!r}"
            )
            raise ArithmeticProblem(what)
        found.append(token[1])
        pos = token.end()
    return found


def number(text: str) -> int:
    """A whole number as the shell writes it: 12, 0x1f, 017 (octal), 2#101."""
    base, mark, digits = text.partition("#")
    if not mark:
        digits = text
        base = (
            "16" if text[:2] in ("0x", "0X") else "8" if text[0] == "0" and len(text) > 1 else "10"
        )
    if base == "10" and len(digits) >= 40:
        return _small(LIMIT)
    try:
        return _small(int(digits, int(base)))
    except ValueError:
        raise ArithmeticProblem(f"{text!r} is no number") from None


def _small(value: int) -> int:
    if not -LIMIT <= value < LIMIT:
        raise ArithmeticProblem("a number is larger than 64 bits hold")
    return value
