"""Calls between the laboratory's processes over a unix socket: length and msgpack, many calls at a
time on one connection.

Errors of rft come back as themselves; a connection that ends fails every call that waits with
ConnectionError.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rft import errors
from rft.errors import BufferFailed, Fenced, FrameRejected, IdConflict
from rft.fault_injection import fault
from rft.types.ports import EndOfData
from rft.worker import framing

_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name in dir(errors)
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, Exception)
} | {"EndOfData": EndOfData}
Handler = Callable[..., Awaitable[Any]]


async def _read(reader: asyncio.StreamReader) -> Any:
    return msgspec.msgpack.decode(await framing.read(reader))


def _frame(message: Any) -> bytes:
    return framing.frame(msgspec.msgpack.encode(message))


async def serve(path: str, methods: dict[str, Handler]) -> asyncio.Server:
    """Answers calls of `methods`, each in its own task."""
    running: set[asyncio.Task[None]] = set()

    async def one(
        writer: asyncio.StreamWriter,
        number: int,
        method: str,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        answer: Any
        try:
            answer = [number, None, await methods[method](*args, **kwargs)]
        except tuple(_ERRORS.values()) as e:
            answer = [number, type(e).__name__, str(e)]
        if not writer.is_closing():
            writer.write(_frame(answer))

    async def session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                task = asyncio.create_task(one(writer, *await _read(reader)))
                running.add(task)
                task.add_done_callback(_ended)
        except ConnectionError:
            writer.close()  # the client is gone; what it asked for goes on

    def _ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # its caller would wait for ever: the supervisor shows this as how the process died
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)

    return await asyncio.start_unix_server(session, path)


class Client:
    """`await client.call(method, ...)`.  `duplicate` sends every message twice and expects both
    answers to be good; `patience` repeats a call that failed with BufferFailed.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        name: str,
        duplicate: bool,
        patience: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._name = name
        self._duplicate = duplicate
        self._patience = patience
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def connect(
        cls, path: str, *, name: str, duplicate: bool = False, patience: int = 0
    ) -> Client:
        return cls(
            *await asyncio.open_unix_connection(path),
            name=name,
            duplicate=duplicate,
            patience=patience,
        )

    async def _listen(self) -> None:
        why: Exception = ConnectionError("the connection ended")
        try:
            while True:
                number, error, value = await _read(self._reader)
                answer = self._waiting.pop(number)
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(_ERRORS[error](value))
        except ConnectionError as e:
            why = ConnectionError(str(e))
        finally:
            for answer in self._waiting.values():
                answer.set_exception(why)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Fault point lab.NAME.METHOD.sent: the message is on its way, its answer not there."""
        for left in range(self._patience, -1, -1):
            try:
                return await self._call(method, args, kwargs)
            except BufferFailed as e:
                # these do not pass
                if not left or isinstance(e, Fenced | FrameRejected | IdConflict):
                    raise
        raise AssertionError("unreachable")

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._listener.done():
            raise ConnectionError("the connection ended before this call")
        answers = [self._send(method, args, kwargs) for _ in range(1 + self._duplicate)]
        await self._writer.drain()
        fault(f"lab.{self._name}.{method}.sent")
        first, *_ = await asyncio.gather(*answers)
        return first

    def _send(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> asyncio.Future[Any]:
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        self._writer.write(_frame([number, method, args, kwargs]))
        return answer
