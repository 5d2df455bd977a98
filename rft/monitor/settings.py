"""What the monitor needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["off", "warn", "stop"]
ALARM: Level = "warn"
LEVELS: dict[str, Level] = dict.fromkeys(
    "reward_divergence length_drift entropy_collapse no_spread identical_answers judge kl_jump "
    "mismatch_jump starving".split(),
    ALARM,
)
"""Every alarm and what it does unless something else is written."""


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """metrics.jsonl always; `kinds` names further trackers, several at once."""

    folder: Path
    kinds: tuple[str, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)  # per kind: {"wandb": {...}}
    plugin_dirs: tuple[str, ...] = ()  # where further trackers are found
    project: str = "rft"
    group: str = ""
    name: str = "run"
    config: dict[str, Any] = field(default_factory=dict)  # redacted, for trackers that store it
    num_samples: int = 64  # rows of a table that are shown
    dump_dir: Path | None = None  # gets whole tables
    alarms: dict[str, Level] = field(default_factory=lambda: dict(LEVELS))
