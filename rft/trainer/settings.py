"""Settings of the trainer loop, the learner and the optimizers.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rft.algorithm.settings import AlgorithmSettings
from rft.schema import units
from rft.schema.base import Diagnostics, IgnoreCase, Section, key, renamed, safe_key
from rft.taskset.settings import OfflineDataSettings
from rft.types.ids import SEED
from rft.types.row_layout import AskedLayout

_OPTIONS = {  # option -> the values of optimizer_type that have it
    "betas": ("adamw", "nadam", "radam"),
    "eps": ("adamw", "nadam", "radam", "adagrad"),
    "momentum": ("sgd",),
}


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    lr: float = safe_key(1e-6, "Peak learning rate.", gt=0)
    lr_warmup_steps: int = key(
        -1, "Steps of linear warm-up; negative: use lr_warmup_steps_ratio.", unit="train steps"
    )
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all train steps.", ge=0, le=1)
    lr_warmup_from_zero: bool = key(
        False,
        "False: step t of W warm-up steps (t from 0) has the rate lr (t + 1) / W.  True: lr t / W, "
        "veRL's form, which begins at 0.",
    )
    min_lr_ratio: float = key(
        0.01, "Floor of the linear, cosine and wsd schedules as a share of lr.", ge=0, le=1
    )
    num_cycles: units.Periods = key(
        0.5, "Periods of the cosine from the warm-up to the end; 0.5: from lr down to the floor."
    )
    lr_scheduler_type: Annotated[Literal["constant", "linear", "cosine", "wsd"], IgnoreCase] = key(
        "constant",
        "Schedule after the warm-up; linear: down to the floor at the end; wsd: nine tenths at lr, "
        "then a cosine down to the floor.",
    )
    optimizer_type: Annotated[
        Literal["adamw", "nadam", "radam", "adagrad", "sgd"], renamed(adam="adamw")
    ] = key(
        "adamw",
        "Optimizer of torch; adam means AdamW.  Weight decay is decoupled, except for adagrad and "
        "sgd.",
    )
    betas: tuple[float, float] = key(
        (0.9, 0.999),
        "Decay rates of the two moments of adamw, nadam and radam, each in [0, 1).",
    )
    eps: float = key(1e-8, "Added to the denominator; sgd has none.", gt=0)
    momentum: float = key(0.0, "Of sgd.", ge=0, lt=1)
    weight_decay: float = key(0.01, "Weight decay.", ge=0)
    decay_norms_and_biases: bool = key(
        True, "False: parameters of one dimension have no weight decay."
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if not all(0 <= b < 1 for b in self.betas):
            diagnostics.error(f"{at}.betas", "each must be in [0, 1)")
        for name, types in _OPTIONS.items():
            if self.optimizer_type not in types:
                choice = f"optimizer_type {' and '.join(types)}"
                self.refuse_options(at, (name,), choice, "optimizer_type", diagnostics)
        curve = self.lr_scheduler_type
        # min_lr_ratio 0 means no floor, so a constant rate does not contradict it
        floor = ("min_lr_ratio",) if curve == "constant" and self.min_lr_ratio else ()
        waves = ("num_cycles",) if curve in ("constant", "linear") else ()
        self.warn_unused(at, floor + waves, f"lr_scheduler_type is {curve}", diagnostics)
        if self.lr_warmup_steps == 0 or (
            self.lr_warmup_steps < 0 and not self.lr_warmup_steps_ratio
        ):
            self.warn_unused(at, ("lr_warmup_from_zero",), "there is no warm-up", diagnostics)
        if self.lr_warmup_steps >= 0 and self.lr_warmup_steps_ratio > 0:
            diagnostics.warn(
                f"{at}: lr_warmup_steps is written and wins; lr_warmup_steps_ratio has no effect"
            )


class CriticOptimizerConfig(OptimizerConfig):
    """Optimizer of the critic; keys as in algorithm.optimizer."""

    lr: float = safe_key(1e-5, "Peak learning rate.", gt=0)


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """How rows are cut into micro-batches for a forward pass without training."""

    max_token_len_per_gpu: int = 16384
    micro_batch_size: int | None = None  # rows; None: cut by tokens


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic (value model), if the algorithm has one; other settings are the policy's."""

    model_path: str = ""
    optim: OptimizerConfig = field(default_factory=CriticOptimizerConfig)
    grad_clip: float = 1.0
    warmup: int = 0  # train steps in which the policy is not updated
    ppo_epochs: int = 1
    cliprange_value: float = 0.5
    max_token_len_per_gpu: int = 16384
    forward_max_token_len_per_gpu: int = 16384  # when only values are computed
    use_dynamic_bsz: bool = True
    micro_batch_size: int | None = None
    forward_micro_batch_size: int | None = None
    row_layout: AskedLayout = "auto"
    gradient_checkpointing: bool = False
    offload_policy: bool = False


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The adapter that is trained instead of the full model.

    Null fields: the value of the adapter in `path`, else the default of a new adapter.
    """

    name: str = "lora"  # name of the adapter's folder in checkpoints
    path: str | None = None  # folder of the initial adapter; None = a new one
    base_name: str = ""  # base model's name in adapter_config.json
    rank: int | None = None
    alpha: float | None = None
    # module names; a single string is a regular expression or "all-linear"
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    merge: bool = False  # publish the base weights with the adapter merged, not the adapter alone


class ProfilerConfig(Section):
    """Traces of single train steps."""

    steps: tuple[units.TrainSteps, ...] | None = safe_key(
        None, "Train steps that are traced.  Null: none."
    )
    discrete: bool = safe_key(
        False, "One trace for each phase of a step instead of one for the step."
    )
    all_ranks: bool = safe_key(False, "Trace every rank.")
    ranks: tuple[int, ...] | None = safe_key(
        None, "Ranks that are traced.  Null: rank 0.", unit="ranks"
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if self.all_ranks:
            self.warn_unused(at, ("ranks",), "all_ranks is true", diagnostics)
        if (self.all_ranks or self.ranks is not None or self.discrete) and not self.steps:
            diagnostics.warn(f"{at}: no steps are named, so nothing is traced")


WeightSet = Literal["current", "window", "average"]
"""Weights that the trainer can compute with: those it trains, those of the start of a window, their
moving average.
"""


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """The model and its training, on each of `world_size` ranks."""

    model_path: str
    # folder of the tokenizer that exported models get; None = model_path
    tokenizer_path: str | None = None
    chat_template: str | None = None  # Jinja text of exported models; None = the tokenizer's
    lora: LoraSettings | None = None  # None: full fine-tuning
    train_vision: bool = False  # also train the tower for images and its projection
    device: str = "cpu"
    # engines share the device: cached memory is released when weights are published
    shares_device: bool = False
    dtype: str = "float32"
    world_size: int = 1
    cpu_threads: int = 2  # per rank
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    grad_clip: float = 1.0  # largest gradient norm
    critic: CriticSettings = field(default_factory=CriticSettings)
    total_steps: int = 1
    ppo_epochs: int = 1  # updates per train step, each on all rows of the step
    shuffle_minibatches: bool = False  # new order of micro-batches in each epoch
    data_seed: int = SEED  # seed of that order
    max_token_len_per_gpu: int = 16384  # token budget of one micro-batch
    use_dynamic_bsz: bool = True
    micro_batch_size: int | None = None  # rows, used when use_dynamic_bsz is False
    # forward passes of the policy without training; None: as in training
    log_prob: ForwardSettings | None = None
    # forward passes of the reference model before a step; None: together with the policy
    ref: ForwardSettings | None = None
    max_response_tokens: int = 1024
    # divisor of seq-mean-token-sum-norm; None = max_response_tokens
    loss_scale_factor: int | None = None
    router_aux_loss_coef: float = 0.0  # weight of the load-balancing loss; 0 = off
    router_replay: bool = False  # route tokens to the experts that the engine chose
    # a step reports the log-probs of its tokens before the update, and the buffer stores them
    keep_trainer_logprobs: bool = False
    row_layout: AskedLayout = "auto"  # a learner holds the proven layout, never "auto"
    image_layout: AskedLayout = (
        "padded"  # of a micro-batch with images; a learner holds the proven one
    )
    # deal rows to ranks by tokens; False: in equal numbers, in their order
    balance_batch: bool = True
    logprob_chunk_tokens: int = 1024  # tokens per tile of logits
    entropy_chunking: bool = True  # compute entropies tile by tile; False: from all logits at once
    # recompute the tiles in the backward pass of the entropy; False: keep all logits
    entropy_checkpointing: bool = True
    fused_logprobs: bool = False  # compile the computation of a tile
    gradient_checkpointing: bool = False
    # with gradient_checkpointing: checkpointed activations are stored on the host
    activation_offload: bool = False
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    fsdp_size: int = -1  # ranks that share one copy of the model; -1 = all
    reduce_dtype: str = "float32"  # dtype of the gradient reduction over ranks
    sequence_parallel: int = 1  # ranks that share one micro-batch
    ref_offload: bool = False  # the reference model lives on the host
    ref_reshard_after_forward: bool = True
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    external_lib: str | None = None  # module imported before the model is loaded
    # entries that replace those of preprocessor_config.json
    image_processor_args: dict[str, Any] = field(default_factory=dict)
    # entries that replace those of config.json
    override_config: dict[str, Any] = field(default_factory=dict)
    offload_policy: bool = False  # parameters, gradients and optimizer state live on the host
    save_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    load_contents: tuple[str, ...] | None = None  # None: everything that was saved
    use_liger: bool = False
    compile: bool = False  # each layer
    # decay of the moving average of the weights that a teacher serves; None: none is kept
    average_decay: float | None = None
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    profile_folder: Path = Path("profile")
    seed: int = SEED
    deterministic: bool = False

    @property
    def sharded(self) -> bool:
        """Return whether FSDP2 is used: with several ranks, with a compute dtype other than
        float32, or with parameters offloaded to the host.

        A single float32 rank has nothing to shard, and FSDP2 would still copy every parameter twice
        and every gradient three times a step (about 1 s of a 5 s step of a 135 M model on two
        cores).
        """
        offloaded = self.offload_policy or self.ref_offload or self.critic.offload_policy
        return self.world_size > 1 or self.dtype != "float32" or offloaded


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The training loop around the learner."""

    total_steps: int
    batch_groups: int | None  # groups per step; None: see batch_rows
    batch_rows: int | None  # rows per step; None: see batch_groups
    save_interval: int = 0  # train steps; 0 = only at the end
    # seconds after which an unsaved step causes a checkpoint; 0 = age never causes one
    save_after_s: float = 0.0
    save_hf_checkpoint: Literal["always", "never", "last"] = "last"
    max_checkpoints_to_keep: int = 3  # 0 = all
    best_metric: str | None = None  # metric whose best checkpoint is retained besides the newest
    best_mode: Literal["max", "min"] = "max"
    async_save: bool = False  # checkpoints are written while steps go on
    checkpoint_dir: Path
    read_deadline_s: float = 1800.0
    # number of steps whose rows must be leased before the first of them begins
    require_batches: int = 1
    max_staleness: int | None = None
    max_nonfinite_steps: int = 3
    # training data set; None: the explorer samples the data
    offline_data: OfflineDataSettings | None = None
    # folder of a run whose rows are trained on again, step by step
    replay_run: Path | None = None
    held_out: OfflineDataSettings | None = None  # held-out rows for the loss evaluation
    # train steps between two loss evaluations; 0 = only before the first and after the last step
    eval_interval: int = 0
    seed: int = SEED  # seed of the order of offline data

    @property
    def alone(self) -> bool:
        """Return whether the trainer works without engines: on a data set or another run's rows."""
        return self.offline_data is not None or self.replay_run is not None
