"""Sizes and schedule: how many rows make a step, how many steps a run, when weights move.  Part of
`resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rft.config import plan_serve
from rft.config.context import Context, filled
from rft.config.plan import Tasksets, schedule
from rft.config.roles import reads_data, samples
from rft.config.schema.explorer_section import InferenceModelConfig
from rft.config.schema.model_section import ModelConfig
from rft.config.schema.root import RunConfig
from rft.engine.settings import EngineSettings
from rft.plugins import REGISTRY
from rft.sync.settings import SyncSettings
from rft.taskset.settings import TasksetSettings
from rft.trainer.settings import LearnerSettings

NumBatches = Callable[[Tasksets, int, int], int]


_SAME_NAME = [
    name for name in InferenceModelConfig.model_fields if name in ModelConfig.model_fields
]
_FROM_ENGINE = {**{name: name for name in _SAME_NAME}, "chat_template": "custom_chat_template"}
"""Key of explorer.rollout_model → the same of model."""


def one_place(ctx: Context) -> RunConfig:
    """`config` with what may be written in two places put where the rest of `resolve` reads it."""
    moved: dict[str, Any] = {}
    for ours, theirs in _FROM_ENGINE.items():
        written = getattr(ctx.config.explorer.rollout_model, ours)
        there = getattr(ctx.config.model, theirs)
        if written is None or written == there:
            continue
        if there != type(ctx.config.model).model_fields[theirs].default:
            ctx.error(
                f"explorer.rollout_model.{ours}",
                f"is {written!r}, but model.{theirs} is {there!r}; both mean the same, write one "
                f"of them",
            )
            continue
        moved[theirs] = written
        ctx.derive(f"model.{theirs}", written, f"explorer.rollout_model.{ours}")
    return ctx.config.model_copy(
        update={
            "model": ctx.config.model.model_copy(update=moved),
            "synchronizer": ctx.config.synchronizer.model_copy(
                update={"sync_interval": _interval(ctx), "max_staleness": max_staleness(ctx)}
            ),
        }
    )


def _interval(ctx: Context) -> int:
    """Train steps between two versions; each side may write its own name for it."""
    s = ctx.config.synchronizer
    explorer = s.explorer_sync_interval or s.sync_interval
    trainer = s.trainer_sync_interval or s.sync_interval
    if s.sync_style != "fixed":
        mine, other = (
            ("explorer", "trainer")
            if s.sync_style == "explorer_driven"
            else ("trainer", "explorer")
        )
        own = explorer if mine == "explorer" else trainer
        if own != s.sync_interval:
            ctx.derive("synchronizer.sync_interval", own, f"{mine}_sync_interval")
        if getattr(s, f"{other}_sync_interval") not in (None, own):
            ctx.warn(
                f"synchronizer.{other}_sync_interval has no effect: in sync_style {s.sync_style} "
                f"the {mine}'s counts"
            )
        return own
    if explorer != trainer:
        ctx.error(
            "synchronizer.explorer_sync_interval"
            if s.explorer_sync_interval
            else "synchronizer.trainer_sync_interval",
            f"with sync_style fixed both sides have the same interval, here the explorer has "
            f"{explorer} and the trainer {trainer}; "
            "write synchronizer.sync_interval alone",
        )
    elif trainer != s.sync_interval:
        ctx.derive(
            "synchronizer.sync_interval",
            trainer,
            "explorer_sync_interval and trainer_sync_interval",
        )
    return trainer


def max_staleness(ctx: Context) -> int | None:
    """`synchronizer.max_staleness`, which `sample_strategy: staleness_control` may give too."""
    written = ctx.config.synchronizer.max_staleness
    if ctx.config.algorithm.sample_strategy != "staleness_control":
        return written
    given: Any = ctx.config.algorithm.sample_strategy_args.get("max_staleness")
    if given is None or not isinstance(given, int | float) or math.isinf(given):
        return written
    if written not in (None, given):
        ctx.error(
            "algorithm.sample_strategy_args.max_staleness",
            f"is {given}, but synchronizer.max_staleness is {written}; both mean the same, write "
            f"one of them",
        )
        return written
    if written is None:
        ctx.derive("synchronizer.max_staleness", given, "sample_strategy staleness_control")
    return int(given)


def elsewhere(ctx: Context, repeat_times: int) -> Tasksets:
    """What the process that trains knows of tasks that only the files of those that explore name:
    the size of a group.
    """
    if ctx.config.mode != "train" or reads_data(ctx.config):
        return ()
    if (
        ctx.config.trainer.total_steps is None
        and ctx.config.buffer.total_steps is None
        and ctx.config.buffer.total_tasks is None
    ):
        ctx.error(
            "trainer.total_steps",
            "is required where no taskset is named: only the processes of mode: explore know how "
            "many tasks there are.  Or name the "
            "same buffer.explorer_input here as there",
        )
    return (
        TasksetSettings(name="elsewhere", path="", workflow="", reward=None, num_runs=repeat_times),
    )


def batch(
    ctx: Context, train: Tasksets, compares: bool, whole: bool
) -> tuple[int | None, int | None]:
    """(groups, rows) of a train step; one of them is None.

    `compares`: advantages come from the other runs of a task; `whole`: from all rows of a group,
    which have to be in one step.
    """
    b = ctx.config.buffer
    runs = {t.num_runs for t in train} or {1}
    if runs == {1} and compares:
        ctx.warn(
            "algorithm.repeat_times is 1: a group of one has no advantage and nothing is learnt; "
            "use 8, for example"
        )
    elif 1 in runs and compares:
        ctx.warn(
            "a taskset has groups of one, which have no advantage; give it repeat_times of 2 or "
            "more"
        )
    if not b.train_batch_size:
        ctx.derive(
            "buffer.train_batch_size",
            f"{b.batch_size} groups",
            "all rows of batch_size accepted groups",
        )
        return b.batch_size, None
    low = b.batch_size * min(runs)
    high = b.batch_size * max(runs)
    if low == high == b.train_batch_size:
        ctx.note(
            f"buffer.train_batch_size {high} is batch_size x repeat_times: a step trains whole "
            f"groups, also when a run failed"
        )
        return b.batch_size, None
    if whole:
        ctx.warn(
            f"buffer.train_batch_size {b.train_batch_size} counts rows, and the advantages of this "
            f"algorithm need all rows of a group: a "
            f"step trains the {b.batch_size} groups of buffer.batch_size instead"
        )
        return b.batch_size, None
    ctx.warn(
        f"buffer.train_batch_size {b.train_batch_size} is not batch_size x runs "
        f"({low if low == high else f'{low} to {high}'}): groups are "
        "split over train steps, and a failed run leaves its row missing (see on_short_batch).  "
        "Leave it out to train whole groups"
    )
    if low != high and ctx.config.synchronizer.max_staleness is None:
        ctx.warn(
            f"explore batches of more than {low} rows make later ones older without bound; write "
            f"synchronizer.max_staleness"
        )
    return None, b.train_batch_size


def steps(
    ctx: Context, train: Tasksets, written: int | None, num_batches: NumBatches | None
) -> tuple[int | None, int | None]:
    """(explore steps, train steps); None where the tasksets would have to be opened.  `written`:
    rows of a step where these are counted.
    """
    b = ctx.config.buffer
    t = ctx.config.trainer
    rows = b.batch_size * min((s.num_runs for s in train), default=1)
    size = written or rows  # rows of a train step
    batches = b.total_steps
    epochs = b.total_epochs or 1
    if b.total_tasks is not None:
        wanted = -(-b.total_tasks // b.batch_size)
        if batches not in (None, wanted):
            ctx.error(
                "buffer.total_tasks",
                f"is {b.total_tasks}, {wanted} steps of batch_size {b.batch_size}, but total_steps "
                f"is {batches}; write one of them",
            )
        elif batches is None:
            ctx.derive(
                "buffer.total_steps",
                wanted,
                f"total_tasks {b.total_tasks} in batches of {b.batch_size}",
            )
        batches = wanted
    fixed = batches is not None  # by the explorer's side; for trainer.total_steps
    needed = None
    if batches is None and t.total_steps is not None:
        batches = needed = -(-t.total_steps * size // rows)
    if (
        not fixed
        and (b.total_epochs or batches is None)
        and num_batches is not None
        and train
        and not ctx.errors
    ):
        whole = 0
        with ctx.taking():
            whole = num_batches(train, b.batch_size, epochs)
        if batches is not None and whole < batches:
            ctx.warn(
                f"trainer.total_steps {t.total_steps} is never reached: buffer.total_epochs "
                f"{epochs} gives {whole} explore steps"
            )
        batches = whole if batches is None else min(batches, whole)
    if not fixed and batches is not None:
        whole_set = f"{epochs} epoch(s) of the training tasksets in batches of {b.batch_size}"
        ctx.derive(
            "buffer.total_steps",
            batches,
            "what trainer.total_steps needs" if batches == needed else whole_set,
        )
    steps = None if batches is None else batches * rows // size
    if batches and not steps:
        ctx.error(
            "buffer.train_batch_size",
            f"is {size}, and {batches} explore steps of {rows} rows do not fill one train step",
        )
    if t.total_steps is not None and steps is not None:
        if fixed and t.total_steps > steps:
            ctx.warn(
                f"trainer.total_steps {t.total_steps} is never reached: buffer.total_steps "
                f"{batches} gives {steps} train steps"
            )
        steps = min(steps, t.total_steps)
        if fixed and batches is not None:
            batches = min(batches, -(-steps * size // rows))
    elif steps is not None:
        ctx.derive(
            "trainer.total_steps",
            steps,
            "one per explore step" if size == rows else f"{rows} / {size} per explore step",
        )
    return batches, steps


def sync(
    ctx: Context,
    engines: tuple[EngineSettings, ...],
    learner: LearnerSettings,
    train: Tasksets,
    written: int | None,
) -> SyncSettings:
    """`written`: rows of a step where these are counted."""
    s = ctx.config.synchronizer
    b = ctx.config.buffer
    group = 1 if written is None else min((t.num_runs for t in train), default=1)
    if s.sync_style == "fully_async" and s.sync_interval % s.require_batches:
        ctx.error(
            "synchronizer.require_batches",
            f"{s.require_batches} must divide sync_interval {s.sync_interval}: weights move "
            f"between two takes of the trainer",
        )
    gpus = learner.device == "cuda" and all(e.device == "cuda" for e in engines)
    settings = filled(
        SyncSettings,
        s,
        method=_transport(ctx, ctx.find(s.sync_method)) if ":" in s.sync_method else s.sync_method,
        backend="nccl" if gpus else "gloo",
        bucket_bytes=s.bucket_size_mb << 20 if s.bucketed_broadcast else None,
        overlap=s.overlap_broadcast_and_load,
        workers=tuple(e.workers for e in engines),
        style=s.sync_style,
        interval=s.sync_interval,
        offset=s.sync_offset,
        timeout_s=s.sync_timeout,
        engine_dtype=engines[0].dtype,
        trainer_dtype=learner.dtype,
        canary_temperature=next(
            (t.sampling.temperature for t in train if t.sampling.temperature > 0), 1.0
        ),
        in_turns=ctx.config.mode == "colocate",
        shares_cores=learner.device == engines[0].device == "cpu"
        and (ctx.config.cluster.node_num or 1) == 1,
        at_a_time=plan_serve.at_a_time(ctx, len(engines)),
        drain_s=ctx.config.explorer.serve.drain_timeout,
        threshold=s.staleness_threshold if s.sync_style == "fully_async" else None,
        batch_units=b.batch_size * group,
        step_units=written or b.batch_size,
        group_units=group,
    )
    if settings.canary_dtype == "float32":
        s.idle("synchronizer", ("canary_tolerance",), "engines and trainer compute in float32", ctx)
    with ctx.taking():
        if schedule(settings).staleness_bound is None:
            ctx.warn(
                f"sync_style {s.sync_style} without synchronizer.max_staleness: experiences may be "
                f"of any age, as many as the buffer "
                f"holds; write max_staleness: {2 * s.sync_interval}, for example"
            )
    if ctx.config.deterministic and s.sync_style != "fixed" and s.max_staleness != 0:
        ctx.error(
            "synchronizer.sync_style", "must be fixed with deterministic: true, or max_staleness 0"
        )
    if ctx.config.deterministic and s.sync_offset:
        ctx.error("synchronizer.sync_offset", "must be 0 with deterministic: true")
    nodes = ctx.config.cluster.node_num
    if s.sync_method == "memory" and nodes > 1 and samples(ctx.config):
        ctx.error(
            "synchronizer.sync_method",
            f"memory works inside one node, and node_num is {nodes}; use nccl or checkpoint",
        )
    return settings


def _transport(ctx: Context, name: str) -> str:
    """A plugin transport, checked once plugins may be imported."""
    key = "synchronizer.sync_method"
    if ctx.facts.plugins_loaded:
        with ctx.taking(key):
            found = REGISTRY.get("transport", name).obj
            if lacks := [
                m
                for m in ("stage", "fetch", "release", "close")
                if not callable(getattr(found, m, None))
            ]:
                ctx.error(key, f"lacks {', '.join(lacks)}, see rft.sync.base.OwnTransport")
    return name
