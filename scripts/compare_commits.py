"""The train step of this working tree beside an older commit's: seconds and peak memory.

    python scripts/compare_commits.py COMMIT [--starts 2] [--steps 1] [--rows 8]

Each layout trains the fixed rollouts of `bench_trainer.py` in fresh processes of both sides, which
take their steps in turn; libraries and the script that drives a step are the same on both sides.
Prints one JSON object per layout; ratios are this tree's / the commit's, lists begin with this tree.
Exit code 1 if a peak is over 2 % larger, or the lower end of the step ratio's 95 % interval over
1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bench_harness as harness
from bench_trainer import LR, NOISE, Side, rollouts

from rft.testing.models import smollm2

LAYOUTS = {
    "defaults": [],
    "padded rows, gradient checkpointing": [
        "trainer.row_layout=padded",
        "trainer.enable_gradient_checkpointing=true",
    ],
    "LoRA": ["model.lora_configs=[{lora_rank: 8}]"],
}
LARGER, LONGER = 1.02, 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="of each start, after one of warm-up")
    parser.add_argument("--rows", type=int, default=8, help="a multiple of 8")
    args = parser.parse_args()
    git = ["git", "-C", str(harness.ROOT), "worktree"]
    passed = True
    with tempfile.TemporaryDirectory(prefix="rft-compare-") as name:
        old = Path(name) / "old"
        subprocess.run([*git, "add", "--quiet", "--detach", old, args.commit], check=True)
        try:
            for i, layout in enumerate(LAYOUTS):
                folders = [Path(name) / f"{i}-{start}" for start in range(args.starts)]
                starts = [race(f, old, LAYOUTS[layout], args.rows, args.steps) for f in folders]
                passed &= judge(layout, starts)
        finally:
            subprocess.run([*git, "remove", "--force", old], check=True)
    return 0 if passed else 1


def race(
    folder: Path, old: Path, overrides: list[str], rows: int, steps: int
) -> list[list[dict[str, Any]]]:
    """Return what `train_step.py` reports of each step, of this tree and of the old one."""
    folder.mkdir()
    threads = os.cpu_count() or 1
    spec = {"model": str(smollm2()), "lr": LR, "noise": NOISE, "overrides": overrides}
    with ExitStack() as stack:
        sides = []
        for side, tree in (("new", harness.ROOT), ("old", old)):
            path = folder / f"{side}.safetensors"
            rollouts(rows, path)
            given = {**spec, "rollouts": str(path)}
            made = Side(
                sys.executable,
                "train_step.py",
                given,
                folder / side,
                threads,
                PYTHONPATH=str(tree),
            )
            sides.append(stack.enter_context(made))
        harness.in_turn(sides[0].step, sides[1].step, steps)
    return [side.reports for side in sides]


def judge(layout: str, starts: list[list[list[dict[str, Any]]]]) -> bool:
    """Print the layout's figures; return whether they are within the limits."""
    new, old = ([start[side] for start in starts] for side in (0, 1))
    peaks = [[reports[-1]["peak_bytes"] for reports in side] for side in (new, old)]
    seconds = [[r["seconds"] for reports in side for r in reports[1:]] for side in (new, old)]
    memory = statistics.median(peaks[0]) / statistics.median(peaks[1])
    longer = harness.speed_ratio("step", seconds[1], seconds[0], None)
    shown = {
        "layout": layout,
        "peak_ratio": round(memory, 4),
        "peaks_mib": [[peak >> 20 for peak in side] for side in peaks],
        "step_ratio": longer.ratio,
        "step_interval": [longer.low, longer.high],
        "seconds": seconds,
        "losses": [side[0][0]["loss"] for side in (new, old)],
        "machine": harness.machine(),
    }
    print(json.dumps(shown), flush=True)
    return memory <= LARGER and longer.low <= LONGER


if __name__ == "__main__":
    sys.exit(main())
