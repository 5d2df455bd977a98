"""What the experience pipeline needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLLOUT_MODEL = "rollout_model"  # the name under which operators ask the policy


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """One operator.  `key` is where it was written, for messages."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """What happens to experiences between explorer and buffer."""

    operators: tuple[OperatorSettings, ...] = ()
    input_path: Path | None = None  # jsonl file that takes a copy of the experiences as they were played
