"""Frames over descriptors and streams: whole, bounded, and with one deadline."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rft.worker import framing

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def later(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    ours, theirs = pair
    frames = [b"", b"a", os.urandom(3 << 20)]  # the last one is more than fits in between

    def send() -> None:
        for data in frames:
            framing.send(theirs.fileno(), data, deadline=later())

    sender = threading.Thread(target=send)
    sender.start()
    assert [framing.receive(ours.fileno(), deadline=later()) for _ in frames] == frames
    sender.join()
    assert os.get_blocking(theirs.fileno())  # as it was
    read, write = os.pipe()
    framing.send(write, b"over a pipe")
    os.close(write)
    assert framing.receive(read) == b"over a pipe"
    with pytest.raises(framing.ChannelClosed):
        framing.receive(read)
    os.close(read)


def test_single_bytes_gain_no_time(pair: Pair) -> None:
    ours, theirs = pair
    stop = threading.Event()

    def drip() -> None:
        theirs.sendall((1000).to_bytes(4, "big"))
        while not stop.wait(0.02):
            theirs.sendall(b"x")

    sender = threading.Thread(target=drip)
    sender.start()
    try:
        with pytest.raises(TimeoutError):
            framing.receive(ours.fileno(), deadline=later(0.3))
    finally:
        stop.set()
        sender.join()


def test_a_reader_that_does_not_read_holds_up_nobody(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        framing.send(pair[0].fileno(), bytes(8 << 20), deadline=later(0.1))
    assert os.get_blocking(pair[0].fileno())


async def test_what_is_too_large_or_cut_off_is_refused(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(ValueError, match="a message of 9 bytes; at most 8"):
        framing.send(ours.fileno(), bytes(9), largest=8)
    framing.send(ours.fileno(), bytes(9))
    with pytest.raises(framing.BadMessage, match="a message of 9 bytes; at most 8"):
        framing.receive(theirs.fileno(), largest=8)
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.recv(9)
    theirs.sendall(framing.frame(b"whole") + framing.frame(b"cut off")[:6])
    theirs.shutdown(socket.SHUT_WR)
    assert await framing.read(reader) == b"whole"
    with pytest.raises(framing.ChannelClosed):
        await framing.read(reader)
    writer.close()
    await writer.wait_closed()
