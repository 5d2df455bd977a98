"""Shell arithmetic, `$((…))`: whole numbers, variables, + - * / % **, comparisons, && || !, bits, ?:, assignments.

Runs nothing.  Invariant: the result is what bash computes (64 bits are not imitated; larger numbers are refused), division cuts
towards zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_DEPTH = 25
LIMIT = 1 << 63
_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+(?:#[0-9a-zA-Z]+)?|[A-Za-z_]\w*"
    r"|\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>!~&|^?:=(),])"
)
_BINARY: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip


class ArithmeticProblem(Exception):
    """What cannot be computed, as a sentence."""


def evaluate(text: str, read: Callable[[str], int], write: Callable[[str, int], None]) -> int:
    """The value of an expression.  `read` gives a variable's value and `write` sets it; raises ArithmeticProblem."""
    return _Evaluator(text, read, write).whole()


class _Evaluator:
    def __init__(self, text: str, read: Callable[[str], int], write: Callable[[str, int], None]) -> None:
        self.text, self.read, self.write = text, read, write
        self.tokens = _tokens(text)
        self.pos = self.depth = 0
        self.skipping = 0  # inside a branch that && || ?: do not take: nothing is read or written

    def whole(self) -> int:
        if not self.tokens:
            return 0
        result = self.comma()
        if self.pos < len(self.tokens):
            raise ArithmeticProblem(f"unexpected {self.tokens[self.pos]!r}")
        return result

    def peek(self) -> str:
        return self.tokens[self.pos] if self.pos < len(self.tokens) else ""

    def accept(self, *tokens: str) -> str:
        found = self.peek()
        if not found or found not in tokens:
            return ""
        self.pos += 1
        return found

    def comma(self) -> int:
        result = self.assignment()
        while self.accept(","):
            result = self.assignment()
        return result

    def assignment(self) -> int:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ArithmeticProblem("nested too deeply")
        name, op = self.peek(), self.tokens[self.pos + 1] if self.pos + 1 < len(self.tokens) else ""
        if re.match(r"[A-Za-z_]", name) and op in ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="):
            self.pos += 2
            right = self.assignment()
            result = right if op == "=" else self.apply(op[:-1], self.variable(name), right)
            self.assign(name, result)
        else:
            result = self.conditional()
        self.depth -= 1
        return result

    def assign(self, name: str, value: int) -> None:
        if not self.skipping:
            self.write(name, value)

    def variable(self, name: str) -> int:
        return 1 if self.skipping else self.read(name)

    def conditional(self) -> int:
        test = self.binary(0)
        if not self.accept("?"):
            return test
        yes = self.skipped(not test, self.assignment)
        if not self.accept(":"):
            raise ArithmeticProblem("'?' without ':'")
        no = self.skipped(bool(test), self.assignment)
        return yes if test else no

    def skipped(self, skip: bool, part: Callable[[], int]) -> int:
        self.skipping += skip
        result = part()
        self.skipping -= skip
        return result

    def binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self.power()
        left = self.binary(level + 1)
        while op := self.accept(*_BINARY[level]):
            skip = (op == "&&" and not left) or (op == "||" and bool(left))
            right = self.skipped(skip, lambda: self.binary(level + 1))
            left = self.apply(op, left, right)
        return left

    def power(self) -> int:
        base = self.unary()
        if not self.accept("**"):
            return base
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ArithmeticProblem("nested too deeply")
        result = self.apply("**", base, self.power())
        self.depth -= 1
        return result

    def unary(self) -> int:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ArithmeticProblem("nested too deeply")
        if op := self.accept("+", "-", "!", "~"):
            value = self.unary()
            result = {"+": value, "-": -value, "!": int(not value), "~": ~value}[op]
        elif op := self.accept("++", "--"):
            name = self.name()
            result = self.variable(name) + (1 if op == "++" else -1)
            self.assign(name, result)
        else:
            result = self.atom()
        self.depth -= 1
        return result

    def name(self) -> str:
        found = self.peek()
        if not re.match(r"[A-Za-z_]", found):
            raise ArithmeticProblem(f"a variable is missing before {found!r}")
        self.pos += 1
        return found

    def atom(self) -> int:
        token = self.peek()
        if not token:
            raise ArithmeticProblem("a number is missing at the end")
        if self.accept("("):
            result = self.comma()
            if not self.accept(")"):
                raise ArithmeticProblem("unbalanced '('")
            return result
        if re.match(r"[A-Za-z_]", token):
            self.pos += 1
            result = self.variable(token)
            if op := self.accept("++", "--"):
                self.assign(token, result + (1 if op == "++" else -1))
            return result
        if not token[0].isdigit():
            raise ArithmeticProblem(f"unexpected {token!r}")
        self.pos += 1
        return number(token)

    def apply(self, op: str, a: int, b: int) -> int:
        if self.skipping:
            return 1
        if op in ("/", "%") and b == 0:
            raise ArithmeticProblem("division by zero")
        if op in ("<<", ">>") and not 0 <= b < 64:
            raise ArithmeticProblem(f"a shift by {b}")
        if op == "**" and (b < 0 or (abs(a) > 1 and b > 63)):
            raise ArithmeticProblem(f"{a}**{b} is out of range")
        result = int(_OPERATIONS[op](a, b))
        if not -LIMIT <= result < LIMIT:
            raise ArithmeticProblem("a number is larger than 64 bits hold")
        return result


def _divide(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) else -(-a // b)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
    "**": lambda a, b: a**b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&&": lambda a, b: bool(a) and bool(b),
    "||": lambda a, b: bool(a) or bool(b),
}


def _tokens(text: str) -> list[str]:
    found, pos, text = [], 0, text.strip()
    while pos < len(text):
        token = _TOKEN.match(text, pos)
        if not token:
            bad = text[pos:].strip()[:1]
            what = "shell arithmetic knows whole numbers only" if bad == "." else f"unexpected {bad!r}"
            raise ArithmeticProblem(what)
        found.append(token[1])
        pos = token.end()
    return found


def number(text: str) -> int:
    """A whole number as the shell writes it: 12, 0x1f, 017 (octal), 2#101."""
    try:
        if "#" in text:
            base, digits = text.split("#")
            return _small(int(digits, int(base)))
        if text[:2] in ("0x", "0X"):
            return _small(int(text, 16))
        return _small(int(text, 8 if text[0] == "0" and len(text) > 1 else 10)) if len(text) < 40 else _small(LIMIT)
    except ValueError:
        raise ArithmeticProblem(f"{text!r} is no number") from None


def _small(value: int) -> int:
    if value >= LIMIT:
        raise ArithmeticProblem("a number is larger than 64 bits hold")
    return value
