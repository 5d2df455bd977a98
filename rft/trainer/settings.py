"""What the trainer needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """AdamW and its learning-rate schedule.  Steps are optimizer steps."""

    lr: float = 1e-6
    lr_warmup_steps: int = -1  # < 0: use the ratio
    lr_warmup_steps_ratio: float = 0.0
    lr_warmup_from_zero: bool = False
    min_lr_ratio: float = 0.01
    num_cycles: float = 0.5  # periods of the cosine
    lr_scheduler_type: Literal["constant", "cosine", "wsd"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Parts of the algorithm by name, each with its checked arguments."""

    algorithm_type: str = "grpo"
    advantage_fn: str = "grpo"
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)
    policy_loss_fn: str = "ppo"
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    kl_loss_fn: str = "none"
    kl_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    entropy_loss_fn: str = "none"
    entropy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    bypass_old_logprobs: bool = True  # old log-probs = the engine's; False recomputes them before the update


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """The model and how it is trained, on each of `world_size` ranks."""

    model_path: str
    tokenizer_path: str | None = None  # folder whose tokenizer goes into exported models; None = model_path
    device: str = "cpu"
    dtype: str = "float32"
    world_size: int = 1
    cpu_threads: int = 2  # per rank
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    total_steps: int = 1
    max_token_len_per_gpu: int = 16384  # token budget of one micro-batch
    use_dynamic_bsz: bool = True
    micro_batch_size: int | None = None  # rows, used when use_dynamic_bsz is False
    max_response_tokens: int = 1024
    loss_scale_factor: int | None = None  # divisor of seq-mean-token-sum-norm; None = max_response_tokens
    share_prompts: bool = True
    logprob_chunk_tokens: int = 1024
    gradient_checkpointing: bool = False
    reshard_after_forward: bool = True
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    seed: int = 42
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The training loop around the learner."""

    total_steps: int
    batch_groups: int | None  # groups per step, or
    batch_rows: int | None  # rows per step
    save_interval: int = 0  # 0 = only at the end
    save_hf_checkpoint: Literal["always", "never", "last"] = "last"
    max_checkpoints_to_keep: int = 0  # 0 = all
    checkpoint_dir: Path
    read_deadline_s: float = 1800.0
    max_staleness: int | None = None
    max_nonfinite_steps: int = 3
