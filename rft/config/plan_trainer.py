"""The learner and the training loop: ranks, micro-batches, memory, optimizers, checkpoints.  Part
of `resolve`; knows no torch.

Invariant: what cannot work is an error here, with its key; what has no effect is a warning.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.algorithm.settings import AlgorithmSettings
from rft.config import lora_plan, plan_serve
from rft.config.context import Context, Problems, filled
from rft.config.plan import Tasksets
from rft.config.roles import serves, trains
from rft.config.schema.algorithm_section import OptimizerConfig
from rft.config.schema.root import RunConfig
from rft.config.schema.trainer_section import CriticOptimizerConfig
from rft.trainer.settings import (
    CriticSettings,
    ForwardSettings,
    LearnerSettings,
    OptimSettings,
    ProfilerSettings,
    TrainerSettings,
)
from rft.types import rotary
from rft.types.row_layout import AskedLayout

_HOST = ("param_offload", "optimizer_offload", "grad_offload")
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
    if t.grad_clip is not None and o.clip_grad is not None and t.grad_clip != o.clip_grad:
        ctx.error(
            "trainer.grad_clip",
            f"is {t.grad_clip}, but algorithm.optimizer.clip_grad is {o.clip_grad}; write one of "
            f"them",
        )
    why = "algorithm.optimizer.clip_grad" if o.clip_grad else "default"
    clip = ctx.chosen("trainer.grad_clip", t.grad_clip, o.clip_grad or 1.0, why)
    # tokens of an experience on one rank: the ranks' budgets are added
    longest = -(-lengths[0] // t.ulysses_sequence_parallel_size)
    key = "trainer.max_token_len_per_gpu"
    budget = ctx.chosen(
        key, t.max_token_len_per_gpu, max(2048, 2 * lengths[0]), "2 x max_model_len, at least 2048"
    )
    if t.use_dynamic_bsz:
        _holds(t.max_token_len_per_gpu, longest, key, ctx)
    elif t.micro_batch_size_per_gpu is None:
        ctx.error("trainer.micro_batch_size_per_gpu", _BY_ROWS)
    usual = "bfloat16" if device == "cuda" else "float32"
    dtype = ctx.chosen("trainer.param_dtype", t.param_dtype, usual, f"trainer on {device}")
    layout = _row_layout(ctx)
    if device == "cpu" and dtype != "float32":
        ctx.error(
            "trainer.param_dtype", f"{dtype} training on CPU takes minutes per step; use float32"
        )
    # on a machine
    beside = (
        world
        if device == "cpu"
        else max(1, min(world, ctx.config.cluster.gpu_per_node or ctx.facts.gpus))
    )
    threads = max(1, ctx.facts.cpus // beside)
    threads = ctx.chosen(
        "trainer.cpu_threads",
        t.cpu_threads,
        threads,
        f"{ctx.facts.cpus} cores for {beside} rank(s)",
    )
    critic = _critic(ctx, clip, budget, longest, steps)
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
        dtype=dtype,
        world_size=world,
        cpu_threads=threads,
        algorithm=algorithm,
        optim=_optim(o, "algorithm.optimizer", clip, steps, ctx),
        critic=replace(critic, offload_policy=critic_offload(ctx, device)),
        total_steps=steps or 1,
        data_seed=ctx.config.seed if t.data_seed is None else t.data_seed,
        max_token_len_per_gpu=budget,
        micro_batch_size=t.micro_batch_size_per_gpu,
        max_response_tokens=lengths[2],
        loss_scale_factor=ctx.config.algorithm.loss_scale_factor,
        row_layout=layout,
        router_replay=ctx.config.explorer.rollout_model.router_replay,
        gradient_checkpointing=t.enable_gradient_checkpointing,
        trust_remote_code=ctx.config.model.trust_remote_code,
        seed=ctx.config.seed,
        deterministic=ctx.config.deterministic,
        **_forwards(ctx, budget, longest),
        **_sharding(ctx, device, world, steps),
    )


_REPLAY = "buffer.trainer_input.replay_run"


def replays(ctx: Context) -> bool:
    """Whether the run trains on rows of another one."""
    return ctx.config.mode == "train" and ctx.config.buffer.trainer_input.replay_run is not None


def replay_run(ctx: Context) -> Path | None:
    """The folder of that run; what contradicts it is an error."""
    given = ctx.config.buffer.trainer_input.replay_run
    if given is None:
        return None
    if ctx.config.mode != "train":
        ctx.error(_REPLAY, f"is for mode: train, and mode is {ctx.config.mode}", given=given)
    if ctx.config.trainer.total_steps is None:
        ctx.error(
            "trainer.total_steps",
            f"is required with {_REPLAY}: how many steps of that run are trained again",
        )
    if ctx.config.monitor.keep_trainer_logprobs:
        ctx.error(
            "monitor.keep_trainer_logprobs",
            f"is kept in the ledger of the run that sampled; write false beside {_REPLAY}",
        )
    folder = Path(ctx.find(given)).expanduser().absolute()
    if folder == ctx.run_dir.absolute():
        ctx.error(
            _REPLAY, "is the folder of this run itself; give this run another name", given=given
        )
    return folder


def _holds(budget: int | None, longest: int, key: str, p: Problems) -> None:
    if budget is not None and budget < longest:
        p.note(
            f"{key} is {budget} tokens and the longest experience may have {longest} on a rank "
            f"(max_model_len): a longer one is a "
            "micro-batch alone"
        )


def _row_layout(ctx: Context) -> AskedLayout:
    """What is asked for, by any of the keys that say it."""
    t = ctx.config.trainer
    layout = t.row_layout
    key = "trainer.row_layout"
    for name in ("share_prompts", "use_remove_padding"):
        if layout in ("shared", "packed") and not getattr(t, name):
            ctx.error(
                key, f"is {layout}, and trainer.{name}: false asks for padded rows; leave one out"
            )
        elif layout == "auto" and not getattr(t, name):
            layout = "padded"
            ctx.derive(key, layout, f"trainer.{name}: false")
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
    ctx: Context, clip: float, budget: int, longest: int, steps: int | None
) -> CriticSettings:
    """`clip` and `budget` are the policy's."""
    t = ctx.config.trainer
    c = ctx.config.trainer.critic
    dynamic = t.use_dynamic_bsz if c.use_dynamic_bsz is None else c.use_dynamic_bsz
    tokens = c.max_token_len_per_gpu or budget
    forward = c.forward_max_token_len_per_gpu or tokens
    for name in ("max_token_len_per_gpu", "forward_max_token_len_per_gpu") if dynamic else ():
        _holds(getattr(c, name), longest, f"trainer.critic.{name}", ctx)
    if steps and t.critic_warmup >= steps:
        ctx.warn(
            f"trainer.critic_warmup {t.critic_warmup} is as long as the run ({steps} train steps): "
            f"no policy is trained"
        )
    rows = c.micro_batch_size_per_gpu or t.micro_batch_size_per_gpu
    if not dynamic and rows is None:
        ctx.error("trainer.critic.micro_batch_size_per_gpu", _BY_ROWS)
    return filled(
        CriticSettings,
        c,
        model_path=ctx.find_model(
            ctx.config.model.critic_model_path or ctx.config.model.model_path
        ),
        optim=_optim(c.optimizer, "trainer.critic.optimizer", c.grad_clip or clip, steps, ctx),
        warmup=t.critic_warmup,
        ppo_epochs=c.ppo_epochs or t.ppo_epochs,
        max_token_len_per_gpu=tokens,
        forward_max_token_len_per_gpu=forward,
        use_dynamic_bsz=dynamic,
        micro_batch_size=rows,
        forward_micro_batch_size=c.forward_micro_batch_size_per_gpu or rows,
        row_layout=(t.row_layout if t.share_prompts else "padded")
        if c.use_remove_padding
        else "padded",
        gradient_checkpointing=(
            t.enable_gradient_checkpointing
            if c.enable_gradient_checkpointing is None
            else c.enable_gradient_checkpointing
        ),
    )


def _optim(
    o: OptimizerConfig | CriticOptimizerConfig,
    key: str,
    clip: float,
    steps: int | None,
    p: Problems,
) -> OptimSettings:
    """`o` is written below `key`; `clip` is the largest gradient norm, `steps` the length of the
    run.
    """
    if o.lr_warmup_steps > (steps or o.lr_warmup_steps):
        p.warn(
            f"{key}.lr_warmup_steps {o.lr_warmup_steps} is longer than the run ({steps} train "
            f"steps)"
        )
    if o.warmup_style is not None:
        p.derive(f"{key}.lr_scheduler_type", o.warmup_style, "warmup_style")
    kind = o.warmup_style or o.lr_scheduler_type
    share = "lr_scheduler_type" if kind != "constant" else "lr_warmup_steps_ratio"
    if steps == plan_serve.ENDLESS and (
        kind != "constant" or (o.lr_warmup_steps < 0 and o.lr_warmup_steps_ratio > 0)
    ):
        p.error(
            f"{key}.{share}",
            "follows from the number of train steps, and the service has no end; write "
            "trainer.total_steps",
        )
    return filled(OptimSettings, o, lr_scheduler_type=kind, clip_grad=clip)


def deterministic(ctx: Context, train: Tasksets) -> None:
    """A deterministic step is submitted as a whole, so all of it must be decoded at the same time."""
    wanted = ctx.config.buffer.batch_size * max((t.num_runs for t in train), default=1)
    given = ctx.config.explorer.rollout_model.max_num_seqs
    if ctx.config.deterministic and given < wanted:
        ctx.error(
            "explorer.rollout_model.max_num_seqs",
            f"is {given}; with deterministic: true it must hold the {wanted} runs of a step",
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
    c = ctx.config.trainer.critic
    wanted = c.param_offload or c.optimizer_offload
    if wanted and device == "cpu":
        ctx.warn(f"trainer.critic.param_offload, optimizer_offload: {_IN_HOST_ANYWAY}")
    return wanted and device == "cuda"


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
    if sequence > 1 and not (
        t.row_layout != "padded"
        and t.share_prompts
        and t.use_remove_padding
        and t.critic.use_remove_padding
    ):
        ctx.error(
            "trainer.ulysses_sequence_parallel_size",
            "needs shared or packed rows (trainer.row_layout), the critic's too; ranks share "
            "packed positions, no padded ones",
        )
    if t.forward_prefetch and world == 1:
        ctx.warn("trainer.forward_prefetch has no effect: one rank gathers nothing")
    return sequence


def _offload(ctx: Context, device: str) -> bool:
    t = ctx.config.trainer
    asked = [name for name in (*_HOST, "offload_policy") if getattr(t, name)]
    if not asked:
        return False
    if device == "cpu":
        ctx.warn(f"trainer.{', '.join(asked)}: {_IN_HOST_ANYWAY}")
        return False
    if not t.offload_policy:
        ctx.derive(
            "trainer.offload_policy",
            True,
            f"trainer.{asked[0]}; FSDP2 keeps all of them on the host or none",
        )
    return True


def _activations(ctx: Context, device: str) -> bool:
    t = ctx.config.trainer
    if not t.enable_activation_offload:
        return False
    if device == "cpu":
        ctx.warn(f"trainer.enable_activation_offload: {_IN_HOST_ANYWAY}")
    return True


def _fused(ctx: Context, device: str) -> bool:
    """Whether the work on a tile of logits is compiled: fused_kernel_backend triton, where kernels
    are asked for.
    """
    t = ctx.config.trainer
    if t.fused_kernel_backend == "torch":
        if t.use_fused_kernels:
            ctx.note(
                "trainer.use_fused_kernels with fused_kernel_backend torch: log-probs and "
                "entropies are always computed by tiles"
            )
        return False
    if not t.use_fused_kernels:
        ctx.warn("trainer.fused_kernel_backend has no effect: use_fused_kernels is false")
        return False
    if device == "cpu":
        ctx.error(
            "trainer.fused_kernel_backend",
            "Triton's kernels run on GPUs; write torch, which works by tiles too",
        )
    return True


# ---------------------------------------------------------------- where a model is only run forward


def _forwards(ctx: Context, budget: int, longest: int) -> dict[str, Any]:
    """Fields of `LearnerSettings`.  `budget`: tokens of a training micro-batch on one rank;
    `longest`: of an experience.
    """
    t = ctx.config.trainer
    r = ctx.config.trainer.ref
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


# ---------------------------------------------------------------- checkpoints and traces


MOST_LOST = 50  # train steps that a crash may lose without a warning
SERVICE_SAVE_S = 600.0


def _save_after(ctx: Context, steps: int | None) -> float:
    """When the age of a step makes a checkpoint due; warns where a crash would lose more than
    MOST_LOST of `steps` train steps.
    """
    t = ctx.config.trainer
    if t.save_after is None and serves(ctx.config) and not t.save_interval:
        ctx.derive(
            "trainer.save_after",
            SERVICE_SAVE_S,
            "a service has no end at which a checkpoint would be saved",
        )
        ctx.note(
            f"a crash loses no reward; train steps of the last {SERVICE_SAVE_S:.0f} s are repeated "
            f"(trainer.save_after)"
        )
        return SERVICE_SAVE_S
    lost = min(t.save_interval or plan_serve.ENDLESS, steps or 0)
    if not t.save_after and lost > MOST_LOST and trains(ctx.config):
        many = "all its train steps" if lost == plan_serve.ENDLESS else f"up to {lost} train steps"
        ctx.warn(
            f"a crash would lose {many} (trainer.save_interval is {t.save_interval}): write "
            f"trainer.save_interval: {MOST_LOST // 2}, "
            f"or trainer.save_after: {SERVICE_SAVE_S:.0f}, the seconds after which a step is in a "
            f"checkpoint"
        )
    return t.save_after or 0.0


def trainer(ctx: Context, device: str, steps: int | None) -> TrainerSettings:
    """The training loop of `steps` train steps, None until that is known; what makes a step is
    filled in by the mode's builder.
    """
    t = ctx.config.trainer
    later = ctx.chosen(
        "trainer.checkpoint.async_save",
        t.checkpoint.async_save,
        device == "cuda",
        f"trainer on {device}",
    )
    always = "hf_model" in t.checkpoint.save_contents
    if always:
        ctx.derive(
            "trainer.save_hf_checkpoint", "always", "hf_model in trainer.checkpoint.save_contents"
        )
    s = ctx.config.synchronizer
    return filled(
        TrainerSettings,
        t,
        t.checkpoint,
        s,
        total_steps=steps or 0,
        batch_groups=None,
        batch_rows=None,
        save_after_s=_save_after(ctx, steps),
        save_hf_checkpoint="always" if always else t.save_hf_checkpoint,
        async_save=later,
        checkpoint_dir=ctx.run_dir / "checkpoints",
        read_deadline_s=plan_serve.read_deadline_s(
            ctx, ctx.config.buffer.trainer_input.experience_buffer.max_read_timeout
        ),
        require_batches=s.require_batches
        if s.sync_style == "fully_async"
        else s.sync_interval  # a window is sampled whole before its first step
        if ctx.config.mode == "colocate"
        else 1,
        seed=ctx.config.seed,
        replay_run=replay_run(ctx),
    )


def _profiler(ctx: Context, world: int, steps: int | None) -> ProfilerSettings:
    f = ctx.config.trainer.profiler
    ranks = tuple(range(world)) if f.all_ranks else (0,) if f.ranks is None else f.ranks
    if wrong := [r for r in ranks if not 0 <= r < world]:
        ctx.error(
            "trainer.profiler.ranks", f"has {wrong[0]}; there are {world} training rank(s), from 0"
        )
    if late := [n for n in f.steps or () if n > (steps or n)]:
        ctx.warn(f"trainer.profiler.steps {late} are not traced: the run has {steps} train steps")
    return ProfilerSettings(
        steps=tuple(f.steps or ()), ranks=ranks, discrete=f.discrete, folder=ctx.run_dir / "profile"
    )
