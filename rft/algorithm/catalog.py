"""Algorithms by name: which parts each one is made of, and what a configuration of parts needs computed.  Torch-free.

A configuration names an algorithm and may replace any part of it.  Invariant: every entry's parts and arguments pass
`check_args`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rft.algorithm.argbase import Args, Computed, Sampled
from rft.algorithm.args import AggMode, EntropyArgs, KlArgs, check_args, validate
from rft.algorithm.controller import KlController
from rft.algorithm.correction_args import CorrectionArgs
from rft.errors import ConfigError

Data = Literal["chats", "texts", "pairs"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmDefaults:
    """The parts of one algorithm.  Arguments left out have the defaults of the part's own `Args`."""

    name: str
    doc: str
    advantage_fn: str
    policy_loss_fn: str
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "default"
    loss_agg_mode: AggMode = "token-mean"
    kl_penalty_fn: str = "none"
    sample_strategy: str = "default"
    repeat_times: int = 8  # runs of each task where the configuration names none; a group of one has no advantage
    advantage_fn_args: Mapping[str, Any] = field(default_factory=dict)
    policy_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    kl_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    entropy_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    data: Data | None = None  # the rows of a data set that it trains on; None: what the policy samples


def _of(name: str, advantage_fn: str, policy_loss_fn: str, repeat_times: int, doc: str, **more: Any) -> AlgorithmDefaults:
    return AlgorithmDefaults(
        name=name, doc=doc, advantage_fn=advantage_fn, policy_loss_fn=policy_loss_fn, repeat_times=repeat_times, **more
    )


_SEQUENCES: Any = {"loss_agg_mode": "seq-mean-token-mean"}
_MIXED: Any = {"entropy_loss_fn": "mix", "sample_strategy": "mix"}
_NO_BONUS: Any = {"entropy_loss_fn": "none"}
ALGORITHMS: dict[str, AlgorithmDefaults] = {
    d.name: d
    for d in (
        AlgorithmDefaults(
            name="grpo",
            doc="Group-relative advantages with the clipped PPO loss (arXiv:2402.03300).  No KL loss unless kl_loss_fn is set: "
            "Trinity-RFT's preset adds k2 with kl_coef 0.001, which costs a reference model; write kl_loss_fn: k2 for the same.",
            advantage_fn="grpo",
            policy_loss_fn="ppo",
        ),
        AlgorithmDefaults(
            name="dr_grpo",
            doc="GRPO without its two biases (arXiv:2503.20783): advantages are not divided by the group's standard deviation, "
            "and a sequence's loss is divided by max_response_tokens instead of its own length.",
            advantage_fn="grpo",
            advantage_fn_args={"norm_by_std": False},
            policy_loss_fn="ppo",
            loss_agg_mode="seq-mean-token-sum-norm",
        ),
        _of("ppo", "ppo", "ppo", 1, "Clipped ratio with a critic (arXiv:1707.06347)."),
        _of(
            "dapo",
            "grpo",
            "ppo",
            16,
            "GRPO with a wider upper clip bound (arXiv:2503.14476).  Its penalty for overlong answers is an argument of every reward; "
            "groups of equal rewards stay in the step with advantage 0 instead of being sampled anew.",
            policy_loss_fn_args={"clip_range_low": 0.2, "clip_range_high": 0.28},
        ),
        _of("reinforceplusplus", "reinforceplusplus", "ppo", 2, "Whitened returns without a critic (arXiv:2501.03262)."),
        _of("reinforceplusplus_baseline", "reinforceplusplus_baseline", "ppo", 2, "The same less the group's mean."),
        _of("rloo", "rloo", "ppo", 2, "Leave-one-out baseline (arXiv:2402.14740)."),
        _of("remax", "remax", "ppo", 1, "Greedy answer as baseline (arXiv:2310.10505)."),
        _of("opmd", "opmd", "opmd", 2, "Online policy mirror descent (arXiv:2501.12599)."),
        _of("asymre", "asymre", "opmd", 2, "Asymmetric REINFORCE (arXiv:2506.20520).", **_NO_BONUS),
        _of("topr", "reinforce", "topr", 2, "Tapered off-policy REINFORCE (arXiv:2503.14286)."),
        _of("cispo", "grpo", "cispo", 2, "Clipped importance weights (arXiv:2506.13585)."),
        _of("gspo", "grpo", "gspo", 2, "Ratios of whole sequences (arXiv:2507.18071).", **_SEQUENCES),
        _of("sapo", "grpo", "sapo", 2, "Soft gates (arXiv:2511.20347).", **_SEQUENCES),
        _of("rec", "rec", "rec", 2, "Group-relative REINFORCE (arXiv:2509.24203)."),
        _of("sppo", "opmd", "sppo", 2, "Simple policy optimisation.", **_NO_BONUS),
        _of("mix", "grpo", "mix", 8, "GRPO and SFT on an expert's rows.", **_MIXED),
        _of("mix_chord", "grpo", "mix_chord", 8, "The same with a weight that follows the step (arXiv:2508.11408).", **_MIXED),
        _of("multi_step_grpo", "step_wise_grpo", "ppo", 8, "GRPO over runs of several steps."),
        _of("gigpo", "gigpo", "ppo", 8, "Group in group (arXiv:2505.10978)."),
        _of("on_policy_distill", "on_policy_distill", "ppo", 8, "A teacher's log-probs as advantages.", **_NO_BONUS),
        _of("jsd", "jsd", "ppo", 8, "Distillation by Jensen-Shannon divergence (arXiv:2306.13649).", **_NO_BONUS),
        _of("m2po", "grpo", "m2po", 8, "Second-moment mask for stale rows (arXiv:2510.01161)."),
        _of("opo", "opo", "ppo", 8, "Length-weighted baseline (arXiv:2505.23585)."),
        _of(
            "gmpo",
            "grpo",
            "geo_mean",
            8,
            "Geometric mean of a sequence's ratios (arXiv:2507.20673), with the paper's bounds of the log ratio.",
            policy_loss_fn_args={"clip_range": 0.4},
            **_SEQUENCES,
        ),
        _of("clip_cov", "grpo", "clip_cov", 8, "GRPO; tokens that lower the entropy most cost nothing (arXiv:2505.22617)."),
        _of("kl_cov", "grpo", "kl_cov", 8, "GRPO; such tokens are held near the old policy instead (arXiv:2505.22617)."),
        _of("gpg", "gpg", "gpg", 8, "Group policy gradient (arXiv:2504.02546)."),
        _of("grpo_passk", "grpo_passk", "ppo", 8, "Only the best answer of a group counts (arXiv:2503.19595)."),
        _of("raft", "none", "sft", 8, "SFT on the best answers (arXiv:2304.06767).", sample_strategy="group_best", **_NO_BONUS),
        _of("sft", "none", "sft", 1, "Supervised fine-tuning on chats.", data="chats", **_NO_BONUS),
        _of("cpt", "none", "sft", 1, "Continued pre-training on texts.", data="texts", **_NO_BONUS),
        _of("dpo", "none", "dpo", 1, "Direct preference optimisation (arXiv:2305.18290).", data="pairs", **_NO_BONUS),
    )
}
RENAMED = {"grpo_verl": "grpo"}  # older names that people bring along


def algorithm_defaults(name: str, *, key: str = "algorithm.algorithm_type") -> AlgorithmDefaults:
    """The parts of algorithm `name`; raises ConfigError that lists what there is."""
    name = RENAMED.get(name, name)
    if (found := ALGORITHMS.get(name)) is not None:
        return found
    near = difflib.get_close_matches(name, ALGORITHMS, n=1)
    tail = f"  Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown algorithm {name!r}.  Available: {', '.join(ALGORITHMS)}.{tail}", key=key, given=name)


_NO_GROUPS = ("none", "ppo", "reinforce", "reinforceplusplus", "remax", "on_policy_distill", "jsd")


def compares_in_groups(advantage_fn: str) -> bool:
    """Whether a run's advantage comes from the other runs of its task, so that a group of one has none."""
    return advantage_fn not in _NO_GROUPS


class PartSettings(Protocol):
    """What this room reads of the trainer's algorithm settings."""

    @property
    def advantage_fn(self) -> str: ...
    @property
    def advantage_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def sample_strategy(self) -> str: ...
    @property
    def sample_strategy_args(self) -> Mapping[str, Any]: ...
    @property
    def policy_loss_fn(self) -> str: ...
    @property
    def policy_loss_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def kl_loss_fn(self) -> str: ...
    @property
    def kl_loss_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def kl_penalty_fn(self) -> str: ...
    @property
    def kl_penalty_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def entropy_loss_fn(self) -> str: ...
    @property
    def entropy_loss_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def loss_agg_mode(self) -> str: ...
    @property
    def bypass_old_logprobs(self) -> bool: ...
    @property
    def rollout_correction(self) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True)
class Needs:
    """What is read beyond the log-probs of the samplers and of the policy; the trainer computes nothing else."""

    reference: bool  # the reference model
    kl_loss: bool  # log-probs of the reference model, in the KL loss
    kl_penalty: bool  # the same, in the reward
    entropy: bool  # entropy of every response token, with gradient
    before: frozenset[Computed]  # what is computed for all rows before the step
    samples: Sampled = "all"  # which rows need log-probs of their sampler
    pairs: bool = False  # rows come in pairs, chosen and rejected
    skips_zero: bool = False  # rows whose advantages are all 0 have no loss and no gradient

    @property
    def critic(self) -> bool:
        return "values" in self.before


def needs(settings: PartSettings) -> Needs:
    """A KL or entropy term with coefficient 0 needs nothing.  Raises ConfigError for wrong arguments."""
    kl = check_args("kl_loss_fn", settings.kl_loss_fn, settings.kl_loss_fn_args)
    entropy = check_args("entropy_loss_fn", settings.entropy_loss_fn, settings.entropy_loss_fn_args)
    parts = [
        check_args("advantage_fn", settings.advantage_fn, settings.advantage_fn_args),
        check_args("policy_loss_fn", settings.policy_loss_fn, settings.policy_loss_fn_args),
    ]
    before = frozenset[Computed]().union(*(getattr(args, "before", ()) for args in parts))
    kl_loss = settings.kl_loss_fn != "none" and not (isinstance(kl, KlArgs) and kl.kl_coef == 0)
    penalty = check_args("kl_penalty_fn", settings.kl_penalty_fn, settings.kl_penalty_fn_args)
    kl_penalty = settings.kl_penalty_fn != "none" and not (isinstance(penalty, KlArgs) and penalty.kl_coef == 0)
    if kl_penalty:
        before |= {"ref"}
    if (correction := correction_args(settings)) is not None and correction.measured:
        before |= {"old"}
    bonus = settings.entropy_loss_fn != "none" and not (isinstance(entropy, EntropyArgs) and entropy.entropy_coef == 0)
    loss = parts[1] if isinstance(parts[1], Args) else Args()  # a plugin's own model says nothing of all this
    return Needs(
        reference=kl_loss or "ref" in before or any(getattr(args, "reference", False) for args in parts),
        kl_loss=kl_loss,
        kl_penalty=kl_penalty,
        entropy=bonus,
        before=before,
        samples=loss.samples,
        pairs=loss.pairs,
        skips_zero=loss.zero_without_advantage and not kl_loss and not bonus and "values" not in before,
    )


def correction_args(settings: PartSettings) -> CorrectionArgs | None:
    """The checked `algorithm.rollout_correction`; None where there is none.  Raises ConfigErrors for wrong arguments."""
    if settings.rollout_correction is None:
        return None
    checked = validate(
        CorrectionArgs, settings.rollout_correction, what="the rollout correction", key="algorithm.rollout_correction"
    )
    assert isinstance(checked, CorrectionArgs)
    return checked


def controllers(settings: PartSettings) -> dict[str, KlController]:
    """What holds the factor of each KL term in use: "kl_penalty" and "kl_loss"."""
    needed, found = needs(settings), {}
    for name, used in (("kl_penalty", needed.kl_penalty), ("kl_loss", needed.kl_loss)):
        args = check_args(f"{name}_fn", getattr(settings, f"{name}_fn"), getattr(settings, f"{name}_fn_args"))
        if used and isinstance(args, KlArgs):
            found[name] = KlController(args.kl_coef, args.target_kl if args.adaptive else None, args.horizon)
    return found
