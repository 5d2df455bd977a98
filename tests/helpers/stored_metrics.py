"""The metrics file of a run that was not played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def metrics(run_dir: Path, steps: int = 12, note: str = "") -> None:
    """What explorer, trainer, synchronizer and evaluation say of a few steps."""
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        now = 1.7e9 + 10 * step
        lines += [
            {
                "role": "synchronizer",
                "step": step - 1,
                "time": now - 9,
                "values": {"sync/total_s": 0.5, "sync/load_s": 0.5},
            },
            {
                "role": "explorer",
                "step": step,
                "time": now - 4,
                "values": {"rollout/reward/mean": step / 20, "rollout/time/batch": 4.0},
            },
            {
                "role": "trainer",
                "step": step,
                "time": now,
                "values": {
                    "experience/reward/mean": step / 20,
                    "experience/response_tokens": 100.0,
                    "perf/step_s": 3.0,
                },
                **({"notes": [note]} if note and step == 2 else {}),
            },
        ]
        if step % 5 == 0:
            lines.append(
                {
                    "role": "eval",
                    "step": step,
                    "time": now,
                    "values": {"eval/held_out/mean@1": step / 15},
                }
            )
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
