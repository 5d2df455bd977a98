"""The services that `bench_serve.py` asks: a scripted one, whose answers take as long as their
prompts say.

    python scripts/serve_sides.py FOLDER [ENGINES]

Real gateway, sessions and buffer in one process; with 0 engines a server that only waits and
answers.  It prints {"address", "key", "pid"}; for each line {"do": "roll"} it gives its engines new
weights, as a trainer would, and answers with {"seconds"}; it ends when stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from aiohttp import web

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings, PipelineSettings
from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine, logprobs, weights_key
from rft.engine.settings import EngineSettings
from rft.explorer.service_settings import ServeConfig, ServeRuntime
from rft.extras.serve.access import ENVIRONMENT
from rft.extras.serve.service import Service, settle
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.choose import make
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.types.ports import Assignment, GenerateRequest, LoadReport, ScoreRow, WeightManifest

ANSWER = "an answer of thirty-two letters.."
LOAD_S = 0.5  # that an engine takes to load weights
PROBES = [[10 + i, 20, 30] for i in range(16)]


class Timed(ScriptedEngine):
    """Takes as long for an answer as the last message says, in seconds."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        with self.admission.counted(request):
            if request.messages:
                await asyncio.sleep(float(request.messages[-1]["content"]))
            return await self._answers(request)

    async def load(self, manifest: WeightManifest) -> LoadReport:
        await asyncio.sleep(LOAD_S)
        return await super().load(manifest)


class Gate:
    """Lets one batch begin; no trainer is there."""

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        return Assignment(batch=0, version=Version(1, 0))

    async def wait_verified(self, version: Version) -> bool:
        return True

    async def explored(self, batch: int) -> None: ...

    async def finished(self) -> None:
        await asyncio.Event().wait()

    async def wait_final(self) -> Version:
        return Version(1, 0)

    async def log(self, record: MetricRecord) -> None: ...


class Weights:
    """Publishes versions to the engines of `pool`, and scores as they do."""

    def __init__(self, pool: EnginePool, folder: Path) -> None:
        config = FixedSync(sync_method="memory")
        runtime = SyncRuntime(at_a_time=1 if len(pool.engines) > 1 else None)
        self._transport = make(config, folder)
        self._sync = Synchronizer(
            config, runtime, pool.engines, self, Schedule(), PROBES, Version(1, 0)
        )
        self._step = -1
        self._key = 0

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return [
            logprobs(r.tokens[: r.prompt_length], r.tokens[r.prompt_length :], self._key)
            for r in rows
        ]

    async def publish(self) -> None:
        self._step += 1
        weights = {"embed": torch.full((1024,), float(self._step))}
        manifest = self._transport.stage(Version(1, self._step), weights.items(), {})
        self._key = weights_key(manifest)
        await self._sync.publish(manifest)

    def close(self) -> None:
        self._transport.close()


async def bare() -> None:
    """Answers as late as it is asked to, and keeps nothing: what any server here takes."""

    async def opened(request: web.Request) -> web.Response:
        return web.json_response({"base_url": f"http://{request.host}/v1", "api_key": "none"})

    async def answered(request: web.Request) -> web.Response:
        await asyncio.sleep(float((await request.json())["messages"][-1]["content"]))
        chunk = json.dumps(
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {"role": "assistant", "content": ANSWER},
                        "finish_reason": "stop",
                    }
                ]
            }
        )
        return web.Response(
            text=f"data: {chunk}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
        )

    app = web.Application()
    app.router.add_post("/v1/sessions", opened)
    app.router.add_post("/v1/chat/completions", answered)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    print(json.dumps({"address": address, "key": "none", "pid": os.getpid()}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await runner.cleanup()


async def main(folder: Path, engines: int) -> None:
    os.environ[ENVIRONMENT] = key = secrets.token_hex(16)
    settings = EngineSettings(engine_type="scripted", max_model_len=2048)
    pool = EnginePool([Timed(answer=lambda m: ANSWER, settings=settings) for _ in range(engines)])
    weights = Weights(pool, folder / "sync")
    await weights.publish()
    buffer = Buffer(BufferSettings(folder=folder / "buffer", run="bench"))
    await buffer.open()
    lineage = (await buffer.start_lineage(None, None)).lineage
    limits = ServeConfig(
        requests_per_minute=10**9,
        tokens_per_minute=10**12,
        max_concurrent=10**6,
        max_sessions=10**6,
    )
    gate: Any = Gate()
    service = Service(
        ServeRuntime(port=0, batch_size=1, config=limits),
        PipelineSettings(),
        model=pool,
        buffer=cast(Any, buffer.writer(lineage)),
        gate=gate,
        sink=gate,
        lineage=lineage,
        folder=folder,
        on_listening=settle,
    )
    running = asyncio.ensure_future(service.run())
    await service.gateway.listening.wait()
    print(
        json.dumps({"address": service.gateway.address, "key": key, "pid": os.getpid()}), flush=True
    )
    while await asyncio.to_thread(sys.stdin.readline):
        began = time.perf_counter()
        await weights.publish()
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    await service.stop()
    await asyncio.gather(running, return_exceptions=True)
    await buffer.close()
    weights.close()


if __name__ == "__main__":
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    asyncio.run(main(Path(sys.argv[1]), count) if count else bare())
