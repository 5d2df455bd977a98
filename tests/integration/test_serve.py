"""`rft serve` as a person runs it: clients in other processes play and reward, the trainer steps; then everything is killed, often."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from rft.client import AsyncClient, Client
from rft.monitor.read import read, series
from rft.serve.access import ENVIRONMENT
from rft.trainer import manifest as manifests
from tests.helpers import runs

KEY = "a-key-for-tests-0123456789"
EXAMPLE = runs.ROOT / "examples" / "serve"
SMALL = ("buffer.batch_size=2", "algorithm.repeat_times=2", "explorer.proxy_port=0")


def serve(launch: Any, model: Path, root: Path, *overrides: str) -> Any:
    given = (f"model.model_path={model}", f"checkpoint_root_dir={root}", *SMALL, *overrides)
    return launch("serve", "-c", str(EXAMPLE / "config.yaml"), *given, **{ENVIRONMENT: KEY})


def folder(root: Path) -> Path:
    return root / "rft" / "examples" / "serve"


async def address(root: Path, run: Any, timeout_s: float = 180.0) -> str:
    """Of the service, once it listens."""
    file = folder(root) / "serve.json"
    async with asyncio.timeout(timeout_s), httpx.AsyncClient() as http:
        while True:
            assert run.process.poll() is None, run.output
            try:
                found = str(json.loads(file.read_text())["base_url"])
                await http.get(found.removesuffix("/v1") + "/health")
                return found
            except (OSError, ValueError, httpx.TransportError):  # not there, half written, or of a service that was killed
                await asyncio.sleep(0.1)


async def play(rft: AsyncClient, task: str, reward: float, text: str = "ab1") -> str:
    session = await rft.session(task_id=task)
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as model:
        await model.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
    await rft.reward(session, reward)
    return session.id


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("explorer.rollout_model.engine_type=vllm", "explorer.rollout_model.engine_num=2"), marks=pytest.mark.vllm),
        ("--in-process",),
    ],
    ids=["two vllm engines", "one process"],
)
def test_a_model_learns_from_rewards_that_are_posted(launch, tiny_model, tmp_path, how):
    run = serve(launch, tiny_model, tmp_path, *how, "trainer.total_steps=3")

    async def play_all() -> None:
        found = await address(tmp_path, run)
        async with AsyncClient(found, KEY) as rft:
            for step in range(3):
                await asyncio.gather(*(play(rft, f"{step}-{i // 2}", float(i % 2)) for i in range(4)))

    asyncio.run(play_all())
    assert run.end(120) == 0, run.output
    ok, audit = runs.audit(folder(tmp_path))
    assert ok and audit["acked"] == audit["used"] == 12, audit
    values = read(folder(tmp_path) / "metrics.jsonl")
    assert [v for _, v in series(values, "rollout/reward/mean")] == [0.5] * 3
    assert max(v for _, v in series(values, "sync/canary_max_abs")) <= 1e-4, "every step's weights were served"
    assert any(v > 0 for _, v in series(values, "actor/grad_norm")), "and they changed"
    assert manifests.latest(folder(tmp_path) / "checkpoints").version.step == 3
    assert not (folder(tmp_path) / "serve.json").exists() and KEY not in run.output


def test_its_one_listener_is_on_loopback(launch, tiny_model, tmp_path):
    run = serve(launch, tiny_model, tmp_path)
    found = asyncio.run(address(tmp_path, run))
    state = json.loads((folder(tmp_path) / "state.json").read_text())
    listening = [
        c.laddr for p in runs.parts(state["run_id"]) for c in p.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN
    ]
    port = int(found.split(":")[2].removesuffix("/v1"))
    assert [a for a in listening if a.port == port] == [("127.0.0.1", port)]
    assert {a.ip.removeprefix("::ffff:") for a in listening} == {"127.0.0.1"}
    assert httpx.post(f"{found}/chat/completions", json={}).status_code == 401
    with Client(found, KEY) as rft:
        session = rft.session(task_id="t")
        assert rft.state(session)["state"] == "open"
        rft.withdraw(session)
        assert rft.commit() == 0
    run.interrupt()
    assert run.end(60) == 130, run.output
    assert runs.audit(folder(tmp_path))[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--in-process",)], ids=["parts", "one process"])
def test_nothing_that_was_acknowledged_is_lost(launch, tiny_model, tmp_path, how):
    """kill -9 of a random part (service, buffer, trainer, engine, coordinator) at 20 random moments, or of the one process there is."""
    dice, acknowledged, rewarded = random.Random(0), set[str](), set[str]()

    async def one(rft: AsyncClient, number: int) -> None:
        session = await rft.session(task_id=str(number // 2))
        body = {"model": "policy", "messages": [{"role": "user", "content": f"ab{number % 10}"}]}
        headers = {"Authorization": f"Bearer {session.api_key}", "Idempotency-Key": "1"}
        async with httpx.AsyncClient(timeout=30) as http:
            answer = await http.post(f"{session.base_url}/chat/completions", json=body, headers=headers)
        if answer.status_code == 200:
            acknowledged.add(answer.json()["id"])
            await rft.reward(session, float(number % 2))
            rewarded.add(session.id)

    async def clients(run: Any) -> None:
        async with AsyncClient(await address(tmp_path, run), KEY, patience_s=0.0) as rft:
            for first in range(0, 10_000, 8):
                await asyncio.gather(*(one(rft, len(acknowledged) * 100 + first + i) for i in range(8)), return_exceptions=True)
                if run.process.poll() is not None:
                    return

    async def until_it_ends(run: Any, kills: int) -> int:
        """Kills parts until one is killed that the run does not survive; how many moments are left."""
        playing = asyncio.ensure_future(clients(run))
        await address(tmp_path, run)
        run_id = json.loads((folder(tmp_path) / "state.json").read_text()).get("run_id")
        while kills:
            await asyncio.sleep(dice.uniform(0.5, 4.0))
            parts = {_name(p): p for p in runs.parts(run_id) if _name(p)} or {"": run.process}
            part = dice.choice(sorted(parts))
            parts[part].kill()
            kills -= 1
            if part != "engine":  # that one is restarted
                await asyncio.to_thread(run.process.wait, 180)
                break
        await asyncio.wait_for(playing, 60) if run.process.poll() is not None else playing.cancel()
        return kills

    kills = 20
    while kills:
        run = serve(launch, tiny_model, tmp_path, "trainer.save_interval=1", *how)
        kills = asyncio.run(until_it_ends(run, kills))
    if run.process.poll() is None:
        run.interrupt()
        run.end(120)
    ok, audit = runs.audit(folder(tmp_path))
    assert ok and len(acknowledged) > 100, (audit, len(acknowledged))
    with contextlib.closing(sqlite3.connect(folder(tmp_path) / "buffer" / "experience_buffer.db")) as ledger:
        calls = [f"chatcmpl-{id}" for (id,) in ledger.execute("SELECT id FROM calls")]
        scored = {id for (id,) in ledger.execute("SELECT id FROM sessions WHERE score IS NOT NULL")}
    assert acknowledged <= set(calls) and len(calls) == len(set(calls))
    assert rewarded <= scored


def _name(process: psutil.Process) -> str:
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    return next((n for n in ("buffer", "trainer", "explorer", "engine", "coordinator") if title.startswith(f"ray::{n}")), "")
