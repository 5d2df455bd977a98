"""`time_to_first`: from the command to the first optimizer step, against TRL; how long `--help` and
stopping take.

Files are warm: the model has been converted and everything was imported before.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_harness as harness
from bench_step import Ours, Trl, config, trl_spec

from rft.testing.models import smollm2


def time_to_first(quick: bool) -> harness.Result:
    """Seconds of TRL / seconds of ours until the first optimizer step is done."""
    harness.peer_python()
    rounds = 3 if quick else 5
    model = smollm2()
    measured = harness.probes()
    ready: list[float] = []
    stop: list[float] = []

    def ours() -> float:
        with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
            folder = Path(name)
            began = time.monotonic()
            with Ours(config(model, folder, folder / "gate", 10), folder) as run:
                ready.append(time.monotonic() - began)
                run.step()
                first = time.monotonic() - began
                asked = time.monotonic()
            stop.append(time.monotonic() - asked)
            return first

    def trl() -> float:
        with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
            began = time.monotonic()
            with Trl(trl_spec(model, 10), Path(name)) as peer:
                peer.step()
                return time.monotonic() - began

    mine, theirs = harness.in_turn(ours, trl, rounds, discard=0 if quick else 1)
    more = {
        "ready_s": _median(ready),
        "stop_s": _median(stop),
        "help_s": _median([_help() for _ in range(5)]),
    }
    return harness.Result(
        "time_to_first",
        [harness.speed_ratio("first_step", mine, theirs, None)],
        harness.summary(mine, **more),
        harness.summary(theirs),
        measured,
    )


def _help() -> float:
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "rft.cli.main", "--help"], stdout=subprocess.DEVNULL, check=True
    )
    return time.monotonic() - began


def _median(seconds: list[float]) -> float:
    return round(statistics.median(seconds), 2)
