"""Section `trainer`: how long, how often saved, and how a step is cut into micro-batches."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.config.schema.explorer_section import Device
from rft.schema import units
from rft.schema.base import Diagnostics, IgnoreCase, Section, key, safe_key, section
from rft.trainer.settings import (
    CriticOptimizerConfig,
    CriticSettings,
    LearnerSettings,
    ProfilerConfig,
    TrainerSettings,
)
from rft.types.row_layout import AskedLayout

Content = Annotated[Literal["model", "optimizer", "extra", "hf_model"], IgnoreCase]
_OFFLOAD = (
    "Parameters, gradients and optimizer state live on the host, parameters are fetched for each "
    "layer, and the update runs there."
)


class CriticConfig(Section):
    """The value model of algorithms that have one.  Null values are the policy's."""

    optimizer: CriticOptimizerConfig = section(
        CriticOptimizerConfig, "Optimizer and learning-rate schedule."
    )
    micro_batch_size_per_gpu: units.Rows | None = safe_key(None, "Rows of one micro-batch.")
    max_token_len_per_gpu: units.Tokens | None = safe_key(None, "Token budget of one micro-batch.")
    forward_micro_batch_size_per_gpu: units.Rows | None = safe_key(
        None, "The same where values are computed without training."
    )
    forward_max_token_len_per_gpu: units.Tokens | None = safe_key(
        None, "The same where values are computed without training."
    )
    use_dynamic_bsz: bool | None = safe_key(
        None, "Micro-batches by token budget instead of by rows."
    )
    row_layout: Annotated[AskedLayout, IgnoreCase] | None = safe_key(
        None, "How the rows of a micro-batch are laid out.  Null: trainer.row_layout."
    )
    enable_gradient_checkpointing: bool | None = safe_key(
        None, "Recompute activations in the backward pass."
    )
    offload_policy: bool = safe_key(CriticSettings.offload_policy, _OFFLOAD)
    grad_clip: units.GradientNorm | None = key(
        None, "Largest gradient norm.  Null: trainer.grad_clip."
    )
    cliprange_value: float = key(
        CriticSettings.cliprange_value,
        "New values are clipped to within this distance of the old ones.",
        gt=0,
    )
    ppo_epochs: units.Passes | None = key(None, "Passes over a batch.  Null: trainer.ppo_epochs.")


class RefConfig(Section):
    """The reference model, where a KL needs one.  Its micro-batches are computed before the step;
    null: as trainer.log_prob_*.
    """

    param_offload: bool = safe_key(
        False, "Keep its parameters on the host and fetch them for each layer."
    )
    reshard_after_forward: bool | None = safe_key(
        None, "Free gathered parameters after the forward pass."
    )
    log_prob_micro_batch_size_per_gpu: units.Rows | None = safe_key(
        None, "Rows of one micro-batch, with use_dynamic_bsz: false."
    )
    use_dynamic_bsz: bool | None = safe_key(
        None, "Micro-batches by token budget instead of by rows."
    )
    max_token_len_per_gpu: units.Tokens | None = safe_key(None, "Token budget of one micro-batch.")


class CheckpointConfig(Section):
    """What a checkpoint holds."""

    save_contents: tuple[Content, ...] = safe_key(
        LearnerSettings.save_contents,
        "What is saved; extra: step and seeds, which are always saved; hf_model: a Hugging Face "
        "folder in every checkpoint.",
        min_length=1,
    )
    load_contents: tuple[Content, ...] | None = safe_key(
        None, "What is loaded on resume.  Null: what was saved.", min_length=1
    )
    async_save: bool | None = safe_key(
        None,
        "Copy a checkpoint to host memory and write it while training continues, one at a time.  "
        "Null: on GPUs.",
    )
    best_metric: str | None = safe_key(
        None,
        "Name of a metric in metrics.jsonl: the checkpoint with its best value is kept, besides "
        "the max_checkpoints_to_keep newest.",
    )
    best_mode: Annotated[Literal["max", "min"], IgnoreCase] = safe_key(
        TrainerSettings.best_mode, "Which values of best_metric are better."
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        loaded = self.load_contents
        weights = {"model", "hf_model"}
        if not weights & set(self.save_contents):
            diagnostics.error(
                f"{at}.save_contents", "needs model or hf_model; nothing could be loaded again"
            )
        if loaded is not None and (
            missing := [name for name in loaded if name not in self.save_contents]
        ):
            diagnostics.error(
                f"{at}.load_contents", f"has {', '.join(missing)}, which save_contents leaves out"
            )
        if loaded is not None and not weights & set(loaded):
            diagnostics.error(
                f"{at}.load_contents", "needs model; training would start from other weights"
            )


class TrainerConfig(Section):
    """The training loop.  Null values are chosen for the device."""

    total_steps: units.TrainSteps | None = safe_key(None, "Stop after this many train steps.")
    eval_interval: units.TrainStepsOr0 = safe_key(
        TrainerSettings.eval_interval,
        "Mode train: compute the loss on experience_buffer.eval_split every so many train steps; 0 "
        "= only before the first and after the "
        "last.",
    )
    save_interval: units.TrainStepsOr0 = safe_key(
        TrainerSettings.save_interval, "Checkpoint every so many train steps; 0 = only at the end."
    )
    save_after: units.Pause | None = safe_key(
        None,
        "Checkpoint also once the oldest train step that none holds is so old, while the trainer "
        "waits too; 0 = never.  Null: 600 for a "
        "service without save_interval, else 0.",
    )
    save_hf_checkpoint: Annotated[Literal["always", "never", "last"], IgnoreCase] = safe_key(
        TrainerSettings.save_hf_checkpoint,
        "Which checkpoints also hold a Hugging Face model folder.",
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig, "What a checkpoint holds.")
    max_checkpoints_to_keep: int = safe_key(
        TrainerSettings.max_checkpoints_to_keep,
        "Older checkpoints are removed; 0 = keep all.",
        unit="checkpoints",
        ge=0,
    )
    grad_clip: units.GradientNorm = key(LearnerSettings.grad_clip, "Largest gradient norm.")
    use_dynamic_bsz: bool = safe_key(
        LearnerSettings.use_dynamic_bsz, "Micro-batches by token budget instead of by rows."
    )
    max_token_len_per_gpu: units.Tokens | None = safe_key(
        None, "Token budget of one micro-batch.  Null: twice max_model_len, at least 2048."
    )
    micro_batch_size_per_gpu: units.Rows | None = safe_key(
        None, "Rows of one micro-batch, with use_dynamic_bsz: false."
    )
    device: Device = safe_key("auto", "auto: cuda where the cluster has GPUs, else cpu.")
    world_size: units.Ranks | None = safe_key(
        None, "Training ranks.  Null: the GPUs left over by the engines, 1 on CPU."
    )
    cpu_threads: units.Threads | None = safe_key(
        None, "Threads of each rank.  Null: a machine's cores / its ranks."
    )
    param_dtype: Annotated[Literal["auto", "float32", "bfloat16"], IgnoreCase] = key(
        "auto",
        "Type used in forward and backward; master weights are float32.  auto: bfloat16 on GPUs, "
        "float32 on CPU.",
    )
    enable_gradient_checkpointing: bool | None = safe_key(
        None,
        "Recompute activations in the backward pass: slower, less memory.  Null: on GPUs, unless "
        "the memory estimate fits without it.",
    )
    reshard_after_forward: bool = safe_key(
        LearnerSettings.reshard_after_forward, "Free gathered parameters after the forward pass."
    )
    router_aux_loss_coef: float = key(
        LearnerSettings.router_aux_loss_coef,
        "For mixtures of experts: factor of the load-balancing loss (arXiv:2101.03961), added to "
        "the policy's; 0 = off.  It costs one more "
        "forward pass per step, which counts how often each expert is chosen.",
        ge=0,
    )
    row_layout: Annotated[AskedLayout, IgnoreCase] = safe_key(
        LearnerSettings.row_layout,
        "How the rows of a micro-batch are laid out.  shared: one after the other, common prefixes "
        "computed once; packed: one after the "
        "other; padded: each padded to the longest.  auto: the first of these that is exact for "
        "every layer type of the model; linear attention, Mamba and short convolutions are packed.  "
        "Each is "
        "compared with plain rows of transformers when the model is loaded, and a layout that is "
        "not exact is not used.",
    )
    logprob_chunk_tokens: units.Tokens = safe_key(
        LearnerSettings.logprob_chunk_tokens,
        "Tokens of a tile of logits; it has as many entries of the vocabulary as make 4 MiB on "
        "CPU, 256 MiB on a GPU.",
    )
    attn_implementation: Annotated[
        Literal["auto", "sdpa", "eager", "flash_attention_2", "varlen"], IgnoreCase
    ] = safe_key(
        LearnerSettings.attn_implementation,
        "Attention kernel; shared and packed rows need another than eager.  auto: on GPUs in "
        "bfloat16 and float16 flash-attn if it is installed, else torch's own flash attention "
        "(varlen, from Ampere on; padded rows take sdpa); else sdpa.",
    )
    max_nonfinite_steps: units.TrainSteps = safe_key(
        TrainerSettings.max_nonfinite_steps,
        "Stop after this many steps in a row whose gradient is not finite (each is skipped).",
    )
    ppo_epochs: units.Passes = key(
        LearnerSettings.ppo_epochs,
        "Passes over a batch, each with its own update; old log-probs are those before the first.",
    )
    shuffle_minibatches: bool = safe_key(
        LearnerSettings.shuffle_minibatches,
        "Take the micro-batches in another order in every pass; apart from rounding, this changes "
        "nothing.",
    )
    data_seed: int | None = safe_key(None, "Seed of that order.  Null: seed.", ge=0)
    critic_warmup: units.TrainStepsOr0 = key(
        0, "First train steps in which only the critic is trained."
    )
    balance_batch: bool = safe_key(
        LearnerSettings.balance_batch,
        "Balance tokens over ranks.  False: in their order, equally many to each rank as far as "
        "groups allow.",
    )
    entropy_chunking: bool = safe_key(
        LearnerSettings.entropy_chunking,
        "With an entropy loss: entropies and log-probs are computed by tiles.  False: from all "
        "logits of a micro-batch at once, taking "
        "their memory.",
    )
    entropy_checkpointing: bool = safe_key(
        LearnerSettings.entropy_checkpointing,
        "With an entropy loss: the backward pass computes tiles of logits again, but for 160 MiB "
        "of them.  False: all are kept.",
    )
    log_prob_micro_batch_size_per_gpu: units.Rows | None = safe_key(
        None,
        "Rows of one micro-batch when log-probs are only computed, with use_dynamic_bsz: false.  "
        "Null: micro_batch_size_per_gpu.",
    )
    log_prob_max_token_len_per_gpu: units.Tokens | None = safe_key(
        None,
        "Token budget of one micro-batch when log-probs are only computed.  Null: "
        "max_token_len_per_gpu.",
    )
    train_vision: bool = key(
        LearnerSettings.train_vision,
        "Models that read images: also train the vision tower and its projection.  False: they are "
        "frozen.",
    )
    ulysses_sequence_parallel_size: units.Ranks = safe_key(
        LearnerSettings.sequence_parallel,
        "Ranks that share each micro-batch, an equal slice of its positions each.",
    )
    fsdp_size: int = safe_key(
        LearnerSettings.fsdp_size,
        "Ranks that share one copy of the model; -1 = all.",
        unit="ranks",
        ge=-1,
    )
    forward_prefetch: bool = safe_key(
        LearnerSettings.forward_prefetch,
        "Gather the next layer's parameters while a layer computes, always; false: FSDP2 decides.",
    )
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], IgnoreCase] = key(
        LearnerSettings.reduce_dtype,
        "Type in which gradients are added over ranks, where param_dtype is bfloat16.",
    )
    offload_policy: bool = safe_key(LearnerSettings.offload_policy, _OFFLOAD)
    enable_activation_offload: bool = safe_key(
        False, "Keep what enable_gradient_checkpointing keeps for the backward pass on the host."
    )
    use_torch_compile: bool = safe_key(False, "Compile each layer of the model: a slow first step.")
    use_liger: bool = safe_key(
        LearnerSettings.use_liger, "Liger's fused layers, on GPUs where liger-kernel is installed."
    )
    fused_kernel_backend: Annotated[Literal["torch", "triton"], IgnoreCase] = safe_key(
        "torch",
        "Log-probs and entropies are computed by tiles of logits.  torch: operators of torch; "
        "triton: the work on a tile compiled into few kernels, on GPUs.",
    )
    critic: CriticConfig = section(CriticConfig, "The critic, where the algorithm has one.")
    ref: RefConfig = section(RefConfig, "The reference model.")
    profiler: ProfilerConfig = section(ProfilerConfig, "Traces, in the run's folder.")

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if self.checkpoint.best_metric is not None and not self.max_checkpoints_to_keep:
            diagnostics.warn(
                f"{at}.checkpoint.best_metric has no effect: all checkpoints are kept; set "
                f"{at}.max_checkpoints_to_keep"
            )
        if "hf_model" in self.checkpoint.save_contents and self.save_hf_checkpoint == "never":
            text = f"has hf_model, but {at}.save_hf_checkpoint is never; remove one of them"
            diagnostics.error(f"{at}.checkpoint.save_contents", text)
        if self.use_dynamic_bsz:
            self.warn_unused(
                at,
                ("micro_batch_size_per_gpu",),
                "micro-batches are cut by tokens (use_dynamic_bsz: true)",
                diagnostics,
            )
        if self.enable_activation_offload and self.enable_gradient_checkpointing is False:
            text = (
                f"needs {at}.enable_gradient_checkpointing: true; what that keeps for the "
                f"backward pass goes to the host"
            )
            diagnostics.error(f"{at}.enable_activation_offload", text)
