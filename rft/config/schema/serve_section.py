"""The section `explorer.serve`: who may ask in mode: serve, how much, and how long a session waits
for its reward.
"""

from __future__ import annotations

from rft.config.schema import units
from rft.config.schema.base import Section, key, safe_key
from rft.explorer.service_settings import LimitSettings, ServeSettings
from rft.sync.settings import SyncSettings


class ServeConfig(Section):
    """mode: serve.  A session is a run whose reward is posted by whoever played it; clients open
    them with their keys.
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
        ServeSettings.session_ttl_s,
        "How long a session waits for its reward; then it is explained as unrewarded and never "
        "trained.  A session may ask for less.",
    )
    session_may_reward: bool = safe_key(
        ServeSettings.session_may_reward,
        "Whether the key of a session, which its agent has, may reward and withdraw that session.  "
        "False: only a client's key may.",
    )
    reward_range: tuple[float, float] | None = safe_key(
        None,
        "Lowest and highest reward that is taken, of a session or one of its messages; others are "
        "refused.  Null: any.",
    )
    group_deadline: units.Seconds = safe_key(
        ServeSettings.group_deadline_s,
        "Where runs of a client's task_id are compared: a group closes when algorithm.repeat_times "
        "of them are rewarded, or so long after "
        "its first reward.",
    )
    drain_timeout: units.Pause = safe_key(
        SyncSettings.drain_s,
        "Before one of several engines loads new weights: how long its requests may take to end, "
        "while new ones go to the others.  "
        "Then they are paused, and go on under the new weights.",
    )
    requests_per_minute: units.Requests = safe_key(
        LimitSettings.requests_per_minute, "Of each key."
    )
    tokens_per_minute: units.Tokens = safe_key(
        LimitSettings.tokens_per_minute,
        "Of each key: prompts and answers, counted when an answer is there.",
    )
    max_concurrent: units.Requests = safe_key(
        LimitSettings.max_concurrent, "Requests of one key at the same time."
    )
    max_sessions: int = safe_key(
        LimitSettings.max_sessions, "Sessions of one client that wait.", unit="sessions", ge=1
    )
