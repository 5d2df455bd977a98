"""What the trainer needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rft.algorithm.settings import AlgorithmSettings
from rft.taskset.settings import OfflineDataSettings
from rft.types.ids import SEED
from rft.types.row_layout import AskedLayout


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """The optimizer and its learning-rate schedule.  Steps are optimizer steps."""

    optimizer_type: Literal["adamw", "nadam", "radam", "adagrad", "sgd"] = "adamw"
    lr: float = 1e-6
    lr_warmup_steps: int = -1  # < 0: use the ratio
    lr_warmup_steps_ratio: float = 0.0
    lr_warmup_from_zero: bool = False
    min_lr_ratio: float = 0.01
    num_cycles: float = 0.5  # periods of the cosine
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_norms_and_biases: bool = True
    momentum: float = 0.0  # of sgd
    clip_grad: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """How rows are cut into micro-batches where a model is only run forward."""

    max_token_len_per_gpu: int = 16384
    micro_batch_size: int | None = None  # rows; None: by tokens


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The value model, where the algorithm has one.  The rest is as for the policy."""

    model_path: str = ""
    optim: OptimSettings = field(default_factory=lambda: OptimSettings(lr=1e-5))
    warmup: int = 0  # train steps in which the policy is not updated
    ppo_epochs: int = 1
    cliprange_value: float = 0.5
    max_token_len_per_gpu: int = 16384
    forward_max_token_len_per_gpu: int = 16384  # where values are only computed
    use_dynamic_bsz: bool = True
    micro_batch_size: int | None = None
    forward_micro_batch_size: int | None = None
    row_layout: AskedLayout = "auto"
    gradient_checkpointing: bool = False
    offload_policy: bool = False


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The adapter that is trained instead of the whole model.  None: a new one's default, or what
    the adapter in `path` has.
    """

    name: str = "lora"  # of its folder in checkpoints
    path: str | None = None  # folder of the adapter to begin with; None = a new one
    base_name: str = ""  # what adapter_config.json calls the base model
    rank: int | None = None
    alpha: float | None = None
    # names; as one text a regular expression, or "all-linear"
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    merge: bool = False  # publish whole weights with the adapter added, not the adapter alone


@dataclass(frozen=True, kw_only=True)
class ProfilerSettings:
    """Which train steps are traced, on which ranks, and where the files go."""

    steps: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)
    discrete: bool = False  # a file for each phase
    folder: Path = Path("profile")


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """The model and how it is trained, on each of `world_size` ranks."""

    model_path: str
    # folder whose tokenizer goes into exported models; None = model_path
    tokenizer_path: str | None = None
    chat_template: str | None = None  # Jinja text that goes there too; None = the tokenizer's own
    lora: LoraSettings | None = None  # None: the whole model is trained
    device: str = "cpu"
    # engines are on it too: what is not in use is given back when weights are published
    shares_device: bool = False
    dtype: str = "float32"
    world_size: int = 1
    cpu_threads: int = 2  # per rank
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    total_steps: int = 1
    ppo_epochs: int = 1  # updates of a train step, each on all of its rows
    shuffle_minibatches: bool = False  # micro-batches in another order each time
    data_seed: int = SEED  # of that order
    max_token_len_per_gpu: int = 16384  # token budget of one micro-batch
    use_dynamic_bsz: bool = True
    micro_batch_size: int | None = None  # rows, used when use_dynamic_bsz is False
    # where the policy is only run forward; None: as in training
    log_prob: ForwardSettings | None = None
    # the reference model, run before a step; None: with the policy
    ref: ForwardSettings | None = None
    max_response_tokens: int = 1024
    # divisor of seq-mean-token-sum-norm; None = max_response_tokens
    loss_scale_factor: int | None = None
    router_aux_loss_coef: float = 0.0  # of the loss that keeps experts equally busy; 0 = off
    router_replay: bool = False  # tokens go through the experts that the engine chose
    # a step reports its tokens' log-probs before the update, and the buffer keeps them
    keep_trainer_logprobs: bool = False
    row_layout: AskedLayout = "auto"  # of a learner: the one that was proven, never "auto"
    # rows are dealt to ranks by tokens; False: in equal numbers, in their order
    balance_batch: bool = True
    logprob_chunk_tokens: int = 1024  # of a tile of logits
    entropy_chunking: bool = True  # entropies are computed by tiles; False: from all logits at once
    # their backward pass computes tiles again; False: all logits are kept
    entropy_checkpointing: bool = True
    fused_logprobs: bool = False  # what is done with a tile is compiled
    gradient_checkpointing: bool = False
    # with gradient_checkpointing: what it keeps is kept on the host
    activation_offload: bool = False
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    fsdp_size: int = -1  # ranks that share one copy of the model; -1 = all
    reduce_dtype: str = "float32"  # of gradients while they are added over ranks
    sequence_parallel: int = 1  # ranks that share one micro-batch
    ref_offload: bool = False  # the reference model lives on the host
    ref_reshard_after_forward: bool = True
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    external_lib: str | None = None  # module imported before the model
    # entries of config.json that are replaced
    override_config: dict[str, Any] = field(default_factory=dict)
    offload_policy: bool = False  # parameters, gradients and optimizer state live on the host
    save_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    load_contents: tuple[str, ...] | None = None  # None: what was saved
    use_liger: bool = False
    compile: bool = False  # each layer
    profiler: ProfilerSettings = field(default_factory=ProfilerSettings)
    seed: int = SEED
    deterministic: bool = False

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 is used: with several ranks, to compute in another dtype than the
        parameters', or to keep them on the host.

        One float32 rank has nothing to shard, and FSDP2 would still copy every parameter twice and
        every gradient three times a step (about 1 s of a 5 s step of a 135 M model on two cores).
        """
        offloaded = self.offload_policy or self.ref_offload or self.critic.offload_policy
        return self.world_size > 1 or self.dtype != "float32" or offloaded


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The training loop around the learner."""

    total_steps: int
    batch_groups: int | None  # groups per step, or
    batch_rows: int | None  # rows per step
    save_interval: int = 0  # train steps; 0 = only at the end
    # age of the oldest step that no checkpoint holds; 0 = never for its age
    save_after_s: float = 0.0
    save_hf_checkpoint: Literal["always", "never", "last"] = "last"
    max_checkpoints_to_keep: int = 3  # 0 = all
    best_metric: str | None = None  # the checkpoint where it is best is kept beside the newest
    best_mode: Literal["max", "min"] = "max"
    async_save: bool = False  # checkpoints are written while steps go on
    checkpoint_dir: Path
    read_deadline_s: float = 1800.0
    # number of steps whose rows must be leased before the first of them begins
    require_batches: int = 1
    max_staleness: int | None = None
    max_nonfinite_steps: int = 3
    # the data set that is trained on; None: what an explorer samples
    offline_data: OfflineDataSettings | None = None
    # the folder of a run whose rows are trained on again, step by step
    replay_run: Path | None = None
    held_out: OfflineDataSettings | None = None  # rows of the same kind whose loss is computed
    # train steps between two such evaluations; 0 = only before the first step and after the last
    eval_interval: int = 0
    seed: int = SEED  # of the order of offline data

    @property
    def alone(self) -> bool:
        """Whether the trainer works without engines: on a data set, or on rows of another run."""
        return self.offline_data is not None or self.replay_run is not None
