"""Where a pool sends requests, and what happens when one of its engines dies."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rft.engine import pool as pool_module
from rft.engine.pool import EnginePool
from rft.engine.scripted import ScriptedEngine, echo
from rft.errors import EngineFailed, EngineStalled
from rft.testing.engine_contract import ask
from rft.types.completion import Completion
from rft.types.metrics import Metric, reduce
from rft.types.ports import GenerateRequest, ScoreRow


def engines(count: int) -> list[ScriptedEngine]:
    return [ScriptedEngine(answer=echo) for _ in range(count)]


def calls(made: list[ScriptedEngine]) -> list[int]:
    return [len(e.calls) for e in made]


def goes_on(c: Completion, request: GenerateRequest, text: str) -> GenerateRequest:
    return GenerateRequest(
        messages=(*request.messages, c.message, {"role": "user", "content": text}),
        prefix_tokens=np.concatenate([c.prompt_tokens, c.tokens]),
        prefix_messages=len(request.messages) + 1,
    )


async def test_a_group_shares_an_engine_also_when_its_runs_come_one_after_the_other() -> None:
    made = engines(3)
    pool = EnginePool(made)
    for _ in range(8):
        await pool.generate(ask("the group's prompt"))
    assert sorted(calls(made)) == [0, 0, 8]
    await asyncio.gather(*(pool.generate(ask(f"prompt {i}")) for i in range(9)))
    assert sum(calls(made)) == 17 and min(calls(made)) == 3


async def test_a_run_stays_where_its_turns_are_cached() -> None:
    made = engines(4)
    pool = EnginePool(made)
    requests = [ask(f"run {i}") for i in range(8)]
    for turn in range(4):
        answers = await asyncio.gather(*(pool.generate(r) for r in requests))
        requests = [
            goes_on(a[0], r, f"turn {turn}") for a, r in zip(answers, requests, strict=True)
        ]
    for i in range(8):
        assert sum(any(f"run {i}" in str(r.messages[0]) for r in e.calls) for e in made) == 1, (
            "one engine saw all turns of a run"
        )
    assert calls(made) == [8, 8, 8, 8]


async def test_a_cached_beginning_is_not_worth_a_long_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "SPILL", 2)
    made = engines(2)
    pool = EnginePool(made)
    await pool.generate(ask("a"))
    first = calls(made).index(1)
    made[first].hold()
    others = [asyncio.ensure_future(pool.generate(ask(str(i), n=3))) for i in range(2)]
    await made[first].waiting(3)
    await others[1]  # the other engine has nothing to do again
    await pool.generate(ask("a"))
    assert made[1 - first].calls[-1].messages[0]["content"] == "a"
    made[first].release()
    await asyncio.gather(*others)


async def test_the_number_of_requests_under_way_is_bounded() -> None:
    (engine,) = made = engines(1)
    pool = EnginePool(made, max_concurrent=3)
    engine.hold()
    jobs = [asyncio.ensure_future(pool.generate(ask(str(i)))) for i in range(9)]
    await engine.waiting(3)
    await asyncio.sleep(0)
    assert len(engine.calls) == 3
    engine.release()
    await asyncio.gather(*jobs)
    assert len(engine.calls) == 9


class Reviving:
    """Brings engines back by hand: `revive` waits for `go` and replaces the dead one."""

    def __init__(self, count: int) -> None:
        self.made = engines(count)
        self.asked: list[int] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.pool = EnginePool(self.made, revive=self.revive)

    async def revive(self, index: int) -> None:
        self.asked.append(index)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        self.made[index]._dead = ""


async def test_requests_of_a_dead_engine_are_asked_elsewhere() -> None:
    r = Reviving(2)
    for e in r.made:
        e.hold()
    jobs = [asyncio.ensure_future(r.pool.generate(ask(str(i)))) for i in range(8)]
    await r.made[0].waiting(4)
    await r.made[1].waiting(4)
    r.made[1].release()
    r.made[0].die("kill -9")
    assert [a[0].text for a in await asyncio.gather(*jobs)] == [str(i) for i in range(8)]
    assert r.asked == [0], "it is brought back once, however many of its requests failed"
    await r.pool.score(ScoreRow(tokens=np.arange(4), prompt_length=1))
    assert len(r.made[0].calls) == 4, "nothing goes to it meanwhile"
    r.go.set()
    await asyncio.sleep(0)
    await asyncio.gather(*(r.pool.generate(ask(f"later {i}")) for i in range(4)))
    assert len(r.made[0].calls) == 6, "it takes its share again"


async def test_what_was_lost_is_counted_and_what_it_had_counted_is_kept() -> None:
    r = Reviving(2)

    async def metrics() -> dict[str, float]:
        return reduce(await r.pool.metrics())

    await asyncio.gather(*(r.pool.generate(ask(str(i))) for i in range(4)))
    before = await metrics()
    assert before["engine/generated_tokens"] > 0 and before["engine/lost"] == 0
    r.made[0].will_fail(EngineStalled("it hangs"))
    r.made[1].will_fail(EngineFailed("it died"))
    r.go.set()
    await asyncio.gather(*(r.pool.generate(ask(f"again {i}")) for i in range(2)))
    await asyncio.sleep(0)
    now = await metrics()
    assert (now["engine/lost"], now["engine/stalled"], now["engine/asked_again"]) == (2, 1, 2)
    r.made[0]._num_tokens = 0  # a new process
    assert (await metrics())["engine/generated_tokens"] == now["engine/generated_tokens"]
    await r.pool.generate(ask("and on"))
    assert (await metrics())["engine/generated_tokens"] > now["engine/generated_tokens"]


async def test_an_engine_that_cannot_count_holds_up_nobody() -> None:
    r = Reviving(2)
    await asyncio.gather(*(r.pool.generate(ask(str(i))) for i in range(4)))
    before = reduce(await r.pool.metrics())

    async def hangs() -> list[Metric]:
        raise EngineStalled("it hangs")

    r.made[0].metrics = hangs  # type: ignore[method-assign]
    assert reduce(await r.pool.metrics()) == before


async def test_with_no_engine_left_requests_wait() -> None:
    r = Reviving(1)
    r.made[0].die()
    job = asyncio.ensure_future(r.pool.generate(ask("hi")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert r.asked == [0] and not job.done()
    r.go.set()
    assert (await job)[0].text == "hi"


async def test_an_engine_that_cannot_be_brought_back_fails_everyone() -> None:
    r = Reviving(1)
    r.made[0].die()
    r.error = EngineFailed("died more than 3 times")
    r.go.set()
    for _ in range(2):
        with pytest.raises(EngineFailed, match="more than 3 times"):
            await r.pool.generate(ask("hi"))
    assert r.asked == [0]


async def test_a_failure_that_stays_is_the_pools() -> None:
    """An engine that is well but refuses, again and again."""
    made = [ScriptedEngine()]  # its script is over

    async def revive(index: int) -> None:
        """It is well."""

    with pytest.raises(EngineFailed, match=r"engine 0 of 1: .*the script is over"):
        await EnginePool(made, revive=revive).generate(ask("hi"))
    assert len(made[0].calls) == 3
