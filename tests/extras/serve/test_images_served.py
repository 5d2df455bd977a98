"""Images of clients: stored once with the session, in the rows' files when it is rewarded, also after
a restart.
"""

from __future__ import annotations

import base64
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.testing import tiny_vision
from rft.types.completion import Completion
from rft.types.images import Image, ImagePlace, names_in
from rft.types.ports import GenerateRequest
from rft.types.sessions import unpack_turns
from tests.extras.serve.serving import Served, serving
from tests.extras.serve.test_dialects_served import post

RED = Image.of(tiny_vision.picture((220, 30, 30)))
BLUE = Image.of(tiny_vision.picture((40, 60, 220)))


class SeeingEngine(ScriptedEngine):
    """Says where the images stand in its prompts, as engines with a vision tower do."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        before = request.prefix_places
        start = 0 if request.prefix_tokens is None else len(request.prefix_tokens)
        names = [*names_in(request.messages)][len(before) :]
        later = tuple(ImagePlace(name, start + i, 1) for i, name in enumerate(names))
        answers = await super().generate(request)
        return [msgspec.structs.replace(a, images=(*before, *later)) for a in answers]


def url(image: Image) -> dict[str, Any]:
    data = base64.b64encode(image.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def chat(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def stored(folder: Path) -> tuple[set[str], list[int]]:
    """Return the names of the images that the ledger has, and how often each file is stored."""
    with closing(sqlite3.connect(folder / "buffer" / "experience_buffer.db")) as ledger:
        names = {name for (name,) in ledger.execute("SELECT sha256 FROM images")}
        blocks = [block for (block,) in ledger.execute("SELECT block FROM payloads")]
    return names, [sum(block.count(x.data) for block in blocks) for x in (RED, BLUE)]


@pytest.mark.parametrize("restarts", [False, True])
async def test_images_are_stored_once_and_become_files_of_the_rows(
    restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SeeingEngine(answer=lambda m: "a")
    first = chat(("user", [{"type": "text", "text": "see"}, url(RED)]))
    more = chat(*((m["role"], m["content"]) for m in first["messages"]), ("assistant", "a"))
    more["messages"].append({"role": "user", "content": [url(BLUE), url(RED)]})

    async def begin(served: Served) -> dict[str, Any]:
        session = await served.open()
        for body, key in ((first, "k1"), (first, "k1"), (more, "k2")):
            got = await post(served, session, "/chat/completions", body, key)
            assert got.status_code == 200, got.text
        return session

    async def end(served: Served, session: dict[str, Any]) -> None:
        again = await post(served, session, "/chat/completions", more, "k2")
        assert again.status_code == 200 and len(engine.calls) == 2
        (live,) = served.service.book.sessions.values()
        await live.load()
        turns = live.transcript().turns
        assert [[i.sha256 for i in t.images] for t in turns] == [
            [RED.sha256],
            [RED.sha256, BLUE.sha256],
        ]
        store = served.buffer.writer(served.lineage)
        calls = await store.session_calls(session["id"])  # type: ignore[attr-defined]
        kept = [[i.sha256 for t in unpack_turns(c.turns) for i in t.images] for c in calls]
        assert kept == [[RED.sha256], [BLUE.sha256]]
        assert (await served.reward(session, 1.0, final=True)).status_code == 200
        await served.gate.wait_explored(1)
        assert (await served.state(session))["state"] == "accepted"

    async with serving(tmp_path, monkeypatch, engine) as served:
        session = await begin(served)
        if not restarts:
            await end(served, session)
    if restarts:
        async with serving(tmp_path, monkeypatch, engine) as served:
            await end(served, session)
    assert stored(tmp_path) == ({RED.sha256, BLUE.sha256}, [1, 1])
