"""Countdown: reach a number from given numbers with + - * /, each used once.  The answer is read,
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
    """`format_score`: of an answer in tags that is no solution."""

    model_config = ConfigDict(extra="forbid")
    format_score: float = 0.1
    score: float = 1.0


@reward("countdown_reward", args=CountdownArgs)
class CountdownReward(Reward):
    """`score` for a right equation in the last <answer> block, `format_score` for another one, 0
    without a block.

    The gold answer is {"numbers": [...], "target": n}; a row with columns `nums` and `target` will
    do.
    """

    def __init__(self, format_score: float = 0.1, score: float = 1.0) -> None:
        self.format_score = format_score
        self.score = score

    def __call__(self, task: Task, transcript: Transcript) -> Score:
        numbers, target = _wanted(task)
        expressions = blocks(transcript.answer, "answer")
        if not expressions:
            return Score(value=0.0, reason="no <answer> block")
        why = _wrong(expressions[-1], numbers, target)
        note(
            "last <answer> block",
            expressions[-1],
            why or target,
            f"{target} from {numbers}",
            not why,
        )
        return Score(value=self.format_score if why else self.score, reason=why)

    def gold_answer(self, task: Task) -> str | None:
        """A solution; None where none is looked for (more than four numbers)."""
        numbers, target = _wanted(task)
        if len(numbers) > 4:
            return None
        found = next(
            (
                text
                for value, text in _reached([(Fraction(n), str(n)) for n in numbers])
                if value == target
            ),
            None,
        )
        return None if found is None else f"<answer>{found}</answer>"


def _wrong(expression: str, numbers: list[int], target: Fraction) -> str:
    """What is wrong with a solution; empty for a right one."""
    try:
        value, used = evaluated(expression)
    except ValueError as e:
        return str(e)
    if Counter(used) != Counter(numbers):
        return f"uses {sorted(used)} instead of {sorted(numbers)}"
    return "" if value == target else f"gives {value} instead of {target}"


def _reached(left: list[tuple[Fraction, str]]) -> Iterator[tuple[Fraction, str]]:
    """Every value that uses all of `left`, with its expression."""
    if len(left) == 1:
        yield left[0]
        return
    for i, j in permutations(range(len(left)), 2):
        (a, x), (b, y) = left[i], left[j]
        rest = [left[k] for k in range(len(left)) if k not in (i, j)]
        made = [(a + b, "+"), (a - b, "-"), (a * b, "*"), *([(a / b, "/")] if b else [])]
        for value, sign in made:
            yield from _reached([(value, f"({x} {sign} {y})"), *rest])


def evaluated(text: str) -> tuple[Fraction, list[int]]:
    """(value, numbers used) of an expression of whole numbers, + - * / (also × ÷ \\frac) and
    brackets.  Raises ValueError.
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


def _wanted(task: Task) -> tuple[list[int], Fraction]:
    truth: Mapping[str, Any] = task.truth if isinstance(task.truth, Mapping) else task.row
    numbers = truth.get("numbers", truth.get("nums"))
    target = truth.get("target")
    if numbers is None or target is None:
        raise unreadable(task, "{numbers: [...], target: n}")
    return [int(n) for n in numbers], Fraction(target)
