"""What the buffer needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BufferSettings:
    """One experience buffer: a ledger and a payload storage."""

    name: str = "experience_buffer"
    folder: Path
    ledger_url: str | None = None  # None = SQLite file in `folder`
    storage_type: Literal["sql", "queue", "file"] = "sql"
    storage_path: str | None = None  # folder of the segments; None = in `folder`; queue: "none" = memory only
    durability: Literal["process", "power"] = "process"
    capacity: int = 10000  # groups that may wait to be trained before the explorer is held back
    capacity_bytes: int = 4 << 30  # and bytes of their payload
    on_damaged_payload: Literal["stop", "explain"] = "stop"
    full_disk_wait_s: float = 600.0  # how long a write is repeated while no space is left
    max_uses: int = 1
    resume_rows: Literal["orphan", "keep"] = "orphan"
    on_short_batch: Literal["stop", "train", "carry"] = "stop"
    num_explorers: int = 1  # how many explorers write; a batch is complete when each of them has closed it
    max_row_bytes: int = 32 << 20  # an experience larger than this is rejected, and counted
