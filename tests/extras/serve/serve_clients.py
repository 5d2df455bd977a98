"""Clients of `rft serve` that outlive it: they send each call again until it is answered, and know
what was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3
from pathlib import Path
from typing import Any

import httpx

from rft.extras.serve.client import AsyncClient


class Persistent:
    """Clients that send a call again until it is answered, over every restart."""

    def __init__(self, address: str, key: str, *, clients: int = 8, pause_s: float = 0.0) -> None:
        """`pause_s`: of each client, between two sessions."""
        self.address = address
        self._key = key
        self._clients = clients
        self._pause_s = pause_s
        self.acknowledged = set[str]()
        self.rewarded = set[str]()
        self.again = 0  # calls that had to be sent again
        self.stopped = False
        self._news = asyncio.Condition()

    async def more(self, answers: int) -> None:
        """Waits for so many further acknowledged answers."""
        wanted = len(self.acknowledged) + answers
        async with asyncio.timeout(300), self._news:
            await self._news.wait_for(lambda: len(self.acknowledged) >= wanted)

    async def play(self, first: int) -> None:
        async with (
            AsyncClient(self.address, self._key, patience_s=300.0) as rft,
            httpx.AsyncClient(timeout=30) as http,
        ):
            for number in itertools.count(first, self._clients):
                if self.stopped:
                    return
                session = await rft.session(task_id=str(number // 2))
                answer = await self._answer(http, session, f"ab{number % 10}")
                async with self._news:
                    self.acknowledged.add(answer)
                    self._news.notify_all()
                await rft.reward(session, float(number % 2))
                self.rewarded.add(session.id)
                assert await rft.reward(session, float(number % 2)) == "duplicate"
                await asyncio.sleep(self._pause_s)

    async def _answer(self, http: httpx.AsyncClient, session: Any, text: str) -> str:
        """Id of the answer, which is the same however often it is asked for."""
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        headers = {"Authorization": f"Bearer {session.api_key}", "Idempotency-Key": "1"}
        found: set[str] = set()
        async with asyncio.timeout(300):
            while True:
                try:
                    answer = await http.post(
                        f"{session.base_url}/chat/completions", json=body, headers=headers
                    )
                except httpx.TransportError:
                    answer = None
                if answer is None or answer.status_code == 503:
                    self.again += 1
                    await asyncio.sleep(0.2)
                    continue
                assert answer.status_code == 200, answer.text
                found.add(answer.json()["id"])
                assert len(found) == 1, found
                if random.random() < 0.5:
                    return found.pop()

    def lost(self, run_dir: Path) -> list[str]:
        """What a run's ledger lacks, or has twice, of what was acknowledged.  Empty = nothing."""
        with contextlib.closing(
            sqlite3.connect(run_dir / "buffer" / "experience_buffer.db")
        ) as ledger:
            calls = [f"chatcmpl-{id}" for (id,) in ledger.execute("SELECT id FROM calls")]
            scored = {
                id for (id,) in ledger.execute("SELECT id FROM sessions WHERE score IS NOT NULL")
            }
        twice = (
            [f"{len(calls) - len(set(calls))} answers are stored twice"]
            if len(calls) != len(set(calls))
            else []
        )
        lost = {"answers": self.acknowledged - set(calls), "rewards": self.rewarded - scored}
        return [
            *twice,
            *(
                f"{len(ids)} acknowledged {what} are lost, e.g. {min(ids)}"
                for what, ids in lost.items()
                if ids
            ),
        ]
