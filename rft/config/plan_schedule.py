"""Sizes and schedule: how many rows make a step, how many steps a run, when weights move.  Part of
`resolve`.
"""

from __future__ import annotations

from collections.abc import Callable

from rft.config import cross_rules, plan_serve
from rft.config.context import Context
from rft.config.plan import Tasksets
from rft.config.roles import reads_data
from rft.config.schema.root import RunConfig
from rft.engine.settings import EngineSettings
from rft.plugins import REGISTRY
from rft.sync.schedule import Schedule
from rft.sync.settings import SyncRuntime
from rft.sync.settings import schedule as planned
from rft.taskset.settings import TasksetSettings
from rft.trainer.settings import LearnerSettings

NumBatches = Callable[[Tasksets, int, int], int]


def one_place(ctx: Context) -> RunConfig:
    """`config` with what may be written in two places put where the rest of `resolve` reads it."""
    return ctx.config.model_copy(
        update={
            "synchronizer": ctx.config.synchronizer.model_copy(
                update={
                    "max_staleness": cross_rules.staleness_control_sets_max_staleness(ctx),
                    "sync_method": _transport(ctx),
                }
            ),
        }
    )


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
    ctx: Context, train: Tasksets, compares: bool, needs_whole_groups: bool
) -> tuple[int | None, int | None]:
    """(groups, rows) of a train step; one of them is None.

    `compares`: advantages come from the other runs of a task; `needs_whole_groups`: from all rows of a group,
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
            "one explore batch (buffer.batch_size)",
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
    if needs_whole_groups:
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


def _explore_steps(ctx: Context) -> int | None:
    """Explore steps that buffer.total_steps or total_tasks gives."""
    b = ctx.config.buffer
    if b.total_tasks is None:
        return b.total_steps
    steps = -(-b.total_tasks // b.batch_size)
    if b.total_steps is None:
        reason = f"total_tasks {b.total_tasks} in batches of {b.batch_size}"
        ctx.derive("buffer.total_steps", steps, reason)
    elif b.total_steps != steps:
        ctx.error(
            "buffer.total_tasks",
            f"is {b.total_tasks}, {steps} steps of batch_size {b.batch_size}, but total_steps is "
            f"{b.total_steps}; write one of them",
        )
    return steps


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
    batches = _explore_steps(ctx)
    epochs = b.total_epochs or 1
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
        epoch_steps = 0
        with ctx.collect_errors():
            epoch_steps = num_batches(train, b.batch_size, epochs)
        if batches is not None and epoch_steps < batches:
            ctx.warn(
                f"trainer.total_steps {t.total_steps} is never reached: buffer.total_epochs "
                f"{epochs} gives {epoch_steps} explore steps"
            )
        batches = epoch_steps if batches is None else min(batches, epoch_steps)
    if not fixed and batches is not None:
        whole_set = f"{epochs} epoch(s) of the training tasksets in batches of {b.batch_size}"
        ctx.derive(
            "buffer.total_steps",
            batches,
            "from trainer.total_steps" if batches == needed else whole_set,
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


def schedule(ctx: Context, train: Tasksets, step_rows: int | None) -> Schedule:
    """Return the schedule; `step_rows`: rows of a train step where it counts rows."""
    s = ctx.config.synchronizer
    b = ctx.config.buffer
    group = 1 if step_rows is None else min((t.num_runs for t in train), default=1)
    units = {
        "batch_units": b.batch_size * group,
        "step_units": step_rows or b.batch_size,
        "group_units": group,
    }
    schedule = planned(s.model_copy(update={"max_staleness": None}), **units)
    with ctx.collect_errors():
        schedule = planned(s, **units)
        if schedule.staleness_bound is None:
            ctx.warn(
                f"sync_style {s.sync_style} without synchronizer.max_staleness: experiences may be "
                f"of any age, as many as the buffer "
                f"holds; write max_staleness: {2 * s.sync_interval}, for example"
            )
    cross_rules.determinism_needs_fixed_schedule(ctx, schedule)
    return schedule


def sync_runtime(
    ctx: Context,
    engines: tuple[EngineSettings, ...],
    learner: LearnerSettings,
    train: Tasksets,
) -> SyncRuntime:
    s = ctx.config.synchronizer
    gpus = learner.device == "cuda" and all(e.device == "cuda" for e in engines)
    runtime = SyncRuntime(
        backend="nccl" if gpus else "gloo",
        workers=tuple(e.workers for e in engines),
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
    )
    if runtime.canary_dtype == "float32":
        s.warn_unused(
            "synchronizer",
            ("canary_tolerance",),
            "engines and trainer compute in float32",
            ctx,
        )
    return runtime


def _transport(ctx: Context) -> str:
    """Return `sync_method` with the path of a plugin; check the plugin once it is loaded."""
    method = ctx.config.synchronizer.sync_method
    if ":" not in method:
        return method
    name = ctx.find(method)
    key = "synchronizer.sync_method"
    if ctx.facts.plugins_loaded:
        with ctx.collect_errors(key):
            transport = REGISTRY.get("transport", name).obj
            methods = ("stage", "fetch", "release", "close")
            if lacks := [m for m in methods if not callable(getattr(transport, m, None))]:
                ctx.error(key, f"lacks {', '.join(lacks)}, see rft.sync.base.OwnTransport")
    return name
