"""A thousand runs in flight, by a clock that counts this process's own work alone (scripts/bench_explorer.py measures the wall too)."""

from __future__ import annotations

import bench_explorer


def test_a_thousand_runs_in_flight_cost_little() -> None:
    runs, writer = 4000, bench_explorer.Writer()
    taken = bench_explorer.play(runs, seed=0, writer=writer, own_clock=True)
    assert writer.runs == runs and bench_explorer.ideal(runs, seed=0) / taken >= 0.85, (
        "the benchmark asks for 0.95 of a quiet machine"
    )
    assert bench_explorer._growth(writer.rss) < 1.0  # MB per 1,000 runs
