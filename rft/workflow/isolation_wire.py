"""Messages between an isolated run and its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rft.types.completion import Layout, Score, TokenScores
from rft.types.task import Task

MAX_FRAME = 64 << 20


@dataclass(frozen=True)
class Isolation:
    """Limits of one run's process: memory on top of the initial memory, size of a written file,
    open files.
    """

    memory_mb: int = 1024
    file_mb: int = 64
    open_files: int = 256


class Order(msgspec.Struct, kw_only=True):
    """The first frame to a child: the runs to play."""

    task: Task
    keywords: dict[str, Any]
    runs: list[tuple[int, str]]  # number and request id
    whole_group: bool  # one call of run_group plays all runs
    models: list[str]
    limits: Isolation
    teacher_top: int = 0


class RunCall(msgspec.Struct, array_like=True):
    """A frame from a child.  verb generate | score | classify: one call of `model` ("" = the
    policy); done | failed: the end.
    """

    id: int
    verb: str
    run: int  # index among the order's runs
    model: str
    body: msgspec.Raw


class Answer(msgspec.Struct, array_like=True):
    """A frame to a child.  `body` by `error`: "" the result; prompt_too_long [tokens, limit]; other
    a text.
    """

    id: int
    error: str
    body: msgspec.Raw


class Played(msgspec.Struct, kw_only=True):
    """The result of one run: (number of the call, index) of each completion, and what the workflow
    added.
    """

    calls: list[tuple[tuple[int, int], Score | None, dict[str, Any], TokenScores | None]]
    layout: Layout
    metrics: dict[str, float]
    info: dict[str, Any]
    score: Score | None
    limited: bool = False
    expert: bool = False


def pack(value: Any) -> bytes:
    return _ENCODER.encode(value)


def unpack(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Decode `data` as `kind`.  Raises msgspec.ValidationError or DecodeError for other data."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes(), *value.shape[1:]]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent; use texts, numbers, lists and dicts")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, data, *columns = value
        if dtype not in ("<i4", "<f4", "<f2"):
            raise ValueError(f"an array of {dtype!r}")
        return np.frombuffer(data, dtype).reshape(-1, *columns)
    raise NotImplementedError(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
