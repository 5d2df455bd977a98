"""M5: `max_cost_usd` is a hard bound: for many users of one ledger, behind kill -9, and with
`cache: off`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rft.engine import external
from rft.engine.built_in import make
from rft.engine.external import ExternalEngine
from rft.engine.settings import EngineSettings, ExternalModelConfig
from rft.errors import ConfigError, EngineFailed
from rft.reward import judge_metrics
from rft.reward.judge_args import JudgeArgs
from rft.reward.judge_cache import Cache
from rft.reward.judge_client import JudgeClient
from rft.reward.judge_costs import BudgetUsedUp, CostLedger
from rft.reward.run_folder import run_folder
from rft.testing.judge import FakeJudge, completion
from rft.types.completion import Completion
from rft.types.ports import GenerateRequest
from rft.types.task import SamplingArgs
from rft.types.throttled import RESENT
from tests.attacks.table import attack

ROOT = Path(__file__).parents[2]
REQUEST = GenerateRequest(
    messages=({"role": "user", "content": "?"},),
    sampling=SamplingArgs(max_tokens=50),
    request_id="r",
)
PRICES = {"price_per_1k_prompt_tokens": 1.0, "price_per_1k_completion_tokens": 1.0}
MOST = (1 + 2 * 64 + 50) / 1000  # of REQUEST
SAID = (
    b'{"choices": [{"finish_reason": "stop", "message": {"content": "fine"}}],'
    b' "usage": {"prompt_tokens": 10, "completion_tokens": %s}}'
)


def _start(folder: Path, cap: float) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.attacks.judge_child",
        str(folder / "costs.db"),
        str(folder / "bill"),
        str(cap),
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _bill(folder: Path) -> float:
    return sum(map(float, (folder / "bill").read_text().split()))


def _attack(folder: Path, *, users: int, kills: int, cap: float, random_: random.Random) -> None:
    """`users` processes at a time; `kills` of them die while they ask, each after some more calls,
    and are replaced.
    """
    processes = [_start(folder, cap) for _ in range(users)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "asks\n"
        for _ in range(kills):
            victim = random_.choice(processes)
            victim.send_signal(signal.SIGKILL)
            victim.wait(60)
            assert victim.stdout is not None
            victim.stdout.close()
            processes.remove(victim)
            new = _start(folder, cap)
            processes.append(new)
            assert new.stdout is not None and new.stdout.readline() == "asks\n"
            assert _bill(folder) <= cap
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "used up\n"
            assert process.wait(120) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    with closing(CostLedger(folder / "costs.db")) as ledger:
        assert _bill(folder) <= ledger.spent("judge") + 1e-6 <= cap + 2e-6
    assert _bill(folder) > 0


@pytest.fixture
def seed() -> Iterator[random.Random]:
    yield random.Random(5)


@attack("M5", "three users of one ledger, two of them killed", "total spent stays within the cap")
@pytest.mark.e2e
def test_users_of_one_ledger_never_spend_more_than_it_allows(
    tmp_path: Path, seed: random.Random
) -> None:
    _attack(tmp_path, users=3, kills=2, cap=30.0, random_=seed)


@attack(
    "M5",
    "sixteen users, kill -9 at twenty moments, `cache: off`",
    "total spent stays within the cap at every moment",
)
@pytest.mark.slow
def test_sixteen_users_and_twenty_kills(tmp_path: Path, seed: random.Random) -> None:
    _attack(tmp_path, users=16, kills=20, cap=400.0, random_=seed)


class Expensive(FakeJudge):
    async def generate(self, request: GenerateRequest) -> list[Completion]:
        await super().generate(request)
        return [completion("fine")]


async def _spend(model: FakeJudge, args: JudgeArgs) -> None:
    client = JudgeClient(model, "judge", args)
    try:
        while True:
            await client.generate(REQUEST, 60, judge_metrics.for_judge("attacked"))
    finally:
        await client.close()


@attack("M5", "a run with `cache: off` is started three times", "the cap is that of all three")
async def test_without_a_cache_a_restart_keeps_what_was_spent(tmp_path: Path) -> None:
    run_folder.set(tmp_path)
    model = Expensive(5)
    args = JudgeArgs(cache="off", max_cost_usd=1.0, max_tokens=50, **PRICES)
    asked = []
    for _ in range(3):
        with pytest.raises(BudgetUsedUp):
            await _spend(model, args)
        asked.append(len(model.calls))
    assert asked[0] > 0 and asked == [asked[0]] * 3
    with closing(CostLedger(tmp_path / "judge_cache.db")) as ledger:
        assert 0 < ledger.spent("judge") <= 1.0
    assert stat.S_IMODE((tmp_path / "judge_cache.db").stat().st_mode) == 0o600


@attack("M5", "a connection that breaks behind the request", "what is sent again is counted again")
async def test_what_is_sent_again_is_paid_again(tmp_path: Path) -> None:
    """A connection that broke behind the request: the provider may have worked on it."""

    class Breaks(FakeJudge):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            await super().generate(request)
            await RESENT.get()()
            return [completion("fine")]

    args = JudgeArgs(
        cache="off", cost_ledger=str(tmp_path / "c.db"), max_cost_usd=1e6, max_tokens=50, **PRICES
    )
    client = JudgeClient(Breaks(5), "judge", args)
    await client.generate(REQUEST, 60, judge_metrics.for_judge("attacked"))
    assert MOST < client.ledger.spent("judge") < 2 * MOST
    await client.close()
    assert "RESENT" in ExternalEngine._post.__code__.co_names


# what the server does, and what of the most is counted
ANSWERS: dict[str, tuple[bytes | None, float]] = {
    "wrong key": (b"HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n", 0.0),
    "refused": (b"HTTP/1.1 400 X\r\nContent-Length: 0\r\n\r\n", 0.0),
    "busy": (b"HTTP/1.1 429 X\r\nContent-Length: 0\r\n\r\n", 0.0),
    "nobody there": (None, 0.0),
    "ends while it works": (b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n", 1.0),
    "breaks": (b"", 1.0),
    "breaks within its answer": (b"HTTP/1.1 200 X\r\nContent-Length: 900\r\n\r\n{", 1.0),
    "a drip": (b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 3, 1.0),
    "no end": (b"HTTP/1.1 200 X\r\n\r\n" + b" " * 100_000, 1.0),
    "no JSON": (b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\n<>", 1.0),
    "without bottom": (b"HTTP/1.1 200 X\r\nContent-Length: 80000\r\n\r\n" + b"[" * 80_000, 1.0),
    "tokens below zero": (b"HTTP/1.1 200 X\r\n\r\n" + SAID % b"-9000", 1.0),
    "tokens without end": (b"HTTP/1.1 200 X\r\n\r\n" + SAID % b"Infinity", 1.0),
    "an answer": (b"HTTP/1.1 200 X\r\n\r\n" + SAID % b"20", 0.03 / MOST),
}


@attack(
    "M5",
    "a judge's server that breaks off, drips, answers nonsense, or reports tokens below zero",
    "what may be paid is counted",
)
@pytest.mark.parametrize("name", ANSWERS)
async def test_what_a_server_may_have_worked_on_is_counted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "LARGEST", 90_000, raising=False)
    answer, share = ANSWERS[name]
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"]")
            writer.write(answer or b"")
            while name == "a drip":
                await asyncio.sleep(0.05)
                writer.write(b"1\r\n \r\n")
                await writer.drain()
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        over.set()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    if answer is None:
        listening.close()
    server = ExternalModelConfig(
        model_name="judge", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0
    )
    engine = await make(
        EngineSettings(engine_type="external", name="judge", external=server, request_timeout_s=0.5)
    )
    args = JudgeArgs(
        cache="off", cost_ledger=str(tmp_path / "c.db"), max_cost_usd=1.0, max_tokens=50, **PRICES
    )
    client = JudgeClient(engine, "judge", args)
    with (
        pytest.raises((EngineFailed, ValueError))
        if name != "an answer"
        else contextlib.nullcontext()
    ):
        await client.generate(REQUEST, 60, judge_metrics.for_judge("attacked"))
    assert client.ledger.spent("judge") == pytest.approx(MOST * share)
    await client.close()
    await engine.close()
    if answer is not None:
        await over.wait()
    listening.close()


@attack(
    "L", "a database of another program as cache or ledger", "refused; not one byte of it changes"
)
def test_a_database_of_another_program_is_left_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "mine.db"
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE photos (x)")
    before = other.read_bytes()
    for use, key in ((Cache, "cache"), (CostLedger, "cost_ledger")):
        with pytest.raises(ConfigError, match="table photos of another program") as refused:
            use(other)
        assert refused.value.key == f"reward_fn_args.{key}"
    assert other.read_bytes() == before


@attack("M5", "a ledger of an earlier version", "what was spent stays spent")
def test_a_ledger_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "c.db")) as db:
        db.execute(
            "CREATE TABLE spent (model TEXT PRIMARY KEY, calls INTEGER NOT NULL, cost_usd REAL NOT "
            "NULL) WITHOUT ROWID"
        )
        db.execute("INSERT INTO spent VALUES ('judge', 7, 2.5)")
        db.commit()
    with closing(CostLedger(tmp_path / "c.db")) as ledger:
        assert ledger.spent("judge") == 2.5
        with pytest.raises(BudgetUsedUp, match=r"\$2\.5000 of max_cost_usd \$3"):
            ledger.reserve("judge", 1.0, 3.0)
