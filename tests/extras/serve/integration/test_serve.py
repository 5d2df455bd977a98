"""`rft serve` as a person runs it: clients in other processes play and reward, the trainer steps;
then everything is killed, often.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from rft.extras.serve.access import ENVIRONMENT
from rft.extras.serve.client import AsyncClient, Client
from rft.monitor.read import read, series
from rft.trainer.checkpoint import manifest as manifests
from tests.extras.serve.serve_clients import Persistent
from tests.helpers import runs

KEY = "a-key-for-tests-0123456789"
EXAMPLE = runs.ROOT / "examples" / "serve"
SMALL = ("buffer.batch_size=2", "algorithm.repeat_times=2", "explorer.proxy_port=0")


def serve(
    launch: Any,
    model: Path,
    root: Path,
    *overrides: str,
    command: str = "serve",
    **environment: str,
) -> Any:
    given = (f"model.model_path={model}", f"checkpoint_root_dir={root}", *SMALL, *overrides)
    return launch(
        command, "-c", str(EXAMPLE / "config.yaml"), *given, **{ENVIRONMENT: KEY}, **environment
    )


def folder(root: Path) -> Path:
    return root / "rft" / "examples" / "serve"


async def address(root: Path, run: Any, timeout_s: float = 180.0, part: str = "") -> str:
    """Of the service, once it listens.  `part`: its folder in the run's, where it has one."""
    file = folder(root) / part / "serve.json"
    async with asyncio.timeout(timeout_s), httpx.AsyncClient() as http:
        while True:
            assert run.process.poll() is None, run.output
            try:
                found = str(json.loads(file.read_text())["base_url"])
                await http.get(found.removesuffix("/v1") + "/health")
                return found
            except (
                OSError,
                ValueError,
                httpx.TransportError,
            ):  # not there, half written, or of a service that was killed
                await asyncio.sleep(0.1)


async def play(rft: AsyncClient, task: str, reward: float, *texts: str) -> str:
    """Each of `texts` begins a conversation of its own."""
    session = await rft.session(task_id=task)
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0
    ) as model:
        for text in texts or ("ab1",):
            await model.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": text}]
            )
    await rft.reward(session, reward)
    return session.id


async def until_served(run_dir: Path, step: int) -> None:
    async with asyncio.timeout(180):
        while True:
            if (
                max(
                    (v for _, v in series(read(run_dir / "metrics.jsonl"), "sync/version")),
                    default=-1,
                )
                >= step
            ):
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            ("explorer.rollout_model.engine_type=vllm", "explorer.rollout_model.engine_num=2"),
            marks=pytest.mark.vllm,
        ),
        ("--in-process",),
    ],
    ids=["two vllm engines", "one process"],
)
def test_a_model_learns_from_rewards_that_are_posted(launch, tiny_model, tmp_path, how):
    run = serve(launch, tiny_model, tmp_path, *how, "trainer.total_steps=3")

    visits = 0

    async def visit(rft: AsyncClient) -> None:
        """Calls without a pause, none of which may fail: new weights come meanwhile."""
        nonlocal visits
        while True:
            session = await rft.session(task_id="visit")
            async with openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, max_retries=0
            ) as model:
                for text in ("ab1", "ab2"):
                    await model.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": text}]
                    )
                    visits += 1
            await rft.withdraw(session)

    async def play_all() -> None:
        found = await address(tmp_path, run)
        async with AsyncClient(found, KEY) as rft:
            visiting = asyncio.ensure_future(visit(rft))
            for step in range(3):
                await asyncio.gather(
                    *(play(rft, f"{step}-{i // 2}", float(i % 2)) for i in range(4))
                )
                if step < 2:
                    await until_served(folder(tmp_path), step + 1)
            assert not visiting.done(), visiting.exception()
            visiting.cancel()

    asyncio.run(play_all())
    assert run.end(120) == 0, run.output
    ok, audit = runs.audit(folder(tmp_path))
    assert ok and audit["used"] == 12 and audit["acked"] - 12 >= visits > 0, (audit, visits)
    values = read(folder(tmp_path) / "metrics.jsonl")
    assert [v for _, v in series(values, "rollout/reward/mean")] == [0.5] * 3
    assert max(v for _, v in series(values, "sync/canary_max_abs")) <= 1e-4, (
        "every step's weights were served"
    )
    assert any(v > 0 for _, v in series(values, "actor/grad_norm")), "and they changed"
    assert sum(v for _, v in series(values, "sync/requests_aborted")) == 0
    assert manifests.latest(folder(tmp_path) / "checkpoints").version.step == 3
    assert not (folder(tmp_path) / "serve.json").exists() and KEY not in run.output


@pytest.mark.parametrize("norm_by_std", [False, True])
def test_conversations_of_a_session_share_the_advantage_of_their_run(
    launch: Any, tiny_model: Path, tmp_path: Path, norm_by_std: bool
) -> None:
    """A solved session of one conversation and a failed one of three are two runs: +0.5 and -0.5, over
    their standard deviation +0.7071 and -0.7071.
    """
    run = serve(
        launch,
        tiny_model,
        tmp_path,
        "--in-process",
        "trainer.total_steps=1",
        "monitor.keep_trainer_logprobs=true",
        f"algorithm.advantage_fn_args.norm_by_std={str(norm_by_std).lower()}",
    )

    async def play_all() -> None:
        async with AsyncClient(await address(tmp_path, run), KEY) as rft:
            for task in ("a", "b"):
                await play(rft, task, 1.0)
                await play(rft, task, 0.0, "ab1", "cd2", "ef3")

    asyncio.run(play_all())
    assert run.end(120) == 0, run.output
    with closing(sqlite3.connect(folder(tmp_path) / "buffer/experience_buffer.db")) as ledger:
        rows = ledger.execute(
            "SELECT e.group_id, e.reward, min(t.advantage), max(t.advantage) FROM v_experiences e "
            "JOIN v_tokens t ON t.id = e.id WHERE t.advantage IS NOT NULL GROUP BY e.id"
        ).fetchall()
        means = {mean for (mean,) in ledger.execute("SELECT reward_mean FROM v_groups")}
    size = 0.5 / 0.5**0.5 if norm_by_std else 0.5
    for group in {group for group, *_ in rows}:
        found = sorted((reward, low, high) for g, reward, low, high in rows if g == group)
        expected = [(0.0, -size, -size)] * 3 + [(1.0, size, size)]
        assert found == [pytest.approx(row, abs=2e-6) for row in expected]
    assert len(rows) == 8 and means == {0.5}


def test_its_one_listener_is_on_loopback(launch, tiny_model, tmp_path):
    run = serve(launch, tiny_model, tmp_path)
    found = asyncio.run(address(tmp_path, run))
    state = json.loads((folder(tmp_path) / "state.json").read_text())
    listening = [
        c.laddr
        for p in runs.parts(state["run_id"])
        for c in p.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
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


@pytest.mark.timeout(1800)
def test_a_service_joins_a_trainer_that_another_command_started(launch, tiny_model, tmp_path):
    """It is killed while a reward waits, started again, and what it had acknowledged is trained."""
    cluster = runs.Cluster()
    given = (
        "explorer.serve.trainer_apart=true",
        f"cluster.ray_address={cluster.address}",
        "trainer.total_steps=2",
    )

    def start(command: str, *more: str) -> Any:
        return serve(
            launch, tiny_model, tmp_path, *given, *more, command=command, **cluster.environment
        )

    async def play_some(run: Any, *tasks: str) -> None:
        async with AsyncClient(await address(tmp_path, run, 400, "explorers/explorer"), KEY) as rft:
            await asyncio.gather(*(play(rft, task, float(i)) for task in tasks for i in range(2)))

    try:
        trainer = start("run", "mode=train")
        killed = start("serve")
        asyncio.run(play_some(killed, "0"))
        killed.process.kill()
        killed.end(400)
        # its service may go on for a moment
        (folder(tmp_path) / "explorers/explorer/serve.json").unlink(missing_ok=True)
        again = start("serve")
        asyncio.run(play_some(again, "1", "2", "3"))
        codes = [run.end(400) for run in (trainer, again)]
    finally:
        cluster.end()
    assert codes == [0, 0], f"{trainer.output}\n{again.output}"
    ok, audit = runs.audit(folder(tmp_path))
    assert ok and audit["used"] == audit["acked"] == 8, audit
    assert manifests.latest(folder(tmp_path) / "checkpoints").version.step == 2


KILLS = 5  # of a run; four runs of each kind are 20 moments


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", [(), ("--in-process",)], ids=["parts", "one process"])
def test_nothing_that_was_acknowledged_is_lost(launch, tiny_model, tmp_path, how, seed):
    """kill -9 of a random part (service, buffer, trainer, engine, coordinator) at random moments,
    or of the one process there is.
    """
    dice = random.Random(seed)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    clients = Persistent(f"http://127.0.0.1:{port}", KEY)
    killed_parts = list[str]()

    async def started() -> Any:
        given = (
            f"explorer.proxy_port={port}",
            "trainer.save_interval=1",
            "trainer.total_steps=100000",
            *how,
        )
        run = serve(launch, tiny_model, tmp_path, *given)
        await address(tmp_path, run, 400)
        return run

    async def killed(run: Any) -> bool:
        """Kills a part; whether the run survives that."""
        run_id = json.loads((folder(tmp_path) / "state.json").read_text()).get("run_id")
        parts = {runs.role(p): p for p in runs.parts(run_id) if runs.role(p)} or {"": run.process}
        part = dice.choice(sorted(parts))
        parts[part].kill()
        killed_parts.append(part or "all")
        if part != "engine":  # that one is restarted
            await asyncio.to_thread(run.end, 180)
        return part == "engine"

    async def all_of_it() -> Any:
        run = await started()
        players = [asyncio.ensure_future(clients.play(i)) for i in range(8)]
        for _ in range(KILLS):
            await clients.more(dice.randint(1, 16))
            await asyncio.sleep(dice.uniform(0.0, 0.5))
            if not await killed(run):
                run = await started()
        clients.stopped = True
        await asyncio.wait_for(asyncio.gather(*players), 300)
        return run

    run = asyncio.run(all_of_it())
    run.interrupt()
    run.end(120)
    ok, audit = runs.audit(folder(tmp_path))
    told = (audit, len(clients.acknowledged), clients.again)
    assert ok and len(clients.acknowledged) > 5 * KILLS and clients.again > 0, told
    assert clients.lost(folder(tmp_path)) == [], told
    answered = len(clients.acknowledged)
    rewarded = len(clients.rewarded)
    print(
        f"killed {killed_parts}: {answered} answers, {rewarded} rewards, {clients.again} sent again"
    )
