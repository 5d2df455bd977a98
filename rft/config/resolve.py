"""RunConfig → Plan: one pure function.  Inherited and derived values are decided here and nowhere
else.

Depends on the machine only through `Facts`.  Invariant: the same configuration and facts give the
same Plan; nothing is written back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rft.algorithm.settings import AlgorithmSettings
from rft.buffer.settings import BufferSettings, MixSettings
from rft.config import (
    cross_rules,
    devices,
    lora_plan,
    offline_plan,
    plan_algorithm,
    plan_engines,
    plan_explorer,
    plan_replay,
    plan_schedule,
    plan_serve,
    plan_trainer,
    plan_training_loop,
)
from rft.config.context import Context, filled
from rft.config.plan import Facts, Plan, Tasksets
from rft.config.plan_schedule import NumBatches
from rft.config.roles import joins, reads_data
from rft.config.schema.buffer_section import RolloutArgs
from rft.config.schema.root import RunConfig
from rft.config.tasksets import (
    feedback_lag,
    limit_prompts,
    num_process,
    sampling_args,
    task_pipeline,
    tasksets,
)
from rft.engine.settings import EngineSettings
from rft.errors import ConfigErrors
from rft.explorer.settings import ExplorerSettings
from rft.monitor.settings import TrackedRun
from rft.schema.base import sections
from rft.sync.schedule import Schedule
from rft.taskset.settings import OfflineDataSettings, TaskPipelineSettings
from rft.trainer.settings import TrainerSettings


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a mode plays and trains.  A train step has `groups` or `rows`; `None` steps are known
    once the data is opened.
    """

    train: Tasksets = ()
    # whose group sizes make a step: `train`, or what another process explores
    counted: Tasksets = ()
    evals: Tasksets = ()
    explore_steps: int | None = None
    train_steps: int | None = None
    groups: int | None = None
    rows: int | None = None
    data: offline_plan.DataSets | None = None  # trained on instead of what is sampled
    expert: tuple[MixSettings, OfflineDataSettings] | None = None  # mixed into what is sampled
    task_pipeline: TaskPipelineSettings | None = None


def resolve(
    config: RunConfig,
    facts: Facts | None = None,
    *,
    num_batches: NumBatches | None = None,
    name: str = "",
) -> Plan:
    """The Plan of `config`.  Raises ConfigErrors with everything that contradicts itself.

    Where the length of the run is given in epochs, `num_batches` is asked for it; without it
    `Plan.total_steps` is None and `Plan.trainer.total_steps` is 0.  `name` replaces the run's name
    (a time-stamped sibling).
    """
    ctx = Context(config, facts or Facts(), name)
    plan = build(ctx, num_batches)
    if ctx.errors:
        raise ConfigErrors(ctx.errors)
    return plan


def build(ctx: Context, num_batches: NumBatches | None = None) -> Plan:
    """The Plan; it is right where `ctx` has no errors afterwards."""
    ctx.config = plan_serve.service_config(ctx)
    ctx.config = devices.chosen_mode(ctx, plan_schedule.one_place(ctx))
    for key, _, section in sections(ctx.config):
        section.rules(key, ctx)
    lengths = plan_engines.lengths(ctx)
    algorithm, repeat_times, compares = plan_algorithm.algorithm(ctx)
    any_sampling = plan_algorithm.takes_any_sampling(algorithm)
    train, evals = tasksets(
        ctx, max_response_tokens=lengths[2], repeat_times=repeat_times, any_sampling=any_sampling
    )
    served = _served(ctx, lengths[2], any_sampling, repeat_times if compares else 1)
    cluster, engine_device, world_size, trainer_device = devices.devices(ctx)
    devices.check_colocated(ctx, (engine_device, trainer_device))
    top = plan_algorithm.teacher_top(algorithm)
    engines = plan_engines.engines(ctx, lengths, engine_device, top)
    work = _workload(
        ctx, train, evals, served, algorithm, repeat_times, compares, engines[0], num_batches
    )
    devices.check_processes(ctx)
    plan_algorithm.advantage_inputs(algorithm, ctx)
    plan_algorithm.critic(ctx, algorithm)
    learner = plan_trainer.learner(
        ctx, algorithm, lengths, trainer_device, world_size, work.train_steps
    )
    auxiliary, decay = plan_engines.auxiliary(ctx, lengths[0], cluster.gpus, top)
    learner = replace(learner, chat_template=engines[0].chat_template, average_decay=decay)
    engines, learner = devices.in_turns(
        ctx, *lora_plan.published(ctx, engines, learner), shared=cluster.shared
    )
    plan_trainer.micro_batches(
        ctx, work.counted, work.rows, learner, bool(plan_algorithm.has_critic(algorithm, ctx.facts))
    )
    plan_trainer.deterministic(ctx, work.train)
    schedule = plan_schedule.schedule(ctx, work.counted, work.rows)
    cross_rules.memory_transport_needs_one_node(ctx)
    _unread_buffers(ctx, work)
    return filled(
        Plan,
        ctx.config,
        joins=joins(ctx.config),
        run_dir=ctx.run_dir,
        explorer=_explorer(ctx, work, algorithm, schedule),
        serve=plan_serve.serve(ctx, work.counted),
        engines=engines,
        auxiliary=auxiliary,
        buffer=_buffer(ctx, work),
        mix=work.expert[0] if work.expert else None,
        expert=work.expert[1] if work.expert else None,
        learner=learner,
        trainer=_trainer(ctx, work, trainer_device),
        sync=ctx.config.synchronizer,
        sync_runtime=plan_schedule.sync_runtime(ctx, engines, learner, work.counted),
        schedule=schedule,
        monitor=plan_explorer.monitor(ctx),
        tracked_run=_tracked_run(ctx),
        task_pipeline=work.task_pipeline,
        cluster=cluster,
        total_steps=work.train_steps,
        num_runs=max((t.num_runs for t in work.counted), default=0),
        log_level=ctx.config.log.level,
        log_by_node=ctx.config.log.group_by_node,
        plugin_dirs=ctx.plugin_dirs,
        resume_from_path=_resume_path(ctx),
        derived=tuple(ctx.derived),
        notes=tuple(ctx.notes),
        warnings=tuple(ctx.warnings),
    )


def _explorer(
    ctx: Context, work: Workload, algorithm: AlgorithmSettings, schedule: Schedule
) -> ExplorerSettings:
    return replace(
        plan_explorer.explorer(ctx, work.train, work.evals, work.explore_steps, algorithm),
        feedback_lag=feedback_lag(schedule),
        pipeline=plan_explorer.pipeline(ctx, algorithm, work.rows),
    )


def _served(ctx: Context, max_response_tokens: int, any_sampling: bool, num_runs: int) -> Tasksets:
    """Settings of the taskset that sessions of a service belong to."""
    sampling = partial(
        sampling_args, ctx, RolloutArgs(), max_response_tokens, "model", False, any_sampling
    )
    return plan_serve.taskset(ctx, sampling, num_runs)


def _trainer(ctx: Context, work: Workload, device: str) -> TrainerSettings:
    data = work.data
    return replace(
        plan_training_loop.trainer(ctx, device, work.train_steps),
        batch_groups=work.groups,
        batch_rows=work.rows,
        offline_data=None if data is None else data.trained,
        held_out=None if data is None else data.held_out,
    )


def _resume_path(ctx: Context) -> Path | None:
    path = ctx.config.resume_from_path
    return Path(ctx.find(path)) if path else None


def _tracked_run(ctx: Context) -> TrackedRun:
    return TrackedRun(
        folder=ctx.run_dir,
        plugin_dirs=ctx.plugin_dirs,
        project=ctx.config.project,
        group=ctx.config.group,
        name=ctx.name,
        config=ctx.written.shown(),
    )


def _buffer(ctx: Context, work: Workload) -> BufferSettings:
    if work.data is not None:
        return BufferSettings(folder=ctx.run_dir / "buffer")
    return plan_explorer.replayed(ctx, plan_explorer.buffer(ctx))


def _workload(
    ctx: Context,
    train: Tasksets,
    evals: Tasksets,
    served: Tasksets,
    algorithm: AlgorithmSettings,
    repeat_times: int,
    compares: bool,
    engine: EngineSettings,
    num_batches: NumBatches | None,
) -> Workload:
    """What there is to do, by the kind of mode."""
    cross_rules.alignment_needs_a_model_of_its_own(ctx)
    cross_rules.images_need_engine_and_rows(ctx, (*train, *evals), engine.engine_type)
    train, evals = limit_prompts(
        ctx.config, train, evals, engine, num_process(ctx.config, ctx.facts)
    )
    prepared = None
    if ctx.config.mode == "train" and reads_data(ctx.config):
        p = ctx.config.data_processor
        reason = (
            "it is for tasks and what is sampled; rows that are there already are trained on as "
            "they are"
        )
        p.warn_unused("data_processor", ("task_pipeline",), reason, ctx)
        p.experience_pipeline.warn_unused(
            "data_processor.experience_pipeline", ("operators", "save_input"), reason, ctx
        )
    else:
        prepared, train, evals = task_pipeline(ctx, train, evals)
    data = offline_plan.data_sets(ctx, algorithm, ctx.name, engine)
    if plan_replay.replays(ctx) and (data is not None or algorithm.sample_strategy == "mix"):
        text = (
            f"is for rows that were sampled, and algorithm {algorithm.algorithm_type} reads a "
            f"data set; leave it out"
        )
        ctx.error("buffer.trainer_input.replay_run", text)
    if data is not None:
        size, train_steps = offline_plan.steps(ctx, data, num_batches)
        work = Workload(data=data, groups=size, train_steps=train_steps)
    elif plan_replay.replays(ctx):
        work = Workload(groups=1, train_steps=ctx.config.trainer.total_steps)
    elif ctx.config.mode == "bench":
        work = Workload(evals=evals, explore_steps=0, train_steps=0, groups=1)
    else:  # what engines sample, in this process or in another
        counted = train or served or plan_schedule.elsewhere(ctx, repeat_times)
        groups, rows = plan_schedule.batch(
            ctx, counted, compares, plan_algorithm.needs_whole_groups(algorithm, compares)
        )
        explore_steps, train_steps = plan_schedule.steps(
            ctx, counted, rows, num_batches if train else None
        )
        work = Workload(
            train=train,
            counted=counted,
            evals=evals,
            explore_steps=explore_steps,
            train_steps=train_steps,
            groups=groups,
            rows=rows,
        )
    own_rows = work.rows or (work.groups or 1) * max((t.num_runs for t in work.counted), default=1)
    return replace(
        work, task_pipeline=prepared, expert=offline_plan.expert(ctx, algorithm, own_rows, engine)
    )


def _unread_buffers(ctx: Context, work: Workload) -> None:
    for name in ctx.config.buffer.trainer_input.auxiliary_buffers:
        if work.expert is None or name != work.expert[0].name:
            ctx.error(
                f"{offline_plan.BUFFERS}.{name}",
                "only the buffer that sample_strategy mix names is read, of chats; leave it out",
            )
