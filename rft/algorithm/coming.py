"""Arguments of algorithm parts that a configuration may name before they exist.  Torch-free.

`COMING` has the form of `args.ARGS`; a part that is built moves its model there.  Formulas stand with the part when it comes.
Invariant: no name is in both.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from rft.algorithm.argbase import Args, NoArgs

# ---------------------------------------------------------------- advantages


class GaeArgs(Args):
    """Generalised advantage estimation with a critic (arXiv:1506.02438)."""

    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="lambda: 1 = whole returns, 0 = one-step differences of values")


class ReinforcePlusPlusArgs(Args):
    """Whitened return to go without a critic (arXiv:2501.03262)."""

    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")


class OpmdArgs(Args):
    """Reward less a baseline of the group (arXiv:2501.12599)."""

    opmd_baseline: Literal["mean", "logavgexp"] = Field("mean", description="mean, or tau (logsumexp(r / tau) - log n)")
    tau: float = Field(1.0, gt=0, description="temperature of logavgexp")


class AsymReArgs(Args):
    """Reward less the group's mean and a shift (arXiv:2506.20520)."""

    baseline_shift: float = Field(-0.1, description="added to the group's mean; negative lets good rows weigh more")


class RecArgs(Args):
    """Group-relative REINFORCE with a choice of rows (arXiv:2509.24203)."""

    epsilon: float = Field(1e-6, gt=0, description="added to the standard deviation before dividing")
    std_normalize: bool = Field(False, description="divide by the group's biased standard deviation")
    drop: Literal["balance"] | None = Field(
        None, description="balance: drop rows below the mean until both sides are equally many"
    )


class StepWiseGrpoArgs(Args):
    """GRPO over the last experiences of each run, given to all of the run's steps."""

    epsilon: float = Field(1e-6, gt=0, description="added to the group's standard deviation before dividing")
    enable_step_norm: bool = Field(False, description="divide by the run's number of steps")
    std_threshold: float | None = Field(None, ge=0, description="drop groups whose standard deviation is not above this")
    std_cal_level: Literal["group", "batch"] = Field("group", description="which rewards the standard deviation is taken over")


class GigpoArgs(Args):
    """Group in group: episodes of a task, and steps that begin in the same state (arXiv:2505.10978)."""

    omega: float = Field(1.0, ge=0, description="weight of the step advantage")
    gamma: float = Field(1.0, ge=0, le=1, description="discount per step")
    fnorm: Literal["none", "std"] = Field("none", description="what centred rewards are divided by")
    epsilon: float = Field(1e-6, gt=0, description="added to the divisor")
    step_reward_key: str = Field("step_reward", description="entry of the experience's info with the reward of the step")
    env_state_hash_key: str = Field("env_state_hash", description="entry of the experience's info that names the state")


class OnPolicyDistillArgs(Args):
    """Teacher's log-prob less the student's, per token."""

    kl_coef: float = Field(1.0, ge=0, description="factor of the advantage")


class JsdArgs(Args):
    """Generalised Jensen-Shannon divergence between teacher and student, per sampled token (arXiv:2306.13649)."""

    lambda_coef: float = Field(0.5, ge=0, le=1, description="weight of the teacher in the mixture; 0 and 1 are the two KLs")
    kl_coef: float = Field(1.0, ge=0, description="factor of the advantage")
    temperature: float = Field(1.0, gt=0, description="divides both log-probs")
    chunk_size: int | None = Field(None, ge=1, description="tokens computed at the same time; null: all")


class ClipBArgs(Args):
    """GRPO without those tokens of bad answers that would lower the entropy most, judged from the batch."""

    epsilon: float = Field(1e-6, gt=0, description="added to the group's standard deviation before dividing")
    mu: float = Field(2.5, gt=0, description="standard deviations of the entropy score beyond which a token is dropped")


class ClipVArgs(Args):
    """As clipb, judged from the vocabulary."""

    epsilon: float = Field(1e-6, gt=0, description="added to the group's standard deviation before dividing")
    mu: float = Field(8.5, gt=0, description="standard deviations beyond which a token is dropped")
    max_frac: float = Field(1e-4, gt=0, le=1, description="most tokens that may be dropped, as a share")


class NormArgs(Args):
    """Group statistics with a switch for the division."""

    epsilon: float = Field(1e-6, gt=0, description="added to the group's standard deviation before dividing")
    norm_by_std: bool = Field(True, description="divide by the group's unbiased standard deviation")


# ---------------------------------------------------------------- policy losses


class GspoArgs(Args):
    """Clipped ratio of whole sequences (arXiv:2507.18071)."""

    clip_range: float | None = Field(None, ge=0, description="both bounds, where the two below are not given")
    clip_range_low: float = Field(3e-4, ge=0, le=1, description="the sequence ratio is clipped at 1 - this")
    clip_range_high: float = Field(4e-4, ge=0, description="the sequence ratio is clipped at 1 + this")


class CispoArgs(Args):
    """Clipped importance weight, gradient through log-probs only (arXiv:2506.13585)."""

    clip_range_low: float = Field(1.0, ge=0, le=1, description="the weight is clipped at 1 - this")
    clip_range_high: float = Field(0.28, ge=0, description="the weight is clipped at 1 + this")
    enable_mask_clip: bool = Field(False, description="leave out tokens whose ratio is beyond the two bounds below")
    mask_clip_range_low: float = Field(1.0, ge=0, le=1, description="tokens of bad answers below 1 - this are left out")
    mask_clip_range_high: float = Field(0.28, ge=0, description="tokens of good answers above 1 + this are left out")


class SapoArgs(Args):
    """Soft gate instead of a clip (arXiv:2511.20347)."""

    tau_pos: float = Field(1.0, gt=0, description="steepness of the gate for positive advantages")
    tau_neg: float = Field(1.05, gt=0, description="steepness of the gate for the others")


class ToprArgs(Args):
    """Tapered importance weights for bad answers (arXiv:2503.14286)."""

    advantage_threshold: float = Field(0.0, description="advantages up to this get a ratio clipped to [0, 1], others weight 1")


class OpmdLossArgs(Args):
    """-A log-prob / (1 + tau)."""

    tau: float = Field(1.0, ge=0, description="regularisation towards the sampling policy")


class SppoArgs(Args):
    """-A (log-prob - old) where the ratio is near 1."""

    epsilon: float = Field(0.3, gt=0, description="ratios from 1 / (1 + epsilon) to 1 + epsilon count")


class RecLossArgs(Args):
    """-A log-prob with a choice of range, weight and regulariser (arXiv:2509.24203)."""

    epsilon_low: float = Field(0.2, ge=0, le=1, description="lower bound of the range: 1 - this")
    epsilon_high: float = Field(0.2, ge=0, description="upper bound of the range: 1 + this")
    epsilon_low_prime: float = Field(0.6, ge=0, le=1, description="ring: good answers below 1 - this count again")
    epsilon_high_prime: float = Field(2.0, ge=0, description="ring: bad answers above 1 + this count again")
    clip_mode: Literal["none", "one-side", "two-side", "ring", "gspo-one-side"] = Field("none", description="which tokens count")
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = Field(
        "none", description="factor of each token's loss"
    )
    regularizer: Literal["none", "k2", "forward-kl"] = Field("none", description="added to each token's loss")
    regularizer_coef: float = Field(0.0, ge=0, description="factor of the regulariser")
    temp: float = Field(1.0, gt=0, description="weight advantage: A exp(A / temp)")


class SftPhiArgs(Args):
    """-log-prob p (1 - p)."""

    cutoff_prob: float = Field(1.0, gt=0, le=1, description="log-probs are limited to the log of this")


class DpoArgs(Args):
    """Direct preference optimisation (arXiv:2305.18290)."""

    beta: float = Field(0.1, gt=0, description="factor of the implicit reward")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of preferences taken to be the wrong way round")


class _Mixed(Args):
    clip_range: float = Field(0.2, ge=0, description="both clip bounds, where the two below are null")
    clip_range_low: float | None = Field(None, ge=0, le=1, description="the ratio is clipped at 1 - clip_range_low")
    clip_range_high: float | None = Field(None, ge=0, description="the ratio is clipped at 1 + clip_range_high")


class MixArgs(_Mixed):
    """PPO on the policy's own rows and SFT on an expert's."""

    mu: float = Field(0.1, ge=0, le=1, description="weight of the SFT part; the PPO part has 1 - mu")


class MixChordArgs(_Mixed):
    """As mix, with a weight that follows the step (arXiv:2508.11408)."""

    mu_warmup_steps: int = Field(0, ge=0, description="train steps from 0 to mu_peak")
    mu_decay_steps: int = Field(0, ge=0, description="train steps from mu_peak to mu_valley")
    mu_peak: float = Field(0.1, ge=0, le=1, description="largest weight of the SFT part")
    mu_valley: float = Field(0.1, ge=0, le=1, description="weight of the SFT part at the end")
    enable_phi_function: bool = Field(True, description="the SFT part is sft_phi, else sft")


class M2poArgs(Args):
    """Ratio loss on tokens kept by their second moment (arXiv:2510.01161)."""

    m2_threshold: float = Field(0.04, gt=0, description="largest mean of the squared log ratio among the kept tokens")
    log_ratio_clip: float = Field(20.0, gt=0, description="limit of the log ratio before the exponential")


class GeoMeanArgs(_Mixed):
    """Geometric mean of a sequence's ratios (arXiv:2507.20673)."""


class ClipCovArgs(_Mixed):
    """PPO without some tokens whose advantage and log-prob vary together (arXiv:2505.22617)."""

    clip_cov_ratio: float = Field(2e-4, gt=0, le=1, description="share of the tokens that lose their gradient")
    clip_cov_lb: float = Field(1.0, description="least covariance of such a token")
    clip_cov_ub: float = Field(5.0, description="largest covariance of such a token")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb {self.clip_cov_lb} must be below clip_cov_ub {self.clip_cov_ub}")
        return self


class KlCovArgs(Args):
    """Ratio loss with a KL penalty on the tokens of largest covariance (arXiv:2505.22617)."""

    kl_cov_ratio: float = Field(2e-4, gt=0, le=1, description="share of the tokens that get the penalty")
    ppo_kl_coef: float = Field(1.0, ge=0, description="factor of the penalty")


# ---------------------------------------------------------------- KL, entropy, choice of the rows


class KlPenaltyArgs(Args):
    """Weight of a KL term, constant or steered (arXiv:1909.08593)."""

    kl_coef: float = Field(0.001, ge=0, description="factor of the KL; the first one, where it is adaptive")
    adaptive: bool = Field(False, description="steer the factor so that the KL comes near target_kl")
    target_kl: float = Field(0.1, gt=0, description="the KL that is steered for, in nats per token")
    horizon: int = Field(10000, gt=0, description="experiences after which the factor follows an error wholly")


class MixEntropyArgs(Args):
    """Entropy bonus of the policy's own rows."""

    entropy_coef: float = Field(0.0, ge=0, description="factor of the entropy bonus")


class MixSampleArgs(Args):
    """Rows of an expert's data set beside the policy's own."""

    expert_data_ratio: float = Field(0.5, ge=0, le=1, description="share of the expert's rows in a batch")
    sft_dataset_name: str = Field("sft_dataset", description="which of buffer.trainer_input.auxiliary_buffers holds them")


class PfPpoArgs(Args):
    """Rows drawn anew by their reward (arXiv:2409.06957)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field("pow", description="how a reward becomes a weight")
    weight_pow: float = Field(2.0, gt=0, description="exponent of pow")


KL_NAMES = ("k1", "k2", "k3", "abs", "low_var_kl", "corrected_k3")
COMING: dict[tuple[str, str], type[BaseModel]] = {
    ("advantage_fn", "none"): NoArgs,
    ("advantage_fn", "ppo"): GaeArgs,
    ("advantage_fn", "rloo"): NoArgs,
    ("advantage_fn", "reinforce"): NoArgs,
    ("advantage_fn", "reinforceplusplus"): ReinforcePlusPlusArgs,
    ("advantage_fn", "reinforceplusplus_baseline"): NoArgs,
    ("advantage_fn", "remax"): NoArgs,
    ("advantage_fn", "opmd"): OpmdArgs,
    ("advantage_fn", "asymre"): AsymReArgs,
    ("advantage_fn", "rec"): RecArgs,
    ("advantage_fn", "step_wise_grpo"): StepWiseGrpoArgs,
    ("advantage_fn", "gigpo"): GigpoArgs,
    ("advantage_fn", "on_policy_distill"): OnPolicyDistillArgs,
    ("advantage_fn", "jsd"): JsdArgs,
    ("advantage_fn", "clipb"): ClipBArgs,
    ("advantage_fn", "clipv"): ClipVArgs,
    ("advantage_fn", "opo"): NoArgs,
    ("advantage_fn", "gpg"): NoArgs,
    ("advantage_fn", "grpo_passk"): NormArgs,
    ("advantage_fn", "optimal_token_baseline"): NoArgs,
    ("policy_loss_fn", "gspo"): GspoArgs,
    ("policy_loss_fn", "cispo"): CispoArgs,
    ("policy_loss_fn", "sapo"): SapoArgs,
    ("policy_loss_fn", "topr"): ToprArgs,
    ("policy_loss_fn", "opmd"): OpmdLossArgs,
    ("policy_loss_fn", "sppo"): SppoArgs,
    ("policy_loss_fn", "rec"): RecLossArgs,
    ("policy_loss_fn", "importance_sampling"): NoArgs,
    ("policy_loss_fn", "sft"): NoArgs,
    ("policy_loss_fn", "sft_is"): NoArgs,
    ("policy_loss_fn", "sft_phi"): SftPhiArgs,
    ("policy_loss_fn", "dpo"): DpoArgs,
    ("policy_loss_fn", "mix"): MixArgs,
    ("policy_loss_fn", "mix_chord"): MixChordArgs,
    ("policy_loss_fn", "m2po"): M2poArgs,
    ("policy_loss_fn", "gpg"): NoArgs,
    ("policy_loss_fn", "geo_mean"): GeoMeanArgs,
    ("policy_loss_fn", "clip_cov"): ClipCovArgs,
    ("policy_loss_fn", "kl_cov"): KlCovArgs,
    ("kl_loss_fn", "corrected_k3"): KlPenaltyArgs,
    **{("kl_penalty_fn", name): KlPenaltyArgs for name in KL_NAMES},
    ("entropy_loss_fn", "mix"): MixEntropyArgs,
    ("sample_strategy", "mix"): MixSampleArgs,
    ("sample_strategy", "pf_ppo"): PfPpoArgs,
}


def coming(kind: str) -> tuple[str, ...]:
    """The names of `kind` that are accepted and not there yet."""
    return tuple(n for k, n in COMING if k == kind)
