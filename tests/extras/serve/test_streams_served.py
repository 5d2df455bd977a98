"""Streams begin when their answer is stored; those that last show life, and end with an error event
where the engine fails.
"""

from __future__ import annotations

import openai
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.workflow import endpoint
from tests.extras.serve.serving import HI, serving

STREAM = {"model": "m", "messages": HI, "stream": True}


async def test_a_stream_that_lasts_shows_life_and_ends_with_its_whole_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.01)
    engine = ScriptedEngine(answer=lambda m: "yes")
    async with serving(tmp_path, monkeypatch, engine) as served:
        engine.hold()
        session = await served.open()
        signs: list[str] = []
        async with served.client.stream(
            "POST",
            f"{session['base_url']}/chat/completions",
            json=STREAM,
            headers={"Authorization": f"Bearer {session['api_key']}"},
        ) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                signs.append(line)
                if line == ": still":
                    assert not any(s.startswith("data:") for s in signs), (
                        "no token before the answer is stored"
                    )
                    engine.release()
        assert '"content": "yes"' in "".join(signs) and signs[-2] == "data: [DONE]"
        assert (await served.reward(session, 1.0)).status_code == 200


async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_and_trains_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.01)
    engine = ScriptedEngine(answer=lambda m: "a long answer")
    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await served.open()
        engine.hold(after_tokens=3)
        async with openai.AsyncOpenAI(
            base_url=session["base_url"], api_key=session["api_key"], max_retries=0
        ) as model:
            stream = await model.chat.completions.create(model="policy", messages=HI, stream=True)
            engine.die("kill -9")
            with pytest.raises(openai.APIError, match=r"the engine failed.*kill -9"):
                [chunk async for chunk in stream]
        nothing = await served.reward(session, 1.0)
        assert (nothing.status_code, nothing.json()["error"]["code"]) == (400, "no_calls")
        assert (await served.buffer.audit()).waiting == 0
