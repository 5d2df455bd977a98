"""What the buffer needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rft.errors import ConfigError
from rft.types.ids import SEED

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
    # jsonl file that takes a copy of the experiences as they were played
    input_path: Path | None = None


UNLIMITED = 2**31 - 1  # of max_uses
STORAGES = ("sql", "queue", "file")  # built in


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Reading by priority, see `rft.buffer.priority`."""

    priority_fn: str = "linear_decay"
    priority_fn_args: dict[str, Any] = field(default_factory=dict)
    cooldown_s: float | None = None  # between two uses of a row; with max_uses 1 it has no effect
    seed: int = SEED


@dataclass(frozen=True, kw_only=True)
class MixSettings:
    """Rows of another source in each train batch, see `rft.buffer.mixing`."""

    name: str  # of the auxiliary buffer
    rows: int  # of each train batch, beside those of the lease
    shuffle: bool = False
    seed: int = SEED

    def fits(self, count: int) -> None:
        """Raises ConfigError unless a source of `count` rows has enough for a batch."""
        if self.rows > count:
            text = (
                f"has {count} rows, and each train batch takes {self.rows} of them; lower "
                f"expert_data_ratio, or add rows"
            )
            raise ConfigError(
                text, key=f"buffer.trainer_input.auxiliary_buffers.{self.name}", given=count
            )


@dataclass(frozen=True, kw_only=True)
class BufferSettings:
    """One experience buffer: a ledger and a payload storage."""

    name: str = "experience_buffer"
    folder: Path
    # project/group/name of the run; shown in the views, and names the schema in PostgreSQL
    run: str = ""
    # sqlite:///FILE or postgresql://...; None = SQLite file in `folder`
    ledger_url: str | None = None
    # how often a lost or locked database is tried again, after once at once
    max_retry_times: int = 3
    max_retry_interval_s: float = 1.0  # pause before the first of these; it doubles
    storage_type: str = "sql"  # a marked name, pkg.module:Name or path/file.py:Name
    storage_args: dict[str, Any] = field(default_factory=dict)  # of a storage with `Args`
    # folder of the segments; None = in `folder`; queue: "none" = memory only
    storage_path: str | None = None
    durability: Literal["process", "power"] = "process"
    capacity: int = 10000  # groups that may wait to be trained before the explorer is held back
    capacity_bytes: int = 4 << 30  # and bytes of their payload
    on_damaged_payload: Literal["stop", "explain"] = "stop"
    full_disk_wait_s: float = 600.0  # how long a write is repeated while no space is left
    full_disk_reserve_bytes: int = 4 << 20  # beside an SQLite ledger, for the trainer's writes
    max_uses: int = 1
    replay: ReplaySettings | None = None  # None = oldest first
    resume_rows: Literal["orphan", "keep"] = "orphan"
    on_short_batch: Literal["stop", "train", "carry"] = "stop"
    # how many explorers write; a batch is complete when each of them has closed it
    num_explorers: int = 1
    vocab_size: int | None = None  # token ids from here on are rejected; None = not known
    max_row_bytes: int = 32 << 20  # an experience larger than this is rejected, and counted
