"""Countdown: reach a number from given numbers with + - * /, each used once.  The answer is parsed,
never executed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import permutations
from typing import Any

from pydantic import BaseModel, ConfigDict

from rft.reward.answer_values import rewritten
from rft.reward.base import Reward, reward
from rft.reward.extract import blocks
from rft.reward.readings import note, unreadable
from rft.types.completion import Score, Transcript
from rft.types.task import Task

_LONGEST = 200


class CountdownArgs(BaseModel):
    """`format_score`: score of an answer in tags that is not a solution."""

    model_config = ConfigDict(extra="forbid")
    format_score: float = 0.1
    score: float = 1.0


@reward("countdown_reward", args=CountdownArgs)
class CountdownReward(Reward):
    """`score` for a correct equation in the last <answer> block, `format_score` for a wrong one.

    0 without a block.  The gold answer is {"numbers": [...], "target": n}; a row with columns
    `nums` and `target` is accepted, too.
    """

    def __init__(self, format_score: float = 0.1, score: float = 1.0) -> None:
        self.format_score = format_score
        self.score = score

    def __call__(self, task: Task, transcript: Transcript) -> Score:
        numbers, target = _numbers_and_target(task)
        expressions = blocks(transcript.answer, "answer")
        if not expressions:
            return Score(value=0.0, reason="no <answer> block")
        fault = _wrong(expressions[-1], numbers, target)
        note(
            "last <answer> block",
            expressions[-1],
            fault or target,
            f"{target} from {numbers}",
            not fault,
        )
        return Score(value=self.format_score if fault else self.score, reason=fault)

    def gold_answer(self, task: Task) -> str | None:
        """Return a solution; None for more than four numbers, where no solution is searched."""
        numbers, target = _numbers_and_target(task)
        if len(numbers) > 4:
            return None
        expression = next(
            (
                text
                for value, text in _reached([(Fraction(n), str(n)) for n in numbers])
                if value == target
            ),
            None,
        )
        return None if expression is None else f"<answer>{expression}</answer>"


def _wrong(expression: str, numbers: list[int], target: Fraction) -> str:
    """Return the fault of a solution; empty if correct."""
    try:
        value, used = evaluated(expression)
    except ValueError as e:
        return str(e)
    if Counter(used) != Counter(numbers):
        return f"uses {sorted(used)} instead of {sorted(numbers)}"
    return "" if value == target else f"gives {value} instead of {target}"


def _reached(terms: list[tuple[Fraction, str]]) -> Iterator[tuple[Fraction, str]]:
    """Yield every value that uses all of `terms`, with its expression."""
    if len(terms) == 1:
        yield terms[0]
        return
    for i, j in permutations(range(len(terms)), 2):
        (a, x), (b, y) = terms[i], terms[j]
        rest = [terms[k] for k in range(len(terms)) if k not in (i, j)]
        results = [(a + b, "+"), (a - b, "-"), (a * b, "*"), *([(a / b, "/")] if b else [])]
        for value, sign in results:
            yield from _reached([(value, f"({x} {sign} {y})"), *rest])


def evaluated(text: str) -> tuple[Fraction, list[int]]:
    r"""Return (value, used numbers) of an expression of integers, + - * / (also × ÷ \frac) and
    brackets.

    Raises ValueError.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"the expression is longer than {_LONGEST} characters")
    text = rewritten(text).split("=")[0].strip()
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("no arithmetic expression") from None
    used: list[int] = []
    return _value(tree.body, used), used


def _value(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(n)) if not isinstance(n, bool):
            used.append(n)
            return Fraction(n)
        case ast.BinOp(left=left, op=op, right=right):
            a = _value(left, used)
            b = _value(right, used)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div() if b != 0:
                    return a / b
                case ast.Div():
                    raise ValueError("division by zero")
    raise ValueError("only whole numbers, + - * / and brackets are allowed")


def _numbers_and_target(task: Task) -> tuple[list[int], Fraction]:
    truth: Mapping[str, Any] = task.truth if isinstance(task.truth, Mapping) else task.row
    numbers = truth.get("numbers", truth.get("nums"))
    target = truth.get("target")
    if numbers is None or target is None:
        raise unreadable(task, "{numbers: [...], target: n}")
    return [int(n) for n in numbers], Fraction(target)
