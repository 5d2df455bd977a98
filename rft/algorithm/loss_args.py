"""Arguments of the policy losses.  Torch-free; formulas stand with the losses.

`LOSSES` maps the name of every shipped policy loss to its model.  Invariant: an attribute such as `zero_without_advantage` is True
only where it holds exactly.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from rft.algorithm.argbase import AggMode, Args, Computed, Sampled


class _Gradient(Args):
    """A loss that is a multiple of the advantage, token by token."""

    @property
    def zero_without_advantage(self) -> bool:
        return True


class GradientArgs(_Gradient):
    """For losses that are a multiple of the advantage and take no arguments."""


class _HasBounds(Protocol):
    @property
    def low(self) -> float: ...


Clipping = TypeVar("Clipping", bound=_HasBounds)


def _below_one(args: Clipping) -> Clipping:
    if args.low > 1:
        raise ValueError(f"clip_range {args.low} as the lower bound must be at most 1; set clip_range_low")
    return args


class _Clipped(Args):
    clip_range: float = Field(0.2, ge=0, description="both clip bounds, where the two below are null")
    clip_range_low: float | None = Field(None, ge=0, le=1, description="the ratio is clipped at 1 - clip_range_low")
    clip_range_high: float | None = Field(None, ge=0, description="the ratio is clipped at 1 + clip_range_high")

    _bounds = model_validator(mode="after")(_below_one)

    @property
    def low(self) -> float:
        return self.clip_range if self.clip_range_low is None else self.clip_range_low

    @property
    def high(self) -> float:
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


class PpoArgs(_Clipped, _Gradient):
    """Clipped importance ratio (arXiv:1707.06347) with dual clip (arXiv:1912.09729) and separate bounds (arXiv:2503.14476)."""

    clip_ratio_c: float = Field(3.0, gt=1, description="dual clip: a token with negative advantage A costs at most -A times this")
    enable_sequence_masking: bool = Field(
        False, description="tokens of bad answers that the policy has moved far away from cost nothing (arXiv:2512.02556)"
    )
    delta_sequence_masking: float = Field(
        0.1, ge=0, description="how far: mean of old less new log-prob of the sequence, in nats"
    )
    fallback_to_policy_gradient: bool = Field(
        False, description="the ratio is taken against the policy itself: it is 1, nothing is clipped"
    )


class GspoArgs(_Gradient):
    """Clipped ratio of whole sequences (arXiv:2507.18071)."""

    agg_mode: ClassVar[AggMode | None] = "seq-mean-token-mean"

    clip_range: float | None = Field(None, ge=0, description="both bounds, where the two below are not given")
    clip_range_low: float = Field(3e-4, ge=0, le=1, description="the sequence ratio is clipped at 1 - this")
    clip_range_high: float = Field(4e-4, ge=0, description="the sequence ratio is clipped at 1 + this")

    _bounds = model_validator(mode="after")(_below_one)

    @property
    def low(self) -> float:
        return self._bound("clip_range_low", self.clip_range_low)

    @property
    def high(self) -> float:
        return self._bound("clip_range_high", self.clip_range_high)

    def _bound(self, name: str, value: float) -> float:
        return value if self.clip_range is None or name in self.model_fields_set else self.clip_range


class GeoMeanArgs(_Clipped, _Gradient):
    """Geometric mean of a sequence's ratios (arXiv:2507.20673); bounds hold for log ratios."""

    agg_mode: ClassVar[AggMode | None] = "seq-mean-token-mean"
    fixed_agg: ClassVar[bool] = True

    clip_range: float = Field(0.2, ge=0, description="both bounds of the log ratio, where the two below are null")
    clip_range_low: float | None = Field(None, ge=0, le=1, description="the log ratio is clipped at -clip_range_low")
    clip_range_high: float | None = Field(None, ge=0, description="the log ratio is clipped at clip_range_high")


class CispoArgs(_Gradient):
    """Clipped importance weight, gradient through log-probs only (arXiv:2506.13585)."""

    clip_range_low: float = Field(1.0, ge=0, le=1, description="the weight is clipped at 1 - this")
    clip_range_high: float = Field(0.28, ge=0, description="the weight is clipped at 1 + this")
    enable_mask_clip: bool = Field(False, description="tokens whose ratio is beyond the two bounds below cost nothing")
    mask_clip_range_low: float = Field(1.0, ge=0, le=1, description="so do tokens of bad answers below 1 - this")
    mask_clip_range_high: float = Field(0.28, ge=0, description="so do tokens of good answers above 1 + this")


class SapoArgs(_Gradient):
    """Soft gate instead of a clip (arXiv:2511.20347)."""

    agg_mode: ClassVar[AggMode | None] = "seq-mean-token-mean"

    tau_pos: float = Field(1.0, gt=0, description="steepness of the gate for positive advantages")
    tau_neg: float = Field(1.05, gt=0, description="steepness of the gate for the others")


class ToprArgs(_Gradient):
    """Tapered importance weights for bad answers (arXiv:2503.14286)."""

    advantage_threshold: float = Field(0.0, description="advantages up to this get a ratio clipped to [0, 1], others weight 1")


class OpmdLossArgs(_Gradient):
    """-A log-prob / (1 + tau) (arXiv:2501.12599)."""

    tau: float = Field(1.0, ge=0, description="regularisation towards the sampling policy")


class SppoArgs(_Gradient):
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

    @property
    def zero_without_advantage(self) -> bool:
        return self.regularizer == "none" or self.regularizer_coef == 0


class SftArgs(Args):
    """For losses that imitate the rows as they are and take no arguments."""

    samples: ClassVar[Sampled] = "none"


class SftPhiArgs(SftArgs):
    """-log-prob p (1 - p) (arXiv:2508.11408)."""

    cutoff_prob: float = Field(1.0, gt=0, le=1, description="log-probs are limited to the log of this")


class DpoArgs(Args):
    """Direct preference optimisation (arXiv:2305.18290)."""

    reference: ClassVar[bool] = True
    samples: ClassVar[Sampled] = "none"
    pairs: ClassVar[bool] = True
    agg_mode: ClassVar[AggMode | None] = "seq-mean-token-sum"
    fixed_agg: ClassVar[bool] = True

    beta: float = Field(0.1, gt=0, description="factor of the implicit reward")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of preferences taken to be the wrong way round")


class MixArgs(_Clipped):
    """PPO on the policy's own rows and SFT on an expert's."""

    samples: ClassVar[Sampled] = "own"

    mu: float = Field(0.1, ge=0, le=1, description="weight of the SFT part; the PPO part has 1 - mu")


class MixChordArgs(_Clipped):
    """As mix, with a weight that follows the step (arXiv:2508.11408)."""

    samples: ClassVar[Sampled] = "own"

    mu_warmup_steps: int = Field(0, ge=0, description="train steps from 0 to mu_peak")
    mu_decay_steps: int = Field(0, ge=0, description="train steps from mu_peak to mu_valley")
    mu_peak: float = Field(0.1, ge=0, le=1, description="largest weight of the SFT part")
    mu_valley: float = Field(0.1, ge=0, le=1, description="weight of the SFT part at the end")
    enable_phi_function: bool = Field(True, description="the SFT part is sft_phi, else sft")


class M2poArgs(_Gradient):
    """Ratio loss on tokens kept by their second moment (arXiv:2510.01161)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old"})

    m2_threshold: float = Field(0.04, gt=0, description="largest mean of the squared log ratio among the kept tokens")
    log_ratio_clip: float = Field(20.0, gt=0, description="limit of the log ratio before the exponential")


class ClipCovArgs(_Clipped, _Gradient):
    """PPO without some tokens whose advantage and log-prob vary together (arXiv:2505.22617)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old"})

    clip_cov_ratio: float = Field(2e-4, gt=0, le=1, description="share of the tokens that lose their gradient")
    clip_cov_lb: float = Field(1.0, description="such a token's covariance is above this")
    clip_cov_ub: float = Field(5.0, description="and below this")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb {self.clip_cov_lb} must be below clip_cov_ub {self.clip_cov_ub}")
        return self


class KlCovArgs(Args):
    """Ratio loss with a KL penalty on the tokens of largest covariance (arXiv:2505.22617)."""

    before: ClassVar[frozenset[Computed]] = frozenset({"old"})

    kl_cov_ratio: float = Field(2e-4, gt=0, le=1, description="share of the tokens that get the penalty")
    ppo_kl_coef: float = Field(1.0, ge=0, description="factor of the penalty")


LOSSES: dict[str, type[Args]] = {
    "ppo": PpoArgs,
    "gspo": GspoArgs,
    "geo_mean": GeoMeanArgs,
    "cispo": CispoArgs,
    "sapo": SapoArgs,
    "reinforce": GradientArgs,
    "gpg": GradientArgs,
    "importance_sampling": GradientArgs,
    "topr": ToprArgs,
    "opmd": OpmdLossArgs,
    "sppo": SppoArgs,
    "rec": RecLossArgs,
    "sft": SftArgs,
    "sft_is": SftArgs,
    "sft_phi": SftPhiArgs,
    "dpo": DpoArgs,
    "mix": MixArgs,
    "mix_chord": MixChordArgs,
    "m2po": M2poArgs,
    "clip_cov": ClipCovArgs,
    "kl_cov": KlCovArgs,
}
