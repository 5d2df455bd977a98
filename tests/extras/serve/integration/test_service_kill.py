"""kill -9 of a service at random moments and at each named one: what a client saw acknowledged is
in the ledger, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rft.buffer.audit import audit_run
from rft.extras.serve.access import ENVIRONMENT
from rft.extras.serve.client import AsyncClient, ServeError
from rft.fault_injection import SERVE_POINTS, VARIABLE
from tests.extras.serve.serving import HI, KEY
from tests.helpers import runs

pytestmark = pytest.mark.e2e


class Killed:
    """Clients that play against a service which is killed and started again, and what they saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.acknowledged: dict[str, str] = {}  # answers, by the id of the message
        self.rewarded: set[str] = set()
        self._number = 0

    def start(self, fault: str = "", *patience_s: str) -> subprocess.Popen[bytes]:
        (self.folder / "serve.json").unlink(missing_ok=True)
        environment = {**os.environ, ENVIRONMENT: KEY, **({VARIABLE: fault} if fault else {})}
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.extras.serve.integration.service_child",
                str(self.folder),
                *patience_s,
            ],
            cwd=runs.ROOT,
            env=environment,
        )

    async def address(self, child: subprocess.Popen[bytes]) -> str:
        async with asyncio.timeout(60):
            while True:
                assert child.poll() is None, "the service ended while it started"
                with contextlib.suppress(OSError, ValueError):
                    return str(json.loads((self.folder / "serve.json").read_text())["base_url"])
                await asyncio.sleep(0.02)

    async def play(self, address: str, clients: int = 6) -> None:
        """Until the service is gone.  A request whose answer did not come is asked again, after the
        next start.
        """
        async with (
            AsyncClient(address, KEY, patience_s=0.0) as rft,
            httpx.AsyncClient(timeout=20) as http,
        ):
            await asyncio.gather(*(self._one_after_the_other(rft, http) for _ in range(clients)))

    async def _one_after_the_other(self, rft: AsyncClient, http: httpx.AsyncClient) -> None:
        with contextlib.suppress(ServeError, httpx.TransportError):
            while True:
                self._number += 1
                number = self._number
                session = await rft.session(task_id=str(number // 2))
                for turn in range(1 + number % 3):
                    text = f"{number}-{turn}"
                    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
                    headers = {
                        "Authorization": f"Bearer {session.api_key}",
                        "Idempotency-Key": text,
                    }
                    answer = (
                        await http.post(
                            f"{session.base_url}/chat/completions", json=body, headers=headers
                        )
                    ).json()
                    self.acknowledged[answer["id"]] = text
                await rft.reward(session, float(number % 2))
                self.rewarded.add(session.id)

    def check(self) -> None:
        audit = audit_run(self.folder)
        assert audit.ok, audit
        with contextlib.closing(
            sqlite3.connect(self.folder / "buffer" / "experience_buffer.db")
        ) as ledger:
            calls = [f"chatcmpl-{id}" for (id,) in ledger.execute("SELECT id FROM calls")]
            retries = ledger.execute(
                "SELECT count(*) FROM (SELECT 1 FROM calls GROUP BY session, retry_key HAVING "
                "count(*) > 1)"
            )
            assert retries.fetchone() == (0,), "a request counts once"
            scored = {
                id for (id,) in ledger.execute("SELECT id FROM sessions WHERE score IS NOT NULL")
            }
        assert self.acknowledged.keys() <= set(calls) and len(set(calls)) == len(calls)
        assert self.rewarded <= scored

    def train_the_rest(self) -> None:
        """Once more, without clients, until no row waits; then each acknowledged reward of a whole
        group was trained exactly once.
        """
        assert self.start("", "2.0").wait(60) == 0
        audit = audit_run(self.folder)
        assert audit.ok and audit.discarded == {} and audit.used + audit.waiting == audit.acked, (
            audit
        )
        with contextlib.closing(
            sqlite3.connect(self.folder / "buffer" / "experience_buffer.db")
        ) as ledger:
            states = dict(ledger.execute("SELECT id, state FROM sessions"))
            waiting = ledger.execute(
                "SELECT count(*) FROM sessions WHERE state = 'rewarded' GROUP BY task_id"
            ).fetchall()
        assert {states[id] for id in self.rewarded} <= {"accepted", "rewarded"} and set(
            waiting
        ) <= {(1,)}, "whole groups are rows"


def test_at_twenty_random_moments(tmp_path):
    dice = random.Random(0)
    killed = Killed(tmp_path)

    async def moment() -> None:
        child = killed.start()
        try:
            playing = asyncio.ensure_future(killed.play(await killed.address(child)))
            await asyncio.sleep(dice.uniform(0.05, 0.6))
            child.kill()
            await playing
        finally:
            child.kill()
            child.wait()

    for _ in range(20):
        asyncio.run(moment())
        killed.check()
    killed.train_the_rest()
    assert len(killed.acknowledged) > 200 and len(killed.rewarded) > 50


@pytest.mark.parametrize(
    "point", [*SERVE_POINTS, "buffer.append.before", "buffer.append.stored", "buffer.append.after"]
)
def test_at_each_named_moment(tmp_path, point):
    killed = Killed(tmp_path)

    async def until_it_dies(fault: str) -> None:
        child = killed.start(fault)
        try:
            await asyncio.wait_for(killed.play(await killed.address(child)), 30)
            assert child.wait(10) == -9
        finally:
            child.kill()
            child.wait()

    for nth in (3, 9):
        asyncio.run(until_it_dies(f"{point}:{nth}=kill"))
        killed.check()
    killed.train_the_rest()


EXAMPLE = runs.ROOT / "examples" / "serve" / "config.yaml"


def test_a_service_without_a_checkpoint_trains_its_rewards_again(tiny_model, tmp_path):
    """N25: 10 sessions rewarded, 2 steps trained, kill -9, the same command: all 10 were set aside
    as orphaned.
    """
    folder = tmp_path / "rft" / "examples" / "serve"
    given = [
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "explorer.proxy_port=0",
    ]
    command = (
        "serve",
        "--in-process",
        "-c",
        str(EXAMPLE),
        *given,
        "buffer.batch_size=2",
        "algorithm.repeat_times=2",
    )

    async def play(address: str) -> None:
        """Five groups of two sessions: two steps and a half."""
        async with AsyncClient(address, KEY) as rft, httpx.AsyncClient(timeout=60) as http:
            for number in range(10):
                session = await rft.session(task_id=str(number // 2))
                headers = {"Authorization": f"Bearer {session.api_key}"}
                body = {"model": "policy", "messages": HI}
                (
                    await http.post(
                        f"{session.base_url}/chat/completions", json=body, headers=headers
                    )
                ).raise_for_status()
                await rft.reward(session, float(number % 2))

    first = runs.Run(*command, env={ENVIRONMENT: KEY})
    try:
        first.wait_for("the policy is served")
        asyncio.run(play(json.loads((folder / "serve.json").read_text())["base_url"]))
        first.wait_for("step 2/")
    finally:
        first.process.kill()
        first.end()
    assert not list(folder.glob("checkpoints/global_step_*")), (
        "the crash came before the first checkpoint was due"
    )

    again = runs.Run(*command, env={ENVIRONMENT: KEY})
    try:
        again.wait_for("step 2/")
        again.interrupt()
        assert again.end(60) == 130, again.output
    finally:
        again.process.kill()
    assert "no checkpoint was saved before the stop; starting again at step 0" in again.output, (
        again.output
    )
    ok, audit = runs.audit(folder)
    assert ok and (audit["acked"], audit["used"], audit["available"], audit["explained"]) == (
        10,
        8,
        2,
        {},
    ), audit
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [
        (r["step"], r["values"]["actor/loss"], r["values"]["actor/grad_norm"])
        for r in lines
        if r["role"] == "trainer"
    ]
    assert steps[2:] == steps[:2], (
        "the lost steps were trained again: the same rows in the same batches"
    )
