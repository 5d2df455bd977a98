"""Messages between the processes of a sandbox as JSON in bounded frames, and values of programs as
JSON.

Independent of the messages' content.
Invariant: decoded values hold only Python's own data types, newly created, and `Handle`s; nothing
written by a program is ever run on the receiving side.
"""

from __future__ import annotations

import json
import math
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rft.worker import framing
from rft.worker.framing import BadMessage

LARGEST = 8 << 20
"""Maximum bytes of a message from a program."""
LARGEST_ORDER = 1 << 30
LARGEST_REPLY = 64 << 10
"""Maximum bytes of a status message."""
_ITEMS = 1_000_000
_DIGITS = 4300  # digits of a number: Python's own limit for parsing
_BITS = 14_285  # about as many bits


@dataclass(frozen=True)
class Handle:
    """An object that stays with the program, e.g. an instance of its own class."""

    id: int
    kind: str


def send(
    sock: socket.socket, message: Any, *, largest: int = LARGEST, deadline: float | None = None
) -> None:
    """Send a message.  Raises the errors of `framing.send`."""
    framing.send(sock.fileno(), json.dumps(message).encode(), largest=largest, deadline=deadline)


def receive(sock: socket.socket, *, largest: int = LARGEST, deadline: float | None = None) -> Any:
    """Receive a message.  Raises the errors of `framing.receive`, and BadMessage unless it is JSON."""
    return parse(framing.receive(sock.fileno(), largest=largest, deadline=deadline))


def parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise BadMessage(f"no JSON: {type(e).__name__}") from None


# ---------------------------------------------------------------- values


def encode(value: Any, hold: Callable[[Any], Any]) -> Any:
    """Encode `value` as JSON; `hold(value)` returns the message of a handle for anything but plain
    data.
    """
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind in (int, float, str):
        return value
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), hold)
    for base, tag, items in _BASES:
        if isinstance(value, base):
            return [tag, [encode(v, hold) for v in items(value)]]
    if isinstance(value, dict):
        return ["d", [[encode(k, hold), encode(v, hold)] for k, v in dict.items(value)]]
    if isinstance(value, Mapping):
        return encode(dict(value), hold)
    if isinstance(value, Iterator):
        return ["i", [encode(v, hold) for v in _first(value)]]
    scalar = _scalar(value)
    return scalar if scalar is not None else hold(value)


_BASES: tuple[tuple[type, str, Callable[[Any], Iterator[Any]]], ...] = (
    (list, "l", list.__iter__),
    (tuple, "t", tuple.__iter__),
    (set, "s", set.__iter__),
    (frozenset, "f", frozenset.__iter__),
    (deque, "q", deque.__iter__),
)


def _scalar(value: Any) -> Any:
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return ["b" if isinstance(value, bytes) else "B", bytes(value).decode("latin-1")]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, range):
        return ["r", value.start, value.stop, value.step]
    if isinstance(value, Decimal):
        return ["D", str(value)]
    if isinstance(value, Fraction):
        return ["F", value.numerator, value.denominator]
    return None


def _first(items: Iterator[Any]) -> list[Any]:
    got = []
    for item in items:
        got.append(item)
        if len(got) > _ITEMS:
            raise ValueError(f"an iterator of more than {_ITEMS} items")
    return got


def decode(message: Any) -> Any:
    """Decode a value.  Raises BadMessage for anything that `encode` does not produce.

    Each number takes bounded time, but keys can be chosen so that their hashes collide: only a
    sandboxed process decodes a program's data.
    """
    try:
        return _decode(message)
    except (TypeError, ValueError, LookupError, RecursionError, ArithmeticError) as e:
        raise BadMessage(f"no value: {type(e).__name__}") from None


def _decode(m: Any) -> Any:
    if m is None or isinstance(m, bool | int | float | str):
        return m
    tag = m[0]
    body = m[1:]
    if tag in _SEQUENCES:
        (items,) = body
        return _SEQUENCES[tag]([_decode(v) for v in _typed(items, list)])
    if tag == "d":
        (items,) = body
        return {_decode(k): _decode(v) for k, v in _typed(items, list)}
    kinds, make = _SCALARS[tag]
    return make(*(_typed(v, kind) for v, kind in zip(body, kinds, strict=True)))


def _typed(value: Any, kind: type[Any]) -> Any:
    """Return `value` if it has exactly the type that `encode` produces; constructors would parse a
    text instead of a number, at unbounded cost.
    """
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    if kind is int and value.bit_length() > _BITS:
        raise ValueError(f"a number of {value.bit_length()} bits")
    return value


_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "l": lambda v: v,
    "t": tuple,
    "s": set,
    "f": frozenset,
    "q": deque,
    "i": iter,
}


def _decimal(text: str) -> Decimal:
    if len(text) > _DIGITS:
        raise ValueError(f"a decimal of {len(text)} characters")
    return Decimal(text)


_SCALARS: dict[str, tuple[tuple[type, ...], Callable[..., Any]]] = {
    "b": ((str,), lambda s: s.encode("latin-1")),
    "B": ((str,), lambda s: bytearray(s.encode("latin-1"))),
    "c": ((float, float), complex),
    "r": ((int, int, int), range),
    "D": ((str,), _decimal),
    "F": ((int, int), Fraction),
    "h": ((int, str), lambda id, kind: Handle(id, kind[:100])),
}


def same(got: Any, expected: Any) -> bool:
    """Return whether plain values are equal; tuples equal lists, and numbers may differ by a
    relative 1e-9 if one is a float.
    """
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        return got == expected or (float in (type(got), type(expected)) and _close(got, expected))
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        got_items, theirs = ({str(k): v for k, v in d.items()} for d in (got, expected))
        return got_items.keys() == theirs.keys() and all(
            same(v, theirs[k]) for k, v in got_items.items()
        )
    return type(got) is type(expected) and bool(got == expected)


def _close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    except OverflowError:  # an int beyond all floats
        return False


def short(value: Any) -> str:
    """Format a value for display."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= 200 else f"{text[:200]}…")
