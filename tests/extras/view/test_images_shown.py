"""The page of a rollout shows the images of its conversation, and only pictures are answered."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.testing.storage_contract import row
from rft.testing.tiny_vision import picture
from rft.types.block import encode
from rft.types.ids import GroupId
from rft.types.images import Image, ImagePlace
from tests.extras.view.viewed import metrics, viewing

RED = Image.of(picture((220, 30, 30)))
PAGE = Image.of(b"<script>1</script>")


async def played(run_dir: Path, *images: Image) -> str:
    """A run of one row that shows the images; the row's id."""
    buffer = Buffer(BufferSettings(folder=run_dir / "buffer", run="run"))
    await buffer.open()
    line = (await buffer.start_lineage(None, None)).lineage
    places = tuple(ImagePlace(x.sha256, i, 1) for i, x in enumerate(images))
    content = [*(x.part for x in images), {"type": "text", "text": "which colour?"}]
    shown = msgspec.structs.replace(
        row(GroupId(line, 0, 0, 0).run(0)),
        images=places,
        messages=({"role": "user", "content": content}, {"role": "assistant", "content": "r"}),
    )
    files = {x.sha256: x.data for x in images}
    await buffer.writer(line).append(encode([shown]), accepted=True, images=files)
    await buffer.close()
    metrics(run_dir)
    return str(shown.id)


@pytest.mark.extra("view")
async def test_a_rollout_shows_its_images_and_nothing_else_is_a_picture(tmp_path: Path) -> None:
    id = await played(tmp_path / "run", RED, PAGE)
    async with viewing(tmp_path / "run") as (server, session):
        base = f"{server.address}run/run"
        async with session.get(f"{base}/rollout/{id}") as answer:
            page = await answer.text()
            assert f'image/{RED.sha256}" alt="image ' in page
            assert "which colour?" in page
        async with session.get(f"{base}/image/{RED.sha256}") as answer:
            assert (answer.status, answer.content_type) == (200, "image/png")
            assert await answer.read() == RED.data
            assert "img-src 'self'" in answer.headers["Content-Security-Policy"]
        for name in (PAGE.sha256, "0" * 64, "..%2fstate.json"):
            async with session.get(f"{base}/image/{name}") as answer:
                assert answer.status >= 400
                assert b"<script>1" not in await answer.read()
