"""Mode serve: what is trained comes from sessions of clients, at any time.  Part of `resolve`."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft.config.context import Context, filled
from rft.config.plan import Tasksets
from rft.config.roles import serves
from rft.config.schema.base import Section
from rft.config.schema.root import RunConfig
from rft.explorer.service_settings import LimitSettings, ServeSettings
from rft.taskset.settings import TasksetSettings
from rft.types.task import SamplingArgs

_KEYS = {  # what a service needs of the schedule, and why
    ("synchronizer", "sync_style"): ("trainer_driven", "clients do not wait for weights"),
    ("buffer", "on_short_batch"): ("carry", "a step waits for rewards"),
    ("buffer", "resume_rows"): (
        "keep",
        "a reward that a client was told is stored cannot be asked for again",
    ),
}
# keys of the exploring loop, which a service does not have, nor has a run on given rows
PLAYING = (
    "max_group_timeout group_policy stop_hopeless_groups max_retry_times dynamic_timeout "
    "over_rollout max_concurrent_runs "
    "max_failed_groups runner_state_report_interval eval_interval eval_on_startup eval_at_end "
    "eval_in_background"
).split()
ENDLESS = 1_000_000_000  # train steps


def config(ctx: Context) -> RunConfig:
    """The configuration as a service needs it."""
    made = ctx.config
    if not serves(made):
        e = made.explorer
        why = f"mode is {made.mode}"
        e.idle("explorer", ("proxy_port", "listen_address", "min_running_model_num"), why, ctx)
        e.serve.idle("explorer.serve", type(e.serve).model_fields, why, ctx)
        return made
    for (name, key), (value, why) in _KEYS.items():
        part: Section = getattr(made, name)
        if getattr(part, key) != value:
            if part.written(key):
                ctx.error(f"{name}.{key}", f"must be {value} where a service samples: {why}")
            ctx.derive(f"{name}.{key}", value, why)
            made = made.model_copy(update={name: part.model_copy(update={key: value})})
    if made.deterministic:
        ctx.error(
            "deterministic",
            "cannot be where a service samples: clients ask when they will; write false",
        )
        made = made.model_copy(update={"deterministic": False})
    if (
        made.trainer.total_steps is None
        and made.buffer.total_steps is None
        and made.buffer.total_tasks is None
    ):
        ctx.note("no trainer.total_steps: the service goes on until it is stopped")
        made = made.model_copy(
            update={"trainer": made.trainer.model_copy(update={"total_steps": ENDLESS})}
        )
    given = made.buffer.explorer_input
    why = (
        "clients of the service bring the tasks and play them; evaluate its checkpoints with "
        "mode: bench"
    )
    given.idle("buffer.explorer_input", ("taskset", "tasksets", "eval_tasksets"), why, ctx)
    operators = made.data_processor.experience_pipeline.operators  # their deadline is max_timeout
    made.explorer.idle("explorer", PLAYING if operators else ("max_timeout", *PLAYING), why, ctx)
    none = {"taskset": None, "tasksets": (), "eval_tasksets": ()}
    return made.model_copy(
        update={
            "buffer": made.buffer.model_copy(
                update={"explorer_input": given.model_copy(update=none)}
            )
        }
    )


def taskset(ctx: Context, sampling: Callable[[], SamplingArgs], num_runs: int) -> Tasksets:
    """What the schedule needs to know of sessions."""
    if not serves(ctx.config):
        return ()
    return (
        TasksetSettings(
            name="serve",
            path="",
            workflow="session",
            reward=None,
            sampling=sampling(),
            num_runs=num_runs,
        ),
    )


def serve(ctx: Context, counted: Tasksets) -> ServeSettings | None:
    c = ctx.config
    if c.mode != "serve":
        return None
    e = c.explorer
    try:
        ipaddress.ip_address(e.listen_address)
    except ValueError:
        ctx.error(
            "explorer.listen_address",
            "must be an IP address, for example 127.0.0.1, or 0.0.0.0 for every interface",
        )
    path = e.serve.clients_file
    made: dict[str, Any] = {
        "session_ttl_s": e.serve.session_ttl,
        "group_deadline_s": e.serve.group_deadline,
    }
    made |= {"max_timeout_s": e.max_timeout, "session_may_reward": e.serve.session_may_reward}
    if (bounds := e.serve.reward_range) is not None:
        made["reward_range"] = bounds
        if not bounds[0] < bounds[1]:
            ctx.error(
                "explorer.serve.reward_range",
                "must be the lowest reward, then a higher one, for example [0, 1]",
            )
    return ServeSettings(
        host=e.listen_address,
        port=e.proxy_port,
        clients_file=None if path is None else Path(ctx.find(path)).expanduser().absolute(),
        num_runs=counted[0].num_runs,
        batch_size=c.buffer.batch_size,
        sampling=counted[0].sampling,
        limits=filled(LimitSettings, e.serve),
        **made,
    )


def at_a_time(ctx: Context, engines: int) -> int | None:
    """How many engines load new weights together, while the others serve; None: all."""
    least = ctx.config.explorer.min_running_model_num
    if not serves(ctx.config) or least == 0:
        return None
    if least is None:
        return 1 if engines > 1 else None
    if least >= engines:
        ctx.error(
            "explorer.min_running_model_num",
            f"is {least}, and there {'is 1 engine' if engines == 1 else f'are {engines} engines'}: "
            f"at least one has to load new weights.  "
            f"Write at most {engines - 1}{' (requests wait)' if engines == 1 else ''}, or raise "
            f"explorer.rollout_model.engine_num",
        )
    return max(1, engines - least)


def read_deadline_s(ctx: Context, written: float) -> float:
    """How long the trainer waits for rows: a service for as long as nobody rewards anything."""
    return math.inf if serves(ctx.config) else written
