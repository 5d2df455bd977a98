"""Sizes and schedule: how many rows make a step, how many steps a run, when weights move, where experiences are kept.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft.buffer.settings import BufferSettings
from rft.config.plan import Facts, schedule
from rft.config.problems import Problems
from rft.config.reading import max_staleness
from rft.config.schema.base import Section
from rft.config.schema.explorer import ServedModelConfig
from rft.config.schema.root import RunConfig
from rft.config.served import auxiliary_names
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, PluginError
from rft.explorer.settings import ApiSettings, ExplorerSettings
from rft.plugins import REGISTRY
from rft.sync.settings import SyncSettings
from rft.taskset.settings import TasksetSettings

NumBatches = Callable[[tuple[TasksetSettings, ...], int, int], int]
"""(training tasksets, batch_size, epochs) → whole explore steps; opens the tasksets."""


_FROM_ENGINE = {  # key of explorer.rollout_model → the same of model
    **{
        name: name
        for name in (
            "max_model_len max_prompt_tokens max_response_tokens min_response_tokens enable_prompt_truncation repetition_penalty "
            "enable_thinking trust_remote_code"
        ).split()
    },
    "chat_template": "custom_chat_template",
}
_COROUTINES = "runs are coroutines of one process; explorer.max_concurrent_runs bounds them"
_NO_EFFECT = {
    "ignore_validator_suggestions": "what is only a suggestion never stops a run",
    "explorer.runner_per_model": _COROUTINES,
    "explorer.runner_num": _COROUTINES,
    "explorer.runner_prepare_concurrency": _COROUTINES,
    "explorer.runner_prepare_max_retries": _COROUTINES,
    "explorer.max_repeat_times_per_runner": _COROUTINES,
    "explorer.concurrent_mode": _COROUTINES,
    "explorer.rollout_model.enable_history": "every model call of a run is kept",
    "explorer.rollout_model.use_v1": "vLLM has no other engine",
    "synchronizer.group_name": "the name is chosen by itself",
    "synchronizer.wait_for_checkpoint": "a version is used when it is complete",
}


def one_place(config: RunConfig, p: Problems) -> RunConfig:
    """`config` with what may be written in two places put where the rest of `resolve` reads it; and what has no effect, said."""
    for key, why in _NO_EFFECT.items():
        *above, name = key.split(".")
        place: Any = config
        for step in above:
            place = getattr(place, step)
        if (value := getattr(place, name)) != type(place).model_fields[name].default:
            p.note(f"{key} {str(value).lower() if isinstance(value, bool) else value} has no effect: {why}")
    moved: dict[str, Any] = {}
    for ours, theirs in _FROM_ENGINE.items():
        written, there = getattr(config.explorer.rollout_model, ours), getattr(config.model, theirs)
        if written is None or written == there:
            continue
        if there != type(config.model).model_fields[theirs].default:
            p.error(
                f"explorer.rollout_model.{ours}",
                f"is {written!r}, but model.{theirs} is {there!r}; both mean the same, write one of them",
                given=written,
            )
            continue
        moved[theirs] = written
        p.derive(f"model.{theirs}", written, f"explorer.rollout_model.{ours}")
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=moved),
            "synchronizer": config.synchronizer.model_copy(
                update={"sync_interval": _interval(config, p), "max_staleness": max_staleness(config, p)}
            ),
        }
    )


def _interval(config: RunConfig, p: Problems) -> int:
    """Train steps between two versions; each side may write its own name for it."""
    s = config.synchronizer
    explorer, trainer = s.explorer_sync_interval or s.sync_interval, s.trainer_sync_interval or s.sync_interval
    if s.sync_style != "fixed":
        mine, other = ("explorer", "trainer") if s.sync_style == "explorer_driven" else ("trainer", "explorer")
        own = explorer if mine == "explorer" else trainer
        if own != s.sync_interval:
            p.derive("synchronizer.sync_interval", own, f"{mine}_sync_interval")
        if getattr(s, f"{other}_sync_interval") not in (None, own):
            p.warn(
                f"synchronizer.{other}_sync_interval has no effect: with sync_style {s.sync_style} the {mine}'s interval counts"
            )
        return own
    if explorer != trainer:
        p.error(
            "synchronizer.explorer_sync_interval" if s.explorer_sync_interval else "synchronizer.trainer_sync_interval",
            f"with sync_style fixed both sides have the same interval, here the explorer has {explorer} and the trainer {trainer}; "
            "write synchronizer.sync_interval alone",
            given=s.explorer_sync_interval or s.trainer_sync_interval,
        )
    elif trainer != s.sync_interval:
        p.derive("synchronizer.sync_interval", trainer, "explorer_sync_interval and trainer_sync_interval")
    return trainer


def batch(config: RunConfig, train: tuple[TasksetSettings, ...], compares: bool, p: Problems) -> tuple[int | None, int | None]:
    """(groups, rows) of a train step; one of them is None.  `compares`: advantages come from the other runs of a task."""
    b = config.buffer
    runs = {t.num_runs for t in train} or {1}
    if runs == {1} and compares:
        p.warn("algorithm.repeat_times is 1: a group of one has no advantage and nothing is learnt; use 8, for example")
    elif 1 in runs and compares:
        p.warn("a taskset has groups of one, which have no advantage; give it repeat_times of 2 or more")
    if not b.train_batch_size:
        p.derive("buffer.train_batch_size", f"{b.batch_size} groups", "all rows of batch_size accepted groups")
        return b.batch_size, None
    low, high = b.batch_size * min(runs), b.batch_size * max(runs)
    if low == high == b.train_batch_size:
        p.note(f"buffer.train_batch_size {high} is batch_size x repeat_times: a step trains whole groups, also when a run failed")
        return b.batch_size, None
    p.warn(
        f"buffer.train_batch_size {b.train_batch_size} is not batch_size x runs ({low if low == high else f'{low} to {high}'}): groups are "
        "split over train steps, and a failed run leaves its row missing (see on_short_batch).  Leave it out to train whole groups"
    )
    return None, b.train_batch_size


def steps(
    config: RunConfig, train: tuple[TasksetSettings, ...], num_batches: NumBatches | None, p: Problems
) -> tuple[int | None, int | None]:
    """(explore steps, train steps); None where the tasksets would have to be opened."""
    b, t = config.buffer, config.trainer
    rows = b.batch_size * min((s.num_runs for s in train), default=1)
    size = b.train_batch_size or rows  # rows of a train step
    batches, epochs = b.total_steps, b.total_epochs or 1
    if b.total_tasks is not None:
        wanted = -(-b.total_tasks // b.batch_size)
        if batches not in (None, wanted):
            p.error(
                "buffer.total_tasks",
                f"is {b.total_tasks}, {wanted} steps of batch_size {b.batch_size}, but total_steps is {batches}; write one of them",
                given=b.total_tasks,
            )
        elif batches is None:
            p.derive("buffer.total_steps", wanted, f"total_tasks {b.total_tasks} in batches of {b.batch_size}")
        batches = wanted
    fixed = batches is not None  # by the explorer's side
    if batches is None and t.total_steps is not None:
        batches = -(-t.total_steps * size // rows)
        p.derive("buffer.total_steps", batches, "what trainer.total_steps needs")
    if not fixed and (b.total_epochs or batches is None) and num_batches is not None and train and not p.errors:
        try:
            whole = num_batches(train, b.batch_size, epochs)
        except ConfigError as e:
            p.take(e)
            whole = 0
        if batches is None:
            p.derive("buffer.total_steps", whole, f"{epochs} epoch(s) of the training tasksets in batches of {b.batch_size}")
        elif whole < batches:
            p.warn(
                f"trainer.total_steps {t.total_steps} is never reached: buffer.total_epochs {epochs} gives {whole} explore steps"
            )
        batches = whole if batches is None else min(batches, whole)
    steps = None if batches is None else batches * rows // size
    if t.total_steps is not None and steps is not None:
        if fixed and t.total_steps > steps:
            p.warn(
                f"trainer.total_steps {t.total_steps} is never reached: buffer.total_steps {batches} gives {steps} train steps"
            )
        steps = min(steps, t.total_steps)
        if fixed and batches is not None:
            batches = min(batches, -(-steps * size // rows))
    elif steps is not None:
        p.derive("trainer.total_steps", steps, "one per explore step" if size == rows else f"{rows} / {size} per explore step")
    return batches, steps


def explorer(
    config: RunConfig,
    train: tuple[TasksetSettings, ...],
    evals: tuple[TasksetSettings, ...],
    batches: int | None,
    plugin_dirs: tuple[str, ...],
    baseline: bool,
    p: Problems,
) -> ExplorerSettings:
    """`baseline`: the algorithm reads the reward of a greedy run of every task."""
    e, k = config.explorer, config.synchronizer.sync_interval
    style, quota = config.synchronizer.sync_style, config.synchronizer.staleness_threshold is not None
    quota = quota and style == "fully_async"
    if style != "fully_async":
        _unread(e, "max_inflight_batches", f"synchronizer.sync_style is {style}", p)
    interval = -(-e.eval_interval // k) * k
    if interval != e.eval_interval:
        p.derive("explorer.eval_interval", interval, f"next multiple of synchronizer.sync_interval {k}")
    if e.over_rollout.ratio > 0 and config.buffer.on_short_batch == "stop":
        p.error(
            "explorer.over_rollout.ratio",
            "leaves steps short of groups, and with buffer.on_short_batch: stop that ends the run; write train or carry there, or 0 here",
            given=e.over_rollout.ratio,
        )
    for name in ("over_rollout.wait_after_min", "over_rollout.return_partial_tasks") if not e.over_rollout.ratio else ():
        _unread(e.over_rollout, name, "explorer.over_rollout.ratio is 0", p)
    for name in ("dynamic_timeout.warmup_min_steps", "dynamic_timeout.ratio") if not e.dynamic_timeout.enable else ():
        _unread(e.dynamic_timeout, name, "explorer.dynamic_timeout.enable is false", p)
    for name, on in (
        ("over_rollout.ratio", e.over_rollout.ratio > 0),
        ("dynamic_timeout.enable", e.dynamic_timeout.enable),
        ("eval_in_background", e.eval_in_background),
    ):
        if on and config.deterministic:
            p.error(f"explorer.{name}", "depends on how long runs take; leave it out, or deterministic: true", given=True)
    if not evals and config.mode == "bench":
        p.error("buffer.explorer_input.eval_tasksets", "is empty; mode bench plays these tasks under every checkpoint")
    elif not evals and config.mode != "train":
        p.note("no eval_tasksets: nothing is evaluated")
    return ExplorerSettings(
        tasksets=train,
        eval_tasksets=evals,
        name=e.name,
        batch_size=config.buffer.batch_size,
        total_batches=batches,
        total_epochs=config.buffer.total_epochs or 1,
        seed=config.seed,
        max_timeout_s=e.max_timeout,
        max_retry_times=e.max_retry_times,
        max_group_timeout_s=e.max_group_timeout,
        whole_groups=e.group_policy == "drop",
        stop_hopeless=e.stop_hopeless_groups and not config.deterministic,
        timeout_ratio=e.dynamic_timeout.ratio if e.dynamic_timeout.enable else None,
        timeout_warmup=e.dynamic_timeout.warmup_min_steps,
        over_rollout=e.over_rollout.ratio,
        wait_after_s=e.over_rollout.wait_after_min,
        keep_partial=e.over_rollout.return_partial_tasks,
        baseline=baseline,
        by_group=quota or not config.synchronizer.partial_rollout,
        max_inflight=e.max_inflight_batches if style == "fully_async" else None,
        eval_in_background=e.eval_in_background,
        bench_latest=e.bench_on_latest_checkpoint,
        report_interval_s=e.runner_state_report_interval,
        max_refill=config.buffer.max_refill,
        on_short_batch=config.buffer.on_short_batch,
        eval_interval=interval if evals else 0,
        eval_on_startup=e.eval_on_startup and bool(evals),
        eval_at_end=e.eval_at_end and bool(evals),
        max_concurrent_runs=e.max_concurrent_runs,
        breaker=e.max_failed_groups,
        deterministic=config.deterministic,
        apis=_apis(config, p),
        plugin_dirs=plugin_dirs,
        env_vars=dict(e.env_vars),
    )


def _apis(config: RunConfig, p: Problems) -> tuple[ApiSettings, ...]:
    """The servers for onlookers: of the policy, then of the auxiliary models."""
    e = config.explorer
    served: list[tuple[str, str | None, ServedModelConfig]] = [("rollout_model", None, e.rollout_model)]
    named = zip(auxiliary_names(config), e.auxiliary_models, strict=True)
    served += [(f"auxiliary_models[{i}]", name, model) for i, (name, model) in enumerate(named)]
    for where, _, model in served:
        for name in ("base_port", "api_key") if not model.enable_openai_api else ():
            if getattr(model, name) is not None:
                p.warn(f"explorer.{where}.{name} has no effect: enable_openai_api is false")
    return tuple(ApiSettings(model=name, port=m.base_port, key=m.api_key) for _, name, m in served if m.enable_openai_api)


def _unread(section: Section, name: str, why: str, p: Problems, above: str = "explorer") -> None:
    field = name.rpartition(".")[2]
    if getattr(section, field) != type(section).model_fields[field].default:
        p.warn(f"{above}.{name} has no effect: {why}")


def sync(
    config: RunConfig,
    facts: Facts,
    engines: tuple[EngineSettings, ...],
    trainer_device: str,
    train: tuple[TasksetSettings, ...],
    find: Callable[[str], str],
    p: Problems,
) -> SyncSettings:
    s, b = config.synchronizer, config.buffer
    rows = b.batch_size * min((t.num_runs for t in train), default=1)
    uneven = b.train_batch_size not in (None, 0, rows)
    _style(config, p)
    gpus = trainer_device == "cuda" and all(e.device == "cuda" for e in engines)
    if s.sync_method != "nccl":
        for name in ("bucketed_broadcast", "overlap_broadcast_and_load", "bucket_size_mb"):
            _unread(s, name, f"sync_method is {s.sync_method}", p, "synchronizer")
    elif not s.bucketed_broadcast:
        _unread(s, "bucket_size_mb", "bucketed_broadcast is false", p, "synchronizer")
    settings = SyncSettings(
        method=_transport(find(s.sync_method), facts, p) if ":" in s.sync_method else s.sync_method,
        backend="nccl" if gpus else "gloo",
        bucket_bytes=s.bucket_size_mb << 20 if s.bucketed_broadcast else None,
        overlap=s.overlap_broadcast_and_load,
        workers=tuple(e.workers for e in engines),
        style=s.sync_style,
        interval=s.sync_interval,
        offset=s.sync_offset,
        max_staleness=s.max_staleness,
        timeout_s=s.sync_timeout,
        kv_cache=s.kv_cache,
        engine_dtype=engines[0].dtype,
        threshold=s.staleness_threshold if s.sync_style == "fully_async" else None,
        partial_rollout=s.partial_rollout,
        batch_units=rows if uneven else b.batch_size,
        step_units=b.train_batch_size or 1 if uneven else b.batch_size,
        group_units=rows // b.batch_size if uneven else 1,
    )
    try:
        if schedule(settings).staleness_bound is None:
            p.warn(
                f"sync_style {s.sync_style} without synchronizer.max_staleness: experiences may be of any age, as many as the buffer's "
                f"capacity lets wait; write max_staleness: {2 * s.sync_interval}, for example"
            )
    except ConfigError as e:
        p.take(e)
    if config.deterministic and s.sync_style != "fixed" and s.max_staleness != 0:
        p.error("synchronizer.sync_style", "must be fixed with deterministic: true, or max_staleness 0", given=s.sync_style)
    if config.deterministic and s.sync_offset:
        p.error("synchronizer.sync_offset", "must be 0 with deterministic: true", given=s.sync_offset)
    nodes = config.cluster.node_num
    if s.sync_method == "memory" and nodes > 1:
        p.error(
            "synchronizer.sync_method",
            f"memory works inside one node, and node_num is {nodes}; use nccl or checkpoint",
            given="memory",
        )
    return settings


def _transport(name: str, facts: Facts, p: Problems) -> str:
    """A transport of somebody's own, looked at once plugins may be imported."""
    key = "synchronizer.sync_method"
    if facts.plugins_loaded:
        try:
            found = REGISTRY.get("transport", name).obj
        except PluginError as e:
            p.error(key, e.message, given=name)
        else:
            if lacks := [m for m in ("stage", "fetch", "release", "close") if not callable(getattr(found, m, None))]:
                p.error(key, f"lacks {', '.join(lacks)}, see rft.sync.base.OwnTransport", given=name)
    return name


def _style(config: RunConfig, p: Problems) -> None:
    """Keys of one style in another, and batches that do not make up a window."""
    s = config.synchronizer
    if s.sync_style == "fully_async":
        if s.sync_interval % s.require_batches:
            p.error(
                "synchronizer.require_batches",
                f"{s.require_batches} must divide sync_interval {s.sync_interval}: weights move between two takes of the trainer",
                given=s.require_batches,
            )
    else:
        for name in ("require_batches", "staleness_threshold"):
            _unread(s, name, f"sync_style is {s.sync_style}", p, "synchronizer")
    if s.sync_style in ("trainer_driven", "fully_async"):
        _unread(s, "sync_offset", f"sync_style is {s.sync_style}", p, "synchronizer")


def buffer(config: RunConfig, run_dir: Path, p: Problems) -> BufferSettings:
    b = config.buffer.trainer_input.experience_buffer
    url = path = None
    if b.capacity < config.buffer.batch_size:
        p.error(
            "buffer.trainer_input.experience_buffer.capacity",
            f"is {b.capacity} groups, too few for a step of buffer.batch_size {config.buffer.batch_size}; raise it or lower that",
            given=b.capacity,
        )
    if b.path is not None and ("://" in b.path or b.storage_type == "sql"):  # the segments of the others are in the run folder
        url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", b.path)
        url = url if "://" in url else f"sqlite:///{Path(url).expanduser().absolute()}"
        if (scheme := url.partition("://")[0]) not in ("sqlite", "postgresql+psycopg"):
            p.error(
                "buffer.trainer_input.experience_buffer.path",
                f"names a database of kind {scheme}; write postgresql://USER:PASSWORD@HOST/DATABASE, a file, or leave it out",
                given=b.path,
            )
    else:
        path = b.path if b.path is None or b.path.lower() == "none" else str(Path(b.path).expanduser().absolute())
        if path is not None and path.lower() == "none":
            path = "none"
            if b.storage_type == "file":
                p.error(
                    "buffer.trainer_input.experience_buffer.path", "none is for storage_type queue; leave it out", given=b.path
                )
            else:
                p.warn("the experience buffer is kept in memory only (path: none): a crash loses the experiences that wait in it")
    return BufferSettings(
        name=b.name,
        folder=run_dir / "buffer",
        run=run_dir.relative_to(Path(config.checkpoint_root_dir).expanduser().absolute()).as_posix(),
        ledger_url=url,
        max_retry_times=b.max_retry_times,
        max_retry_interval_s=b.max_retry_interval,
        storage_type=b.storage_type,
        storage_path=path,
        durability=b.durability,
        capacity=b.capacity,
        capacity_bytes=b.capacity_bytes,
        on_damaged_payload=b.on_damaged_payload,
        resume_rows=config.buffer.resume_rows,
        on_short_batch=config.buffer.on_short_batch,
    )
