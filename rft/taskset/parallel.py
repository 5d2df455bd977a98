"""Work on rows in other processes: `python -m rft.taskset.parallel` answers one part of the rows
after the other.

Invariant: the answers come in the order of the parts, so a result does not depend on how many
processes there are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from rft.errors import ConfigError, SetupError
from rft.worker.job_pool import WorkerPool
from rft.worker.process import Codec, WorkerDied, WorkerError, serve

AT_ONCE = 4096  # rows of one part; a set that is not larger stays in this process


def spread(
    work: str, common: dict[str, Any], parts: Iterable[Any], processes: int
) -> Iterator[Any]:
    """`work(common, part)` of each part, in order, in at most `processes` processes.  Raises what
    the work raises.

    `work`: "module:function" of this room.
    """
    alone = {"TOKENIZERS_PARALLELISM": "false"}  # the processes are the parallelism
    pool = WorkerPool("rows", "rft.taskset.parallel", size=processes, codec=_MSGPACK, env=alone)
    try:
        for answer in pool.map((work, common, part) for part in parts):
            if "error" in answer:
                raise ConfigError(answer["error"], key=answer["key"])
            yield answer["value"]
    except WorkerDied as e:
        raise SetupError(f"a process that works on rows ended: {e}.  Try num_process: 1") from None
    except WorkerError as e:
        last = " / ".join(str(e).strip().splitlines()[-3:])
        raise SetupError(f"a process that works on rows failed: {last}.  Try num_process: 1") from e
    finally:
        pool.close()


def _plain(value: Any) -> Any:
    raise ConfigError(
        f"a row holds {type(value).__name__} ({value!r:.60}); rows are made of texts, numbers, "
        f"lists and mappings"
    )


_MSGPACK = Codec(msgspec.msgpack.Encoder(enc_hook=_plain).encode, msgspec.msgpack.decode)


def _answer(request: tuple[str, dict[str, Any], Any]) -> dict[str, Any]:
    work, common, part = request
    module, _, name = work.partition(":")
    function: Callable[[dict[str, Any], Any], Any] = vars(
        importlib.import_module(f"rft.taskset.{module}")
    )[name]
    try:
        return {"value": msgspec.Raw(_MSGPACK.pack(function(common, part)))}
    except ConfigError as e:
        return {"error": e.message, "key": e.key}


if __name__ == "__main__":
    serve(lambda: _answer, codec=_MSGPACK)
