"""`serve_rolling`: what clients of `rft serve` notice of new weights while they roll over two
engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_harness as harness
from bench_serve import Client, asked, listening, process, quantile, scripted, sessions_of

from rft.extras.serve.client import AsyncClient
from rft.monitor.read import read
from rft.testing import tiny

CLIENTS = 8  # at the same time; calls of a session
CALLS = 4
QUIET_S = 2.0  # between two updates
ROLLS = 4  # of a round
CONFIG = harness.ROOT / "examples" / "serve" / "config.yaml"
Span = tuple[float, float]  # epoch seconds


@dataclass
class Visitors:
    """Clients that call without a pause; a call that fails ends the benchmark."""

    address: str
    key: str
    spans: list[Span] = field(default_factory=list)  # of the calls that are over

    async def visit(self, client: Client) -> None:
        async with AsyncClient(self.address, self.key) as rft:
            while True:
                session = await rft.session(task_id="visit")
                for _ in range(CALLS):
                    began = time.time()
                    await client.ask(
                        session.base_url,
                        session.api_key,
                        f"ab{random.randint(0, 9)}",
                        max_tokens=32,
                    )
                    self.spans.append((began, time.time()))
                await rft.withdraw(session)

    def p99(self, windows: Sequence[Span]) -> float:
        """Of the seconds of the calls that were under way in one of them."""
        return quantile(
            [e - b for b, e in self.spans if any(b < end and e > begin for begin, end in windows)],
            0.99,
        )


@contextlib.asynccontextmanager
async def _at_work(jobs: Sequence[Any]) -> AsyncIterator[None]:
    """While they work; the error of one is raised."""
    running = [asyncio.ensure_future(job) for job in jobs]
    try:
        yield
    finally:
        for job in running:
            job.cancel()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ended


async def _rolled(run: Path, step: int) -> Span:
    """When version `step` was put into the engines, once it is served by all."""
    async with asyncio.timeout(300):
        while True:
            for record in read(run / "metrics.jsonl"):
                if record.values.get("sync/version", -1) >= step:
                    return record.time - record.values["sync/total_s"], record.time
            await asyncio.sleep(0.05)


async def _update(rft: AsyncClient, client: Client, step: int) -> None:
    """Two rewarded sessions: train step `step` is theirs."""
    for reward in (0.0, 1.0):
        session = await rft.session(task_id=str(step))
        await client.ask(session.base_url, session.api_key, "ab1")
        await rft.reward(session, reward)


def _vllm(rounds: int) -> tuple[list[float], list[float]]:
    """p99 of calls at `rft serve` with two vLLM engines and its trainer: quiet, and while weights
    roll.
    """
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        folder = Path(name)
        run = folder / "rft" / "examples" / "serve"
        model = tiny.make(folder / "model")
        command = [
            sys.executable,
            "-m",
            "rft.cli.main",
            "serve",
            "--config",
            str(CONFIG),
            f"checkpoint_root_dir={folder}",
        ]
        command += [
            f"model.model_path={model}",
            "model.max_response_tokens=32",
            "model.max_prompt_tokens=480",
        ]
        command += [
            "explorer.proxy_port=0",
            "explorer.rollout_model.engine_type=vllm",
            "explorer.rollout_model.engine_num=2",
        ]
        command += [
            "explorer.rollout_model.max_num_seqs=32",
            "buffer.batch_size=1",
            "algorithm.repeat_times=2",
        ]
        command += [
            "trainer.total_steps=1000",
            "trainer.save_interval=0",
            "trainer.save_hf_checkpoint=never",
        ]
        with process(
            "rft serve", command, {"RFT_SERVE_KEY": key}, folder, listening(run)
        ) as address:

            async def work(client: Client) -> tuple[list[float], list[float]]:
                visitors = Visitors(address, key)
                windows = list[tuple[list[Span], list[Span]]]()
                async with (
                    AsyncClient(address, key) as rft,
                    _at_work([visitors.visit(client) for _ in range(CLIENTS)]),
                ):
                    for r in range(rounds + 1):
                        quiet = list[Span]()
                        rolling = list[Span]()
                        for i in range(ROLLS):
                            began = time.time()
                            await asyncio.sleep(QUIET_S)
                            quiet.append((began, time.time()))
                            step = 1 + r * ROLLS + i
                            await _update(rft, client, step)
                            rolling.append(await _rolled(run, step))
                        windows.append((quiet, rolling))
                pairs = [(visitors.p99(q), visitors.p99(r)) for q, r in windows[1:]]
                return [q for q, _ in pairs], [r for _, r in pairs]

            made: tuple[list[float], list[float]] = asked(work)
    _tell("vLLM", *made)
    return made


def _scripted(rounds: int) -> tuple[list[float], list[float]]:
    """The same at two scripted engines that take 0.1 to 0.5 s for an answer and 0.5 s for new
    weights.
    """
    with scripted(engines=2) as side:

        async def calls(
            client: Client, sessions: Sequence[tuple[str, str]], until: asyncio.Future[Any]
        ) -> float:
            rng = random.Random(0)
            took = list[float]()

            async def one(session: tuple[str, str]) -> None:
                while not until.done():
                    began = time.perf_counter()
                    await client.ask(*session, f"{rng.uniform(0.1, 0.5):.4f}", stream=True)
                    took.append(time.perf_counter() - began)

            await asyncio.gather(*map(one, sessions))
            return quantile(took, 0.99)

        async def work(client: Client) -> tuple[list[float], list[float]]:
            quiet = list[float]()
            rolling = list[float]()
            for _ in range(rounds + 1):
                # new ones: a conversation must not grow from round to round
                sessions = await sessions_of(client, side.ready, 32)
                quiet.append(
                    await calls(client, sessions, asyncio.ensure_future(asyncio.sleep(3.0)))
                )
                sessions = await sessions_of(client, side.ready, 32)
                rolling.append(
                    await calls(
                        client, sessions, asyncio.ensure_future(asyncio.to_thread(side.ask, "roll"))
                    )
                )
            return quiet[1:], rolling[1:]

        made: tuple[list[float], list[float]] = asked(work)
    _tell("scripted", *made)
    return made


def _tell(engines: str, quiet: Sequence[float], rolling: Sequence[float]) -> None:
    for a, b in zip(quiet, rolling, strict=True):
        harness.note(
            f"p99 of calls at two {engines} engines: {a:.3f} s quiet, {b:.3f} s while weights roll"
        )


def serve_rolling(quick: bool) -> harness.Result:
    """`vllm_p99_at_most`: 2 x the 99th percentile of calls at `rft serve` with two vLLM engines
    (tiny model, 32 tokens an answer, 8 clients without a pause) between updates / the same of the
    calls that were under way while a version rolled over both engines.  A call that fails ends the
    benchmark.  `scripted_p99_at_most`: the same with scripted engines that take 0.5 s for a load,
    32 clients, answers of 0.1 to 0.5 s: with nothing that computes beside it.
    """
    rounds = 3 if quick else 5
    measured = harness.probes()
    of = {"vllm": _vllm(rounds), "scripted": _scripted(rounds)}
    checks = [
        harness.speed_ratio(f"{name}_p99_at_most", rolling, [2 * x for x in quiet], 1.0)
        for name, (quiet, rolling) in of.items()
    ]
    ours = {
        f"{name}_p99_s_rolling": [round(x, 3) for x in rolling] for name, (_, rolling) in of.items()
    }
    quiet = {f"{name}_p99_s_quiet": [round(x, 3) for x in quiet] for name, (quiet, _) in of.items()}
    return harness.Result("serve_rolling", checks, ours, quiet, measured)
