"""A thousand runs in flight: nobody waits for anything but answers, and a run costs a bounded
number of calls, however many there are.
"""

from __future__ import annotations

import cProfile
import pstats

import bench_explorer
import pytest

CALLS_PER_RUN = 1275  # of functions, built-in ones too; 1,267 on Python 3.11


@pytest.mark.e2e
def test_a_thousand_runs_in_flight_cost_little() -> None:
    runs = 3000
    # each task once: what is imported, compiled and remembered then is no cost of a run
    bench_explorer.play(
        4 * bench_explorer.IN_FLIGHT,
        seed=0,
        writer=bench_explorer.Writer(),
        loop=bench_explorer.NoTimeForWork,
    )
    writer = bench_explorer.Writer()
    profile = cProfile.Profile()
    taken = profile.runcall(
        bench_explorer.play, runs, seed=0, writer=writer, loop=bench_explorer.NoTimeForWork
    )
    assert writer.runs == runs and taken == pytest.approx(
        bench_explorer.ideal(runs, seed=0), rel=1e-3
    )
    assert pstats.Stats(profile).total_calls / runs <= CALLS_PER_RUN
    assert bench_explorer._growth(writer.rss) < 1.0  # MB per 1,000 runs
