"""One test over all rows of a table that reports every row that fails: thousands of items would
cost more than what they look at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def for_each(
    name: str, rows: Iterable[Any], ids: Callable[[Any], str] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize(name, rows, ids=ids)`, for rows that change nothing and need no
    fixture of their own.
    """
    rows = list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def play(**fixtures: Any) -> None:
            failed = []
            for row in rows:
                try:
                    test(**{name: row}, **fixtures)
                except pytest.skip.Exception:
                    continue
                except (Exception, pytest.fail.Exception) as e:
                    failed.append(f"{ids(row)}: {type(e).__name__}: {e}")
            assert rows and not failed, f"{len(failed)} of {len(rows)} rows:\n" + "\n".join(failed)

        given = inspect.signature(test)
        play.__signature__ = given.replace(  # type: ignore[attr-defined]
            parameters=[p for p in given.parameters.values() if p.name != name]
        )
        return play

    return decorate
