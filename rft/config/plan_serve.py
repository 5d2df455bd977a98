"""Mode serve: what is trained comes from sessions of clients, at any time.  Part of `resolve`."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from pathlib import Path

from rft.config import cross_rules
from rft.config.context import Context
from rft.config.plan import Tasksets
from rft.config.roles import serves
from rft.config.schema.root import RunConfig
from rft.explorer.service_settings import ServeRuntime
from rft.schema.base import Section
from rft.taskset.settings import TasksetSettings
from rft.types.task import SamplingArgs

_KEYS = {  # what a service needs of the schedule, and why
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


def service_config(ctx: Context) -> RunConfig:
    """The configuration as a service needs it."""
    config = ctx.config
    if not serves(config):
        e = config.explorer
        reason = f"mode is {config.mode}"
        e.warn_unused(
            "explorer", ("proxy_port", "listen_address", "min_running_model_num"), reason, ctx
        )
        e.serve.warn_unused("explorer.serve", type(e.serve).model_fields, reason, ctx)
        return config
    sync = cross_rules.service_is_trainer_driven(ctx, config.synchronizer)
    config = config.model_copy(update={"synchronizer": sync})
    for (name, key), (value, reason) in _KEYS.items():
        part: Section = getattr(config, name)
        if getattr(part, key) != value:
            if part.is_changed(key):
                ctx.error(f"{name}.{key}", f"must be {value} where a service samples: {reason}")
            ctx.derive(f"{name}.{key}", value, reason)
            config = config.model_copy(update={name: part.model_copy(update={key: value})})
    if config.deterministic:
        ctx.error(
            "deterministic",
            "cannot be where a service samples: clients ask when they will; write false",
        )
        config = config.model_copy(update={"deterministic": False})
    if (
        config.trainer.total_steps is None
        and config.buffer.total_steps is None
        and config.buffer.total_tasks is None
    ):
        ctx.note("no trainer.total_steps: the service goes on until it is stopped")
        config = config.model_copy(
            update={"trainer": config.trainer.model_copy(update={"total_steps": ENDLESS})}
        )
    inputs = config.buffer.explorer_input
    reason = (
        "clients of the service bring the tasks and play them; evaluate its checkpoints with "
        "mode: bench"
    )
    inputs.warn_unused(
        "buffer.explorer_input", ("taskset", "tasksets", "eval_tasksets"), reason, ctx
    )
    operators = config.data_processor.experience_pipeline.operators  # their deadline is max_timeout
    config.explorer.warn_unused(
        "explorer", PLAYING if operators else ("max_timeout", *PLAYING), reason, ctx
    )
    none = {"taskset": None, "tasksets": (), "eval_tasksets": ()}
    return config.model_copy(
        update={
            "buffer": config.buffer.model_copy(
                update={"explorer_input": inputs.model_copy(update=none)}
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


def serve(ctx: Context, counted: Tasksets) -> ServeRuntime | None:
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
    if path is not None:
        path = str(Path(ctx.find(path)).expanduser().absolute())
    return ServeRuntime(
        config=e.serve.model_copy(update={"clients_file": path}),
        host=e.listen_address,
        port=e.proxy_port,
        num_runs=counted[0].num_runs,
        batch_size=c.buffer.batch_size,
        sampling=counted[0].sampling,
        max_timeout_s=e.max_timeout,
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
