"""What an isolated run and its process say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rft.types.completion import Layout, Score
from rft.types.task import Task

MAX_FRAME = 64 << 20


@dataclass(frozen=True)
class Isolation:
    """What one run's process may take: memory beyond what it starts with, sizes of files that it
    writes, open files.
    """

    memory_mb: int = 1024
    file_mb: int = 64
    open_files: int = 256


class Order(msgspec.Struct, kw_only=True):
    """The first frame to a child: what to play."""

    task: Task
    keywords: dict[str, Any]
    runs: list[tuple[int, str]]  # number and request id
    together: bool  # by one call of run_group
    models: list[str]
    limits: Isolation


class RunCall(msgspec.Struct, array_like=True):
    """A frame from a child.  verb generate | logprobs | classify: one call of `model` ("" = the
    policy); done | failed: the end.
    """

    id: int
    verb: str
    run: int  # place among the order's runs
    model: str
    body: msgspec.Raw


class Answer(msgspec.Struct, array_like=True):
    """A frame to a child.  error "" = `body` is the result; prompt_too_long: it is [tokens, limit];
    other: a text.
    """

    id: int
    error: str
    body: msgspec.Raw


class Played(msgspec.Struct, kw_only=True):
    """One run, as its process reports it: the completions, each by its call's number and its place
    there, with what the workflow added.
    """

    calls: list[tuple[tuple[int, int], Score | None, dict[str, Any], np.ndarray | None]]
    layout: Layout
    metrics: dict[str, float]
    info: dict[str, Any]
    score: Score | None
    limited: bool = False


def pack(value: Any) -> bytes:
    return _ENCODER.encode(value)


def unpack(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Raises msgspec.ValidationError or DecodeError for what is no `kind`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_array)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent; use texts, numbers, lists and dicts")


def _array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, data = value
        if dtype not in ("<i4", "<f4"):
            raise ValueError(f"an array of {dtype!r}")
        return np.frombuffer(data, dtype)
    raise NotImplementedError(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
