"""The worker process of `rft.reward.math` in which math-verify runs: `python -m
rft.reward.math_worker`.

math-verify's own time limit uses SIGALRM and must be off; the parent kills this process instead.
Invariant: an answer that takes more than MEMORY_MB is an error, not a wrong answer.

math-verify takes the right side of an equation and the part before a text.  A box with a false
equation of numbers (`3=4`), or with further numbers in a text (`4\\text{ apples, 5 pears}`), is
wrong here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from rft.reward.extract import last_boxed
from rft.worker.process import serve

MEMORY_MB = 2048  # in addition to the imports
_TEXT_WITH_NUMBERS = re.compile(r"[^\s$]\s*\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\d[^{}]*\}")


def load() -> Callable[[dict[str, str]], bool | None]:
    """Import math-verify (a second) and return the function that answers {answer, truth}: a bool,
    or None if the truth is unreadable.
    """
    import logging

    logging.disable(logging.WARNING)  # silences the warning that the time limit is off
    from math_verify import parse, verify

    def parsed(text: str) -> Any:
        return _unless_it_fails(partial(parse, text, parsing_timeout=None, raise_on_error=True), [])

    def equal(gold: Any, answer: Any) -> bool:
        return bool(
            _unless_it_fails(
                partial(verify, gold, answer, timeout_seconds=None, raise_on_error=True), False
            )
        )

    def holds(boxed: str) -> bool:
        sides = (
            [parsed(f"\\boxed{{{side}}}") for side in boxed.split("=")]
            if 1 <= boxed.count("=") <= 8
            else []
        )
        numbers = [side for side in sides if side and _is_number(side[0])]
        return len(numbers) < 2 or all(equal(numbers[0], other) for other in numbers[1:])

    def answer(request: dict[str, str]) -> bool | None:
        truth = request["truth"]
        gold = [
            value
            for value in parsed(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}")
            if not isinstance(value, str)
        ]
        if not gold:
            return None
        boxed = last_boxed(request["answer"]) or ""
        if _TEXT_WITH_NUMBERS.search(boxed) and not _TEXT_WITH_NUMBERS.search(truth):
            return False
        return any(
            equal(*pair) for pair in itertools.product(gold, parsed(request["answer"]))
        ) and holds(boxed)

    return answer


def _is_number(value: Any) -> bool:
    return bool(_unless_it_fails(lambda: value.is_number, False))


def _unless_it_fails(call: Callable[[], Any], otherwise: Any) -> Any:
    """Catch errors as math-verify does, except MemoryError, which it counts as a wrong answer."""
    try:
        return call()
    except MemoryError:
        raise
    except Exception:
        return otherwise


if __name__ == "__main__":
    serve(load, memory_mb=MEMORY_MB)
