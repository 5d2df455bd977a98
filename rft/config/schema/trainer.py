"""Section `trainer`: how long, how often saved, and how a step is cut into micro-batches."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.config.schema.base import IgnoreCase, Name, Section, key
from rft.config.schema.explorer import Device


class TrainerConfig(Section):
    """The training loop.  Null values are chosen for the device."""

    name: Name = key("trainer", "Name in logs.", on_resume="safe")
    trainer_strategy: Annotated[Literal["fsdp2"], IgnoreCase] = key("fsdp2", "How the model is spread over ranks.")
    total_steps: int | None = key(None, "Stop after this many train steps.", unit="train steps", on_resume="safe", ge=1)
    save_interval: int = key(
        0, "Checkpoint every so many train steps; 0 = only at the end.", unit="train steps", on_resume="safe", ge=0
    )
    save_hf_checkpoint: Annotated[Literal["always", "never", "last"], IgnoreCase] = key(
        "last", "Which checkpoints also hold a Hugging Face model folder.", on_resume="safe"
    )
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
    logprob_chunk_tokens: int = key(1024, "Tokens whose logits exist at the same time.", unit="tokens", on_resume="safe", ge=1)
    attn_implementation: Annotated[Literal["sdpa", "eager", "flash_attention_2"], IgnoreCase] = key(
        "sdpa", "Attention kernel of transformers.", on_resume="safe"
    )
    max_nonfinite_steps: int = key(
        3,
        "Stop after this many steps in a row whose gradient is not finite (each is skipped).",
        unit="train steps",
        on_resume="safe",
        ge=1,
    )
