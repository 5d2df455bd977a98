"""Work on rows in other processes: `python -m rft.taskset.parallel` answers one part of the rows after the other.

MessagePack travels in frames with their length in front, never pickle.  Invariant: the answers come in the order of the parts, so a
result does not depend on how many processes there are.
"""

from __future__ import annotations

import os
import queue
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import msgspec

from rft.errors import ConfigError, SetupError

AT_ONCE = 4096  # rows of one part; a set that is not larger stays in this process
_HEAD = struct.Struct("<Q")  # bytes of the frame that follows


def spread(work: str, common: dict[str, Any], parts: Iterable[Any], processes: int) -> Iterator[Any]:
    """`WORK[work](common, part)` of each part, in order, in at most `processes` processes.  Raises what the work raises."""
    waiting: deque[Future[Any]] = deque()
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers: list[_Worker] = []

    def ask(part: Any) -> Any:
        worker = idle.get()
        try:
            return worker.ask((work, common, part))
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(processes) as threads:
        try:
            for part in parts:
                if len(workers) < processes:
                    workers.append(_Worker())
                    idle.put(workers[-1])
                waiting.append(threads.submit(ask, part))
                if len(waiting) > processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            threads.shutdown()
            for worker in workers:
                worker.close()


class _Worker:
    """One process; used by one thread at a time."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rft.taskset.parallel"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # the processes are the parallelism
        )

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        frame = msgspec.msgpack.encode(question, enc_hook=_plain)
        try:
            _send(self._process.stdin, frame)
            answer = msgspec.msgpack.decode(_receive(self._process.stdout))
        except (OSError, EOFError):
            raise SetupError(
                f"a process that works on rows ended with {self._process.wait()}: {self._last()}.  Try num_process: 1"
            ) from None
        if "error" in answer:
            raise ConfigError(answer["error"], key=answer["key"])
        return answer["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _last(self) -> str:
        self._said.seek(0)
        return " / ".join(self._said.read().decode("utf-8", "replace").strip().splitlines()[-3:])


def _send(to: IO[bytes], frame: bytes) -> None:
    to.write(_HEAD.pack(len(frame)) + frame)
    to.flush()


def _receive(source: IO[bytes]) -> bytes:
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise EOFError
    (size,) = _HEAD.unpack(head)
    frame = source.read(size)
    if len(frame) < size:
        raise EOFError
    return frame


def _plain(value: Any) -> Any:
    raise ConfigError(f"a row holds {type(value).__name__} ({value!r:.60}); rows are made of texts, numbers, lists and mappings")


def _count(common: dict[str, Any], part: list[Any]) -> Any:
    from rft.taskset.overlong import count

    return count(common, part)


def _operate(common: dict[str, Any], part: dict[str, Any]) -> Any:
    from rft.taskset.pipeline import operate

    return operate(common, part)


WORK: dict[str, Callable[[dict[str, Any], Any], Any]] = {"count": _count, "operate": _operate}


def main() -> None:
    """Answers until the questions end."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what plugins print is no answer
    with answers:
        while True:
            try:
                work, common, part = msgspec.msgpack.decode(_receive(sys.stdin.buffer))
            except EOFError:
                return
            try:
                answer = {"value": WORK[work](common, part)}
            except ConfigError as e:
                answer = {"error": e.message, "key": e.key}
            _send(answers, msgspec.msgpack.encode(answer, enc_hook=_plain))


if __name__ == "__main__":
    main()
