"""The result of one machine check, and the transports tried for each engine."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

State = Literal["ok", "note", "failed"]
TRANSPORTS = {
    "transformers": ("memory", "checkpoint"),
    "vllm": ("memory", "checkpoint", "nccl"),
}  # a broadcast needs two processes


class Line(Struct, frozen=True, kw_only=True):
    """Result of one check.  `seconds`: time since the previous line."""

    topic: str
    state: State
    text: str
    remedy: str = ""
    seconds: float = 0.0
