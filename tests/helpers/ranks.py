"""A trainer's ranks as processes, for tests.  Depends on no trainer.  Invariant: when `run` returns
or raises, none of them is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(
    script: str | Path, world: int, folder: Path, *arguments: object, deadline_s: float = 600.0
) -> None:
    """`python SCRIPT RANK WORLD RENDEZVOUS ARGUMENTS` for each of `world` ranks, who meet at a file
    in `folder`, on one thread each.

    Raises AssertionError with what a rank has printed if its exit code is not 0, TimeoutExpired
    after `deadline_s` seconds.
    """
    given = [str(world), str(folder / "rendezvous"), *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *given],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for process in ranks:
            printed, _ = process.communicate(timeout=deadline_s)
            if process.returncode != 0:
                raise AssertionError(printed[-4000:])
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
