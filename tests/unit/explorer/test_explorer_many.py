"""A thousand runs in flight, by a clock that counts this process's own work alone (scripts/bench_explorer.py measures the wall too)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_a_thousand_runs_in_flight_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("bench_explorer_for_test", SCRIPTS / "bench_explorer.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, bench)
    spec.loader.exec_module(bench)
    runs, writer = 4000, bench.Writer()
    taken = bench.play(runs, seed=0, writer=writer, own_clock=True)
    assert writer.runs == runs and bench.ideal(runs, seed=0) / taken >= 0.85, "the benchmark asks for 0.95 of a quiet machine"
    assert bench._growth(writer.rss) < 1.0  # MB per 1,000 runs
