"""The machines' share: which device each role uses, how GPUs are split, the engines' and the learner's settings.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rft.config import adapter, forwards, halves, served, spread
from rft.config.plan import ClusterSettings, Facts
from rft.config.problems import Problems
from rft.config.schema.algorithm import OptimizerConfig, ScheduleConfig
from rft.config.schema.root import RunConfig
from rft.config.schema.trainer import CriticOptimizerConfig
from rft.taskset.settings import TasksetSettings
from rft.trainer.settings import AlgorithmSettings, CriticSettings, LearnerSettings, OptimSettings


def devices(config: RunConfig, facts: Facts, p: Problems) -> tuple[ClusterSettings, str, int, str]:
    """(cluster, device of the engines, training ranks, device of the trainer)."""
    c, model, t = config.cluster, config.explorer.rollout_model, config.trainer
    nodes, per_node = c.node_num or 1, c.gpu_per_node or facts.gpus
    total = nodes * per_node
    if not c.gpu_per_node:
        p.derive("cluster.gpu_per_node", per_node, "found on this machine")
    device = {}
    for role, wanted, key in (("engine", model.device, "explorer.rollout_model.device"), ("trainer", t.device, "trainer.device")):
        device[role] = ("cuda" if total else "cpu") if wanted == "auto" else wanted
        if wanted == "auto":
            p.derive(key, device[role], f"the cluster has {total} GPUs")
        if device[role] == "cuda" and not total:
            p.error(
                key, "is cuda, but no GPU was found and none is declared; write cluster.gpu_per_node, or use cpu", given=wanted
            )
            total = per_node = max(1, served.gpus(model) * served.copies(model) + (t.world_size or 1))
    tp = model.tensor_parallel_size
    engine_gpus = served.copies(model) * served.gpus(model) if device["engine"] == "cuda" and explores(config.mode) else 0
    beside = served.distinct(config) if explores(config.mode) else ()
    auxiliary = tuple(n for i in beside for n in served.auxiliary_gpus(config, i, total, per_node, p))
    auxiliary_gpus = sum(auxiliary)
    taken = engine_gpus + auxiliary_gpus
    others = f", {auxiliary_gpus} of them by auxiliary models" if auxiliary_gpus else ""
    if device["engine"] == "cuda" and served.gpus(model) > per_node:
        p.error(
            "explorer.rollout_model.tensor_parallel_size",
            f"is {tp}{served.stages(model)}, but a node has {per_node} GPUs and an engine stays in one",
            given=tp,
        )
    world = t.world_size or 1
    if device["trainer"] == "cuda" and trains(config.mode):
        left = total - taken
        world = t.world_size or max(1, left)
        if world > left:
            key = "trainer.world_size" if t.world_size else "cluster.gpu_per_node"
            p.error(
                key,
                f"the engines take {taken} of {total} GPUs ({served.copies(model)} x tensor_parallel_size {tp}{served.stages(model)}"
                f"{others}) and leave "
                f"{max(0, left)} for {world} trainer rank(s); lower explorer.rollout_model.engine_num, add GPUs, "
                "or set one of the devices to cpu",
                given=t.world_size or c.gpu_per_node,
            )
        if world > per_node and world % per_node:
            p.error(
                "trainer.world_size", f"is {world}: more than one node ({per_node} GPUs) must be whole nodes", given=t.world_size
            )
        if not t.world_size:
            p.derive("trainer.world_size", world, f"{total} GPUs less {taken} of the engines{others}")
    elif t.world_size is None:
        why = "trainer on CPU" if trains(config.mode) else f"mode {config.mode} trains nothing here"
        p.derive("trainer.world_size", 1, why)
    cluster = ClusterSettings(
        ray_address=halves.ray_address(config),
        namespace=halves.namespace(config),
        node_num=nodes,
        gpu_per_node=per_node,
        gpus_per_engine=served.gpus(model) if engine_gpus else 0,
        auxiliary=auxiliary,
        trainer_gpus=world if device["trainer"] == "cuda" and trains(config.mode) else 0,
        num_cpus=c.ray_init.num_cpus,
        actor_start_timeout_s=c.actor_start_timeout,
        stall_timeout_s=c.stall_timeout,
        timeline=config.monitor.enable_ray_timeline,
    )
    if c.ray_address is not None and c.ray_init.num_cpus is not None:
        p.warn("cluster.ray_init.num_cpus has no effect: cluster.ray_address joins a Ray that is there")
    if t.trainer_strategy == "fsdp":
        p.warn("trainer.trainer_strategy: fsdp is taken as fsdp2, the one strategy there is")
    return cluster, device["engine"], world, device["trainer"]


def explores(mode: str) -> bool:
    """Whether a program of this mode has engines."""
    return mode != "train"


def trains(mode: str) -> bool:
    """Whether a program of this mode has trainer ranks."""
    return mode in ("both", "train", "colocate")


def learner(
    config: RunConfig,
    facts: Facts,
    algorithm: AlgorithmSettings,
    lengths: tuple[int, int, int],
    device: str,
    world: int,
    steps: int | None,
    run_dir: Path,
    find: Callable[[str], str],
    p: Problems,
) -> LearnerSettings:
    t, o = config.trainer, config.algorithm.optimizer
    if t.grad_clip is not None and o.clip_grad is not None and t.grad_clip != o.clip_grad:
        p.error(
            "trainer.grad_clip",
            f"is {t.grad_clip}, but algorithm.optimizer.clip_grad is {o.clip_grad}; write one of them",
            given=t.grad_clip,
        )
    clip = t.grad_clip or o.clip_grad or 1.0
    if t.grad_clip is None:
        p.derive("trainer.grad_clip", clip, "algorithm.optimizer.clip_grad" if o.clip_grad else "default")
    budget = t.max_token_len_per_gpu or max(2048, 2 * lengths[0])
    if t.max_token_len_per_gpu is None:
        p.derive("trainer.max_token_len_per_gpu", budget, "2 x max_model_len, at least 2048")
    elif t.use_dynamic_bsz and budget < (longest := -(-lengths[0] // t.ulysses_sequence_parallel_size)):
        p.error(
            "trainer.max_token_len_per_gpu",
            f"is {budget} tokens; the longest experience may have {longest} on a rank (max_model_len)",
            given=budget,
        )
    if not t.use_dynamic_bsz and t.micro_batch_size_per_gpu is None:
        p.error("trainer.micro_batch_size_per_gpu", "is required with use_dynamic_bsz: false")
    if t.use_dynamic_bsz and t.micro_batch_size_per_gpu is not None:
        p.warn("trainer.micro_batch_size_per_gpu has no effect with use_dynamic_bsz: true (micro-batches are cut by tokens)")
    dtype = t.param_dtype if t.param_dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    if t.param_dtype == "auto":
        p.derive("trainer.param_dtype", dtype, f"trainer on {device}")
    if t.share_prompts and not t.use_remove_padding:
        p.derive("trainer.share_prompts", False, "trainer.use_remove_padding: false pads every row on its own")
    if device == "cpu" and dtype != "float32":
        p.error("trainer.param_dtype", f"{dtype} training on CPU takes minutes per step; use float32", given=dtype)
    threads = t.cpu_threads or max(1, facts.cpus // (world if device == "cpu" else 1))
    if t.cpu_threads is None:
        p.derive("trainer.cpu_threads", threads, f"{facts.cpus} cores for {world} rank(s)")
    longest = -(-lengths[0] // t.ulysses_sequence_parallel_size)
    critic = _critic(config, clip, budget, longest, steps, find, p)
    return LearnerSettings(
        model_path=find(config.model.model_path),
        tokenizer_path=None if config.model.tokenizer_path is None else find(config.model.tokenizer_path),
        lora=adapter.lora(config, find, p),
        device=device,
        dtype=dtype,
        world_size=world,
        cpu_threads=threads,
        algorithm=algorithm,
        optim=_optim(o, "algorithm.optimizer", clip, steps, p),
        critic=replace(critic, offload_policy=spread.critic_offload(config, device, p)),
        total_steps=steps or 1,
        ppo_epochs=t.ppo_epochs,
        shuffle_minibatches=t.shuffle_minibatches,
        data_seed=config.seed if t.data_seed is None else t.data_seed,
        max_token_len_per_gpu=budget,
        use_dynamic_bsz=t.use_dynamic_bsz,
        micro_batch_size=t.micro_batch_size_per_gpu,
        max_response_tokens=lengths[2],
        loss_scale_factor=config.algorithm.loss_scale_factor,
        share_prompts=t.share_prompts and t.use_remove_padding,
        balance_batch=t.balance_batch,
        entropy_chunking=t.entropy_chunking,
        entropy_checkpointing=t.entropy_checkpointing,
        logprob_chunk_tokens=t.logprob_chunk_tokens,
        gradient_checkpointing=t.enable_gradient_checkpointing,
        reshard_after_forward=t.reshard_after_forward,
        attn_implementation=t.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
        deterministic=config.deterministic,
        **forwards.learner(config, budget, lengths[0], p),
        **spread.learner(config, run_dir, device, world, p),
    )


def _critic(
    config: RunConfig, clip: float, budget: int, longest: int, steps: int | None, find: Callable[[str], str], p: Problems
) -> CriticSettings:
    """`clip` and `budget` are the policy's."""
    t, c = config.trainer, config.trainer.critic
    o = c.optimizer
    dynamic = t.use_dynamic_bsz if c.use_dynamic_bsz is None else c.use_dynamic_bsz
    tokens = c.max_token_len_per_gpu or budget
    forward = c.forward_max_token_len_per_gpu or tokens
    for name, value in (("max_token_len_per_gpu", tokens), ("forward_max_token_len_per_gpu", forward)):
        if getattr(c, name) is not None and value < longest and dynamic:
            p.error(
                f"trainer.critic.{name}",
                f"is {value} tokens; the longest experience may have {longest} on a rank (max_model_len)",
                given=value,
            )
    rows = c.micro_batch_size_per_gpu or t.micro_batch_size_per_gpu
    if not dynamic and rows is None:
        p.error("trainer.critic.micro_batch_size_per_gpu", "is required with use_dynamic_bsz: false")
    return CriticSettings(
        model_path=find(config.model.critic_model_path or config.model.model_path),
        optim=_optim(o, "trainer.critic.optimizer", c.grad_clip or clip, steps, p),
        warmup=t.critic_warmup,
        ppo_epochs=c.ppo_epochs or t.ppo_epochs,
        cliprange_value=c.cliprange_value,
        max_token_len_per_gpu=tokens,
        forward_max_token_len_per_gpu=forward,
        use_dynamic_bsz=dynamic,
        micro_batch_size=rows,
        forward_micro_batch_size=c.forward_micro_batch_size_per_gpu or rows,
        share_prompts=t.share_prompts and c.use_remove_padding,
        gradient_checkpointing=(
            t.enable_gradient_checkpointing if c.enable_gradient_checkpointing is None else c.enable_gradient_checkpointing
        ),
    )


def _optim(o: OptimizerConfig | CriticOptimizerConfig, key: str, clip: float, steps: int | None, p: Problems) -> OptimSettings:
    """`o` is written below `key`; `clip` is the largest gradient norm, `steps` the length of the run."""
    if o.lr_warmup_steps > (steps or o.lr_warmup_steps):
        p.warn(f"{key}.lr_warmup_steps {o.lr_warmup_steps} is longer than the run ({steps} train steps)")
    return OptimSettings(
        lr=o.lr,
        lr_warmup_steps=o.lr_warmup_steps,
        lr_warmup_steps_ratio=o.lr_warmup_steps_ratio,
        lr_warmup_from_zero=o.lr_warmup_from_zero,
        min_lr_ratio=o.min_lr_ratio,
        num_cycles=o.num_cycles,
        lr_scheduler_type=_schedule(o, key, p),
        betas=o.betas,
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip_grad=clip,
        optimizer_type=o.optimizer_type,
        momentum=o.momentum,
        decay_norms_and_biases=o.decay_norms_and_biases,
    )


def _schedule(o: ScheduleConfig, key: str, p: Problems) -> Literal["constant", "linear", "cosine", "wsd"]:
    """`warmup_style` is the older name of `lr_scheduler_type`."""
    if o.warmup_style is None:
        return o.lr_scheduler_type
    if o.lr_scheduler_type not in ("constant", o.warmup_style):
        p.error(
            f"{key}.warmup_style",
            f"is {o.warmup_style}, but lr_scheduler_type is {o.lr_scheduler_type}; remove warmup_style, the older name",
            given=o.warmup_style,
        )
    p.warn(f"{key}.warmup_style is the older name of lr_scheduler_type")
    p.derive(f"{key}.lr_scheduler_type", o.warmup_style, "warmup_style")
    return o.warmup_style


def deterministic(config: RunConfig, train: tuple[TasksetSettings, ...], p: Problems) -> None:
    """A deterministic step is submitted as a whole, so all of it must be decoded at the same time."""
    wanted = config.buffer.batch_size * max((t.num_runs for t in train), default=1)
    given = config.explorer.rollout_model.max_num_seqs
    if config.deterministic and given < wanted:
        p.error(
            "explorer.rollout_model.max_num_seqs",
            f"is {given}; with deterministic: true it must hold the {wanted} runs of a step",
            given=given,
        )


def micro_batches(
    config: RunConfig, train: tuple[TasksetSettings, ...], learner: LearnerSettings, critic: bool, p: Problems
) -> None:
    """Fixed micro-batches of policy and critic must divide a step."""
    shares = learner.world_size // learner.sequence_parallel
    fixed = {} if learner.use_dynamic_bsz else {"trainer": learner.micro_batch_size}
    if critic and not learner.critic.use_dynamic_bsz:
        fixed["trainer.critic"] = learner.critic.micro_batch_size
    for section, micro in fixed.items():
        if micro is None:  # refused before
            continue
        for runs in sorted({t.num_runs for t in train}):
            rows = config.buffer.train_batch_size or config.buffer.batch_size * runs
            if rows % (micro * shares):
                p.error(
                    f"{section}.micro_batch_size_per_gpu",
                    f"is {micro}, and {micro} x {shares} rank(s) does not divide the {rows} experiences of a step "
                    f"(batch_size {config.buffer.batch_size} x {runs} runs); change one of them, or use use_dynamic_bsz: true",
                    given=micro,
                )
                break
