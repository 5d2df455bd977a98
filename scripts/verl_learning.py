"""Trains published veRL scripts, converted and scaled down, on this CPU: do they learn?

    python scripts/verl_learning.py SCRIPT ...

A random model of 0.3 million parameters copies one digit (`tests/extras/migrate/converted.py` says
what is scaled down).  Prints a table of held-out accuracy before, half-way and at the end; exit
code 1 if one of them ends below 0.8.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rft.monitor.read import read, series
from rft.testing import tiny
from tests.extras.migrate import converted


def main(scripts: list[str]) -> int:
    low = not scripts
    print("| Script | before | half-way | end |\n|---|---|---|---|")
    for script in map(Path, scripts):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            done, run = converted.train(script, tiny.make(folder / "model"), folder)
            if done.code:
                print(done.output, file=sys.stderr)
                return 1
            found = {
                r
                for record in read(run / "metrics.jsonl")
                for r in record.values
                if r.endswith("/mean@1") and "eval/" in r
            }
            values = [v for _, v in series(read(run / "metrics.jsonl"), min(found))]
            print(
                f"| {script.parent.name}/{script.name} | "
                + " | ".join(f"{v:.2f}" for v in values)
                + " |",
                flush=True,
            )
            low |= values[-1] < 0.8
    return int(low)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
