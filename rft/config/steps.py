"""Sizes and schedule: how many rows make a step, how many steps a run, when weights move, where experiences are kept.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from rft.buffer.settings import BufferSettings
from rft.config.plan import schedule
from rft.config.problems import Problems
from rft.config.schema.root import RunConfig
from rft.errors import ConfigError
from rft.explorer.settings import ExplorerSettings
from rft.sync.settings import SyncSettings
from rft.taskset.settings import TasksetSettings

NumBatches = Callable[[tuple[TasksetSettings, ...], int, int], int]
"""(training tasksets, batch_size, epochs) → whole explore steps; opens the tasksets."""


def batch(config: RunConfig, train: tuple[TasksetSettings, ...], p: Problems) -> tuple[int | None, int | None]:
    """(groups, rows) of a train step; one of them is None."""
    b = config.buffer
    runs = {t.num_runs for t in train} or {1}
    if runs == {1} and config.algorithm.algorithm_type in ("grpo", "dr_grpo"):
        p.warn("algorithm.repeat_times is 1: a group of one has no advantage and nothing is learnt; use 8, for example")
    elif 1 in runs:
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
    if batches is None and t.total_steps is not None:
        batches = -(-t.total_steps * size // rows)
        p.derive("buffer.total_steps", batches, "what trainer.total_steps needs")
    if b.total_steps is None and (b.total_epochs or batches is None) and num_batches is not None and train and not p.errors:
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
        if b.total_steps is not None and t.total_steps > steps:
            p.warn(
                f"trainer.total_steps {t.total_steps} is never reached: buffer.total_steps {b.total_steps} gives {steps} train steps"
            )
        steps = min(steps, t.total_steps)
        if b.total_steps is not None and batches is not None:
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
    p: Problems,
) -> ExplorerSettings:
    e, k = config.explorer, config.synchronizer.sync_interval
    interval = -(-e.eval_interval // k) * k
    if interval != e.eval_interval:
        p.derive("explorer.eval_interval", interval, f"next multiple of synchronizer.sync_interval {k}")
    if not evals:
        p.note("no eval_tasksets: nothing is evaluated")
    return ExplorerSettings(
        tasksets=train,
        eval_tasksets=evals,
        batch_size=config.buffer.batch_size,
        total_batches=batches,
        total_epochs=config.buffer.total_epochs or 1,
        seed=config.seed,
        max_timeout_s=e.max_timeout,
        max_retry_times=e.max_retry_times,
        max_refill=config.buffer.max_refill,
        on_short_batch=config.buffer.on_short_batch,
        eval_interval=interval if evals else 0,
        eval_on_startup=e.eval_on_startup and bool(evals),
        eval_at_end=e.eval_at_end and bool(evals),
        max_concurrent_runs=e.max_concurrent_runs,
        breaker=e.max_failed_groups,
        deterministic=config.deterministic,
        plugin_dirs=plugin_dirs,
    )


def sync(config: RunConfig, engine_dtype: str, train: tuple[TasksetSettings, ...], p: Problems) -> SyncSettings:
    s, b = config.synchronizer, config.buffer
    rows = b.batch_size * min((t.num_runs for t in train), default=1)
    uneven = b.train_batch_size not in (None, 0, rows)
    settings = SyncSettings(
        method=s.sync_method,
        style=s.sync_style,
        interval=s.sync_interval,
        offset=s.sync_offset,
        max_staleness=s.max_staleness,
        timeout_s=s.sync_timeout,
        kv_cache=s.kv_cache,
        engine_dtype=engine_dtype,
        batch_units=rows if uneven else 1,
        step_units=b.train_batch_size or 1 if uneven else 1,
    )
    try:
        schedule(settings)
    except ConfigError as e:
        p.take(e)
    if config.deterministic and s.sync_offset:
        p.error("synchronizer.sync_offset", "must be 0 with deterministic: true", given=s.sync_offset)
    nodes = config.cluster.node_num
    if s.sync_method == "memory" and nodes > 1:
        p.error(
            "synchronizer.sync_method", f"memory works inside one node, and node_num is {nodes}; use checkpoint", given="memory"
        )
    return settings


def buffer(config: RunConfig, run_dir: Path, p: Problems) -> BufferSettings:
    b = config.buffer.trainer_input.experience_buffer
    url = path = None
    if b.capacity < config.buffer.batch_size:
        p.error(
            "buffer.trainer_input.experience_buffer.capacity",
            f"is {b.capacity} groups, too few for a step of buffer.batch_size {config.buffer.batch_size}; raise it or lower that",
            given=b.capacity,
        )
    if b.storage_type == "sql":
        url = b.path
        if url is not None:
            url = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)
            url = url if "://" in url else f"sqlite:///{Path(url).expanduser().absolute()}"
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
        ledger_url=url,
        storage_type=b.storage_type,
        storage_path=path,
        durability=b.durability,
        capacity=b.capacity,
        resume_rows=config.buffer.resume_rows,
        on_short_batch=config.buffer.on_short_batch,
    )
