"""Rules between two sections of a configuration, one function each.  Part of `resolve`.

Each reports what contradicts itself, or returns the value that both sections decide together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rft.config.context import Context
from rft.config.roles import samples
from rft.schema.base import belongs
from rft.sync.schedule import Schedule
from rft.sync.settings import (
    FixedSync,
    SyncConfig,
    SynchronizerConfig,
    TrainerDrivenSync,
)
from rft.taskset.settings import TasksetSettings

_WITH_OFFSET = "sync_style fixed and explorer_driven"


def staleness_control_sets_max_staleness(ctx: Context) -> int | None:
    """Return `synchronizer.max_staleness`, which `sample_strategy: staleness_control` may set too."""
    written = ctx.config.synchronizer.max_staleness
    algorithm = ctx.config.algorithm
    if algorithm.sample_strategy != "staleness_control":
        return written
    bound: Any = algorithm.sample_strategy_args.get("max_staleness")
    if bound is None or not isinstance(bound, int | float) or math.isinf(bound):
        return written
    if written not in (None, bound):
        ctx.error(
            "algorithm.sample_strategy_args.max_staleness",
            f"is {bound}, but synchronizer.max_staleness is {written}; both mean the same, write "
            f"one of them",
        )
        return written
    if written is None:
        ctx.derive("synchronizer.max_staleness", bound, "sample_strategy staleness_control")
    return int(bound)


def determinism_needs_fixed_schedule(ctx: Context, schedule: Schedule) -> None:
    """`deterministic` leaves no choice to the order in which things happen."""
    if not ctx.config.deterministic:
        return
    if schedule.style != "fixed" and schedule.max_staleness != 0:
        ctx.error(
            "synchronizer.sync_style", "must be fixed with deterministic: true, or max_staleness 0"
        )
    if schedule.offset:
        ctx.error("synchronizer.sync_offset", "must be 0 with deterministic: true")


def memory_transport_needs_one_node(ctx: Context) -> None:
    nodes = ctx.config.cluster.node_num
    if ctx.config.synchronizer.sync_method == "memory" and nodes > 1 and samples(ctx.config):
        ctx.error(
            "synchronizer.sync_method",
            f"memory works inside one node, and node_num is {nodes}; use nccl or checkpoint",
        )


def alignment_needs_a_model_of_its_own(ctx: Context) -> None:
    """A teacher that reads the policy's tokens as text."""
    for i, model in enumerate(ctx.config.explorer.auxiliary_models):
        reason = ""
        if model.task == "score" or model.engine_type not in ("vllm", "transformers"):
            reason = "is offered by engine_type vllm or transformers with task: generate"
        elif model.moving_average is not None:
            reason = "is for another tokenizer; a moving_average of the policy has the policy's"
        if reason and model.alignment == "text":
            ctx.error(f"explorer.auxiliary_models[{i}].alignment", reason, given="text")


def images_need_engine_and_rows(
    ctx: Context, tasksets: Sequence[TasksetSettings], engine_type: str
) -> None:
    """Images are shown by two engines, and their rows are not shared by ranks."""
    for taskset in tasksets:
        if taskset.format.image_key and engine_type not in ("transformers", "vllm"):
            ctx.error(
                f"{taskset.key}.format.image_key",
                f"images are offered with explorer.rollout_model.engine_type: transformers and vllm, "
                f"not with {engine_type}; write one of these, or leave it out",
            )
        images_need_a_rank_each(ctx, taskset)


def images_need_a_rank_each(ctx: Context, rows: TasksetSettings) -> None:
    ranks = ctx.config.trainer.ulysses_sequence_parallel_size
    if rows.format.image_key and ranks > 1:
        ctx.error(
            f"{rows.key}.format.image_key",
            f"rows with images are padded, which {ranks} ranks cannot share; set "
            f"trainer.ulysses_sequence_parallel_size to 1",
        )


def service_is_trainer_driven(ctx: Context, config: SynchronizerConfig) -> SynchronizerConfig:
    """Return the section of a service, whose clients do not wait for weights."""
    reason = "clients do not wait for weights"
    if isinstance(config, TrainerDrivenSync):
        return config
    if config.is_changed("sync_style") or not isinstance(config, FixedSync):
        ctx.error(
            "synchronizer.sync_style", f"must be trainer_driven where a service samples: {reason}"
        )
    elif config.sync_offset:
        ctx.error("synchronizer.sync_offset", belongs(_WITH_OFFSET, "sync_style", "trainer_driven"))
    ctx.derive("synchronizer.sync_style", "trainer_driven", reason)
    shared = {name: getattr(config, name) for name in SyncConfig.model_fields}
    return TrainerDrivenSync(**{**shared, "sync_style": "trainer_driven"})
