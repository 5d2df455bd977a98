"""How the trainer reads the buffer: by age or by priority, how often, how old at most, and what is mixed in.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rft.algorithm.args import validate
from rft.buffer.priority import DecayLimitRandomizationArgs
from rft.buffer.settings import UNLIMITED, BufferSettings, ReplaySettings
from rft.config.plan import Facts
from rft.config.problems import Problems
from rft.config.schema.root import RunConfig
from rft.errors import ConfigError
from rft.plugins import REGISTRY

KEY = "buffer.trainer_input.experience_buffer.replay_buffer"


def reading(config: RunConfig, facts: Facts, settings: BufferSettings, p: Problems) -> BufferSettings:
    """`settings` with what `replay_buffer` asks for."""
    r = config.buffer.trainer_input.experience_buffer.replay_buffer
    if not r.enable:
        for name in sorted(r.model_fields_set - {"enable"}):
            if getattr(r, name) != type(r).model_fields[name].default:
                p.warn(f"{KEY}.{name} has no effect without replay_buffer.enable: each experience is trained once, oldest first")
        return settings
    if config.deterministic:
        p.error(f"{KEY}.enable", "what is read depends on when it came; leave it out with deterministic: true", given=True)
    args = dict(r.priority_fn_args) if "priority_fn_args" in r.model_fields_set else {}  # the default is linear_decay's own
    _check_args(config, args, facts, p)
    return replace(
        settings,
        max_uses=_max_uses(config, p),
        replay=ReplaySettings(
            priority_fn=r.priority_fn,
            priority_fn_args=args,
            cooldown_s=r.reuse_cooldown_time,
            seed=config.seed,
        ),
    )


def max_staleness(config: RunConfig, p: Problems) -> int | None:
    """`synchronizer.max_staleness`, which `sample_strategy: staleness_control` may give too."""
    written = config.synchronizer.max_staleness
    if config.algorithm.sample_strategy != "staleness_control":
        return written
    given: Any = config.algorithm.sample_strategy_args.get("max_staleness")
    if given is None or not isinstance(given, int | float) or math.isinf(given):
        return written
    if written not in (None, given):
        p.error(
            "algorithm.sample_strategy_args.max_staleness",
            f"is {given}, but synchronizer.max_staleness is {written}; both mean the same, write one of them",
            given=given,
        )
        return written
    if written is None:
        p.derive("synchronizer.max_staleness", given, "sample_strategy staleness_control")
    return int(given)


def _max_uses(config: RunConfig, p: Problems) -> int:
    r = config.buffer.trainer_input.experience_buffer.replay_buffer
    if r.reuse_cooldown_time is None:
        if r.max_uses not in (None, 1):
            p.error(
                f"{KEY}.max_uses", "is more than 1, and without reuse_cooldown_time an experience is used once", given=r.max_uses
            )
        return 1
    default = DecayLimitRandomizationArgs.model_fields["use_count_limit"].default
    own = default if r.priority_fn == "decay_limit_randomization" else 0
    limit = r.priority_fn_args.get("use_count_limit", own)
    limit = limit if isinstance(limit, int) and limit > 0 else UNLIMITED
    if r.max_uses is None:
        p.derive(f"{KEY}.max_uses", "no limit" if limit == UNLIMITED else limit, "use_count_limit of priority_fn, else no limit")
    return min(r.max_uses or UNLIMITED, limit)


def _check_args(config: RunConfig, args: dict[str, Any], facts: Facts, p: Problems) -> None:
    """Names and arguments of shipped functions at once, others when plugins are loaded."""
    r = config.buffer.trainer_input.experience_buffer.replay_buffer
    known = REGISTRY.names("priority")
    elsewhere = ":" in r.priority_fn or config.plugin_dirs or facts.plugin_dirs
    if r.priority_fn not in known and elsewhere and not facts.plugins_loaded:
        return
    try:
        if r.priority_fn not in known and ":" not in r.priority_fn:
            raise ConfigError(
                f"unknown priority function {r.priority_fn!r}.  Known: {', '.join(known)}; one of your own is found with --plugin-dir "
                "DIR, as pkg.module:Name or as path/file.py:Name",
                key=f"{KEY}.priority_fn",
                given=r.priority_fn,
            )
        if (model := REGISTRY.get("priority", r.priority_fn).args) is not None:
            validate(model, args, what=f'priority function "{r.priority_fn}"', key=f"{KEY}.priority_fn_args")
        elif args:
            raise ConfigError(
                f"priority function {r.priority_fn!r} takes no arguments", key=f"{KEY}.priority_fn_args", given=args
            )
    except ConfigError as e:
        p.take(e)
