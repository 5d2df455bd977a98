"""The learner and the training loop: ranks, micro-batches, memory, optimizers, checkpoints.  Part
of `resolve`; depends on no torch.

Invariant: what cannot work is an error here, with its key; what has no effect is a warning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rft.algorithm.settings import AlgorithmSettings
from rft.config import lora_plan, plan_serve
from rft.config.context import Context, Problems, filled
from rft.config.plan import Tasksets
from rft.config.schema.root import RunConfig
from rft.trainer.settings import (
    CriticSettings,
    ForwardSettings,
    LearnerSettings,
    OptimizerConfig,
    ProfilerConfig,
)
from rft.types import rotary
from rft.types.row_layout import AskedLayout

_IN_HOST_ANYWAY = "no effect on CPU, where everything is in host memory already"
_BY_ROWS = "is required with use_dynamic_bsz: false"


def learner(
    ctx: Context,
    algorithm: AlgorithmSettings,
    lengths: tuple[int, int, int],
    device: str,
    world: int,
    steps: int | None,
) -> LearnerSettings:
    t = ctx.config.trainer
    o = ctx.config.algorithm.optimizer
    # tokens of an experience on one rank: the ranks' budgets are added
    longest = -(-lengths[0] // t.ulysses_sequence_parallel_size)
    key = "trainer.max_token_len_per_gpu"
    budget = ctx.chosen(
        key,
        t.max_token_len_per_gpu,
        max(2048, 2 * lengths[0]),
        "twice max_model_len, at least 2048",
    )
    if t.use_dynamic_bsz:
        _holds(t.max_token_len_per_gpu, longest, key, ctx)
    elif t.micro_batch_size_per_gpu is None:
        ctx.error("trainer.micro_batch_size_per_gpu", _BY_ROWS)
    if t.train_vision and ctx.config.model.lora_configs:
        ctx.error(
            "trainer.train_vision",
            "an adapter alone is trained (model.lora_configs), so the vision tower is frozen; "
            "write false, or leave out model.lora_configs",
        )
    hardware = _hardware(ctx, device, world)
    critic = _critic(ctx, budget, longest, steps, hardware["gradient_checkpointing"])
    return filled(
        LearnerSettings,
        ctx.config.monitor,
        t,
        model_path=ctx.find_model(ctx.config.model.model_path),
        tokenizer_path=None
        if ctx.config.model.tokenizer_path is None
        else ctx.find_model(ctx.config.model.tokenizer_path),
        lora=lora_plan.lora(ctx),
        device=device,
        world_size=world,
        algorithm=algorithm,
        optim=_optimizer(o, "algorithm.optimizer", steps, ctx),
        critic=replace(critic, offload_policy=critic_offload(ctx, device)),
        total_steps=steps or 1,
        data_seed=ctx.config.seed if t.data_seed is None else t.data_seed,
        max_token_len_per_gpu=budget,
        micro_batch_size=t.micro_batch_size_per_gpu,
        max_response_tokens=lengths[2],
        loss_scale_factor=ctx.config.algorithm.loss_scale_factor,
        row_layout=_row_layout(ctx),
        router_replay=ctx.config.explorer.rollout_model.router_replay,
        trust_remote_code=ctx.config.model.trust_remote_code,
        image_processor_args=ctx.config.model.image_processor_args.written(),
        seed=ctx.config.seed,
        deterministic=ctx.config.deterministic,
        **hardware,
        **_forwards(ctx, budget, longest),
        **_sharding(ctx, device, world, steps),
    )


def _hardware(ctx: Context, device: str, world: int) -> dict[str, Any]:
    """Type, threads and gradient checkpointing, which follow from the device."""
    t = ctx.config.trainer
    on_gpus = device == "cuda"
    dtype = ctx.chosen(
        "trainer.param_dtype",
        t.param_dtype,
        "bfloat16" if on_gpus else "float32",
        f"trainer on {device}",
    )
    if not on_gpus and dtype != "float32":
        ctx.error(
            "trainer.param_dtype", f"{dtype} training on CPU takes minutes per step; use float32"
        )
    if t.attn_implementation in ("flash_attention_2", "varlen") and dtype == "float32":
        ctx.error(
            "trainer.attn_implementation",
            f"{t.attn_implementation} computes bfloat16 and float16 on GPUs, not float32 on {device}; "
            f"write sdpa, or auto",
        )
    ranks = world
    if on_gpus:  # of one machine
        ranks = max(1, min(world, ctx.config.cluster.gpu_per_node or ctx.facts.gpus))
    threads = ctx.chosen(
        "trainer.cpu_threads",
        t.cpu_threads,
        max(1, ctx.facts.cpus // ranks),
        f"{ctx.facts.cpus} cores for {ranks} rank(s)",
    )
    checkpointing = ctx.chosen(
        "trainer.enable_gradient_checkpointing",
        t.enable_gradient_checkpointing,
        on_gpus or t.enable_activation_offload,
        f"trainer on {device}",
    )
    return {"dtype": dtype, "cpu_threads": threads, "gradient_checkpointing": checkpointing}


def _holds(budget: int | None, longest: int, key: str, p: Problems) -> None:
    if budget is not None and budget < longest:
        p.note(
            f"{key} is {budget} tokens and the longest experience may have {longest} on a rank "
            f"(max_model_len): a longer one is a "
            "micro-batch alone"
        )


def _row_layout(ctx: Context) -> AskedLayout:
    """Return what is asked for; padded rows where the attention computes no others."""
    t = ctx.config.trainer
    layout = t.row_layout
    key = "trainer.row_layout"
    if t.attn_implementation == "eager" and layout == "auto":
        layout = "padded"
        ctx.derive(
            key,
            layout,
            f"trainer.attn_implementation: {t.attn_implementation} computes padded rows",
        )
    elif t.attn_implementation == "eager" and layout != "padded":
        ctx.error(
            key,
            f"{layout} rows need trainer.attn_implementation: auto, sdpa or flash_attention_2, not "
            f"eager",
        )
    return layout


def _critic(
    ctx: Context,
    budget: int,
    longest: int,
    steps: int | None,
    checkpointing: bool,
) -> CriticSettings:
    """`budget` and `checkpointing` are the policy's."""
    key = "trainer.critic"
    t = ctx.config.trainer
    c = t.critic
    dynamic = t.use_dynamic_bsz if c.use_dynamic_bsz is None else c.use_dynamic_bsz
    tokens = c.max_token_len_per_gpu or budget
    forward = c.forward_max_token_len_per_gpu or tokens
    for name in ("max_token_len_per_gpu", "forward_max_token_len_per_gpu") if dynamic else ():
        _holds(getattr(c, name), longest, f"{key}.{name}", ctx)
    if steps and t.critic_warmup >= steps:
        ctx.warn(
            f"trainer.critic_warmup {t.critic_warmup} is as long as the run ({steps} train steps): "
            f"no policy is trained"
        )
    rows = c.micro_batch_size_per_gpu or t.micro_batch_size_per_gpu
    if not dynamic and rows is None:
        ctx.error(f"{key}.micro_batch_size_per_gpu", _BY_ROWS)
    return filled(
        CriticSettings,
        c,
        model_path=ctx.find_model(
            ctx.config.model.critic_model_path or ctx.config.model.model_path
        ),
        optim=_optimizer(c.optimizer, f"{key}.optimizer", steps, ctx),
        grad_clip=c.grad_clip or t.grad_clip,
        warmup=t.critic_warmup,
        ppo_epochs=c.ppo_epochs or t.ppo_epochs,
        max_token_len_per_gpu=tokens,
        forward_max_token_len_per_gpu=forward,
        use_dynamic_bsz=dynamic,
        micro_batch_size=rows,
        forward_micro_batch_size=c.forward_micro_batch_size_per_gpu or rows,
        row_layout=c.row_layout or t.row_layout,
        gradient_checkpointing=(
            checkpointing
            if c.enable_gradient_checkpointing is None
            else c.enable_gradient_checkpointing
        ),
    )


def _optimizer(
    optimizer: OptimizerConfig, key: str, steps: int | None, p: Problems
) -> OptimizerConfig:
    """Return the section below `key`; `steps`: length of the run."""
    if optimizer.lr_warmup_steps > (steps or optimizer.lr_warmup_steps):
        p.warn(
            f"{key}.lr_warmup_steps {optimizer.lr_warmup_steps} is longer than the run ({steps} "
            f"train steps)"
        )
    curve = optimizer.lr_scheduler_type
    share = "lr_scheduler_type" if curve != "constant" else "lr_warmup_steps_ratio"
    warms_up = optimizer.lr_warmup_steps < 0 and optimizer.lr_warmup_steps_ratio > 0
    if steps == plan_serve.ENDLESS and (curve != "constant" or warms_up):
        p.error(
            f"{key}.{share}",
            "follows from the number of train steps, and the service has no end; write "
            "trainer.total_steps",
        )
    return optimizer


def deterministic(ctx: Context, train: Tasksets) -> None:
    """A deterministic step is submitted as a whole, so all of it must be decoded at the same time."""
    runs = ctx.config.buffer.batch_size * max((t.num_runs for t in train), default=1)
    max_num_seqs = ctx.config.explorer.rollout_model.max_num_seqs
    if ctx.config.deterministic and max_num_seqs < runs:
        ctx.error(
            "explorer.rollout_model.max_num_seqs",
            f"is {max_num_seqs}; with deterministic: true it must hold the {runs} runs of a step",
        )


def micro_batches(
    ctx: Context, train: Tasksets, written: int | None, learner: LearnerSettings, critic: bool
) -> None:
    """Fixed micro-batches of policy and critic must divide a step as it is written; what running
    leaves out, they take as it comes.
    """
    b = ctx.config.buffer
    shares = learner.world_size // learner.sequence_parallel
    if shares < 1:  # no rank is left; refused before
        return
    fixed = {} if learner.use_dynamic_bsz else {"trainer": learner.micro_batch_size}
    if critic and not learner.critic.use_dynamic_bsz:
        fixed["trainer.critic"] = learner.critic.micro_batch_size
    for section, micro in fixed.items():
        if micro is None:  # refused before
            continue
        for runs in sorted({t.num_runs for t in train}):
            rows = written or b.batch_size * runs
            if rows % (micro * shares):
                ctx.error(
                    f"{section}.micro_batch_size_per_gpu",
                    f"is {micro}, and {micro} x {shares} rank(s) does not divide the {rows} "
                    f"experiences of a step "
                    f"(batch_size {b.batch_size} x {runs} runs); change one of them, or use "
                    f"use_dynamic_bsz: true",
                )
                break


# ---------------------------------------------------------------- ranks and memory


def _sharding(ctx: Context, device: str, world: int, steps: int | None) -> dict[str, Any]:
    """Fields of `LearnerSettings`; `steps` is the length of the run."""
    t = ctx.config.trainer
    loaded = t.checkpoint.load_contents
    return {
        "sequence_parallel": _ranks(ctx, world),
        "offload_policy": _offload(ctx, device),
        "ref_offload": t.ref.param_offload and device == "cuda",
        "activation_offload": _activations(ctx, device),
        "ref_reshard_after_forward": (
            t.reshard_after_forward
            if t.ref.reshard_after_forward is None
            else t.ref.reshard_after_forward
        ),
        "external_lib": ctx.config.model.external_lib,
        "override_config": overrides(ctx.config, ctx),
        "fused_logprobs": _fused(ctx, device),
        "compile": t.use_torch_compile,
        "save_contents": t.checkpoint.save_contents,
        "load_contents": loaded
        and tuple("model" if name == "hf_model" else name for name in loaded),
        "profiler": _profiler(ctx, world, steps),
        "profile_folder": ctx.run_dir / "profile",
    }


def overrides(config: RunConfig, p: Problems | None = None) -> dict[str, Any]:
    """Entries of config.json that are replaced, for trainer and engines; `p` hears what cannot be."""
    m = config.model
    written = {"rope_scaling": m.rope_scaling, "rope_theta": m.rope_theta}
    rope = {name: value for name, value in written.items() if value is not None}
    if p is not None and rope:
        if twice := [name for name in ("rope_parameters", *rope) if name in m.override_config]:
            p.error(
                f"model.{next(iter(rope))}",
                f"model.override_config has {twice[0]} too; write one of them",
            )
        kind = (m.rope_scaling or {}).get("rope_type", (m.rope_scaling or {}).get("type"))
        if m.rope_scaling is not None and kind not in rotary.KINDS:
            p.error("model.rope_scaling", f"needs rope_type: {', '.join(rotary.KINDS[1:])}")
    return {**m.override_config, **rope}


def critic_offload(ctx: Context, device: str) -> bool:
    """Whether the critic lives on the host."""
    offload = ctx.config.trainer.critic.offload_policy
    if offload and device == "cpu":
        ctx.warn(f"trainer.critic.offload_policy: {_IN_HOST_ANYWAY}")
    return offload and device == "cuda"


def _ranks(ctx: Context, world: int) -> int:
    t = ctx.config.trainer
    size = t.fsdp_size
    sequence = t.ulysses_sequence_parallel_size
    if size == 0 or (size > 0 and world % size):
        ctx.error(
            "trainer.fsdp_size",
            f"is {size}; it must divide the {world} training rank(s), or be -1 for all",
        )
    if world % sequence:
        ctx.error(
            "trainer.ulysses_sequence_parallel_size",
            f"is {sequence}; it must divide the {world} training rank(s)",
        )
    if sequence > 1 and "padded" in (t.row_layout, t.critic.row_layout):
        ctx.error(
            "trainer.ulysses_sequence_parallel_size",
            "needs shared or packed rows (trainer.row_layout), the critic's too; ranks share "
            "packed positions, no padded ones",
        )
    if t.forward_prefetch and world == 1:
        ctx.warn("trainer.forward_prefetch has no effect: one rank gathers nothing")
    return sequence


def _offload(ctx: Context, device: str) -> bool:
    offload = ctx.config.trainer.offload_policy
    if offload and device == "cpu":
        ctx.warn(f"trainer.offload_policy: {_IN_HOST_ANYWAY}")
    return offload and device == "cuda"


def _activations(ctx: Context, device: str) -> bool:
    t = ctx.config.trainer
    if not t.enable_activation_offload:
        return False
    if device == "cpu":
        ctx.warn(f"trainer.enable_activation_offload: {_IN_HOST_ANYWAY}")
    return True


def _fused(ctx: Context, device: str) -> bool:
    """Return whether the work on a tile of logits is compiled."""
    fused = ctx.config.trainer.fused_kernel_backend == "triton"
    if fused and device == "cpu":
        ctx.error(
            "trainer.fused_kernel_backend",
            "Triton's kernels run on GPUs; write torch, which works by tiles too",
        )
    return fused


# ---------------------------------------------------------------- where a model is only run forward


def _forwards(ctx: Context, budget: int, longest: int) -> dict[str, Any]:
    """Fields of `LearnerSettings`.  `budget`: tokens of a training micro-batch on one rank;
    `longest`: of an experience.
    """
    t = ctx.config.trainer
    r = t.ref
    training = ForwardSettings(
        max_token_len_per_gpu=budget,
        micro_batch_size=None if t.use_dynamic_bsz else t.micro_batch_size_per_gpu,
    )
    keys = ("trainer.log_prob_micro_batch_size_per_gpu", "trainer.log_prob_max_token_len_per_gpu")
    log_prob = _cut(
        training,
        t.use_dynamic_bsz,
        t.log_prob_micro_batch_size_per_gpu,
        t.log_prob_max_token_len_per_gpu,
        keys,
        longest,
        ctx,
    )
    keys = ("trainer.ref.log_prob_micro_batch_size_per_gpu", "trainer.ref.max_token_len_per_gpu")
    dynamic = log_prob.micro_batch_size is None if r.use_dynamic_bsz is None else r.use_dynamic_bsz
    if (
        not dynamic
        and r.log_prob_micro_batch_size_per_gpu is None
        and log_prob.micro_batch_size is None
    ):
        ctx.error(keys[0], "is required with trainer.ref.use_dynamic_bsz: false")
    ref = _cut(
        log_prob,
        dynamic,
        r.log_prob_micro_batch_size_per_gpu,
        r.max_token_len_per_gpu,
        keys,
        longest,
        ctx,
    )
    return {
        "log_prob": None if log_prob == training else log_prob,
        "ref": None if ref == log_prob == training else ref,
    }


def _cut(
    base: ForwardSettings,
    dynamic: bool,
    rows: int | None,
    tokens: int | None,
    keys: tuple[str, str],
    longest: int,
    p: Problems,
) -> ForwardSettings:
    """`base` with what is written: `rows` or `tokens`, under `keys`."""
    if dynamic:
        if rows is not None:
            p.warn(
                f"{keys[0]} has no effect: micro-batches are cut by tokens (use_dynamic_bsz: true)"
            )
        _holds(tokens, longest, keys[1], p)
    elif tokens is not None:
        p.warn(f"{keys[1]} has no effect: micro-batches are cut by rows (use_dynamic_bsz: false)")
    return ForwardSettings(
        max_token_len_per_gpu=tokens or base.max_token_len_per_gpu,
        micro_batch_size=None if dynamic else rows or base.micro_batch_size,
    )


def _profiler(ctx: Context, world: int, steps: int | None) -> ProfilerConfig:
    f = ctx.config.trainer.profiler
    ranks = tuple(range(world)) if f.all_ranks else (0,) if f.ranks is None else f.ranks
    if wrong := [r for r in ranks if not 0 <= r < world]:
        ctx.error(
            "trainer.profiler.ranks", f"has {wrong[0]}; there are {world} training rank(s), from 0"
        )
    if late := [n for n in f.steps or () if n > (steps or n)]:
        ctx.warn(f"trainer.profiler.steps {late} are not traced: the run has {steps} train steps")
    return f.model_copy(update={"ranks": ranks})
