"""Work on rows in other processes: each part goes through a fresh `python -m rft.taskset.parallel`, which answers on its output.

MessagePack travels, never pickle.  Invariant: the answers come in the order of the parts, so a result does not depend on how many
processes there are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from rft.errors import ConfigError, SetupError

AT_ONCE = 4096  # rows of one part; a set that is not larger stays in this process


def spread(work: str, common: dict[str, Any], parts: Iterable[Any], processes: int) -> Iterator[Any]:
    """`WORK[work](common, part)` of each part, in order, with at most `processes` at a time.  Raises what the work raises."""
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(processes) as threads:
        try:
            for part in parts:
                waiting.append(threads.submit(_ask, work, common, part))
                if len(waiting) > processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _ask(work: str, common: dict[str, Any], part: Any) -> Any:
    question = msgspec.msgpack.encode((work, common, part), enc_hook=_plain)
    done = subprocess.run([sys.executable, "-m", "rft.taskset.parallel"], input=question, capture_output=True, check=False)
    if done.returncode != 0 or not done.stdout:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
        raise SetupError(f"a process that works on rows ended with {done.returncode}: {' / '.join(last)}.  Try num_process: 1")
    answer = msgspec.msgpack.decode(done.stdout)
    if "error" in answer:
        raise ConfigError(answer["error"], key=answer["key"])
    return answer["value"]


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
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what plugins print is no answer
    work, common, part = msgspec.msgpack.decode(sys.stdin.buffer.read())
    try:
        answer = {"value": WORK[work](common, part)}
    except ConfigError as e:
        answer = {"error": e.message, "key": e.key}
    with answers:
        answers.write(msgspec.msgpack.encode(answer, enc_hook=_plain))


if __name__ == "__main__":
    main()
