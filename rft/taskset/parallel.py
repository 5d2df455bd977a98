"""Process rows in worker processes (`python -m rft.taskset.parallel`), one part of the rows after
the other.

Invariant: results come in the order of the parts, so a result does not depend on the number of
processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from rft.errors import ConfigError, SetupError
from rft.worker.job_pool import WorkerPool
from rft.worker.process import Codec, WorkerDied, WorkerError, serve

AT_ONCE = 4096  # rows of one part; a smaller set is processed in this process


def spread(
    work: str, common: dict[str, Any], parts: Iterable[Any], processes: int
) -> Iterator[Any]:
    """Yield `work(common, part)` of each part, in order, from at most `processes` processes.

    `work`: "module:function" of this package.  Raises the ConfigError of the work, or SetupError.
    """
    alone = {"TOKENIZERS_PARALLELISM": "false"}  # parallelism comes from the processes
    pool = WorkerPool("rows", "rft.taskset.parallel", size=processes, codec=CODEC, env=alone)
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


def _refuse(value: Any) -> Any:
    raise ConfigError(
        f"a row holds {type(value).__name__} ({value!r:.60}); rows are made of texts, numbers, "
        f"lists and mappings"
    )


CODEC = Codec(msgspec.msgpack.Encoder(enc_hook=_refuse).encode, msgspec.msgpack.decode)


def _answer(request: tuple[str, dict[str, Any], Any]) -> dict[str, Any]:
    work, common, part = request
    module, _, name = work.partition(":")
    function: Callable[[dict[str, Any], Any], Any] = vars(
        importlib.import_module(f"rft.taskset.{module}")
    )[name]
    try:
        return {"value": msgspec.Raw(CODEC.pack(function(common, part)))}
    except ConfigError as e:
        return {"error": e.message, "key": e.key}


if __name__ == "__main__":
    serve(lambda: _answer, codec=CODEC)
