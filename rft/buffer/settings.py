"""Settings of the buffer.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rft.errors import ConfigError
from rft.types.ids import SEED

ROLLOUT_MODEL = "rollout_model"  # name of the policy for operators


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """One operator.  `key`: its place in the config, for messages."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The processing of experiences between explorer and buffer."""

    operators: tuple[OperatorSettings, ...] = ()
    # jsonl file for a copy of the experiences before the operators
    input_path: Path | None = None


UNLIMITED = 2**31 - 1  # value of max_uses
STORAGES = ("sql", "queue", "file")  # built in


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Reading by priority, see `rft.buffer.priority`."""

    priority_fn: str = "linear_decay"
    priority_fn_args: dict[str, Any] = field(default_factory=dict)
    cooldown_s: float | None = None  # between two uses of a row; no effect with max_uses 1
    seed: int = SEED


@dataclass(frozen=True, kw_only=True)
class MixSettings:
    """Rows of another source in each train batch, see `rft.buffer.mixing`."""

    name: str  # name of the auxiliary buffer
    rows: int  # per train batch, in addition to those of the lease
    shuffle: bool = False
    seed: int = SEED

    def fits(self, count: int) -> None:
        """Raise ConfigError unless a source of `count` rows suffices for a batch."""
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
    """An experience buffer: a ledger and a payload storage."""

    name: str = "experience_buffer"
    folder: Path
    # project/group/name of the run; shown in the views, and part of the schema name in PostgreSQL
    run: str = ""
    # sqlite:///FILE or postgresql://...; None = SQLite file in `folder`
    ledger_url: str | None = None
    # retries of a locked database, after an immediate first retry; 0: of a lost one neither
    max_retry_times: int = 3
    max_retry_interval_s: float = 1.0  # pause before the first of these; doubles each time
    storage_type: str = "sql"  # a plugin name, pkg.module:Name or path/file.py:Name
    storage_args: dict[str, Any] = field(default_factory=dict)  # checked by the storage's model
    # folder of the segments; None = in `folder`; queue: "none" = memory only
    storage_path: str | None = None
    durability: Literal["process", "power"] = "process"
    capacity: int = 10000  # untrained groups before the explorer is held back
    capacity_bytes: int = 4 << 30  # bytes of untrained payload before the explorer is held back
    on_damaged_payload: Literal["stop", "explain"] = "stop"
    full_disk_wait_s: float = 600.0  # how long a full disk or a lost server is waited for
    full_disk_reserve_bytes: int = 4 << 20  # next to an SQLite ledger, for the trainer's writes
    max_uses: int = 1
    replay: ReplaySettings | None = None  # None = oldest first
    resume_rows: Literal["orphan", "keep"] = "orphan"
    on_short_batch: Literal["stop", "train", "carry"] = "stop"
    # number of explorers; a batch is complete when each of them has closed it
    num_explorers: int = 1
    vocab_size: int | None = None  # token ids from here on are rejected; None = unknown
    max_row_bytes: int = 32 << 20  # larger experiences are rejected and counted
