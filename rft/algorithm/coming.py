"""Arguments of algorithm parts that a configuration may name before they exist.  Torch-free.

`COMING` has the form of `args.ARGS`; a part that is built moves its model there.  Formulas stand with the part when it comes.
Invariant: no name is in both.
"""

from __future__ import annotations

from pydantic import BaseModel

COMING: dict[tuple[str, str], type[BaseModel]] = {}


def coming(kind: str) -> tuple[str, ...]:
    """The names of `kind` that are accepted and not there yet."""
    return tuple(n for k, n in COMING if k == kind)
