"""A service around a real buffer and a scripted engine, with a gate that lets every batch begin;
for tests of what clients see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings, PipelineSettings
from rft.engine.scripted import ScriptedEngine
from rft.explorer.service_settings import ServeConfig, ServeRuntime
from rft.extras.serve.access import ENVIRONMENT
from rft.extras.serve.live_session import LiveSession
from rft.extras.serve.service import Service
from rft.trainer.checkpoint.manifest import Manifest
from rft.types.ids import Version
from rft.types.metrics import MetricRecord
from rft.types.ports import Assignment

KEY = "client-key-0123456789"
HI = [{"role": "user", "content": "hi"}]


class OpenGate:
    """Batches begin at once; `end` lets the trainer be finished.  Versions in `rejected` failed
    their canary.
    """

    def __init__(self, cursor: int) -> None:
        self.explored_batches: list[int] = []
        self.news = asyncio.Condition()
        self.rejected: set[Version] = set()
        self._next = cursor
        self._over = asyncio.Event()

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        self._next += 1
        return Assignment(batch=self._next - 1, version=Version(1, 0))

    async def wait_verified(self, version: Version) -> bool:
        return version not in self.rejected

    async def explored(self, batch: int) -> None:
        async with self.news:
            self.explored_batches.append(batch)
            self.news.notify_all()

    async def wait_explored(self, batches: int) -> None:
        async with asyncio.timeout(20), self.news:
            await self.news.wait_for(lambda: len(self.explored_batches) >= batches)

    def end(self) -> None:
        self._over.set()

    async def finished(self) -> None:
        await self._over.wait()

    async def wait_final(self) -> Version:
        return Version(1, 0)


class Sink:
    def __init__(self) -> None:
        self.records: list[MetricRecord] = []

    async def log(self, record: MetricRecord) -> None:
        self.records.append(record)


class Served:
    """What a test holds of a running service."""

    def __init__(
        self, service: Service, buffer: Buffer, gate: OpenGate, sink: Sink, lineage: int
    ) -> None:
        self.service = service
        self.buffer = buffer
        self.gate = gate
        self.sink = sink
        self.lineage = lineage
        self.address = service.gateway.address
        self._over = asyncio.Condition()
        service.book.on_over = self._tell
        self.client = self.http(KEY)

    def http(self, key: str = "", **more: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.address,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=20,
            **more,
        )

    async def open(self, **body: Any) -> dict[str, Any]:
        answer = await self.client.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    async def ask(
        self, session: dict[str, Any], text: str = "hi", retry_key: str = "", **more: Any
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {session['api_key']}"} | (
            {"Idempotency-Key": retry_key} if retry_key else {}
        )
        body = {"model": "policy", "messages": [{"role": "user", "content": text}], **more}
        return await self.client.post(
            f"{session['base_url']}/chat/completions", json=body, headers=headers
        )

    async def reward(self, session: dict[str, Any], reward: Any, **more: Any) -> httpx.Response:
        return await self.client.post(
            f"/v1/sessions/{session['id']}/reward", json={"reward": reward, **more}
        )

    async def state(self, session: dict[str, Any]) -> dict[str, Any]:
        return dict((await self.client.get(f"/v1/sessions/{session['id']}")).json())

    def _tell(self, session: LiveSession) -> None:
        self.service.gateway.remove(session)
        self._telling = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._over:
            self._over.notify_all()

    async def until(self, session: dict[str, Any], reason: str) -> None:
        """Waits until `session` is over; it is, for `reason`."""
        async with asyncio.timeout(20), self._over:
            await self._over.wait_for(lambda: session["id"] not in self.service.book.sessions)
        found = await self.state(session)
        assert (found["state"], found.get("reason")) == ("explained", reason)

    async def played(self, reward: float = 1.0, **body: Any) -> dict[str, Any]:
        session = await self.open(**body)
        assert (await self.ask(session)).status_code == 200
        assert (await self.reward(session, reward)).status_code == 200
        return session


@asynccontextmanager
async def started(
    folder: Path, engine: ScriptedEngine, found: Manifest | None = None, **settings: Any
) -> AsyncIterator[tuple[Service, Buffer, OpenGate, Sink, int]]:
    """A service that listens; the buffer of `folder` goes on, from the checkpoint `found` where
    there is one.
    """
    keys = {k: settings.pop(k) for k in ServeConfig.model_fields.keys() & settings.keys()}
    buffer = Buffer(BufferSettings(folder=folder / "buffer", resume_rows="keep"))
    await buffer.open()
    begun = await buffer.start_lineage(
        *((None, None) if found is None else (found.version, found.consumption))
    )
    lineage = begun.lineage
    engine.version = Version(lineage, 0 if found is None else found.version.step)
    gate = OpenGate(begun.cursor)
    sink = Sink()
    service = Service(
        ServeRuntime(**{"port": 0, "batch_size": 1, "config": ServeConfig(**keys), **settings}),
        PipelineSettings(),
        model=engine,
        buffer=buffer.writer(lineage),  # type: ignore[arg-type]  # it has the store's methods, too
        gate=gate,
        sink=sink,  # type: ignore[arg-type]
        lineage=lineage,
        folder=folder,
    )
    running = asyncio.ensure_future(service.run())
    listening = asyncio.ensure_future(service.gateway.listening.wait())
    try:
        async with asyncio.timeout(20):
            await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield service, buffer, gate, sink, lineage
    finally:
        listening.cancel()
        await service.stop()
        await asyncio.gather(running, listening, return_exceptions=True)
        await buffer.close()


@asynccontextmanager
async def serving(
    folder: Path, monkeypatch: Any, engine: ScriptedEngine | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """`settings`: of the service."""
    monkeypatch.setenv(ENVIRONMENT, KEY)
    engine = engine or ScriptedEngine(answer=lambda m: f"to {m[-1]['content']}")
    async with started(folder, engine, **settings) as parts:
        served = Served(*parts)
        try:
            yield served
        finally:
            await served.client.aclose()
