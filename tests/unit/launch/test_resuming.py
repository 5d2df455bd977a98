"""A run that is started again says where it goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.launch.start import begin


async def test_a_second_start_without_a_checkpoint_says_that_it_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rft.launch.start")
    said = []
    for _ in range(2):
        buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
        await buffer.open()
        try:
            start = await begin(buffer, None)
        finally:
            await buffer.close()
        said.append((start.lineage, [r.getMessage() for r in caplog.records if "starting" in vars(r)]))
    again = "no checkpoint of the earlier attempt (trainer.save_interval): step 0 again, 0 experiences set aside"
    assert said == [(1, []), (2, [again])]
