"""Countdown: reach a number from given numbers with + - * /, each used once.  The answer is read, never executed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pydantic import BaseModel, ConfigDict

from rft.reward.base import reward
from rft.types.completion import Score, Transcript
from rft.types.task import Task

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LONGEST = 200


class CountdownArgs(BaseModel):
    """`format_score`: of an answer in tags that is no solution."""

    model_config = ConfigDict(extra="forbid")
    format_score: float = 0.1
    score: float = 1.0


@reward("countdown_reward", args=CountdownArgs)
def countdown_reward(task: Task, transcript: Transcript, *, format_score: float = 0.1, score: float = 1.0) -> Score:
    """`score` for a right equation in the last <answer> block, `format_score` for another one, 0 without a block.

    The gold answer is {"numbers": [...], "target": n}; a row with columns `nums` and `target` will do.
    """
    numbers, target = _wanted(task)
    blocks = _ANSWER.findall(transcript.answer)
    if not blocks:
        return Score(value=0.0, reason="no <answer> block")
    try:
        value, used = evaluated(blocks[-1])
    except ValueError as e:
        return Score(value=format_score, reason=str(e))
    if Counter(used) != Counter(numbers):
        return Score(value=format_score, reason=f"uses {sorted(used)} instead of {sorted(numbers)}")
    if value != target:
        return Score(value=format_score, reason=f"gives {value} instead of {target}")
    return Score(value=score)


def evaluated(text: str) -> tuple[Fraction, list[int]]:
    """(value, numbers used) of an expression of whole numbers, + - * / and brackets.  Raises ValueError."""
    text = text.strip().split("=")[0].strip()
    if len(text) > _LONGEST:
        raise ValueError(f"the expression is longer than {_LONGEST} characters")
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
            a, b = _value(left, used), _value(right, used)
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
    numbers, target = truth.get("numbers", truth.get("nums")), truth.get("target")
    if numbers is None or target is None:
        raise ValueError(f"task {task.taskset}[{task.index}]: its gold answer must be {{numbers: [...], target: n}}")
    return [int(n) for n in numbers], Fraction(target)
