"""Section `explorer.serve`: authorization and limits of a service, and how long a session waits for
its reward.  Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rft.schema import units
from rft.schema.base import Diagnostics, Section, key, safe_key
from rft.types.task import SamplingArgs


class ServeConfig(Section):
    """mode: serve.  A session is a run whose reward is posted by its client; clients open sessions
    with their keys.
    """

    trainer_apart: bool = key(
        False,
        "Service and trainer are two commands on one Ray, mode: serve and mode: train; write true "
        "in the files of both.  The service is "
        "a part of the run that may come and go, as those of mode: explore are.",
    )
    clients_file: str | None = safe_key(
        None,
        "Keys of clients: lines of a name and the SHA-256 of its key, which `rft serve --new-key "
        "NAME` makes.  Null: the key in the "
        "environment variable RFT_SERVE_KEY alone; it counts beside a file, too.",
    )
    session_ttl: units.Seconds = safe_key(
        3600.0,
        "How long a session waits for its reward; then it is explained as unrewarded and never "
        "trained.  A session may ask for less.",
    )
    session_may_reward: bool = safe_key(
        False,
        "Whether the key of a session, which its agent has, may reward and withdraw that session.  "
        "False: only a client's key may.",
    )
    reward_range: tuple[float, float] | None = safe_key(
        None,
        "Lowest and highest reward that is taken, of a session or one of its messages; others are "
        "refused.  Null: any.",
    )
    group_deadline: units.Seconds = safe_key(
        600.0,
        "Where runs of a client's task_id are compared: a group closes when algorithm.repeat_times "
        "of them are rewarded, or so long after "
        "its first reward.",
    )
    drain_timeout: units.Pause = safe_key(
        10.0,
        "Before one of several engines loads new weights: how long its requests may take to end, "
        "while new ones go to the others.  "
        "Then they are paused, and go on under the new weights.",
    )
    requests_per_minute: units.Requests = safe_key(6000, "Of each key.")
    tokens_per_minute: units.Tokens = safe_key(
        2_000_000,
        "Of each key: prompts and answers, counted when an answer is there.",
    )
    max_concurrent: units.Requests = safe_key(512, "Requests of one key at the same time.")
    max_sessions: int = safe_key(10_000, "Sessions of one client that wait.", unit="sessions", ge=1)

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            diagnostics.error(
                f"{at}.reward_range",
                "must be the lowest reward, then a higher one, for example [0, 1]",
            )


@dataclass(frozen=True, kw_only=True)
class ServeRuntime:
    """One HTTP service and the groups it produces."""

    config: ServeConfig = field(default_factory=ServeConfig)
    host: str = "127.0.0.1"
    port: int = 8010
    # names by the hashes of their keys, read by the command; None: read by the service
    clients: Mapping[str, str] | None = None
    max_timeout_s: float = 1800.0  # time limit of operators for a group
    # rewarded runs of a client's task_id per group; 1 = runs are not compared
    num_runs: int = 1
    batch_size: int  # groups per explore batch
    sampling: SamplingArgs = field(default_factory=SamplingArgs)
