"""Rows of reasoning-gym.  `python -m rft.extras.worlds.gym_rows` makes them, in a process that
hashes texts as every other start of it does.

Some data sets draw from sets of texts, or from random generators that all code shares: in this
process they gave other rows at each start. Invariant: a row depends on name, arguments and index
alone, and is plain data.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from rft.errors import ConfigError, SetupError
from rft.taskset.base import ByIndex, Row
from rft.worker.job_pool import WorkerPool
from rft.worker.process import LITERALS, WorkerDied, WorkerError, serve

POOL = WorkerPool(
    "reasoning_gym_rows",
    "rft.extras.worlds.gym_rows",
    size=1,
    memo=False,
    codec=LITERALS,
    env={"PYTHONHASHSEED": "0"},
)


class NoSuchData(ValueError):
    """`known`: the names of the data sets that there are."""

    def __init__(self, known: list[str]) -> None:
        super().__init__(", ".join(known))
        self.known = known


def gym_rows(name: str, args: Mapping[str, Any]) -> ByIndex:
    """The rows of a data set, each made when it is asked for.

    Raises NoSuchData, ValueError for arguments that it does not take, or SetupError.
    """
    if find_spec("reasoning_gym") is None:
        raise SetupError(
            "tasks of reasoning-gym need that package: pip install 'rft-platform[gym]'"
        )
    request = {"name": name, "args": repr(dict(args))}
    found = _ask(request)
    if "known" in found:
        raise NoSuchData(found["known"])
    if "refused" in found:
        raise ValueError(found["refused"])
    return ByIndex(found["size"], partial(_row, request))


def _row(request: dict[str, Any], index: int) -> Row:
    row: Row = _ask({**request, "index": index})
    return row


def _ask(request: dict[str, Any]) -> Any:
    try:
        (answer,) = POOL.map([request])
    except WorkerDied as e:
        raise SetupError(f"the process that makes rows of reasoning-gym ended: {e}") from None
    except WorkerError as e:
        last = str(e).strip().splitlines()[-1]
        raise ConfigError(
            f"reasoning-gym {request['name']!r} cannot make row {request.get('index')}: {last}"
        ) from e
    return answer


# ---------------------------------------------------------------- the worker's side


def load() -> Callable[[dict[str, Any]], Any]:
    """Gives the function that answers {name, args} with {size}, {known} or {refused}, and with an
    `index` with that row.
    """
    import numpy as np
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    @lru_cache(maxsize=16)
    def made(name: str, args: str) -> Any:
        given = ast.literal_eval(args)
        if name == "composite":
            given["datasets"] = [
                DatasetSpec(**{"weight": 1.0, "config": {}, **one})
                for one in given.get("datasets", [])
            ]
        return create_dataset(name, **given)

    def answer(request: dict[str, Any]) -> Any:
        name = request["name"]
        args = request["args"]
        if name not in DATASETS:
            return {"known": sorted(DATASETS)}
        if "index" in request:
            random.seed(request["index"])
            np.random.seed(request["index"])
            return plain(dict(made(name, args)[request["index"]]))
        try:
            return {"size": len(made(name, args))}
        except (TypeError, ValueError, AssertionError) as e:
            return {"refused": str(e)}

    return answer


def plain(row: Row) -> Row:
    """The row; of metadata that is more than plain data only what is."""
    try:
        ast.literal_eval(repr(row))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {name: _texts(value) for name, value in row.items()}
    return row


def _texts(value: object) -> object:
    if isinstance(value, dict):
        return {str(k): _texts(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_texts(v) for v in value]
    if value is None or isinstance(value, bool):
        return value
    # also of kinds derived from them
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), str(value))


if __name__ == "__main__":
    serve(load, codec=LITERALS)
