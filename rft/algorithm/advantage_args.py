"""Arguments of the advantage functions and of the choice of rows.  Torch-free; formulas stand with the functions.

`ADVANTAGES` and `SAMPLES` have the form of `args.ARGS`, without the kind.  Invariant: defaults are the documented ones of the field.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from rft.algorithm.argbase import Args, Computed, NoArgs, moot

_EPSILON = "added to the standard deviation before dividing"


def _std_threshold() -> float | None:
    threshold: float | None = Field(
        None, ge=0, description="drop groups whose standard deviation is not above this, as the operator reward_std_filter does"
    )
    return threshold


class GrpoArgs(Args):
    """Group-relative advantage (arXiv:2402.03300); `norm_by_std: false` is Dr. GRPO (arXiv:2503.20783)."""

    epsilon: float = Field(1e-6, gt=0, description=_EPSILON)
    norm_by_std: bool = Field(True, description="divide by the unbiased standard deviation")
    std_threshold: float | None = _std_threshold()
    duplicate_experiences: bool = moot(
        False,
        "dropped groups are not made up for: the buffer has one max_uses for all of its rows, and rows are never copied",
        description="use remaining groups again in place of the dropped ones",
    )
    rank_penalty: float | None = Field(
        None, ge=0, description="lower the rewards of likely answers by this times their rank in the group (arXiv:2506.02355)"
    )
    std_cal_level: Literal["group", "batch"] = Field(
        "group", description="which rewards the standard deviation is taken over (arXiv:2508.08221)"
    )

    @property
    def whole_groups(self) -> bool:
        return self.rank_penalty is not None


class GaeArgs(Args):
    """Generalised advantage estimation with a critic (arXiv:1506.02438)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"values"})

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

    epsilon: float = Field(1e-6, gt=0, description=_EPSILON)
    std_normalize: bool = Field(False, description="divide by the group's biased standard deviation")
    drop: Literal["balance"] | None = Field(
        None, description="balance: drop rows below the mean until both sides are equally many"
    )


class StepWiseGrpoArgs(Args):
    """GRPO over the last experiences of each run, given to all of the run's steps."""

    epsilon: float = Field(1e-6, gt=0, description=_EPSILON)
    enable_step_norm: bool = Field(False, description="divide by the run's number of steps")
    std_threshold: float | None = _std_threshold()
    std_cal_level: Literal["group", "batch"] = Field("group", description="which rewards the standard deviation is taken over")


class GigpoArgs(Args):
    """Group in group: episodes of a task, and steps that begin in the same state (arXiv:2505.10978)."""

    reads: ClassVar[str] = (
        "the state of every step, and its reward where it has one, from the entries of info named by env_state_hash_key and "
        "step_reward_key"
    )

    omega: float = Field(1.0, ge=0, description="weight of the step advantage")
    gamma: float = Field(1.0, ge=0, le=1, description="discount per step")
    fnorm: Literal["none", "std"] = Field("none", description="what centred rewards are divided by")
    epsilon: float = Field(1e-6, gt=0, description="added to the divisor")
    step_reward_key: str = Field("step_reward", description="entry of the experience's info with the reward of the step")
    env_state_hash_key: str = Field("env_state_hash", description="entry of the experience's info that names the state")

    @property
    def wants(self) -> tuple[str, ...]:
        return (f"info.{self.env_state_hash_key}",) if self.omega > 0 else ()

    @property
    def whole_groups(self) -> bool:
        return True


class RemaxArgs(Args):
    """Return less the reward of a greedy run (arXiv:2310.10505)."""

    baseline: ClassVar[bool] = True


class _Taught(Args):
    reads: ClassVar[str] = "the teacher's log-probs of every experience (teacher_logprobs)"

    @property
    def wants(self) -> tuple[str, ...]:
        return ("teacher_logprobs",)


class OnPolicyDistillArgs(_Taught):
    """Teacher's log-prob less the student's, per token."""

    kl_coef: float = Field(1.0, ge=0, description="factor of the advantage")


class JsdArgs(_Taught):
    """Generalised Jensen-Shannon divergence between teacher and student, per sampled token (arXiv:2306.13649)."""

    lambda_coef: float = Field(0.5, ge=0, le=1, description="weight of the teacher in the mixture; 0 and 1 are the two KLs")
    kl_coef: float = Field(1.0, ge=0, description="factor of the advantage")
    temperature: float = Field(1.0, gt=0, description="divides both log-probs")
    chunk_size: int | None = moot(
        None,
        "all tokens are computed at once: they are single numbers",
        harmless=True,
        ge=1,
        description="tokens computed at the same time; null: all",
    )


class ClipBArgs(Args):
    """GRPO without those tokens of bad answers that would lower the entropy most, judged from the batch (arXiv:2602.03392)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old", "entropy"})

    epsilon: float = Field(1e-6, gt=0, description=_EPSILON)
    mu: float = Field(2.5, gt=0, description="standard deviations of the entropy score beyond which a token is dropped")


class ClipVArgs(Args):
    """As clipb, judged from the vocabulary (arXiv:2602.03392)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old", "entropy", "discriminator_mean"})

    epsilon: float = Field(1e-6, gt=0, description=_EPSILON)
    mu: float = Field(8.5, gt=0, description="standard deviations beyond which a token is dropped")
    max_frac: float = Field(1e-4, gt=0, le=1, description="most tokens that may be dropped, as a share")


class NormArgs(Args):
    """Group statistics with a switch for the division."""

    epsilon: float = Field(1e-6, gt=0, description=_EPSILON)
    norm_by_std: bool = Field(True, description="divide by the group's unbiased standard deviation")


class TokenBaselineArgs(Args):
    """Baseline of least variance at every token (optimal token baseline)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old", "sum_squares"})

    @property
    def whole_groups(self) -> bool:
        return True


class PfPpoArgs(Args):
    """Rows drawn anew by their reward (arXiv:2409.06957)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = Field("pow", description="how a reward becomes a weight")
    weight_pow: float = Field(2.0, gt=0, description="exponent of pow")


ADVANTAGES: dict[str, type[BaseModel]] = {
    "none": NoArgs,
    "grpo": GrpoArgs,
    "ppo": GaeArgs,
    "reinforce": NoArgs,
    "reinforceplusplus": ReinforcePlusPlusArgs,
    "reinforceplusplus_baseline": NoArgs,
    "remax": RemaxArgs,
    "rloo": NoArgs,
    "opmd": OpmdArgs,
    "asymre": AsymReArgs,
    "rec": RecArgs,
    "step_wise_grpo": StepWiseGrpoArgs,
    "gigpo": GigpoArgs,
    "on_policy_distill": OnPolicyDistillArgs,
    "jsd": JsdArgs,
    "clipb": ClipBArgs,
    "clipv": ClipVArgs,
    "opo": NoArgs,
    "gpg": NoArgs,
    "grpo_passk": NormArgs,
    "optimal_token_baseline": TokenBaselineArgs,
}


class GroupBestArgs(Args):
    """The best runs of each group (arXiv:2304.06767)."""

    num_best: int = Field(1, ge=1, description="runs of each group that are trained on, those with the highest rewards")
    min_reward: float | None = Field(
        None, description="runs with a lower reward are left out even then; null: the best is always good"
    )


class MixSampleArgs(Args):
    """Rows of an expert's data set beside the policy's own, which are as with `default`."""

    expert_data_ratio: float = Field(0.5, gt=0, lt=1, description="share of the expert's rows in a train batch, rounded up")
    sft_dataset_name: str = Field("sft_dataset", description="which of buffer.trainer_input.auxiliary_buffers holds them")


SAMPLES: dict[str, type[BaseModel]] = {
    "default": NoArgs,
    "pf_ppo": PfPpoArgs,
    "group_best": GroupBestArgs,
    "mix": MixSampleArgs,
}
