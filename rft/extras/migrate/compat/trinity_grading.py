"""What reward files of Trinity-RFT import from it and from veRL to compare mathematical answers.

Answers are compared by math-verify, in processes that can be killed.  Invariant: nothing that a
model wrote is evaluated here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rft.extras.migrate.compat import trinity_home as home
from rft.reward.extract import Conclusion, boxed_result, last_boxed
from rft.reward.math import same_result
from rft.reward.readings import UnreadableTruth

TIMEOUT_S = 10.0
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d|\{)")


def match_answer(response: str) -> tuple[bool, str]:
    """(whether there is a box, its content or else the text behind </think>)."""
    response = response.split("</think>")[-1]
    boxed = last_boxed(response)
    return boxed is not None, response if boxed is None else boxed


def grade_answer(given: str | None, truth: str) -> tuple[bool, str]:
    """(whether both are mathematically equal, the answer)."""
    return (False, "") if given is None else (math_equal(given, truth), given)


def math_equal(
    prediction: Any, reference: Any, *_: Any, timeout_s: float = TIMEOUT_S, **__: Any
) -> bool:
    """Whether two answers are mathematically equal.  Further arguments of veRL's function have no
    effect.
    """
    given = str(prediction).strip()
    truth = str(reference).strip()
    if not given or not truth:
        return False
    equal: bool | None = home.run(
        same_result(Conclusion(boxed_result(given) or given, True), truth, timeout_s)
    )
    if equal is None:
        raise UnreadableTruth(f"math-verify cannot read the truth {truth!r}")
    return equal


def _normalized(answer: str | None) -> str | None:
    return None if answer is None else "".join(remove_right_units(fix_fracs(answer)).split())


# a module of veRL's: the same answer in fewer spellings
math_normalize = SimpleNamespace(normalize_answer=_normalized)


def remove_right_units(text: str) -> str:
    r"""Without a unit at the end, `\text{ apples}`."""
    return text.split("\\text{ ")[0]


def fix_fracs(text: str) -> str:
    r"""`\frac12` as `\frac{1}{2}`."""
    return _SHORT_FRACTION.sub(
        lambda m: f"\\frac{{{m[1]}}}{m[2] if m[2] == '{' else f'{{{m[2]}}}'}", text
    )


def validate_think_pattern(text: str) -> bool:
    """Whether there is one <think> and behind it one </think>."""
    return text.count("<think>") == text.count("</think>") == 1 and text.find(
        "<think>"
    ) < text.find("</think>")


@contextmanager
def timeout_limit(seconds: float, **_: Any) -> Iterator[None]:
    """Raises TimeoutError in the end if its block took longer; explorer.max_timeout ends a block
    that never does.
    """
    began = time.monotonic()
    yield
    if time.monotonic() - began > seconds:
        raise TimeoutError(f"took longer than {seconds:g} s")
