"""Private memory of vLLM's worker on CPU against the requests it has answered, with the kernels
that oneDNN keeps left alone and bounded.

    python scripts/engine_memory.py [--requests 12000] [--kernels 64]

oneDNN compiles a kernel for each shape of a product, that is for each number of rows that a step
has, and keeps the last 1,024 (`ONEDNN_PRIMITIVE_CACHE_CAPACITY`).  New numbers of rows become rarer
with time, so an engine that serves mixed batches grows for an hour and then no more.  The tiny
model; batches of 8 requests with 4 answers of 2 tokens.  Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.testing import tiny
from rft.types.ports import GenerateRequest
from rft.types.task import SamplingArgs

CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
SHOWN = 12  # lines


async def serve(requests: int, model: Path) -> None:
    settings = EngineSettings(
        model_path=str(model),
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_bytes=1 << 26,
        cpu_threads=1,
        fixed_weights=True,
    )
    os.environ.update({**cpu_environment(settings), "VLLM_LOGGING_LEVEL": "ERROR"})
    from rft.engine.vllm import VllmEngine

    engine, draw = await VllmEngine.start(settings), random.Random(0)
    workers = psutil.Process().children(recursive=True)

    async def ask(number: int) -> None:
        prompt = tuple(draw.choices(range(3, 259), k=draw.randint(8, 40)))
        await engine.generate(
            GenerateRequest(
                request_id=str(number),
                prompt_tokens=prompt,
                sampling=SamplingArgs(max_tokens=2),
                n=4,
            )
        )

    for first in range(0, requests, 8):
        await asyncio.gather(*(ask(n) for n in range(first, first + 8)))
        if (first + 8) % (requests // SHOWN // 8 * 8) == 0:
            private = sum(p.memory_full_info().uss for p in workers) / 2**20
            print(
                f"| {os.environ.get(CAPACITY, 'default')} | {first + 8:,} | {private:,.1f} |",
                flush=True,
            )
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--kernels", type=int, default=64, help="of the second engine")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        asyncio.run(serve(options.requests, options.model))
        return
    print("| kernels | requests | MiB |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        model = tiny.make(Path(name) / "tiny")
        for kernels in ({}, {CAPACITY: str(options.kernels)}):
            command = [
                sys.executable,
                __file__,
                "--model",
                str(model),
                "--requests",
                str(options.requests),
            ]
            subprocess.run(
                command, check=True, env={**os.environ, **kernels}, stderr=subprocess.DEVNULL
            )


if __name__ == "__main__":
    main()
