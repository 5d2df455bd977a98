"""What `monitor.keep_trainer_logprobs` costs in the ledger: `python scripts/kept_logprobs.py
[--rows N] [--response N] [--json]`.

One group a train step, in a ledger of SQLite with storage file.  Bytes are those of the table's
texts, of the payload and of the database; seconds are medians over the steps.  What the trainer
computes besides is one forward pass of the rows that its step skips.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from rft.buffer.buffer import Buffer
from rft.buffer.inspect import collect
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.types import token_logprobs
from rft.types.block import decode, encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience
from rft.types.ids import GroupId, Version

STEPS = 10
PROMPT = 128  # tokens


def rows(batch: int, count: int, response: int) -> list[Experience]:
    """A group whose log-probs are spread as a sampler's: many near 0, some far below."""
    draw = np.random.default_rng(batch)
    mask = np.arange(PROMPT + response) >= PROMPT
    made = []
    for run in range(count):
        logprobs = np.where(mask, -draw.gamma(0.3, 1.5, len(mask)), 0).astype(np.float32)
        made.append(
            Experience(
                id=GroupId(1, 0, batch, 0).run(run),
                taskset="t",
                task_index=batch,
                workflow="w",
                status="complete",
                tokens=draw.integers(0, 150_000, len(mask)).astype(np.int32),
                loss_mask=mask,
                logprobs=logprobs,
                version_spans=(VersionSpan(Version(1, 0), PROMPT, len(mask)),),
                reward=float(run % 2),
            )
        )
    return made


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = await work()
    return time.perf_counter() - began, found


async def run(folder: Path, count: int, response: int, *, keep: bool) -> dict[str, float]:
    """Seconds of a step's `use` and of what comes before it, and bytes of each trained token."""
    buffer = Buffer(BufferSettings(folder=folder / "buffer", storage_type="file"))
    await buffer.open()
    await buffer.start_lineage(None, None)
    packing = []
    using = []
    for step in range(1, STEPS + 1):
        await buffer.writer(1).append(encode(rows(step - 1, count, response)), accepted=True)
        await buffer.writer(1).close_batch(step - 1, accepted=1, expected=1, reasons={})
        lease = await buffer.reader(1).lease(
            step, groups=1, rows=None, deadline_s=60, max_staleness=None
        )
        given = decode(lease.frame)
        frame = None
        if keep:
            theirs = [x.logprobs[x.loss_mask] for x in given]
            ours = [
                x + np.random.default_rng(step).normal(0, 1e-5, len(x)).astype(np.float32)
                for x in theirs
            ]
            began = time.perf_counter()
            frame = token_logprobs.encode(
                [token_logprobs.of_row(x, told) for x, told in zip(given, ours, strict=True)]
            )
            packing.append(time.perf_counter() - began)
        seconds, _ = await timed(lambda step=step, frame=frame: buffer.reader(1).use(step, frame))  # type: ignore[misc]
        using.append(seconds)
    await buffer.close()
    tokens = STEPS * count * response
    with open_run(folder) as questions:
        sizes = {"trainer_logprobs": 0, **collect(questions)["bytes"]}
        found = {
            f"{name}_bytes_per_token": round(size / tokens, 2)
            for name, size in sizes.items()
            if name != "log"
        }
        found |= {f"{name}_s": asked(questions, sql) for name, sql in QUERIES.items()}
    return found | {
        "pack_s": statistics.median(packing or [0.0]),
        "use_s": statistics.median(using),
    }


QUERIES = {
    "one_row": "SELECT token_start, logprob, trainer_logprob FROM v_tokens WHERE id = "
    "'0001.00.00000003.000000.0002.00.0000'",
    "mean_of_all": "SELECT avg(abs(trainer_logprob - logprob)) FROM v_tokens",
}


def asked(questions: Any, sql: str) -> float:
    began = time.perf_counter()
    with questions.ask(sql) as answer:
        list(answer.rows)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=64, help="of a train step")
    parser.add_argument("--response", type=int, default=512, help="trained tokens of a row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: asyncio.run(
                run(Path(folder) / name, args.rows, args.response, keep=name == "kept")
            )
            for name in ("off", "kept")
        }
    if args.json:
        print(json.dumps(sides))
        return
    for name in sides["off"]:
        print(f"{name:26} off {sides['off'][name]:10.5f}   kept {sides['kept'][name]:10.5f}")


if __name__ == "__main__":
    main()
