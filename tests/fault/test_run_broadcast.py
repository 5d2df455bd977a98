"""kill -9 of an engine while it receives a broadcast, in a whole run: it is named, replaced, and
every version arrives.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.monitor.read import read, series
from tests.helpers import runs


@pytest.mark.slow
def test_an_engine_killed_in_the_middle_of_a_version(tiny_model: Path, tmp_path: Path) -> None:
    """Both engines die at the 85th tensor, in the last of five versions of 20 each; their
    successors see 40.
    """
    arguments = runs.arguments(
        tiny_model,
        tmp_path / "runs",
        *runs.SMALL,
        "trainer.total_steps=4",
        "explorer.rollout_model.engine_num=2",
        "explorer.rollout_model.cpu_threads=1",
        "synchronizer.sync_method=nccl",
        "synchronizer.nccl.bucketed_broadcast=false",
        "synchronizer.nccl.overlap_broadcast_and_load=true",
    )
    run = runs.Run(*arguments, env={"RFT_FAULT": "sync.received:85=kill"})
    assert run.end(500) == 0, run.output
    folder = runs.folder(tmp_path / "runs")
    told = (folder / "logs" / "coordinator.log").read_text()
    assert "engine 0 was restarted" in told and "engine 1 was restarted" in told
    assert "version 1:4: engine 0: load: " in told
    records = read(folder / "metrics.jsonl")
    assert [value for _, value in series(records, "sync/version")] == [0, 1, 2, 3, 4]
    assert [value for _, value in series(records, "sync/engines_restarted")] == [0, 0, 0, 0, 2]
