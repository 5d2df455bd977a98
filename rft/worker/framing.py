"""Frames between processes: a 4-byte length and that many bytes, over any descriptor or stream.

Independent of a frame's content.  Invariant: a deadline (of time.monotonic) covers the complete
frame, so slow single bytes gain no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Iterator

_PIECE = 1 << 20
LARGEST = (1 << 32) - 1


class ChannelClosed(ConnectionError):
    """The other side has closed."""


class BadMessage(ValueError):
    """The other side sent no valid message."""


def frame(data: bytes, largest: int = LARGEST) -> bytes:
    """Prepend the length.  Raises ValueError for data that is too large."""
    if len(data) > largest:
        raise ValueError(f"a message of {len(data)} bytes; at most {largest}")
    return len(data).to_bytes(4, "big") + data


def send(fd: int, data: bytes, *, largest: int = LARGEST, deadline: float | None = None) -> None:
    """Send a frame.

    Raises ValueError for too large data, TimeoutError, OSError of the descriptor.
    """
    rest = memoryview(frame(data, largest))
    with _nonblocking(fd) if deadline is not None else contextlib.nullcontext():
        while rest:
            _wait(fd, select.POLLOUT, deadline)
            rest = rest[os.write(fd, rest[:_PIECE]) :]


@contextlib.contextmanager
def _nonblocking(fd: int) -> Iterator[None]:
    """Make writes return on a full pipe, so that the deadline is checked."""
    blocking = os.get_blocking(fd)
    os.set_blocking(fd, False)
    try:
        yield
    finally:
        os.set_blocking(fd, blocking)


def receive(fd: int, *, largest: int = LARGEST, deadline: float | None = None) -> bytes:
    """Receive a frame.

    Raises ChannelClosed, BadMessage for a too large frame, TimeoutError, OSError.
    """
    return _exactly(fd, _size(_exactly(fd, 4, deadline), largest), deadline)


async def read(reader: asyncio.StreamReader, *, largest: int = LARGEST) -> bytes:
    """Read a frame.

    Raises ChannelClosed, or BadMessage for a too large frame.
    """
    try:
        return await reader.readexactly(_size(await reader.readexactly(4), largest))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise ChannelClosed("the other side is gone") from None


def _size(head: bytes, largest: int) -> int:
    if (size := int.from_bytes(head, "big")) > largest:
        raise BadMessage(f"a message of {size} bytes; at most {largest}")
    return size


def _exactly(fd: int, count: int, deadline: float | None) -> bytes:
    got = bytearray()
    while len(got) < count:
        _wait(fd, select.POLLIN, deadline)
        if not (piece := os.read(fd, min(count - len(got), _PIECE))):
            raise ChannelClosed("the other side is gone")
        got += piece
    return bytes(got)


def _wait(fd: int, event: int, deadline: float | None) -> None:
    """Wait for `fd`.  Raises TimeoutError after the deadline, even with data to read."""
    if deadline is None:
        return
    poll = select.poll()
    poll.register(fd, event)
    seconds = deadline - time.monotonic()
    if seconds <= 0 or not poll.poll(max(1, seconds * 1000)):
        raise TimeoutError
