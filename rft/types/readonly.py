"""Read-only values: a plugin cannot change a record, so only the engine's tokens are trained.

Invariant: the result of `read_only` shares no writable memory with its argument, and writing into it
raises.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr

HINT = "what a plugin receives is read-only; return what you want to change, or change a copy of it"


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(HINT)


class ReadOnlyDict(dict[Any, Any]):
    """A dict that refuses to be changed.

    Copies of it, also pickled ones, are ordinary dicts.
    """

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A list that refuses to be changed.

    Copies of it, also pickled ones, are ordinary lists.
    """

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return copy.deepcopy(list(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


_EMPTY = ()  # there is one empty tuple
_UNCHANGEABLE = frozenset({str, int, float, bool, type(None), ReadOnlyDict, ReadOnlyList})


def read_only(value: Any) -> Any:
    """Return `value` with its dicts, lists and arrays made read-only, at any depth."""
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            return value
        # an array over bytes: its flag cannot be set again
        flat = np.frombuffer(value.tobytes(), value.dtype)
        if value.ndim == 1:
            return flat
        return flat.reshape(value.shape)
    if isinstance(value, dict):
        return ReadOnlyDict({key: read_only(item) for key, item in value.items()})
    if isinstance(value, list):
        return ReadOnlyList(map(read_only, value))
    if kind is tuple:
        return tuple(map(read_only, value))
    return value


def freeze(record: Struct, *fields: str) -> None:
    """Make these fields of a record read-only."""
    for name in fields:
        value = getattr(record, name)
        if type(value) not in _UNCHANGEABLE and value is not _EMPTY:
            force_setattr(record, name, read_only(value))


def hint(error: BaseException) -> str:
    """Return a hint for NumPy's error of writing into a read-only array, else ""."""
    if isinstance(error, ValueError) and "is read-only" in str(error):
        return f" ({HINT})"
    return ""
