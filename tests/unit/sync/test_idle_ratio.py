"""explorer/idle_ratio: the share of a window in which the explorer had nothing to do but wait."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from rft.sync import waits as module
from rft.sync.waits import WaitShare


@pytest.mark.parametrize(
    ("waits", "plays", "ratio"),
    [
        ((), (), 0.0),
        (((2.0, 4.0),), (), 0.25),
        (((0.0, 3.0), (5.0, 8.0)), (), 0.75),
        (((0.0, 8.0),), ((1.0, 7.0),), 0.25),  # the next batch is asked for while one plays
        (((2.0, 6.0),), ((0.0, 8.0),), 0.0),
    ],
)
def test_the_share_of_a_window_in_which_the_explorer_waits(
    waits: tuple[tuple[float, float], ...],
    plays: tuple[tuple[float, float], ...],
    ratio: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "_now", lambda: clock[0])
    gate = WaitShare()
    open_waits = ExitStack()
    gate.window()
    events = [(t, "busy", i == 0) for span in plays for i, t in enumerate(span)]
    events += [(t, "wait", i == 0) for span in waits for i, t in enumerate(span)]
    for at, what, begins in sorted(events):
        clock[0] = at
        if what == "busy":
            gate.busy(begins)
        elif begins:
            open_waits.enter_context(gate.waiting())
        else:
            open_waits.close()
    clock[0] = 8.0
    assert gate.window() == pytest.approx(ratio)
