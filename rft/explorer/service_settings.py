"""What serving needs to know.  Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rft.types.ids import MAX_REWARD
from rft.types.task import SamplingArgs


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """What one key may take; a session has those of its own key, and counts for its client too."""

    requests_per_minute: int = 6000
    tokens_per_minute: int = 2_000_000  # prompt and answer, counted when the answer is there
    max_concurrent: int = 512  # requests under way
    max_sessions: int = 10_000  # of a client that wait at the same time


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """One HTTP service and what is learnt from it."""

    host: str = "127.0.0.1"
    port: int = 8010
    # lines "NAME SHA256-OF-THE-KEY"; None: the key in RFT_SERVE_KEY alone
    clients_file: Path | None = None
    # names by the hashes of their keys, read by the command; None: read where it serves
    clients: Mapping[str, str] | None = None
    session_ttl_s: float = 3600.0  # a session without a reward is given up then
    # a group closes so long after its first reward, with what it has
    group_deadline_s: float = 600.0
    max_timeout_s: float = 1800.0  # that operators have for a group
    # rewarded runs of a client's task_id that make a group; 1: runs are not compared
    num_runs: int = 1
    session_may_reward: bool = False  # also with its own key; and withdraw itself
    reward_range: tuple[float, float] = (-MAX_REWARD, MAX_REWARD)
    batch_size: int  # groups of an explore batch
    sampling: SamplingArgs = field(default_factory=SamplingArgs)
    limits: LimitSettings = field(default_factory=LimitSettings)
