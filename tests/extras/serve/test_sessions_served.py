"""Sessions of clients: what is stored before an answer leaves, what a reward does, and what becomes
of each session.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time

import msgspec
import numpy as np
import openai
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.errors import DiskFull, EngineFailed, RunFailed
from rft.explorer.service_settings import ServeConfig
from rft.types.block import decode
from rft.types.completion import Score
from rft.types.ids import Version
from rft.types.sessions import Explained, Rewarded
from tests.extras.serve.serving import HI, KEY, serving
from tests.helpers.asked_ledger import said

RATIO = {"num_runs": 2, "batch_size": 1}


async def test_rewarded_sessions_of_a_task_become_one_group(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        first, second = (
            await served.open(task_id="a", metadata={"app": "demo"}),
            await served.open(task_id="a"),
        )
        for session, reward in ((first, 1.0), (second, {"right": 0.25, "short": 0.25})):
            async with openai.AsyncOpenAI(
                base_url=session["base_url"], api_key=session["api_key"], max_retries=0
            ) as client:
                answer = await client.chat.completions.create(model="policy", messages=HI)
                message = answer.choices[0].message.content
                more = [
                    *HI,
                    {"role": "assistant", "content": message},
                    {"role": "user", "content": "more"},
                ]
                said = ""
                async for chunk in await client.chat.completions.create(
                    model="policy", messages=more, stream=True
                ):
                    said += chunk.choices[0].delta.content or ""
                assert (message, said) == ("to hi", "to more")
            waiting = await served.buffer.audit()
            assert waiting.ok and waiting.waiting >= 2
            assert (await served.reward(session, reward)).json()["status"] == "ok"
        await served.gate.wait_explored(1)
        audit = await served.buffer.audit()
        assert audit.ok and (audit.acked, audit.available, audit.waiting) == (2, 2, 0), (
            "a chain of two calls is one row"
        )
        assert [(await served.state(s))["state"] for s in (first, second)] == [
            "accepted",
            "accepted",
        ]
        lease = await served.buffer.reader(served.lineage).lease(
            1, groups=1, rows=None, deadline_s=5, max_staleness=None
        )
        assert lease.groups[0].rewards == (1.0, 0.5)
        listening, batch = served.sink.records
        assert (
            listening.notes == (f"the policy is served at {served.address}/v1",)
            and batch.values["rollout/reward/mean"] == 0.75
        )


async def test_messages_can_be_rewarded_alone(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        one, two = [(await served.ask(session, text)).json()["id"] for text in ("x", "y")]
        assert (await served.reward(session, 1.0, message=one)).json()["status"] == "ok"
        assert (await served.state(session))["state"] == "open"
        assert (await served.reward(session, -1.0, message=two, final=True)).json()[
            "status"
        ] == "ok"
        await served.gate.wait_explored(1)
        lease = await served.buffer.reader(served.lineage).lease(
            1, groups=1, rows=None, deadline_s=5, max_staleness=None
        )
        assert lease.groups[0].rewards == (1.0, -1.0), "two calls that do not continue are two rows"


async def test_a_retry_gets_the_same_answer_and_counts_once(tmp_path, monkeypatch):
    engine = ScriptedEngine(answer=lambda m: "a")
    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await served.open()
        first = await served.ask(session, retry_key="k1")
        again = await asyncio.gather(*(served.ask(session, retry_key="k1") for _ in range(4)))
        assert all(a.json() == first.json() for a in again) and len(engine.calls) == 1
        other = await served.ask(session, "else", retry_key="k1")
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
        body = {"model": "m", "messages": HI}
        headers = {"Idempotency-Key": "alone"}
        alone = [
            await served.client.post("/v1/chat/completions", json=body, headers=headers)
            for _ in range(2)
        ]
        assert alone[0].json() == alone[1].json() and len(engine.calls) == 2
        assert (await served.buffer.audit()).waiting == 2
        headers["Idempotency-Key"] = "at once"
        at_once = await asyncio.gather(
            *(
                served.client.post("/v1/chat/completions", json=body, headers=headers)
                for _ in range(3)
            )
        )
        assert len({a.text for a in at_once}) == 1 and len(served.service.book.sessions) == 3
        assert served.service.gateway.values()["serve/calls"] == len(engine.calls) == 3


async def test_the_audit_tells_what_waits_for_a_reward(tmp_path, monkeypatch):
    """Its equation did not add up."""
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        for text in ("x", "y"):
            assert (await served.ask(session, text)).status_code == 200
        out, _, code = await asyncio.to_thread(said, "buffer", "audit", str(tmp_path))
    assert (
        code == 0
        and "acknowledged 2 = used 0 + leased 0 + available 0 + waiting 2 + explained\n" in out
    )


async def test_an_answer_goes_on_when_its_client_has_gone(tmp_path, monkeypatch):
    engine = ScriptedEngine(answer=lambda m: "a")
    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await served.open()
        engine.hold()
        asking = asyncio.ensure_future(served.ask(session, retry_key="k"))
        await engine.waiting(1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        engine.release()
        assert (await served.ask(session, retry_key="k")).status_code == 200 and len(
            engine.calls
        ) == 1


async def test_an_answer_that_is_stored_counts_also_when_its_client_has_gone(tmp_path, monkeypatch):
    async with serving(
        tmp_path, monkeypatch, (engine := ScriptedEngine(answer=lambda m: "a"))
    ) as served:
        session, gateway, gone = await served.open(), served.service.gateway, asyncio.Event()
        respond = gateway.respond

        async def watched(*asked):
            try:
                return await respond(*asked)
            finally:
                gone.set()

        monkeypatch.setattr(gateway, "respond", watched)
        engine.hold()
        asking = asyncio.ensure_future(served.ask(session, retry_key="k"))
        await engine.waiting(1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await gone.wait()
        engine.release()
        await served.service.book.sessions[session["id"]]._retries["k"][1]
        spent = gateway.values()
        assert spent["serve/calls"] == 1 and spent["serve/completion_tokens"] > 0
        left = [
            q._tokens.units
            for q in (gateway.quotas["environment"], gateway._of_sessions[session["id"]])
        ]
        assert max(left) < ServeConfig().tokens_per_minute
        assert (
            await served.ask(session, retry_key="k")
        ).status_code == 200 and gateway.values() == spent


@pytest.mark.parametrize("what", ["call", "reward"])
async def test_a_client_that_goes_while_its_call_is_stored_leaves_store_and_session_alike(
    tmp_path, monkeypatch, what
):
    async with serving(tmp_path, monkeypatch, ScriptedEngine(answer=lambda m: "a")) as served:
        session = await served.open()
        assert (await served.ask(session)).status_code == 200
        live = served.service.book.sessions[session["id"]]
        storing = asyncio.Event()
        go = asyncio.Event()
        store = live._store
        cancelled = asyncio.Event()

        class Slow:
            async def note(self, note):
                stored = await store.note(note)
                storing.set()
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
                return stored

        monkeypatch.setattr(
            *((live, "_store") if what == "call" else (served.service.book, "_store")), Slow()
        )
        asking = asyncio.ensure_future(
            served.ask(session, "again") if what == "call" else served.reward(session, 1.0)
        )
        await storing.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await cancelled.wait()
        go.set()
        monkeypatch.undo()
        if what == "call":
            assert (await served.reward(session, 1.0)).status_code == 200
        await served.gate.wait_explored(1)
        assert (await served.buffer.audit()).ok


@pytest.mark.parametrize("num_runs", [2, 1])
async def test_a_session_whose_first_call_failed_takes_the_reward_zero(
    tmp_path, monkeypatch, num_runs
):
    """N21: 400 no_calls, so that failing early was never compared with the runs that went well."""
    async with serving(tmp_path, monkeypatch, num_runs=num_runs, batch_size=1) as served:
        failed = await served.open(task_id="t")
        refused = await served.reward(failed, 0.5)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_calls")
        assert (await served.reward(failed, 0.0)).json()["status"] == "ok"
        assert (await served.reward(failed, 0.0)).json()["status"] == "duplicate"
        await served.played(1.0, task_id="t")
        await served.gate.wait_explored(1)
        lease = await served.buffer.reader(1).lease(
            1, groups=1, rows=None, deadline_s=5, max_staleness=None
        )
        (row,) = decode(lease.frame)
        assert row.reward == 1.0 and lease.groups[0].rewards == (
            (0.0, 1.0) if num_runs == 2 else (1.0,)
        )
        audit = await served.buffer.audit()
        assert audit.ok and audit.acked == 2 and audit.discarded == {"failed": 1}, audit
        assert (await served.state(failed))["state"] == "accepted"


async def test_what_waited_goes_on_after_a_restart(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        rewarded = await served.played(1.0, task_id="t")
        session = await served.open(task_id="t")
        first = await served.ask(session, retry_key="k")
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        assert served.lineage == 2
        moved = {**session, "base_url": f"{served.address}/run/{session['id']}/v1"}
        assert (await served.ask(moved, retry_key="k")).json() == first.json()
        said = first.json()["choices"][0]["message"]
        longer = [*HI, said, {"role": "user", "content": "go on"}]
        assert (await served.ask(moved, messages=longer)).status_code == 200
        assert (await served.reward(moved, 0.0)).status_code == 200
        await served.gate.wait_explored(1)
        lease = await served.buffer.reader(2).lease(
            1, groups=1, rows=None, deadline_s=5, max_staleness=0
        )
        assert lease.groups[0].rewards == (1.0, 0.0), (
            "N25: the first was orphaned with the weights that wrote it"
        )
        versions = {(x.oldest_version, x.newest_version) for x in decode(lease.frame)}
        assert versions == {(Version(1, 0), Version(1, 0)), (Version(1, 0), Version(2, 0))}
        assert (await served.buffer.audit()).ok and (await served.state(rewarded))[
            "state"
        ] == "accepted"


async def test_a_call_under_way_when_the_service_stops_is_told_to_come_again(tmp_path, monkeypatch):
    engine = ScriptedEngine(answer=lambda m: "a")
    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await served.open()
        engine.hold()
        asked = [asyncio.ensure_future(served.ask(session, retry_key=key)) for key in ("", "k")]
        await engine.waiting(2)
        await served.service.stop()
        for answer in await asyncio.gather(*asked):
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                503,
                "stopping",
            ) and "Retry-After" in answer.headers


@pytest.mark.parametrize(
    ("again", "status", "code"), [(1.0, 200, "duplicate"), (0.5, 200, "replaced")]
)
async def test_a_second_reward_before_the_group_closes(tmp_path, monkeypatch, again, status, code):
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        session = await served.played(1.0, task_id="t")
        answer = await served.reward(session, again)
        assert (answer.status_code, answer.json()["status"]) == (status, code)
        await served.played(0.0, task_id="t")
        await served.gate.wait_explored(1)
        assert (await served.reward(session, again)).json()["status"] == "duplicate"
        late = await served.reward(session, 9.0)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "session_over")
        lease = await served.buffer.reader(served.lineage).lease(
            1, groups=1, rows=None, deadline_s=5, max_staleness=None
        )
        assert lease.groups[0].rewards == (again, 0.0)


class Held:
    """An async function whose calls that `when` picks wait for `go`."""

    def __init__(self, inner, when=lambda *given: True):
        self._inner = inner
        self._when = when
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, *given, **more):
        if self._when(*given):
            self.reached.set()
            await self.go.wait()
        return await self._inner(*given, **more)


async def test_a_reward_that_is_being_replaced_is_that_of_the_rows(tmp_path, monkeypatch):
    """ "replaced" was answered, and the row was trained with the reward before."""
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        session = await served.played(0.0, task_id="a")
        note = Held(
            served.service.book._store.note,
            lambda note: isinstance(note, Rewarded) and note.score.value == 0.5,
        )
        monkeypatch.setattr(served.service.book._store, "note", note)
        replacing = asyncio.ensure_future(served.reward(session, 0.5))
        await note.reached.wait()
        await served.played(1.0, task_id="a")  # which closes the group
        note.go.set()
        assert (await replacing).json()["status"] == "replaced"
        await served.gate.wait_explored(1)
        lease = await served.buffer.reader(served.lineage).lease(
            1, groups=1, rows=None, deadline_s=5, max_staleness=None
        )
        assert lease.groups[0].rewards == (0.5, 1.0)


async def test_no_call_begins_while_the_reward_that_completes_its_session_is_stored(
    tmp_path, monkeypatch
):
    """Its answer was acknowledged, and was in no row."""
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        await served.ask(session, "one")
        note = Held(served.service.book._store.note, lambda note: isinstance(note, Rewarded))
        append = Held(served.service._buffer.append)
        monkeypatch.setattr(served.service.book._store, "note", note)
        monkeypatch.setattr(served.service._buffer, "append", append)
        rewarding = asyncio.ensure_future(served.reward(session, 1.0))
        await note.reached.wait()
        later = asyncio.ensure_future(served.ask(session, "two"))
        note.go.set()
        assert (await rewarding).json()["status"] == "ok"
        await append.reached.wait()
        assert (await later).status_code in (401, 409)
        append.go.set()
        await served.gate.wait_explored(1)
        assert (await served.buffer.audit()).ok


async def test_two_rewards_at_once_complete_a_session_once(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        book = served.service.book
        session = await served.open(task_id="t")
        await served.ask(session)
        live = book.sessions[session["id"]]
        told = await asyncio.gather(
            *(book.reward(live, Score(value=1.0), None, False) for _ in range(2))
        )
        assert (
            told == ["ok", "duplicate"]
            and book.counts["rewarded"] == 1
            and book.groups.waiting("environment") == 1
        )
        await served.played(0.0, task_id="t")
        await served.gate.wait_explored(1)
        lease = await served.buffer.reader(served.lineage).lease(
            1, groups=1, rows=None, deadline_s=5, max_staleness=None
        )
        assert lease.groups[0].rewards == (1.0, 0.0)


async def test_every_session_ends_with_its_reason(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, num_runs=3, group_deadline=1000) as served:
        book = served.service.book
        now = book.clock()
        late = await served.open(task_id="t", ttl=500)
        await served.ask(late)
        gone = await served.open(task_id="t")
        await served.ask(gone)
        for _ in range(2):  # once more is no error
            assert (await served.client.delete(f"/v1/sessions/{gone['id']}")).json()["deleted"]
        alone = await served.played(1.0, task_id="alone")
        pair = [await served.played(float(i), task_id="pair") for i in range(2)]
        for later, session, reason in ((700, late, "unrewarded"), (2000, alone, "too_few")):
            book.clock = lambda later=later: now + later
            book.changed.set()
            await served.until(session, reason)
        await served.gate.wait_explored(1)
        assert [(await served.state(s))["state"] for s in pair] == ["accepted"] * 2
        audit = await served.buffer.audit()
        assert (
            audit.ok
            and audit.discarded == {"too_few": 1, "unrewarded": 1, "withdrawn": 1}
            and audit.available == 2
        )
        refused = await served.reward(late, 1.0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_over")


async def test_an_overdue_session_ends_although_another_is_withdrawn_just_then(
    tmp_path, monkeypatch
):
    async with serving(tmp_path, monkeypatch, num_runs=2, group_deadline=10_000) as served:
        book = served.service.book
        store = book._store.note
        now = book.clock()
        gone, late = [await served.open(task_id="t", ttl=500) for _ in range(2)]
        for session in (gone, late):
            await served.ask(session)

        refused = asyncio.Event()

        async def note(asked):
            if not (isinstance(asked, Explained) and len(asked.sessions) == 2):
                return await store(asked)
            await book.explain([gone["id"]], "withdrawn")
            assert not await store(asked)
            refused.set()
            return False

        monkeypatch.setattr(book._store, "note", note)
        book.clock = lambda: now + 700
        book.changed.set()
        await asyncio.wait_for(refused.wait(), 20)
        book.clock = lambda: now + 800
        book.changed.set()
        await served.until(late, "unrewarded")
        assert (await served.state(gone))["reason"] == "withdrawn"


async def test_a_reward_that_is_stored_as_its_sessions_time_ends_counts(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, num_runs=2, group_deadline=10_000) as served:
        book = served.service.book
        store = book._store.note
        now = book.clock()
        session, other = [await served.open(task_id="t", ttl=500) for _ in range(2)]
        await served.ask(session)
        await served.ask(other)

        async def note(asked):
            stored = await store(asked)
            if isinstance(asked, Rewarded):
                book.clock = lambda: now + 700
                book.changed.set()
                await served.until(other, "unrewarded")
            return stored

        monkeypatch.setattr(book._store, "note", note)
        assert (await served.reward(session, 1.0)).json()["status"] == "ok"
        assert (await served.state(session))["state"] == "rewarded" and book.groups.waiting(
            "environment"
        ) == 1


async def test_a_clock_that_is_set_ends_no_session(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open(task_id="t")
        hour_on = time.time() + 3600.0
        monkeypatch.setattr(time, "time", lambda: hour_on)
        served.service.book.changed.set()
        await served.played(1.0, task_id="other")
        assert (await served.state(session))["state"] == "open"
        assert (await served.ask(session)).status_code == 200


async def test_weights_that_failed_their_canary_are_not_trained(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch) as served:
        served.gate.rejected.add(Version(1, 0))
        session = await served.played()
        await served.until(session, "rejected_weights")
        assert (await served.buffer.audit()).discarded == {"rejected_weights": 1}


async def test_trinitys_client_gives_feedback_and_commits(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, **RATIO, group_deadline=1000) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key=KEY) as client:
            ids = [
                (await client.chat.completions.create(model="m", messages=HI)).id for _ in range(3)
            ]
        body = {"reward": 0.5, "msg_ids": ids[:2], "task_id": "t", "run_id": "0"}
        assert (await served.client.post("/feedback", json=body)).json()["status"] == "ok"
        assert (await served.client.post("/feedback", json=body)).json()["status"] == "duplicate"
        other = {**body, "reward": 1.0, "msg_ids": ids[2:]}
        assert (await served.client.post("/feedback", json=other)).json()["status"] == "ok"
        await served.gate.wait_explored(1)
        audit = await served.buffer.audit()
        assert audit.ok and audit.available == 3
        assert (await served.client.post("/commit")).json()["closed_groups"] == 0


async def test_feedback_without_a_task_id_is_about_the_task_of_the_session(tmp_path, monkeypatch):
    """It took the session out of its task, or was refused where runs are compared."""
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        first, second = await served.open(task_id="a"), await served.open(task_id="a")
        for session, more in ((first, {}), (second, {"task_id": None, "run_id": None})):
            body = {"reward": 0.5, "msg_ids": [(await served.ask(session)).json()["id"]], **more}
            assert (await served.client.post("/feedback", json=body)).json()["status"] == "ok"
            assert (await served.state(session))["task_id"] == "a"
        alone = (
            await served.client.post("/v1/chat/completions", json={"model": "m", "messages": HI})
        ).json()["id"]
        nobody = await served.client.post("/feedback", json={"reward": 0.5, "msg_ids": [alone]})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (400, "task_id_required")
        await served.gate.wait_explored(1)
        assert (await served.buffer.audit()).available == 2


async def test_answers_of_no_task_are_not_compared_with_each_other(tmp_path, monkeypatch):
    """Two questions that were asked without a session became one group, whose rewards were
    compared.
    """
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        for reward in (0.0, 1.0):
            asked = await served.client.post(
                "/v1/chat/completions", json={"model": "m", "messages": HI}
            )
            message = asked.json()["id"].removeprefix("chatcmpl-")
            got = await served.client.post(
                f"/v1/sessions/{message}/reward", json={"reward": reward}
            )
            assert (got.status_code, got.json()["error"]["code"]) == (400, "task_id_required")
        assert served.service.book.groups.waiting("environment") == 0


async def test_commit_closes_what_can_be_trained(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, num_runs=8, group_deadline=1000) as served:
        for reward in (0.0, 1.0):
            await served.played(reward, task_id="t")
        await served.played(1.0, task_id="alone")
        answer = (await served.client.post("/commit")).json()
        assert answer == {"status": "ok", "closed_groups": 1, "waiting_sessions": 1}
        await served.gate.wait_explored(1)


async def test_a_full_disk_a_dead_engine_and_a_dead_buffer_are_told(tmp_path, monkeypatch):
    engine = ScriptedEngine(answer=lambda m: "a")
    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await served.open()
        engine.will_fail(EngineFailed("it is dead"))
        dead = await served.ask(session)
        assert (dead.status_code, dead.json()["error"]["code"]) == (
            503,
            "engine_failed",
        ) and "Retry-After" in dead.headers

        def full():
            raise DiskFull(f"no space ({errno.ENOSPC})")

        def gone():
            raise RunFailed("buffer died: a secret of Ray's")

        for why, code in ((full, "disk_full"), (gone, "run_failed")):
            with monkeypatch.context() as patched:
                patched.setattr(served.buffer._reserve, "fill", why)
                refused = await served.ask(session)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                code,
            ) and "Retry-After" in refused.headers
            assert "Ray" not in refused.text
        assert (await served.ask(session)).status_code == 200
        assert (await served.buffer.audit()).waiting == 1, "what was not answered does not count"


@pytest.mark.parametrize(("rewarded", "reason"), [(True, "too_few"), (False, "unrewarded")])
async def test_a_deadline_that_passes_on_a_full_disk_waits_for_room(
    tmp_path, monkeypatch, rewarded, reason
):
    """The service ended."""
    monkeypatch.setattr("rft.extras.serve.book._DISK_RETRY_S", 0.01)
    async with serving(tmp_path, monkeypatch, num_runs=2, group_deadline=1000) as served:
        book = served.service.book
        tried = asyncio.Event()
        now = book.clock()
        session = (
            await served.played(task_id="t")
            if rewarded
            else await served.open(task_id="t", ttl=500)
        )

        def full():
            tried.set()
            raise DiskFull("no space")

        with monkeypatch.context() as patched:
            patched.setattr(served.buffer._reserve, "fill", full)
            book.clock = lambda: now + 2000
            book.changed.set()
            await asyncio.wait_for(tried.wait(), 20)
        await served.until(session, reason)


async def test_a_reward_that_would_be_lost_is_refused(tmp_path, monkeypatch):
    """`{base_url}/reward` is where agents post that a run starts; here it reached no store, and was
    answered with ok.
    """
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        await served.ask(session)
        key = {"Authorization": f"Bearer {session['api_key']}"}
        refused = await served.client.post(
            f"{session['base_url']}/reward", json={"reward": 1.0}, headers=key
        )
        assert (
            refused.status_code == 404
            and (place := f"/v1/sessions/{session['id']}/reward") in refused.text
        )
        assert (await served.client.post(place, json={"reward": 1.0})).json()["status"] == "ok"


async def test_the_key_of_a_session_neither_rewards_nor_withdraws_it(tmp_path, monkeypatch):
    """R10: an agent could give itself any reward, up to 1e18."""
    async with serving(tmp_path, monkeypatch) as served:
        session = await served.open()
        await served.ask(session)
        place = f"/v1/sessions/{session['id']}"
        async with served.http(session["api_key"]) as own:
            for method, address, body in (
                ("POST", f"{place}/reward", {"reward": 1e18}),
                ("DELETE", place, None),
            ):
                answer = await own.request(method, address, json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    403,
                    "session_may_not_reward",
                )
            assert (await own.get(place)).json()["state"] == "open"


async def test_the_key_of_a_session_may_reward_it_where_that_is_written(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, session_may_reward=True) as served:
        session = await served.open()
        await served.ask(session)
        async with served.http(session["api_key"]) as own:
            answer = await own.post(f"/v1/sessions/{session['id']}/reward", json={"reward": 1.0})
        assert answer.json()["status"] == "ok"


@pytest.mark.parametrize("reward", [1.01, -0.01, 1e18, {"a": 0.6, "b": 0.6}])
async def test_a_reward_out_of_range_is_refused_and_changes_nothing(tmp_path, monkeypatch, reward):
    """R10"""
    async with serving(tmp_path, monkeypatch, reward_range=(0.0, 1.0)) as served:
        session = await served.open()
        message = (await served.ask(session)).json()["id"]
        refused = [
            await served.reward(session, reward),
            await served.reward(session, reward, message=message),
        ]
        if not isinstance(reward, dict):
            body = {"reward": reward, "msg_ids": [message], "task_id": "t"}
            refused.append(await served.client.post("/feedback", json=body))
        for answer in refused:
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                400,
                "reward_out_of_range",
            ), answer.text
            assert "explorer.serve.reward_range takes 0 to 1" in answer.text
        assert await served.state(session) == {
            **await served.state(session),
            "state": "open",
            "task_id": "",
        }
        assert (await served.reward(session, 1.0)).json()["status"] == "ok"


async def test_a_client_is_told_of_the_model(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch) as served:
        assert [m["id"] for m in (await served.client.get("/v1/models")).json()["data"]] == [
            "policy"
        ]
        async with served.http("rft-guess") as http:
            assert (await http.get("/v1/models")).status_code == 401
            refused = await http.post("/v1/sessions", json={"task_id": "t"})
            assert refused.status_code == 401 and "Bearer KEY" in refused.text


async def test_a_reward_that_comes_while_its_group_is_stored_is_refused(tmp_path, monkeypatch):
    """Its rows are made already: "replaced" would not be true."""
    async with serving(tmp_path, monkeypatch) as served:
        storing = asyncio.Event()
        go = asyncio.Event()
        stored = served.service._stored

        async def slow(group, ids):
            storing.set()
            await go.wait()
            await stored(group, ids)

        monkeypatch.setattr(served.service, "_stored", slow)
        session = await served.played(1.0)
        await storing.wait()
        late = await served.reward(session, 0.0)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "session_over")
        go.set()
        await served.gate.wait_explored(1)
        assert (await served.state(session))["reward"] == 1.0


async def test_a_session_that_cannot_be_stored_takes_no_other_with_it(tmp_path, monkeypatch):
    """Rewards of two calls, which are one row, add up to more than can be stored."""
    async with serving(tmp_path, monkeypatch, **RATIO) as served:
        session = await served.open(task_id="t")
        one = (await served.ask(session)).json()
        longer = [*HI, one["choices"][0]["message"], {"role": "user", "content": "more"}]
        two = (await served.ask(session, messages=longer)).json()
        assert (await served.reward(session, 6e17, message=one["id"])).status_code == 200
        assert (
            await served.reward(session, 6e17, message=two["id"], final=True)
        ).status_code == 200
        good = [await served.played(1.0, task_id="t")]
        await served.until(session, "invalid_reward")
        good.append(await served.played(0.0, task_id="t"))
        await served.gate.wait_explored(1)
        assert [(await served.state(s))["state"] for s in good] == ["accepted", "accepted"]


async def test_a_session_that_cannot_be_rows_ends_alone(tmp_path, monkeypatch):
    """It ended the service, at each start again."""

    class Broken(ScriptedEngine):
        async def generate(self, request):
            made = await super().generate(request)
            if request.messages[-1]["content"] != "odd":
                return made
            return [
                msgspec.structs.replace(c, logprobs=np.full_like(c.logprobs, np.nan)) for c in made
            ]

    async with serving(tmp_path, monkeypatch, Broken(answer=lambda m: "a"), **RATIO) as served:
        one, odd = await served.open(task_id="a"), await served.open(task_id="a")
        for session, text in ((one, "hi"), (odd, "odd")):
            await served.ask(session, text)
            assert (await served.reward(session, 1.0)).status_code == 200
        await served.until(odd, "not_storable")
        assert (await served.state(one))["state"] == "rewarded"
        await served.played(task_id="a")
        await served.gate.wait_explored(1)
        assert (await served.state(one))["state"] == "accepted" and (await served.buffer.audit()).ok
