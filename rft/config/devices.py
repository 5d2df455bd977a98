"""Modes and machines: which device each role uses, how GPUs are split, where processes meet.  Part
of `resolve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from rft.config import plan_engines
from rft.config.context import Context
from rft.config.plan import ClusterSettings
from rft.config.roles import apart, explores, reads_data, trains
from rft.config.schema.root import RunConfig
from rft.engine.settings import EngineSettings
from rft.sync.settings import offset
from rft.trainer.settings import LearnerSettings

SHARED_MEMORY = 0.5  # of a GPU that the trainer shares
_FOUND = "auto"  # RAY_ADDRESS, or the Ray that was started on this machine


def namespace(config: RunConfig) -> str:
    """Where the processes of this run meet: what is written, or the same for the same folder."""
    folder = str(Path(config.checkpoint_root_dir).expanduser().absolute())
    return (
        config.ray_namespace or f"rft-{config.project}-{xxhash.xxh3_64_hexdigest(folder.encode())}"
    )


def ray_address(config: RunConfig) -> str | None:
    """The Ray to join; None: the run starts one."""
    return config.cluster.ray_address or (
        _FOUND if apart(config) or config.cluster.node_num > 1 else None
    )


def chosen_mode(ctx: Context, config: RunConfig) -> RunConfig:
    """`config`; with one GPU in all, mode both becomes colocate."""
    total = (config.cluster.node_num or 1) * (config.cluster.gpu_per_node or ctx.facts.gpus)
    devices = (config.explorer.rollout_model.device, config.trainer.device)
    if config.mode != "both" or total != 1 or "cpu" in devices or reads_data(config):
        return config
    ctx.derive("mode", "colocate", "one GPU: engines and trainer use it in turns")
    return config.model_copy(update={"mode": "colocate"})


def in_turns(
    ctx: Context, engines: Sequence[EngineSettings], learner: LearnerSettings, *, shared: bool
) -> tuple[tuple[EngineSettings, ...], LearnerSettings]:
    """Engines that give their memory back while the trainer works.  Where an adapter is sent alone
    they keep the weights, on the host.
    """
    if ctx.config.mode != "colocate":
        return tuple(engines), learner
    level = 1 if learner.lora is not None and not learner.lora.merge else 2
    if shared and engines[0].engine_type == "transformers":
        ctx.warn(
            "explorer.rollout_model.engine_type transformers keeps its memory while the trainer "
            "works; vllm gives it back"
        )
    if (
        shared
        and "gpu_memory_utilization" not in ctx.config.explorer.rollout_model.model_fields_set
    ):
        key = "explorer.rollout_model.gpu_memory_utilization"
        reason = "the trainer's weights and moments stay beside it"
        ctx.derive(key, SHARED_MEMORY, reason)
        engines = [replace(e, gpu_memory_utilization=SHARED_MEMORY) for e in engines]
    sleeping = tuple(
        replace(e, sleep_level=level if e.engine_type == "vllm" else 0) for e in engines
    )
    return sleeping, replace(learner, shares_device=shared)


def devices(ctx: Context) -> tuple[ClusterSettings, str, int, str]:
    """(cluster, device of the engines, training ranks, device of the trainer)."""
    c = ctx.config.cluster
    model = ctx.config.explorer.rollout_model
    t = ctx.config.trainer
    nodes = c.node_num or 1
    per_node = c.gpu_per_node or ctx.facts.gpus
    total = nodes * per_node
    if not c.gpu_per_node:
        ctx.derive("cluster.gpu_per_node", per_node, "found on this machine")
    device = {}
    for role, device_choice, key in (
        ("engine", model.device, "explorer.rollout_model.device"),
        ("trainer", t.device, "trainer.device"),
    ):
        device[role] = ctx.chosen(
            key, device_choice, "cuda" if total else "cpu", f"the cluster has {total} GPUs"
        )
        if device[role] == "cuda" and not total:
            ctx.error(
                key,
                "is cuda, but no GPU was found and none is declared; write cluster.gpu_per_node, "
                "or use cpu",
            )
            total = per_node = max(
                1, plan_engines.gpus(model) * plan_engines.copies(model) + (t.world_size or 1)
            )
    tp = model.tensor_parallel_size
    stages = plan_engines.stages(model)
    local = (
        device["engine"] == "cuda"
        and explores(ctx.config.mode)
        and not ctx.config.model.external_model.enable
    )
    engine_gpus = plan_engines.copies(model) * plan_engines.gpus(model) if local else 0
    auxiliary_indexes = plan_engines.distinct(ctx.config) if explores(ctx.config.mode) else ()
    auxiliary = tuple(
        n for i in auxiliary_indexes for n in plan_engines.auxiliary_gpus(ctx, i, total, per_node)
    )
    auxiliary_gpus = sum(auxiliary)
    shared = ctx.config.mode == "colocate" and set(device.values()) == {"cuda"}
    taken = auxiliary_gpus + (0 if shared else engine_gpus)
    auxiliary_text = f", {auxiliary_gpus} of them by auxiliary models" if auxiliary_gpus else ""
    if device["engine"] == "cuda" and plan_engines.gpus(model) > per_node:
        ctx.error(
            "explorer.rollout_model.tensor_parallel_size",
            f"is {tp}{stages}, but a node has {per_node} GPUs and an engine stays in one",
        )
    world = _world(ctx, device["trainer"], total, per_node, taken, auxiliary_text)
    if shared:
        _check_shared(ctx, engine_gpus, world)
    cluster = ClusterSettings(
        ray_address=ray_address(ctx.config),
        namespace=namespace(ctx.config),
        node_num=nodes,
        gpu_per_node=per_node,
        gpus_per_engine=plan_engines.gpus(model) if engine_gpus else 0,
        auxiliary=auxiliary,
        trainer_gpus=world if device["trainer"] == "cuda" and trains(ctx.config) else 0,
        shared=shared,
        num_cpus=c.ray_init.num_cpus,
        actor_start_timeout_s=c.actor_start_timeout,
        stall_timeout_s=c.stall_timeout,
        timeline=ctx.config.monitor.enable_ray_timeline,
    )
    return cluster, device["engine"], world, device["trainer"]


def _check_shared(ctx: Context, engine_gpus: int, world: int) -> None:
    model = ctx.config.explorer.rollout_model
    if engine_gpus > world:
        ctx.error(
            "explorer.rollout_model.engine_num",
            f"the engines need {engine_gpus} GPUs ({plan_engines.copies(model)} x "
            f"{plan_engines.gpus(model)}) and are to share the "
            f"{world} of the trainer (mode: colocate)",
        )
    elif engine_gpus < world:
        ctx.note(
            f"the engines use {engine_gpus} of the {world} GPUs that they could share; raise "
            f"explorer.rollout_model.engine_num"
        )


def _world(
    ctx: Context, device: str, total: int, per_node: int, taken: int, auxiliary_text: str
) -> int:
    """Training ranks: what is written, else the GPUs that are left.  The engines take `taken`;
    `auxiliary_text` names the auxiliary models.
    """
    model = ctx.config.explorer.rollout_model
    t = ctx.config.trainer
    world = t.world_size or 1
    if device == "cuda" and trains(ctx.config):
        free = total - taken
        world = t.world_size or max(1, free)
        if world > free:
            key = "trainer.world_size" if t.world_size else "cluster.gpu_per_node"
            ctx.error(
                key,
                f"the engines take {taken} of {total} GPUs ({plan_engines.copies(model)} x "
                f"tensor_parallel_size "
                f"{model.tensor_parallel_size}{plan_engines.stages(model)}"
                f"{auxiliary_text}) and leave "
                f"{max(0, free)} for {world} trainer rank(s); lower "
                f"explorer.rollout_model.engine_num, add GPUs, "
                "or set one of the devices to cpu",
            )
        if world > per_node and world % per_node:
            ctx.error(
                "trainer.world_size",
                f"is {world}: more than one node ({per_node} GPUs) must be whole nodes",
            )
        if not t.world_size:
            ctx.derive(
                "trainer.world_size",
                world,
                f"{total} GPUs less {taken} of the engines{auxiliary_text}",
            )
    elif t.world_size is None:
        reason = (
            "trainer on CPU"
            if trains(ctx.config)
            else f"mode {ctx.config.mode} trains nothing here"
        )
        ctx.derive("trainer.world_size", 1, reason)
    return world


def check_processes(ctx: Context) -> None:
    """What several machines, and two processes, need that one does not."""
    if ctx.config.cluster.ray_address is None and (address := ray_address(ctx.config)) is not None:
        other = "explore" if ctx.config.mode == "train" else "train"
        reason = (
            f"to meet the process of mode: {other}"
            if apart(ctx.config)
            else "which the other nodes have joined"
        )
        ctx.derive("cluster.ray_address", address, f"the Ray of this machine (ray start), {reason}")
    if (
        not apart(ctx.config)
        and ctx.config.mode != "serve"
        and ctx.config.explorer.name != "explorer"
    ):
        ctx.warn(f"explorer.name has no effect with mode: {ctx.config.mode}: there is one explorer")


def check_colocated(ctx: Context, devices: tuple[str, ...]) -> None:
    """What lets both sides work at the same time is refused by its key.  `devices`: of engines and
    trainer.
    """
    if ctx.config.mode != "colocate":
        return
    if len(set(devices)) > 1:
        ctx.error(
            "mode",
            f"colocate shares devices, and engines are on {devices[0]}, the trainer on "
            f"{devices[1]}; use mode: both",
        )
    if "cuda" in devices and ctx.config.synchronizer.sync_method == "nccl":
        ctx.error(
            "synchronizer.sync_method",
            "nccl needs a GPU for each process; with colocate use memory, on several nodes "
            "checkpoint",
        )
    s = ctx.config.synchronizer
    e = ctx.config.explorer
    required = (
        ("synchronizer.sync_style", s.sync_style, "fixed"),
        ("synchronizer.sync_offset", offset(s), 0),
        ("explorer.eval_in_background", e.eval_in_background, False),
    )
    reason = (
        "with mode: colocate, where exploring and training take turns; mode: both overlaps them"
    )
    if ctx.written.mode == "both":  # see `chosen_mode`
        reason = (
            "with one GPU, which engines and trainer have in turns; with one of them on cpu "
            "(device) they overlap"
        )
    for key, written, value in required:
        if written != value:
            ctx.error(
                key, f"must be {str(value).lower() if isinstance(value, bool) else value} {reason}"
            )
