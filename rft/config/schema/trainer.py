"""Section `trainer`: how long, how often saved, and how a step is cut into micro-batches."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.config.schema.algorithm import ScheduleConfig
from rft.config.schema.base import IgnoreCase, Moot, Name, Section, key, renamed, section
from rft.config.schema.explorer import Device

Content = Annotated[Literal["model", "optimizer", "extra", "hf_model"], IgnoreCase]
_TOGETHER = "FSDP2 keeps parameters, gradients and optimizer state there together: the same as offload_policy."


class CriticOptimizerConfig(ScheduleConfig):
    """Optimizer of the critic; keys as in algorithm.optimizer."""

    lr: float = key(1e-5, "Peak learning rate.", on_resume="safe", gt=0)


class CriticConfig(Section):
    """The value model of algorithms that have one.  Null values are the policy's."""

    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig, "Optimizer and learning-rate schedule.")
    micro_batch_size_per_gpu: int | None = key(None, "Rows of one micro-batch.", unit="experiences", on_resume="safe", ge=1)
    max_token_len_per_gpu: int | None = key(None, "Token budget of one micro-batch.", unit="tokens", on_resume="safe", ge=1)
    forward_micro_batch_size_per_gpu: int | None = key(
        None, "The same when values are only computed.", unit="experiences", on_resume="safe", ge=1
    )
    forward_max_token_len_per_gpu: int | None = key(
        None, "The same when values are only computed.", unit="tokens", on_resume="safe", ge=1
    )
    use_dynamic_bsz: bool | None = key(None, "Micro-batches by token budget instead of by rows.", on_resume="safe")
    use_remove_padding: bool = key(
        True,
        "Its batches are packed without padding, as the policy's are.  False: a row for each sequence, padded to the longest.",
        on_resume="safe",
    )
    enable_gradient_checkpointing: bool | None = key(None, "Recompute activations in the backward pass.", on_resume="safe")
    param_offload: bool = key(False, f"Keep parameters on the host.  {_TOGETHER}", on_resume="safe")
    optimizer_offload: bool = key(False, f"Keep optimizer state on the host.  {_TOGETHER}", on_resume="safe")
    grad_clip: float | None = key(None, "Largest gradient norm.  Null: trainer.grad_clip.", unit="gradient norm", gt=0)
    cliprange_value: float = key(0.5, "Values are clipped to this distance from the old ones.", gt=0)
    ppo_epochs: int | None = key(None, "Passes over a batch.  Null: trainer.ppo_epochs.", unit="passes", ge=1)


class RefConfig(Section):
    """The reference model, where a KL needs one.  Micro-batches of its own are computed before the step; null: as trainer.log_prob_*."""

    param_offload: bool = key(False, "Keep its parameters on the host and fetch them for each layer.", on_resume="safe")
    reshard_after_forward: bool | None = key(None, "Free gathered parameters after the forward pass.", on_resume="safe")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Rows of one micro-batch, with use_dynamic_bsz: false.", unit="experiences", on_resume="safe", ge=1
    )
    use_dynamic_bsz: bool | None = key(None, "Micro-batches by token budget instead of by rows.", on_resume="safe")
    max_token_len_per_gpu: int | None = key(None, "Token budget of one micro-batch.", unit="tokens", on_resume="safe", ge=1)


class CheckpointConfig(Section):
    """What a checkpoint holds."""

    save_contents: tuple[Content, ...] = key(
        ("model", "optimizer", "extra"),
        "What is saved; extra: step and seeds, which are always there; hf_model: a Hugging Face folder in every checkpoint.",
        on_resume="safe",
        min_length=1,
    )
    load_contents: tuple[Content, ...] | None = key(
        None,
        "What is loaded on resume.  Null: what was saved.",
        on_resume="safe",
        min_length=1,
    )
    async_save: bool | None = key(
        None,
        "Copy a checkpoint to the host and write it while training goes on, one at a time.  Null: on GPUs.",
        on_resume="safe",
    )
    best_metric: str | None = key(
        None,
        "Metric by its name in metrics.jsonl: the checkpoint where it is best is kept beside the max_checkpoints_to_keep newest.",
        on_resume="safe",
    )
    best_mode: Annotated[Literal["max", "min"], IgnoreCase] = key(
        "max", "Which values of best_metric are better.", on_resume="safe"
    )


class ProfilerConfig(Section):
    """Traces of single train steps."""

    steps: tuple[int, ...] | None = key(None, "Train steps that are traced.  Null: none.", unit="train steps", on_resume="safe")
    discrete: bool = key(False, "One trace for each phase of a step instead of one for the step.", on_resume="safe")
    all_ranks: bool = key(False, "Trace every rank.", on_resume="safe")
    ranks: tuple[int, ...] | None = key(None, "Ranks that are traced.  Null: rank 0.", unit="ranks", on_resume="safe")


class TrainerConfig(Section):
    """The training loop.  Null values are chosen for the device."""

    name: Name = key(
        "trainer",
        "Name in logs.",
        on_resume="safe",
        later=Moot("a run has one trainer; logs call it trainer and its rank", harmless=True),
    )
    trainer_type: Annotated[Literal["fsdp2"], renamed(verl="fsdp2")] = key("fsdp2", "Which trainer; verl means this one.")
    trainer_strategy: Annotated[Literal["fsdp2", "fsdp"], IgnoreCase] = key(
        "fsdp2", "How the model is spread over ranks; fsdp is taken as fsdp2, with a warning."
    )
    total_steps: int | None = key(None, "Stop after this many train steps.", unit="train steps", on_resume="safe", ge=1)
    eval_interval: int = key(
        0,
        "Mode train: loss on experience_buffer.eval_split every so many train steps; 0 = before the first and after the last only.",
        unit="train steps",
        on_resume="safe",
        ge=0,
    )
    save_interval: int = key(
        0, "Checkpoint every so many train steps; 0 = only at the end.", unit="train steps", on_resume="safe", ge=0
    )
    save_hf_checkpoint: Annotated[Literal["always", "never", "last"], IgnoreCase] = key(
        "last", "Which checkpoints also hold a Hugging Face model folder.", on_resume="safe"
    )
    save_strategy: Annotated[Literal["unrestricted", "single_thread", "single_process", "single_node"], IgnoreCase] = key(
        "unrestricted",
        "How many may write at the same time.",
        on_resume="safe",
        later=Moot("every rank writes its own file, all at the same time", harmless=True),
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig, "What a checkpoint holds.")
    max_checkpoints_to_keep: int = key(
        0, "Older checkpoints are removed; 0 = keep all.", unit="checkpoints", on_resume="safe", ge=0
    )
    grad_clip: float | None = key(
        None, "Largest gradient norm.  Null: optimizer.clip_grad, else 1.0.", unit="gradient norm", gt=0
    )
    use_dynamic_bsz: bool = key(True, "Micro-batches by token budget instead of by rows.", on_resume="safe")
    max_token_len_per_gpu: int | None = key(
        None, "Token budget of one micro-batch.  Null: 2 x max_model_len, at least 2048.", unit="tokens", on_resume="safe", ge=1
    )
    micro_batch_size_per_gpu: int | None = key(
        None, "Rows of one micro-batch, with use_dynamic_bsz: false.", unit="experiences", on_resume="safe", ge=1
    )
    device: Device = key("auto", "auto: cuda where the cluster has GPUs, else cpu.", on_resume="safe")
    world_size: int | None = key(
        None, "Training ranks.  Null: the GPUs that the engines leave, 1 on CPU.", unit="ranks", on_resume="safe", ge=1
    )
    cpu_threads: int | None = key(
        None, "Threads of each rank.  Null: the machine's cores / ranks.", unit="threads", on_resume="safe", ge=1
    )
    param_dtype: Annotated[Literal["auto", "float32", "bfloat16"], IgnoreCase] = key(
        "auto", "Type used in forward and backward; master weights are float32.  auto: bfloat16 on GPUs, float32 on CPU."
    )
    enable_gradient_checkpointing: bool = key(
        False, "Recompute activations in the backward pass: slower, less memory.", on_resume="safe"
    )
    reshard_after_forward: bool = key(True, "Free gathered parameters after the forward pass.", on_resume="safe")
    share_prompts: bool = key(True, "Compute a group's common prompt once.", on_resume="safe")
    logprob_chunk_tokens: int = key(
        1024,
        "Tokens of a tile of logits; it has as many entries of the vocabulary as make 4 MiB on CPU, 256 MiB on a GPU.",
        unit="tokens",
        on_resume="safe",
        ge=1,
    )
    attn_implementation: Annotated[Literal["auto", "sdpa", "eager", "flash_attention_2"], IgnoreCase] = key(
        "sdpa",
        "Attention kernel of transformers; share_prompts needs sdpa.  auto: flash attention where it is installed and can be used.",
        on_resume="safe",
    )
    max_nonfinite_steps: int = key(
        3,
        "Stop after this many steps in a row whose gradient is not finite (each is skipped).",
        unit="train steps",
        on_resume="safe",
        ge=1,
    )
    ppo_epochs: int = key(
        1,
        "Passes over a batch, each with its own update; old log-probs are those before the first.",
        unit="passes",
        ge=1,
    )
    shuffle_minibatches: bool = key(
        False, "Take the micro-batches in another order in every pass; rounding apart this changes nothing.", on_resume="safe"
    )
    data_seed: int | None = key(None, "Seed of that order.  Null: seed.", on_resume="safe", ge=0)
    critic_warmup: int = key(0, "First train steps in which only the critic is trained.", unit="train steps", ge=0)
    use_remove_padding: bool = key(
        True,
        "Batches are packed without padding, common prompts once.  False, like share_prompts: false: a row for each sequence, padded "
        "to the longest.",
        on_resume="safe",
    )
    balance_batch: bool = key(
        True,
        "Rows are dealt to ranks by their tokens.  False: in their order, equally many to each rank as far as groups allow.",
        on_resume="safe",
    )
    fix_actor_microbatch_loss_scale: bool = key(
        True,
        "Cutting a batch differently never changes the gradient.",
        on_resume="safe",
        later=Moot("losses are always divided by the totals of the whole step", harmless=True, values=(False,)),
    )
    entropy_chunking: bool = key(
        True,
        "With an entropy loss: entropies and log-probs are computed by tiles.  False: from all logits of a micro-batch at once, taking "
        "their memory.",
        on_resume="safe",
    )
    entropy_checkpointing: bool = key(
        True,
        "With an entropy loss: the backward pass computes tiles of logits again, but for 160 MiB of them.  False: all are kept.",
        on_resume="safe",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Rows of one micro-batch when log-probs are only computed, with use_dynamic_bsz: false.  Null: micro_batch_size_per_gpu.",
        unit="experiences",
        on_resume="safe",
        ge=1,
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Token budget of one micro-batch when log-probs are only computed.  Null: max_token_len_per_gpu.",
        unit="tokens",
        on_resume="safe",
        ge=1,
    )
    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that share each micro-batch, an equal slice of its positions each.", unit="ranks", on_resume="safe", ge=1
    )
    fsdp_size: int = key(-1, "Ranks that share one copy of the model; -1 = all.", unit="ranks", on_resume="safe", ge=-1)
    forward_prefetch: bool = key(
        False, "Gather the next layer's parameters while a layer computes, always; false: FSDP2 decides.", on_resume="safe"
    )
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], IgnoreCase] = key(
        "float32", "Type in which gradients are added over ranks, where param_dtype is bfloat16."
    )
    param_offload: bool = key(False, f"Keep parameters on the host.  {_TOGETHER}", on_resume="safe")
    optimizer_offload: bool = key(False, f"Keep optimizer state on the host.  {_TOGETHER}", on_resume="safe")
    grad_offload: bool = key(False, f"Keep gradients on the host.  {_TOGETHER}", on_resume="safe")
    offload_policy: bool = key(
        False,
        "Parameters, gradients and optimizer state live on the host, parameters are fetched for each layer, and the update runs there.",
        on_resume="safe",
    )
    enable_activation_offload: bool = key(
        False, "Keep what enable_gradient_checkpointing keeps for the backward pass on the host.", on_resume="safe"
    )
    use_torch_compile: bool = key(False, "Compile each layer of the model: a slow first step.", on_resume="safe")
    use_liger: bool = key(False, "Liger's fused layers, on GPUs where liger-kernel is installed.", on_resume="safe")
    use_fused_kernels: bool = key(False, "Fused kernels for log-probs and entropies.", on_resume="safe")
    fused_kernel_backend: Annotated[Literal["torch", "triton"], IgnoreCase] = key(
        "torch",
        "torch: tiles of logits, the way that is always taken; triton: the work on a tile compiled into few kernels, on GPUs.",
        on_resume="safe",
    )
    enable_preview: bool = key(
        False,
        "Log the best and the worst experience of a step.",
        on_resume="safe",
        later=Moot("rft buffer shows the rows of any step, and samples of every evaluation are logged", harmless=True),
    )
    critic: CriticConfig = section(CriticConfig, "The critic, where the algorithm has one.")
    ref: RefConfig = section(RefConfig, "The reference model.")
    profiler: ProfilerConfig = section(ProfilerConfig, "Traces, in the run's folder.")
