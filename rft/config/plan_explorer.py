"""The exploring loop, its servers for observers, the operators and the buffer behind it, and where
measurements go: part of `resolve`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.algorithm.catalog import validate
from rft.algorithm.settings import AlgorithmSettings
from rft.buffer.priority import DecayLimitRandomizationArgs
from rft.buffer.settings import (
    ROLLOUT_MODEL,
    STORAGES,
    UNLIMITED,
    BufferSettings,
    OperatorSettings,
    PipelineSettings,
    ReplaySettings,
)
from rft.config import plan_algorithm
from rft.config.context import Context, Problems, filled
from rft.config.plan import Tasksets
from rft.config.plan_engines import auxiliary_names
from rft.errors import PluginError, nearest
from rft.explorer.settings import ApiSettings, ExplorerSettings
from rft.monitor.settings import TRACKERS, MonitorConfig
from rft.plugins import REGISTRY
from rft.schema.base import belongs
from rft.sync.settings import FullyAsyncSync

_BUFFER = "buffer.trainer_input.experience_buffer"
_REPLAY = f"{_BUFFER}.replay_buffer"
_PIPELINE = "data_processor.experience_pipeline"


def explorer(
    ctx: Context,
    train: Tasksets,
    evals: Tasksets,
    batches: int | None,
    algorithm: AlgorithmSettings,
) -> ExplorerSettings:
    e = ctx.config.explorer
    sync = ctx.config.synchronizer
    k = sync.sync_interval
    style = sync.sync_style
    quota = isinstance(sync, FullyAsyncSync) and sync.staleness_threshold is not None
    if style != "fully_async" and e.is_changed("max_inflight_batches"):
        text = belongs("sync_style fully_async", "sync_style", style)
        ctx.error("explorer.max_inflight_batches", text)
    interval = -(-e.eval_interval // k) * k
    if interval != e.eval_interval:
        ctx.derive(
            "explorer.eval_interval", interval, f"next multiple of synchronizer.sync_interval {k}"
        )
    _rules(ctx, evals)
    return filled(
        ExplorerSettings,
        ctx.config,
        ctx.config.buffer,
        e,
        tasksets=train,
        eval_tasksets=evals,
        total_batches=batches,
        total_epochs=ctx.config.buffer.total_epochs or 1,
        max_timeout_s=e.max_timeout,
        max_group_timeout_s=e.max_group_timeout,
        whole_groups=e.group_policy == "drop",
        stop_hopeless=e.stop_hopeless_groups and not ctx.config.deterministic,
        timeout_ratio=e.dynamic_timeout.ratio if e.dynamic_timeout.enable else None,
        timeout_warmup=e.dynamic_timeout.warmup_min_steps,
        over_rollout=e.over_rollout.ratio,
        wait_after_s=e.over_rollout.wait_after_min,
        keep_partial=e.over_rollout.return_partial_tasks,
        baseline=plan_algorithm.reads_baseline(algorithm),
        teacher_top=plan_algorithm.teacher_top(algorithm),
        reproducible=not plan_algorithm.takes_any_sampling(algorithm),
        sampled=not plan_algorithm.takes_any_sampling(replace(algorithm, rollout_correction=None)),
        by_group=quota or not sync.partial_rollout,
        max_inflight=e.max_inflight_batches if style == "fully_async" else None,
        bench_latest=e.bench_on_latest_checkpoint,
        report_interval_s=e.runner_state_report_interval,
        eval_interval=interval if evals else 0,
        eval_on_startup=e.eval_on_startup and bool(evals),
        eval_at_end=e.eval_at_end and bool(evals),
        breaker=e.max_failed_groups,
        apis=_apis(ctx),
        eval_samples=None
        if ctx.config.monitor.eval_dump_dir
        else ctx.config.monitor.log_eval_samples,
        percentiles=ctx.config.monitor.detailed_stats,
        plugin_dirs=ctx.plugin_dirs,
    )


def _rules(ctx: Context, evals: Tasksets) -> None:
    """What the keys of the section need of each other."""
    e = ctx.config.explorer
    if e.over_rollout.ratio > 0 and ctx.config.buffer.on_short_batch == "stop":
        ctx.error(
            "explorer.over_rollout.ratio",
            "leaves steps short of groups, and with buffer.on_short_batch: stop that ends the run; "
            "write train or carry there, or 0 here",
        )
    for name, on in (
        ("over_rollout.ratio", e.over_rollout.ratio > 0),
        ("dynamic_timeout.enable", e.dynamic_timeout.enable),
        ("eval_in_background", e.eval_in_background),
    ):
        if on and ctx.config.deterministic:
            ctx.error(
                f"explorer.{name}",
                "depends on how long runs take; leave it out, or deterministic: true",
            )
    if not evals and ctx.config.mode == "bench":
        ctx.error(
            "buffer.explorer_input.eval_tasksets",
            "is empty; mode bench plays these tasks under every checkpoint",
        )
    elif not evals and ctx.config.mode not in ("train", "serve"):
        ctx.note("no eval_tasksets: nothing is evaluated")


def _apis(ctx: Context) -> tuple[ApiSettings, ...]:
    """The servers for observers: of the policy, then of the auxiliary models."""
    e = ctx.config.explorer
    served = (
        (None, e.rollout_model),
        *zip(auxiliary_names(ctx.config), e.auxiliary_models, strict=True),
    )
    return tuple(
        ApiSettings(model=name, port=m.base_port, key=m.api_key)
        for name, m in served
        if m.enable_openai_api
    )


def monitor(ctx: Context) -> MonitorConfig:
    """Return the section with the paths of tracker plugins and of the folder for answers."""
    m = ctx.config.monitor
    args = m.monitor_args or {}
    if set(args) <= set(m.monitor_type):
        for tracker in [t for t, value in args.items() if not isinstance(value, dict | None)]:
            ctx.error(
                f"monitor.monitor_args.{tracker}",
                f"must be a mapping of arguments: {{{tracker}: {{...}}}}",
                args[tracker],
            )
        args = {_tracker(ctx, tracker): value for tracker, value in args.items()}
    elif len(m.monitor_type) != 1:
        ctx.error(
            "monitor.monitor_args",
            f"has the keys {', '.join(map(str, args))}; with the trackers "
            f"{', '.join(m.monitor_type) or 'none'} it needs one mapping per tracker",
        )
    for tracker in m.monitor_type:
        _check_tracker(ctx, tracker)
    folder = m.eval_dump_dir
    return m.model_copy(
        update={
            "monitor_type": tuple(_tracker(ctx, tracker) for tracker in m.monitor_type),
            "monitor_args": args,
            "eval_dump_dir": str(Path(folder).expanduser().absolute()) if folder else None,
        }
    )


def _check_tracker(ctx: Context, tracker: str) -> None:
    if tracker in TRACKERS or not ctx.can_check_plugin("monitor", tracker):
        return
    try:
        REGISTRY.get("monitor", _tracker(ctx, tracker))
    except PluginError as e:
        text = (
            f"given {tracker!r}; must be one of {', '.join(TRACKERS)}, "
            f"or your own tracker: pkg.module:Name, path/file.py:Name.{nearest(tracker, TRACKERS)}"
        )
        ctx.error("monitor.monitor_type", e.message if ":" in tracker else text, given=tracker)


def _tracker(ctx: Context, name: str) -> str:
    return ctx.find(name) if ":" in name else name


def buffer(ctx: Context) -> BufferSettings:
    b = ctx.config.buffer.trainer_input.experience_buffer
    url = path = None
    is_plugin_name = b.storage_type not in STORAGES and ":" not in b.storage_type
    if (
        is_plugin_name
        and ctx.can_check_plugin("storage", b.storage_type)
        and b.storage_type not in REGISTRY.names("storage")
    ):
        text = (
            f"unknown storage {b.storage_type!r}.{nearest(b.storage_type, STORAGES)}  "
            f"Known: {', '.join(STORAGES)}, or your own: pkg.module:Name, path/file.py:Name."
        )
        ctx.error(f"{_BUFFER}.storage_type", text)
    if b.capacity < ctx.config.buffer.batch_size:
        ctx.error(
            f"{_BUFFER}.capacity",
            f"is {b.capacity} groups, too few for a step of buffer.batch_size "
            f"{ctx.config.buffer.batch_size}; raise it or lower that",
        )
    # the segments of the others are in the run folder
    if b.path is not None and ("://" in b.path or b.storage_type == "sql"):
        url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", b.path)
        url = url if "://" in url else f"sqlite:///{Path(url).expanduser().absolute()}"
        if (scheme := url.partition("://")[0]) not in ("sqlite", "postgresql+psycopg"):
            ctx.error(
                f"{_BUFFER}.path",
                f"names a database of kind {scheme}; write "
                f"postgresql://USER:PASSWORD@HOST/DATABASE, a file, or leave it out",
            )
    else:
        in_memory = b.path is not None and b.path.lower() == "none"
        path = (
            None
            if b.path is None
            else "none"
            if in_memory
            else str(Path(b.path).expanduser().absolute())
        )
        if in_memory and b.storage_type == "file":
            ctx.error(f"{_BUFFER}.path", "none is for storage_type queue; leave it out")
        elif in_memory:
            ctx.warn(
                "the experience buffer is kept in memory only (path: none): a crash loses the "
                "experiences that wait in it"
            )
    return filled(
        BufferSettings,
        b,
        ctx.config.buffer,
        folder=ctx.run_dir / "buffer",
        run=ctx.run_dir.relative_to(
            Path(ctx.config.checkpoint_root_dir).expanduser().absolute()
        ).as_posix(),
        ledger_url=url,
        max_retry_interval_s=b.max_retry_interval,
        storage_path=path,
        resume_rows=ctx.config.buffer.resume_rows or "orphan",
    )


def replayed(ctx: Context, settings: BufferSettings) -> BufferSettings:
    """`settings` with what `replay_buffer` asks for."""
    r = ctx.config.buffer.trainer_input.experience_buffer.replay_buffer
    if not r.enable:
        return settings
    if ctx.config.deterministic:
        ctx.error(
            f"{_REPLAY}.enable",
            "what is read depends on when it came; leave it out with deterministic: true",
        )
    # the default is linear_decay's own
    args = dict(r.priority_fn_args) if "priority_fn_args" in r.model_fields_set else {}
    _check_args(ctx, args)
    return replace(
        settings,
        max_uses=_max_uses(ctx),
        replay=ReplaySettings(
            priority_fn=r.priority_fn,
            priority_fn_args=args,
            cooldown_s=r.reuse_cooldown_time,
            seed=ctx.config.seed,
        ),
    )


def _max_uses(ctx: Context) -> int:
    r = ctx.config.buffer.trainer_input.experience_buffer.replay_buffer
    if r.reuse_cooldown_time is None:
        if r.max_uses not in (None, 1):
            ctx.error(
                f"{_REPLAY}.max_uses",
                "is more than 1, and without reuse_cooldown_time an experience is used once",
            )
        return 1
    default = DecayLimitRandomizationArgs.model_fields["use_count_limit"].default
    default_limit = default if r.priority_fn == "decay_limit_randomization" else 0
    limit = r.priority_fn_args.get("use_count_limit", default_limit)
    limit = limit if isinstance(limit, int) and limit > 0 else UNLIMITED
    if r.max_uses is None:
        ctx.derive(
            f"{_REPLAY}.max_uses",
            "no limit" if limit == UNLIMITED else limit,
            "use_count_limit, else no limit",
        )
    elif r.max_uses > limit:
        ctx.warn(
            f"{_REPLAY}.max_uses {r.max_uses} is never reached: use_count_limit of {r.priority_fn} "
            f"is {limit}"
        )
    return min(r.max_uses or UNLIMITED, limit)


def _check_args(ctx: Context, args: dict[str, Any]) -> None:
    r = ctx.config.buffer.trainer_input.experience_buffer.replay_buffer
    if not ctx.can_check_plugin("priority", r.priority_fn):
        return
    with ctx.collect_errors(f"{_REPLAY}.priority_fn"):
        if (model := REGISTRY.get("priority", r.priority_fn).args) is not None:
            validate(
                model,
                args,
                what=f'priority function "{r.priority_fn}"',
                key=f"{_REPLAY}.priority_fn_args",
            )
        elif args:
            ctx.error(
                f"{_REPLAY}.priority_fn_args",
                f"priority function {r.priority_fn!r} takes no arguments",
            )


def pipeline(
    ctx: Context, algorithm: AlgorithmSettings, batch_rows: int | None
) -> PipelineSettings:
    """`batch_rows`: rows of a train step, where it counts rows.  `find` makes a path of what is
    written, path/file.py:Name too.
    """
    section = ctx.config.data_processor.experience_pipeline
    operators = tuple(
        OperatorSettings(
            name=ctx.find(o.name) if ":" in o.name else o.name,
            args=dict(o.args),
            key=f"{_PIPELINE}.operators[{i}]",
        )
        for i, o in enumerate(section.operators)
    )
    threshold = algorithm.advantage_fn_args.get("std_threshold")
    # stands for an operator, the last
    if algorithm.advantage_fn in ("grpo", "step_wise_grpo") and threshold is not None:
        key = "algorithm.advantage_fn_args.std_threshold"
        args = {"threshold": threshold} | (
            {} if algorithm.advantage_fn == "grpo" else {"of_runs": True}
        )
        operators += (OperatorSettings(name="reward_std_filter", args=args, key=key),)
    if operators:
        _check(
            operators, (ROLLOUT_MODEL, *auxiliary_names(ctx.config)), ctx.facts.plugins_loaded, ctx
        )
    if operators and batch_rows is not None:
        ctx.warn(
            f"buffer.train_batch_size {batch_rows} counts rows, and a row that an operator leaves "
            f"out is missing then (see "
            "on_short_batch).  Leave it out to train whole groups"
        )
    return PipelineSettings(operators=operators, input_path=_input_path(ctx))


def _check(
    operators: Sequence[OperatorSettings], engines: Sequence[str], plugins_loaded: bool, p: Problems
) -> None:
    """Every fault of the list, not only the first; the order where each operator is right by
    itself.

    Names that are not known yet wait until the plugins are loaded.
    """
    from rft.buffer.operators.experience_pipeline import REFUSED, build

    REGISTRY.scan_package("rft.buffer.operators")
    shipped = {*REGISTRY.names("operator"), *REFUSED}
    known_operators = [o for o in operators if plugins_loaded or o.name in shipped]
    before = len(p.errors)
    for operator in known_operators:
        with p.collect_errors():
            build([operator], engines)
    if len(p.errors) == before:
        with p.collect_errors():
            build(known_operators, engines)


def _input_path(ctx: Context) -> Path | None:
    section = ctx.config.data_processor.experience_pipeline
    key = f"{_PIPELINE}.input_save_path"
    if section.input_save_path is not None and "://" in section.input_save_path:
        ctx.error(
            key,
            "a database is not written; name a .jsonl file or a folder.  What the buffer keeps of "
            "each experience can be asked with SQL: "
            "rft buffer query",
        )
        return None
    if not section.save_input:
        if section.input_save_path is not None:
            ctx.note(f"{key} has no effect: save_input is false")
        return None
    if section.input_save_path is None:
        path = ctx.run_dir / "buffer" / "explorer_output.jsonl"
        ctx.derive(key, str(path), "in the run folder")
        return path
    path = Path(section.input_save_path).expanduser().absolute()
    return path if path.suffix in (".jsonl", ".json") else path / "explorer_output.jsonl"
