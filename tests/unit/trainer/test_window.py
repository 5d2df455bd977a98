"""Stale and partial trajectories, counted by the versions that wrote them."""

from __future__ import annotations

import numpy as np
import pytest

from rft.trainer.loop.window import NAMES, Window
from rft.types.completion import VersionSpan
from rft.types.experience import Experience
from rft.types.ids import GroupId, Version


def row(task: int, run: int, *versions: int) -> Experience:
    """One token by each version."""
    n = len(versions) + 1
    return Experience(
        id=GroupId(1, 0, 0, task).run(run),
        taskset="t",
        task_index=task,
        workflow="w",
        status="complete",
        tokens=np.arange(n, dtype=np.int32),
        loss_mask=np.arange(n) > 0,
        logprobs=np.zeros(n, np.float32),
        version_spans=tuple(
            VersionSpan(Version(1, v), i + 1, i + 2) for i, v in enumerate(versions)
        ),
        reward=1.0,
    )


def test_a_window() -> None:
    window = Window()
    for step in (0, 4):
        window.publish(step)
    assert window.closed(), "the window between two versions"
    window.rows([row(0, 0, 0), row(0, 1, 0, 4), row(1, 0, 0), row(1, 1, 0), row(2, 0, 4)])
    window.step(1.0, 4.0)
    assert window.closed() == {}, "no version has come"
    window.publish(8)
    found = window.closed()
    assert found["buffer/stale_samples_processed"] == 1, (
        "task 1; of task 0 one run ended under the newest version"
    )
    assert found["buffer/stale_trajectories_processed"] == 3
    assert (
        found["buffer/partial_num"],
        found["buffer/partial_ratio"],
        found["buffer/max_partial_span"],
    ) == (1, 0.2, 1)
    assert found["trainer/idle_ratio"] == pytest.approx(0.25)
    assert all(found[theirs] == found[ours] for ours, theirs in NAMES.items())
    window.rows([row(3, 0, 0, 4, 8), row(4, 0, 8)])
    window.publish(12)
    after = window.closed()
    assert after["buffer/stale_samples_processed"] == 1, "counted since the start"
    assert (after["buffer/partial_num"], after["buffer/max_partial_span"]) == (1, 2)


def test_rows_of_an_earlier_life() -> None:
    """After a resume: weights older than all versions of this process are stale, those it began
    with are not.
    """
    window = Window()
    window.publish(6)
    window.rows([row(0, 0, 4), row(1, 0, 6), row(2, 0, 2, 6)])
    window.publish(8)
    found = window.closed()
    assert found["buffer/stale_samples_processed"] == 1
    assert found["buffer/max_partial_span"] == 1
