"""explorer/idle_ratio: the share of a window in which the explorer had nothing to do but wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rft.sync import waits as module
from rft.sync.waits import WaitShare


@pytest.mark.parametrize(("waits", "ratio"), [((), 0.0), (((2.0, 4.0),), 0.25), (((0.0, 3.0), (5.0, 8.0)), 0.75)])
def test_the_share_of_a_window_in_which_the_explorer_waits(
    waits: tuple[tuple[float, float], ...], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: Iterator[float] = iter([0.0])
    monkeypatch.setattr(module, "_now", lambda: next(times))
    gate = WaitShare()
    times = iter([0.0])
    gate.window()
    for begin, end in waits:
        times = iter([begin, end])
        with gate.waiting():
            pass
    times = iter([8.0] * 4)
    assert gate.window() == pytest.approx(ratio)
