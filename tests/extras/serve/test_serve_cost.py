"""What a call costs does not depend on how many sessions wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.extras.serve.serving import HI, serving
from tests.helpers.counted import Counted

GROUPED = {"num_runs": 8, "group_deadline": 1000.0}


async def fewest(play: Callable[[], Awaitable[Any]], times: int = 3) -> int:
    """Of several times: others work in this thread, too."""
    found = []
    for _ in range(times):
        with Counted() as counted:
            await play()
        found.append(counted.lines)
    return min(found)


@pytest.mark.e2e
async def test_it_is_flat_in_sessions_that_wait(tmp_path, monkeypatch):
    async with serving(tmp_path, monkeypatch, **GROUPED) as served:

        async def play() -> None:
            """A run, another that is withdrawn, and a call of a client without a session."""
            session = await served.played(1.0, task_id=f"t{len(served.service.book.sessions)}")
            await served.client.delete(f"/v1/sessions/{session['id']}")
            body = {"model": "m", "messages": HI}
            headers = {"Idempotency-Key": session["id"]}
            assert (
                await served.client.post("/v1/chat/completions", json=body, headers=headers)
            ).status_code == 200

        async def wait(count: int) -> None:
            for _ in range(count):
                await served.played(1.0, task_id=f"w{len(served.service.book.sessions)}")

        await wait(5)
        few = await fewest(play)
        await wait(100)
        many = await fewest(play)
        assert len(served.service.book.sessions) > 100
        assert many <= few + 50, "not one line for each session that waits"
