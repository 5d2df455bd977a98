"""`serve_overhead`: what `rft serve` costs beside the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_harness as harness

from rft.testing.models import smollm2

SIDES = harness.ROOT / "scripts" / "serve_sides.py"
START_S = 600.0
ANSWER_S = 600.0
LEAST_S = 2.0  # that a scripted answer takes
MOST_S = 6.0
OVERHEAD_S = 0.020
LEAST_SHARE = 0.95  # of the speed of vLLM's server, of chat completions
LEAST_SHARE_MORE = 0.93  # of other APIs
LENGTH = 512  # context, most of an answer, requests at the same time, of the real engine
TOKENS = 80
AT_ONCE = 32
WORDS = "time year people way day man thing woman life child world school state family student group country problem hand part".split()


@dataclass(frozen=True)
class Dialect:
    """Names of one of the APIs."""

    path: str
    said: str  # what was said
    most: str  # most tokens of an answer
    counted: str  # tokens of the answer, in its usage


DIALECTS = {
    "chat": Dialect("chat/completions", "messages", "max_tokens", "completion_tokens"),
    "responses": Dialect("responses", "input", "max_output_tokens", "output_tokens"),
    "messages": Dialect("messages", "messages", "max_tokens", "output_tokens"),
}


@dataclass
class Client:
    """Calls one API of an address; `late` holds each call's seconds beyond what its answer takes."""

    http: Any
    late: list[float] = field(default_factory=list)
    tokens: int = 0

    async def ask(
        self,
        base_url: str,
        key: str,
        text: str,
        *,
        dialect: str = "chat",
        most: int | None = None,
        takes_s: float = 0.0,
        **more: Any,
    ) -> None:
        """`most`: tokens of the answer.  Raises RuntimeError for what is not a whole answer."""
        api = DIALECTS[dialect]
        said = [{"role": "user", "content": text}]
        body = {"model": "policy", api.said: said, **more}
        if most is not None:
            body[api.most] = most
        began = time.perf_counter()
        async with self.http.post(
            f"{base_url}/{api.path}", json=body, headers=shown(key)
        ) as answer:
            read = await answer.read()
        self.late.append(time.perf_counter() - began - takes_s)
        if answer.status != 200 or (more.get("stream") and not read.endswith(b"data: [DONE]\n\n")):
            raise RuntimeError(f"{answer.status}: {read[-300:]!r}")
        if not more.get("stream"):
            self.tokens += json.loads(read)["usage"][api.counted]


def shown(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def asked(work: Callable[[Client], Awaitable[Any]]) -> Any:
    """What `work` gives, with a client whose connections are not counted."""
    import aiohttp

    async def run() -> Any:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout
        ) as http:
            return await work(Client(http))

    return asyncio.run(run())


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---------------------------------------------------------------- a scripted engine


@contextlib.contextmanager
def scripted(engines: int = 1) -> Iterator[harness.Child]:
    """See serve_sides.py."""
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as folder:
        command = [sys.executable, str(SIDES), folder, str(engines)]
        env = {"PYTHONPATH": str(harness.ROOT)}
        with harness.Child(
            "serve_sides.py", command, answer_s=ANSWER_S, ready_s=START_S, env=env
        ) as child:
            yield child


async def sessions_of(client: Client, side: dict[str, Any], count: int) -> list[tuple[str, str]]:
    """(base URL, key) of new ones."""
    made = []
    for _ in range(count):
        async with client.http.post(
            f"{side['address']}/v1/sessions", json={}, headers=shown(side["key"])
        ) as answer:
            session = await answer.json()
        made.append((session["base_url"], session["api_key"]))
    return made


async def _streams(
    client: Client, sessions: Sequence[tuple[str, str]], calls: int, seed: int
) -> list[float]:
    """Each session makes `calls` streaming calls one after the other, all sessions at once; seconds
    beyond what the answers take.
    """
    rng = random.Random(seed)
    client.late = []

    async def one(session: tuple[str, str], first_s: float, takes: list[float]) -> None:
        await asyncio.sleep(first_s)
        for takes_s in takes:
            await client.ask(*session, f"{takes_s:.4f}", takes_s=takes_s, stream=True)

    plans = [
        (rng.uniform(0, MOST_S), [rng.uniform(LEAST_S, MOST_S) for _ in range(calls)])
        for _ in sessions
    ]
    await asyncio.gather(
        *(one(s, first_s, takes) for s, (first_s, takes) in zip(sessions, plans, strict=True))
    )
    return client.late


def _overheads(rounds: int, calls: int) -> tuple[list[list[float]], list[list[float]]]:
    """Of each round the calls' seconds beyond their answers: of ours, and of a server that does
    nothing but wait for as long.
    """
    with scripted() as side, scripted(engines=0) as bare:

        async def work(client: Client) -> tuple[list[list[float]], list[list[float]]]:
            both = [(s.ready, await sessions_of(client, s.ready, 500)) for s in (side, bare)]
            late: tuple[list[list[float]], list[list[float]]] = ([], [])
            for seed in range(rounds + 1):
                for of_side, (_, sessions) in zip(late, both, strict=True):
                    of_side.append(await _streams(client, sessions, calls, seed))
            return late[0][1:], late[1][1:]

        found: tuple[list[list[float]], list[list[float]]] = asked(work)
    for ours, least in zip(*found, strict=True):
        harness.note(
            f"500 streams, {len(ours)} calls: p50 and p99 {_ms(ours)}, of a bare server "
            f"{_ms(least)}"
        )
    return found


def _ms(late: Sequence[float]) -> str:
    return " and ".join(f"{1e3 * quantile(late, q):.1f} ms" for q in (0.5, 0.99))


def _flatness(rounds: int, many: int) -> tuple[list[float], list[float]]:
    """Processor seconds of the service for a call, with 10 and with `many` sessions that wait."""
    import psutil

    with scripted() as side:
        process = psutil.Process(side.ready["pid"])

        async def cost(client: Client, sessions: Sequence[tuple[str, str]]) -> float:
            before = float(sum(process.cpu_times()[:2]))
            for session in list(sessions[:10]) * 30:
                await client.ask(*session, "0", stream=True)
            return (float(sum(process.cpu_times()[:2])) - before) / 300

        async def work(client: Client) -> tuple[list[float], list[float]]:
            first = await sessions_of(client, side.ready, 10)
            await cost(client, first)
            few = [await cost(client, first) for _ in range(rounds)]
            last = await sessions_of(client, side.ready, many - 20)
            # with as few calls as the first ones had
            last = await sessions_of(client, side.ready, 10)
            await cost(client, last)
            return few, [await cost(client, last) for _ in range(rounds)]

        made: tuple[list[float], list[float]] = asked(work)
    harness.note(
        f"processor ms a call: {1e3 * statistics.median(made[0]):.2f} with 10 sessions, "
        f"{1e3 * statistics.median(made[1]):.2f} with {many}"
    )
    return made


# ---------------------------------------------------------------- vLLM


@contextlib.contextmanager
def process(
    name: str, command: Sequence[str], env: dict[str, str], folder: Path, ready: Callable[[], str]
) -> Iterator[str]:
    """`ready()` gives the address once it listens."""
    with (folder / f"{name}.log").open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, cwd=harness.ROOT, stdout=output, stderr=output
        )
        try:
            deadline = time.monotonic() + START_S
            while not (address := ready()):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{name} did not start")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            yield address
        except RuntimeError as e:
            raise RuntimeError(
                f"{e}\n--- {name} said at last:\n{(folder / f'{name}.log').read_text()[-6000:]}"
            ) from None
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def listening(run: Path) -> Callable[[], str]:
    """The address of the service of folder `run`, once there is one."""

    def ready() -> str:
        try:
            return str(json.loads((run / "serve.json").read_text())["base_url"])
        except (OSError, ValueError):
            return ""

    return ready


def _ours(folder: Path, model: Path, key: str) -> contextlib.AbstractContextManager[str]:
    command = [
        sys.executable,
        "-m",
        "rft.cli.main",
        "serve",
        "--config",
        str(harness.ROOT / "examples" / "serve" / "smollm2.yaml"),
    ]
    command += [
        f"checkpoint_root_dir={folder}",
        f"model.max_model_len={LENGTH}",
        f"model.max_response_tokens={TOKENS}",
    ]
    command += [
        f"model.max_prompt_tokens={LENGTH - TOKENS}",
        "explorer.rollout_model.max_num_seqs=64",
        "model.temperature=1.0",
    ]
    ready = listening(folder / "rft" / "examples" / "langgraph")
    return process(
        "rft serve", command, {"RFT_SERVE_KEY": key, "MODEL_PATH": str(model)}, folder, ready
    )


def _vllms(folder: Path, model: Path, key: str) -> contextlib.AbstractContextManager[str]:
    """vLLM's own server with the engine's arguments and environment that `rft serve` uses."""
    from rft.engine.environment import cpu_environment
    from rft.engine.settings import EngineSettings
    from rft.engine.vllm_args import CPU_BLOCK_SIZE, CPU_KV_CACHE_BYTES

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    threads = os.cpu_count() or 1
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "policy",
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--api-key",
        key,
        "--dtype",
        "float32",
        "--max-model-len",
        str(LENGTH),
    ]
    command += [
        "--max-num-seqs",
        "64",
        "--max-num-batched-tokens",
        "2048",
        "--block-size",
        str(CPU_BLOCK_SIZE),
        "--enforce-eager",
    ]
    command += [
        "--kv-cache-memory-bytes",
        str(CPU_KV_CACHE_BYTES),
        "--disable-log-stats",
        "--generation-config",
        "vllm",
    ]
    env = cpu_environment(EngineSettings(model_path=str(model), device="cpu", cpu_threads=threads))

    def ready() -> str:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return f"http://127.0.0.1:{port}/v1"
        return ""

    return process("vllm server", command, env, folder, ready)


def _throughputs(rounds: int, requests: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds for a token of ours and of vLLM's server, by dialect."""
    model = smollm2()
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        sides = {
            "ours": stack.enter_context(_ours(folder, model, key)),
            "raw": stack.enter_context(_vllms(folder, model, key)),
        }
        number = 0

        def side(address: str, dialect: str) -> Callable[[], float]:
            def run() -> float:
                nonlocal number
                number += 1
                rng = random.Random((number + 1) // 2)  # both sides of a round are asked the same
                texts = [
                    " ".join(rng.choices(WORDS, k=rng.randint(16, 96))) for _ in range(requests)
                ]
                # else all answers end in the same step
                lengths = [rng.randint(TOKENS // 4, TOKENS) for _ in range(requests)]

                async def work(client: Client) -> float:
                    turn = asyncio.Semaphore(AT_ONCE)
                    began = time.perf_counter()

                    # without a seed, of which vLLM's own server on CPU ends
                    async def one(text: str, most: int) -> None:
                        async with turn:
                            await client.ask(
                                address, key, text, dialect=dialect, most=most, temperature=1.0
                            )

                    await asyncio.gather(*map(one, texts, lengths))
                    return (time.perf_counter() - began) / client.tokens

                return float(asked(work))

            return run

        return {
            name: harness.in_turn(side(sides["ours"], name), side(sides["raw"], name), rounds)
            for name in DIALECTS
        }


# ---------------------------------------------------------------- all


def serve_overhead(quick: bool) -> harness.Result:
    """`throughput_*`: seconds for a token at vLLM's own server / at `rft serve` (Ray, one engine,
    every answer stored before it leaves), through the same API, the same chats, 32 at once, answers
    of up to 20 to 80 tokens, same engine arguments, SmolLM2-135M-Instruct; both run all the time and
    are asked in turn.

    With a scripted engine, service and buffer in one process and the clients in another.
    `overhead_p99_at_most`: 20 ms / 99th percentile of what a call takes beyond its answer, 500
    sessions that stream at once, answers of 2 to 6 s: the time of the client that measures and of
    everything else on the machine is in it.  `bare_*` is the same at a server of aiohttp that
    stores nothing and only waits, asked in turn: what the machine itself takes.  `flat_at_most`:
    1.15 x processor time of a call with 10 sessions that wait / with 5,000.
    """
    rounds, calls, many = (3, 2, 5000) if quick else (5, 4, 5000)
    measured = harness.probes()
    late, least = _overheads(rounds, calls)
    few, crowded = _flatness(rounds, many)
    speeds = _throughputs(rounds, 64 if quick else 128)
    p99, bare = ([quantile(x, 0.99) for x in of_side] for of_side in (late, least))
    return harness.Result(
        "serve_overhead",
        [
            *(
                harness.speed_ratio(
                    f"throughput_{name}", *both, LEAST_SHARE if name == "chat" else LEAST_SHARE_MORE
                )
                for name, both in speeds.items()
            ),
            harness.speed_ratio("overhead_p99_at_most", p99, [OVERHEAD_S] * len(p99), 1.0),
            harness.speed_ratio("flat_at_most", crowded, [1.15 * x for x in few], 1.0),
        ],
        {
            "tokens_per_s": {n: round(1 / statistics.median(x), 1) for n, (x, _) in speeds.items()},
            "overhead_p50_ms": round(1e3 * statistics.median(quantile(x, 0.5) for x in late), 2),
            "overhead_p99_ms": [round(1e3 * x, 1) for x in p99],
            "call_ms_10_sessions": round(1e3 * statistics.median(few), 3),
            f"call_ms_{many}_sessions": round(1e3 * statistics.median(crowded), 3),
        },
        {
            "vllm_server_tokens_per_s": {
                n: round(1 / statistics.median(x), 1) for n, (_, x) in speeds.items()
            },
            "bare_p50_ms": round(1e3 * statistics.median(quantile(x, 0.5) for x in least), 2),
            "bare_p99_ms": [round(1e3 * x, 1) for x in bare],
        },
        measured,
    )
