"""The process in which reasoning-gym scores answers: `python -m rft.extras.worlds.gym_worker`, a
worker of `rft.extras.worlds.gym_reward`.

Some data sets evaluate an answer with `eval` or SymPy's `parse_expr`, which run any Python. Here
these names are bound to parsers of plain data and of formulas, which call only elementary
functions.  The process also has an empty environment, and cannot start programs, open sockets or
write files. Invariant: no scored text runs as code, so no answer changes the score of a later one.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from rft.extras.sandbox import kernel, seccomp
from rft.worker.process import LITERALS, serve

MEMORY_MB = 1024  # beyond the memory of its imports
FUNCTIONS = frozenset(  # not Integral: repeating the question is no answer
    "Abs abs acos acosh acot acoth acsc asec asin asinh atan atan2 atanh cos cosh cot coth csc "
    "csch erf exp ln log sec sech sign sin sinh "
    "sqrt tan tanh".split()
)
CONSTANTS = frozenset(("E", "I", "pi"))
EVALUATES_ITS_PROBLEM = "bitwise_arithmetic"  # and never an answer
# answers use given numbers only: pi/pi would add a number
NUMBERS_ONLY = ("countdown", "puzzle24")
_LONGEST = 2000  # characters of a formula
_DIGITS = re.compile(r"[0-9\s+*/()-]*")  # 0x18 and 2.4 would hide other numbers
_ARITHMETIC = (
    ast.Expression,
    ast.Load,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.UnaryOp,
    ast.UAdd,
    ast.USub,
)
_ALGEBRA = (*_ARITHMETIC, ast.Pow)


def load() -> Callable[[dict[str, Any]], float]:
    """Import reasoning-gym (seconds), isolate the process, and return the function that scores
    {name, answer, entry}.
    """
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    tame({sys.modules[of_data.__module__] for of_data, _ in DATASETS.values()})
    scorer = cache(get_score_answer_fn)
    os.environ.clear()
    if missing := seccomp.supported():
        print(
            f"reasoning-gym's scorers are not closed off here: {missing}",
            file=sys.stderr,
            flush=True,
        )
    else:
        kernel.no_new_privileges()
        seccomp.install(seccomp.make(files="read", processes=False))

    def answer(request: dict[str, Any]) -> float:
        return float(scorer(request["name"])(answer=request["answer"], entry=request["entry"]))

    return answer


def tame(modules: set[Any]) -> None:
    """Restrict the evaluators in these modules, and in the package sympy, to formulas and data;
    they raise ValueError otherwise.
    """
    import sympy

    for name in ("parse_expr", "sympify"):
        original = getattr(sympy, name)
        for module in (sympy, *modules):
            if vars(module).get(name) is original:
                setattr(
                    module,
                    name,
                    _formulas_only(original, names=not module.__name__.endswith(NUMBERS_ONLY)),
                )
    for module in modules:
        if not module.__name__.endswith(EVALUATES_ITS_PROBLEM):
            module.eval = ast.literal_eval  # in place of the builtin


def _formulas_only(original: Callable[..., Any], *, names: bool) -> Callable[..., Any]:
    def evaluated(text: Any, local_dict: dict[str, Any] | None = None) -> Any:
        if not isinstance(text, str) or not (names or _DIGITS.fullmatch(text)):
            raise ValueError("no formula of the numbers that were given")
        _check(text, _ALGEBRA if names else _ARITHMETIC, set(local_dict or ()) if names else None)
        return original(text) if local_dict is None else original(text, local_dict=local_dict)

    return evaluated


def _check(text: str, nodes: tuple[type[ast.AST], ...], variables: set[str] | None) -> None:
    """Raise ValueError unless `text` consists of numbers and `nodes`.

    With `variables`, these names, other names without a meaning, CONSTANTS and calls of FUNCTIONS
    are allowed, too.
    """
    if len(text) > _LONGEST or not text.isascii() or "#" in text:
        raise ValueError("no formula")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("no formula") from None
    functions: set[ast.expr] = set()
    for node in ast.walk(tree):  # a call comes before its function
        match node:
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                allowed = variables is not None and name in FUNCTIONS
                functions.add(node.func)
            case ast.Name(id=name):
                allowed = node in functions or (
                    variables is not None and _is_variable(name, variables)
                )
            case ast.Constant():
                allowed = type(node.value) in (int, float)
            case _:
                allowed = isinstance(node, nodes)
        if not allowed:
            raise ValueError(f"{type(node).__name__} is no part of a formula")


def _is_variable(name: str, variables: set[str]) -> bool:
    import sympy

    return (
        name in variables
        or name in CONSTANTS
        or not (hasattr(sympy, name) or hasattr(builtins, name))
    )


if __name__ == "__main__":
    serve(load, codec=LITERALS, memory_mb=MEMORY_MB)
