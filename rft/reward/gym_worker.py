"""The process in which reasoning-gym scores answers.  `python -m rft.reward.gym_worker`, a worker of `rft.reward.reasoning_gym`.

Some of its data sets evaluate an answer as an expression of SymPy, which is code of Python.  So this process has an empty environment,
can start no program, open no socket and write no file; and known forms of code in an answer to such a data set are wrong.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from rft.sandbox import kernel, seccomp
from rft.worker.process import Codec, serve

MEMORY_MB = 1024  # beyond what its imports take
LITERALS = Codec(
    lambda value: repr(value).encode("utf-8", "surrogatepass"),
    lambda data: ast.literal_eval(data.decode("utf-8", "surrogatepass")),
)
_EVALUATES = re.compile(r"parse_expr|sympify|\beval\(|\bexec\(")
_CODE = re.compile(r"__|lambda|\bimport\b|\.\s*[A-Za-z_]\w*\s*\(|[\[\]{};:\\'\"@`]")  # no part of an expression
_LONGEST = 2000  # characters of an expression


def load() -> Callable[[dict[str, Any]], float]:
    """Imports reasoning-gym (seconds), closes the process off, and gives the function that scores {name, answer, entry}."""
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    @cache
    def scorer(name: str) -> tuple[Any, bool]:
        return get_score_answer_fn(name), evaluating[name]

    evaluating = {name: evaluates(of_data) for name, (of_data, _) in DATASETS.items()}  # while files can be read
    os.environ.clear()
    if why := seccomp.supported():
        print(
            f"reasoning-gym's scorers, some of which evaluate answers, are not closed off here: {why}",
            file=sys.stderr,
            flush=True,
        )
    else:
        kernel.no_new_privileges()
        seccomp.install(seccomp.make(files="read", processes=False))

    def answer(request: dict[str, Any]) -> float:
        score, evaluated = scorer(request["name"])
        given = request["answer"]
        if evaluated and (len(given) > _LONGEST or _CODE.search(given)) and not _is_literal(given):
            return 0.0
        return float(score(answer=given, entry=request["entry"]))

    return answer


def evaluates(of_data: type) -> bool:
    """Whether `score_answer` of a data set, or a method it reaches, evaluates text.  That making its rows does (codeio) is not asked."""
    waiting = ["score_answer"]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        method = getattr(of_data, name, None)
        if name in seen or not inspect.isroutine(method):
            continue
        seen.add(name)
        source = inspect.getsource(method)
        if _EVALUATES.search(source):
            return True
        waiting += re.findall(rf"\b(?:self|cls|super\(\)|{of_data.__name__})\.(\w+)", source)
    return False


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


if __name__ == "__main__":
    serve(load, codec=LITERALS, memory_mb=MEMORY_MB)
