"""What a check of the machine reports, and the transports it tries for each engine."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

State = Literal["ok", "note", "failed"]
TRANSPORTS = {
    "transformers": ("memory", "checkpoint"),
    "vllm": ("memory", "checkpoint", "nccl"),
}  # a broadcast needs two processes


class Line(Struct, frozen=True, kw_only=True):
    """What one check found.  `seconds` is the time since the line before."""

    topic: str
    state: State
    text: str
    remedy: str = ""
    seconds: float = 0.0
